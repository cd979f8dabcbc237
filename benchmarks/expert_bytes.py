"""Bytes that a step moves from and to nvme where few experts get tokens, beside all of them.

    python -m benchmarks.expert_bytes [--out FILE]

Models of transformers with 128 experts per layer, one per token, all states on nvme: Switch, whose
experts are modules, and Qwen3-MoE, whose experts are packed. 64 tokens touch few experts. Those of
packed parameters that had no token in the steps before make these steps first (what they missed):
tokens that stay the same show what a step moves without that.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import offload
from offload.config import OffloadConfig
from offload.planning.choice.planner import lay_out_plan
from offload.planning.plan.plan import Hardware, needed_nbytes
from offload.tiers.tier import Tier
from offload.zero.discovery import discover

EXPERTS, TOKENS, VOCABULARY = 128, 64, 1024
SETTLING, STEPS = 4, 6  # not counted, counted
_PLENTY = Hardware(0, 1 << 40, 1 << 40, 1 << 42)


@dataclass(frozen=True)
class Moved:
    """One step, on average."""

    read_nbytes: float
    written_nbytes: float
    touched: float  # experts of a layer

    @property
    def nbytes(self) -> float:
        return self.read_nbytes + self.written_nbytes


def switch(hidden: int = 128) -> nn.Module:
    """Experts are modules."""
    from transformers import SwitchTransformersConfig, SwitchTransformersEncoderModel

    config = SwitchTransformersConfig(
        vocab_size=VOCABULARY, d_model=hidden, d_ff=2 * hidden, d_kv=hidden // 4, num_heads=4,
        num_layers=2, num_sparse_encoder_layers=2, num_experts=EXPERTS, router_jitter_noise=0.0,
        dropout_rate=0.0,
    )  # fmt: skip
    made: nn.Module = SwitchTransformersEncoderModel(config)
    return made


def qwen(hidden: int = 128) -> nn.Module:
    """Experts are packed."""
    from transformers import Qwen3MoeConfig, Qwen3MoeModel

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=hidden,
        moe_intermediate_size=2 * hidden // 3 // 16 * 16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=hidden // 4, num_experts=EXPERTS,
        num_experts_per_tok=1, use_cache=False,
    )  # fmt: skip
    made: nn.Module = Qwen3MoeModel(config)
    return made


class Routers:
    """Counts the experts that routers choose, or lets them choose all in turn."""

    def __init__(self, model: nn.Module, *, to_all: bool) -> None:
        self._to_all = to_all
        self.touched: list[int] = []  # by call of a router
        for name, module in model.named_modules():
            if name.endswith((".mlp.router", ".mlp.gate")):
                module.register_forward_hook(self._after)

    def _after(self, module: nn.Module, args: Any, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(each if each.is_floating_point() else self._choice(each) for each in found)

    def _choice(self, chosen: Tensor) -> Tensor:
        """Of numbers [T, 1], or of ones among zeros [T, 1, E]."""
        one_hot = chosen.dim() == 3
        numbers = chosen.argmax(-1) if one_hot else chosen
        if self._to_all:
            numbers = torch.arange(len(numbers)).remainder(EXPERTS).view_as(numbers)
        self.touched.append(len(numbers.unique()))
        return nn.functional.one_hot(numbers, EXPERTS) if one_hot else numbers


def measure(
    model: nn.Module, folder: Path, *, to_all: bool = False, same: bool = False,
    settling: int = SETTLING, steps: int = STEPS,
) -> Moved:  # fmt: skip
    """Train for some steps in the least host memory that the plan needs. `to_all`: every expert
    gets a token. `same`: all steps have the same tokens."""
    config: dict[str, Any] = {
        "device": "cpu", "precision": "fp32", "prefetch": 0, "nvme": {"paths": [str(folder)]},
        "placement": dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme"),
        "optimizer": {"type": "adamw", "lr": 1e-6, "chunk": 1 << 16},
    }  # fmt: skip
    plan = lay_out_plan(OffloadConfig.load(config), discover(model).shape(), _PLENTY)
    config["budget"] = {"host": needed_nbytes(plan, Tier.HOST), "nvme": "16GiB"}
    routers = Routers(model, to_all=to_all)
    generator = torch.Generator().manual_seed(0)
    tokens = max(TOKENS, EXPERTS) if to_all else TOKENS
    moved = []
    with offload.initialize(model, config) as engine:
        for _ in range(settling + steps):
            moved.append(engine.report().bytes_moved)
            if same:
                generator.manual_seed(0)
            ids = torch.randint(VOCABULARY, (1, tokens), generator=generator)
            engine.module(input_ids=ids).last_hidden_state.square().mean().backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            engine.runtime.updates.settle()
        now = engine.report().bytes_moved
    read, written = (
        (now[link] - moved[settling][link]) / steps for link in ("nvme read", "nvme write")
    )
    counted = routers.touched[len(routers.touched) * settling // (settling + steps) :]
    return Moved(read, written, sum(counted) / len(counted))


CASES: dict[str, dict[str, bool]] = {
    f"{TOKENS}, others in each step": {},
    f"{TOKENS}, the same in each step": {"same": True},
    "every expert gets one": {"to_all": True},
}
_EXPECTED = EXPERTS * (1 - (1 - 1 / EXPERTS) ** TOKENS)
HEAD = f"""# Bytes of experts

2 layers of {EXPERTS} experts, one per token, hidden size 128, fp32, AdamW, all states on nvme, in
the least host memory that the plan needs; by step, without fetching ahead. *Of all*: of the bytes
of a step in which every expert gets a token. Routers without preferences would choose
{EXPERTS} (1 - (1 - 1 / {EXPERTS})^{TOKENS}) = {_EXPECTED:.1f} experts."""


def section(title: str, moved: Sequence[Moved]) -> Iterator[str]:
    yield f"\n## {title}\n"
    yield "| tokens | experts touched per layer | MB read | MB written | of all |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name, each in zip(CASES, moved, strict=True):
        read, written = each.read_nbytes / 1e6, each.written_nbytes / 1e6
        share = each.nbytes / moved[-1].nbytes
        yield f"| {name} | {each.touched:.1f} | {read:.0f} | {written:.0f} | {share:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the record there")
    arguments = parser.parse_args()
    lines = [HEAD]
    for title, build in (("Switch, experts are modules", switch), ("Qwen3-MoE, packed", qwen)):
        moved = []
        for case in CASES.values():
            torch.manual_seed(0)
            with tempfile.TemporaryDirectory() as folder:
                moved.append(measure(build(), Path(folder), **case))
        lines += section(title, moved)
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
