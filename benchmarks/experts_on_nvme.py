"""A mixture of experts far larger than its memory budget, trained from nvme, beside what its bytes
and its arithmetic alone take.

    python -m benchmarks.experts_on_nvme [--layers 24] [--budget 512MiB] [--out FILE]

transformers' Qwen3-MoE with hidden size 1024 and 64 experts of 512, four per token (24 layers: 2.5
billion parameters), fp32, everything at home on nvme, blocks recomputed, 512 tokens per step.
Counted are all steps together, from the first forward until the last update is home. The disk is
measured by raw loops before and after, with the steps' own share of reads; the arithmetic as
forward and backward of two layers in RAM, times half the layers: afterwards, for their memory would
be the process's peak.

Of the peak are counted: what the process holds before the model (interpreter, libraries), what the
engine's ledger says that the host tier held, and the tensors that a traced pass has alive at its
peak; the rest is the heap's holes, kernels, first values and buffers of the benchmark's disk loops.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import offload
from offload import machine
from offload.bench.limits import DiskLimit
from offload.config import OffloadConfig
from offload.planning.activations.facts import ActivationFacts
from offload.planning.activations.trace import trace_activations
from offload.planning.plan.workload import Workload
from offload.tiers.units import format_bytes

TOKENS, VOCABULARY = 512, 8192
DISK_NBYTES = 1 << 30


def build(layers: int) -> nn.Module:
    """The model on the default device."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=512, moe_intermediate_size=512,
        num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=4, head_dim=64,
        num_experts=64, num_experts_per_tok=4, use_cache=False,
    )  # fmt: skip
    model: nn.Module = Qwen3MoeForCausalLM(config)
    return model


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCABULARY, (1, TOKENS), generator=generator) for _ in range(count)]


def compute_seconds(layers: int) -> float:
    """Forward, recomputation and backward of all layers, from those of two in RAM."""
    model: Any = build(2)
    model.gradient_checkpointing_enable()
    model.train()
    found = []
    for tokens in batches(3):
        start = time.perf_counter()
        model(tokens, labels=tokens).loss.backward()
        found.append(time.perf_counter() - start)
        model.zero_grad()
    return min(found) * layers / 2


def run(layers: int, budget: str, steps: int, folder: Path) -> list[str]:
    """The lines of the record."""
    config = {
        "precision": "fp32", "budget": {"host": budget}, "nvme": {"paths": [str(folder)]},
        "placement": {
            "parameters": "nvme", "gradients": "nvme", "optimizer": "nvme",
            "activations": {"checkpoint": True},
        },
        "optimizer": {"type": "adamw", "lr": 1e-4}, "clip_grad_norm": 1.0,
    }  # fmt: skip
    with torch.device("meta"):
        model: Any = build(layers)
    loaded = OffloadConfig.load(config)
    facts = trace_activations(model, loaded, Workload(1, TOKENS), device="cpu")
    before = machine.rss_nbytes()
    with ExitStack() as stack:
        disk = DiskLimit(folder, DISK_NBYTES, lambda text: None, stack)
        engine = stack.enter_context(offload.initialize(model, config))
        engine.settle()
        first = engine.report().bytes_moved
        speeds = [disk.measure(0.5)]
        losses, rows = [], []
        begun = time.perf_counter()
        for tokens in batches(steps):
            start = time.perf_counter()
            loss = model(tokens, labels=tokens).loss
            engine.backward(loss)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            losses.append(loss.item())
            rows.append(time.perf_counter() - start)
        engine.settle()
        seconds = time.perf_counter() - begun
        moved = engine.report().bytes_moved
        read, written = (moved[key] - first[key] for key in ("nvme read", "nvme write"))
        speeds.append(disk.measure(read / (read + written)))
        groups = len(engine.runtime.groups)
        held = engine.report().tiers["host"].peak_nbytes
    numel = sum(param.numel() for param in model.parameters())
    peak = machine.peak_rss_nbytes()
    computing = compute_seconds(layers)
    waiting = [speed.seconds(read, written) for speed in speeds]
    bound = max(computing * steps, min(waiting))
    return [
        f"model       {numel / 1e9:.2f} billion parameters in {groups} groups, {layers} layers",
        f"losses      {_listed(losses, 4)}",
        f"steps       {_listed(rows)} s; with the last update {seconds:.1f} s",
        f"moved       {read / 1e9:.1f} GB read, {written / 1e9:.1f} GB written",
        f"disk        {_listed(waiting)} s for these bytes, measured before and after",
        f"arithmetic  {computing * steps:.1f} s",
        f"share       {bound / seconds:.2f} of the larger of the two",
        *memory_lines(peak, before, held, budget, facts),
    ]


def memory_lines(
    peak: int, before: int, held: int, budget: str, facts: ActivationFacts
) -> list[str]:
    """The peak of RAM in parts, all given in bytes."""
    rest = peak - before - held - facts.peak_nbytes
    passing = facts.peak_nbytes - facts.saved_nbytes
    return [
        f"memory      peak RSS {format_bytes(peak)}, in parts:",
        f"            {format_bytes(before)} before the model",
        f"            {format_bytes(held)} host tier (budget.host {budget})",
        f"            {format_bytes(facts.saved_nbytes)} saved activations",
        f"            {format_bytes(passing)} other tensors alive, {facts.peak_at}",
        f"            {format_bytes(rest)} the rest",
    ]


def _listed(numbers: Sequence[float], digits: int = 1) -> str:
    return ", ".join(f"{number:.{digits}f}" for number in numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--budget", default="512MiB")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--path", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        lines = run(options.layers, options.budget, options.steps, Path(folder))
    print("\n".join(lines))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
