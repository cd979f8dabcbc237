"""Small models, trained for a few passes to measure the cost of passes beside their products."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from offload.config import OffloadConfig
from offload.gpt import LanguageModel, build_meta_model
from offload.planning.activations.facts import ActivationFacts
from offload.planning.activations.trace import DTYPES, trace_activations
from offload.planning.plan.workload import Workload
from offload.tiers import accelerator

Sample = tuple[int, int, int, int, int, int]  # layers, hidden, mlp, heads, batch, sequence

_CALLS = (2, 64, 128, 2, 1, 16)  # too small for anything but calls
_SAMPLES = ((4, 128, 384, 4, 16, 128), (2, 256, 768, 4, 8, 128))
_SAMPLES_GPU = ((2, 1024, 4096, 16, 8, 1024), (2, 4096, 16384, 32, 2, 1024))
_VOCABULARY = 512
_REPEAT = 4
_MOST_REPEAT_S = 0.8
_LEAST_RATE_SHARE = 0.05  # of products in fp32, which stands for slower formats: they take minutes
_LEAST_LEFT = 0.02  # of a pass: what is left of it beside products is no less than that


def measure_models(
    products: Mapping[str, float], device: torch.device, samples: Sequence[Sample] | None = None
) -> tuple[float, dict[str, float]]:
    """Measure seconds per kernel call, and bytes per second that operations touch by precision.

    `products` are FLOP/s of matrix products by precision. A 16-bit format without a fast kernel is
    not measured: its products take all of the time.
    """
    gpu = accelerator.is_accelerator(device)
    facts, took_s = _passes("fp32", _CALLS, device)
    operation_s = took_s / _operations(facts)
    touching: dict[str, float] = {}
    chosen = (_SAMPLES_GPU if gpu else _SAMPLES) if samples is None else samples
    for precision, rate in products.items():
        if rate < _LEAST_RATE_SHARE * products["fp32"] and not gpu:
            touching[precision] = touching["fp32"]
            continue
        touched, left_s = 0, 0.0
        for sample in chosen:
            facts, took_s = _passes(precision, sample, device)
            touched += facts.forward.touched_nbytes + facts.backward.touched_nbytes
            flops = facts.forward.flops + facts.backward.flops
            calls_s = 0.0 if gpu else _operations(facts) * operation_s
            left_s += max(_LEAST_LEFT * took_s, took_s - flops / rate - calls_s)
        touching[precision] = touched / left_s
    return operation_s, touching


def _operations(facts: ActivationFacts) -> int:
    return facts.forward.operations + facts.backward.operations


def _passes(precision: str, sample: Sample, device: torch.device) -> tuple[ActivationFacts, float]:
    """The facts of a forward and backward pass, and the seconds that both take together."""
    batch, sequence = sample[4:]
    config = _config_of(precision, sample, device)
    facts = trace_activations(build_meta_model(config), config, Workload(batch, sequence))
    model = _made(config, device)
    tokens = torch.zeros(batch, sequence, dtype=torch.int64, device=device)  # BS
    times: list[float] = []
    while len(times) < 2 or (len(times) <= _REPEAT and sum(times) < _MOST_REPEAT_S):
        started = time.perf_counter()
        loss = model(tokens, tokens).loss
        loss.backward()
        accelerator.synchronize(device)
        times.append(time.perf_counter() - started)
        model.zero_grad()
    return facts, min(times[1:])


def _config_of(precision: str, sample: Sample, device: torch.device) -> OffloadConfig:
    layers, hidden, mlp, heads, batch, sequence = sample
    shape = {
        "layers": layers, "hidden": hidden, "heads": heads, "mlp": mlp,
        "vocab": _VOCABULARY, "max_sequence": sequence, "tied": False,
    }  # fmt: skip
    return OffloadConfig.load(
        {"precision": precision, "device": device.type,
         "train": {"model": shape, "batch": batch, "sequence": sequence}}
    )  # fmt: skip


def _made(config: OffloadConfig, device: torch.device) -> LanguageModel:
    """Return a model with small weights from a generator of its own."""
    with torch.device("meta"):
        model = LanguageModel(config.train.model)
    model = model.to(DTYPES[config.precision]).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.02, generator=generator)
    return model
