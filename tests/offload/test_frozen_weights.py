"""LoRA on frozen weights: these are read from their tier and never written there again, and have
neither gradients nor optimizer states nor masters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.errors import UnsupportedError
from offload.tiers.tier import PAGE_NBYTES
from offload.tiers.units import round_up
from tests.offload.engine_cases import NVME, config, min_budget, said_by, seeded
from tests.offload.engine_states import assert_same_bits
from tests.offload.lora_memory import RANK, WIDTH, Adapted

PROGRAM = Path(__file__).with_name("lora_memory.py")
ITEMSIZE = {"fp32": 4, "bf16": 2}
STEPS = 3


def build() -> nn.Sequential:
    return nn.Sequential(*(Adapted(64) for _ in range(3)), nn.Linear(64, 64).requires_grad_(False))


def train(engine: offload.Engine, steps: int) -> None:
    model: Any = engine.module
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(2, 64, generator=generator).to(next(model.parameters()).dtype)
        model(x).float().square().mean().backward()
        assert [p.grad is not None for p in model.parameters()] == [
            p.requires_grad for p in model.parameters()
        ]
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    engine.settle()


@pytest.mark.parametrize("chunk", [4096, 1 << 20])
@pytest.mark.parametrize("precision", ITEMSIZE)
def test_each_step_writes_what_belongs_to_adapters_alone(
    precision: str, chunk: int, tmp_path: Path
) -> None:
    """Also where the weights and their adapters are fewer than a chunk."""
    keys = config(
        tmp_path, NVME, precision=precision, groups={"blocks": ["Adapted"]},
        budget={"host": "64MiB", "nvme": "256MiB"}, optimizer={"chunk": chunk},
        clip_grad_norm=1e-6,  # each group is updated once, behind the next forward
    )  # fmt: skip
    model = seeded(build)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    with offload.initialize(model, keys) as engine:
        engine.settle()
        before = engine.report().bytes_moved["nvme write"]
        train(engine, STEPS)
        written = engine.report().bytes_moved["nvme write"] - before
        groups = [group for group in engine.plan.groups if group.layout.numel_trainable]
        assert len(groups) == 3
        weights = sum(
            round_up(g.layout.numel_trainable * ITEMSIZE[precision], PAGE_NBYTES) for g in groups
        )
        needed = STEPS * (weights + sum(sum(group.records) for group in groups))
        assert written == needed  # gradients find room
        for group in groups:
            assert group.layout.numel_trainable < group.layout.numel // 2
            assert sum(group.records) <= 12 * group.layout.numel_trainable, "moments, low halves"
        assert engine.report().tiers["nvme"].by_class["optimizer"] == sum(
            sum(group.records) for group in groups
        )
        with engine.gathered():
            after = {n: p.detach().clone() for n, p in model.named_parameters() if n in frozen}
        assert_same_bits(after, {n: t.to(after[n].dtype) for n, t in frozen.items()})


def test_states_of_what_is_frozen_for_some_steps_do_not_move(tmp_path: Path) -> None:
    keys = config(tmp_path, NVME, groups={"blocks": ["Adapted"]}, clip_grad_norm=1e-6)
    keys |= {"prefetch": 0}  # weights that were read too early are read again
    keys["budget"] |= min_budget(build, keys)
    with offload.initialize(seeded(build), keys) as engine:
        adapters = [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]

        def moved(blocks: str) -> tuple[int, int]:
            """Bytes read and written by two steps that train these blocks alone."""
            for name, param in adapters:
                param.requires_grad_(name[0] in blocks)
            before = dict(engine.report().bytes_moved)
            train(engine, 2)
            after = engine.report().bytes_moved
            read, written = (after[key] - before[key] for key in ("nvme read", "nvme write"))
            return read, written

        for block in "20":
            _, whole, _, one = [moved(each) for each in ("012", "012", block, block)]
            others = 2 * 2 * sum(engine.plan.groups[0].records)  # bytes of two steps
            assert others > 0
            assert whole[0] - one[0] >= others
            assert whole[1] - one[1] >= others


@pytest.mark.slow
def test_weights_of_three_times_the_budget_are_adapted_within_it(tmp_path: Path) -> None:
    """200 MiB of frozen weights on nvme, `budget: {host: 64MiB}`."""
    report = said_by(PROGRAM, str(tmp_path))
    adapters = report["layers"] * 2 * RANK * WIDTH * 4
    frozen = report["layers"] * WIDTH * WIDTH * 4
    assert report["rss"] <= report["host"] * 1.05 + (32 << 20) < frozen
    assert report["written"] <= report["steps"] * 5.2 * adapters  # weights, gradients, two moments
    assert report["read"] > (report["steps"] - 1) * frozen, "more than the memory for copies holds"
    assert report["nvme"]["gradients"] <= adapters
    assert report["nvme"]["optimizer"] <= 3 * adapters  # and versions that are being written


def test_weights_of_8_bits_are_refused(tmp_path: Path) -> None:
    """Cast to the engine's precision, transformers' FP8 modules would compute without scales."""
    model = seeded(build)
    codes = torch.ones(2, 2).to(torch.float8_e4m3fn)
    model.codes = nn.Parameter(codes, requires_grad=False)  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match=r"codes is torch.float8_e4m3fn: .*dequantize"):
        offload.initialize(model, config(tmp_path))
