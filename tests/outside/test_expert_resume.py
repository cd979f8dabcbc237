"""Experts that few steps touch, over many steps with a schedule and clipping, in runs that are cut
and go on: the bits of one run whose experts stay with their block."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload.zero.groups import parameter_grouping
from tests.offload.engine_cases import HOST, NVME, assert_same_bits, config, seeded

pytest.importorskip("transformers")

from tests.outside.expert_cases import EXPERTS, HIDDEN, Routed

LAYERS, TOKENS = 2, 3


class Run:
    """The same training each time, from a checkpoint on if there is one."""

    def __init__(self, folder: Path, *, packed: bool, steps: int, **keys: Any) -> None:
        self._folder = folder
        self._packed = packed
        self._steps = steps
        self._keys = keys
        self.losses: list[Tensor] = []
        folder.mkdir()

    def go(self, placement: dict[str, str], cuts: set[int] = frozenset()) -> dict[str, Tensor]:  # type: ignore[assignment]
        """All states in the end. The run ends and begins anew after each of the steps `cuts`."""
        start = 0
        for stop in sorted({*cuts, self._steps}):
            states = self._part(placement, start, stop)
            start = stop
        return states

    def _part(self, placement: dict[str, str], start: int, stop: int) -> dict[str, Tensor]:
        own = {
            "optimizer": {"type": "adamw", "lr": 1e-2, "weight_decay": 0.1},
            "clip_grad_norm": 0.5, **self._keys,
        }  # fmt: skip
        model = seeded(partial(Routed, LAYERS, packed=self._packed))
        with offload.initialize(model, config(self._folder, placement, **own)) as engine:
            schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(engine.optimizer, 17)
            if start:
                engine.load_checkpoint(self._folder / str(start))
                schedule.load_state_dict(torch.load(self._folder / f"{start}.pt"))
            for step in range(start, stop):
                self._step(engine, step)
                schedule.step()
            if stop < self._steps:
                engine.save_checkpoint(self._folder / str(stop))
                torch.save(schedule.state_dict(), self._folder / f"{stop}.pt")
            return states_of(engine)

    def _step(self, engine: offload.Engine, step: int) -> None:
        draw = random.Random(step)
        generator = torch.Generator().manual_seed(step)
        for _ in range(draw.choice([1, 1, 2])):  # backward passes
            routing = []
            for _ in range(LAYERS):
                some = torch.tensor(draw.sample(range(EXPERTS), 2))
                routing.append(some[torch.randint(2, (TOKENS, 2), generator=generator)])
            x = torch.randn(TOKENS, HIDDEN, generator=generator)
            x = x.to(next(engine.module.parameters()).dtype)
            loss = engine.module(x, routing).float().square().mean() * draw.choice([0.01, 1, 3])
            engine.backward(loss)
            self.losses.append(loss.detach())
        engine.optimizer.step()
        engine.optimizer.zero_grad()


def states_of(engine: offload.Engine) -> dict[str, Tensor]:
    states = {}
    for name, param in engine.module.named_parameters():
        states[name] = engine.values.full(param)
        states.update({f"{name} {k}": v for k, v in engine.values.read_state(param).items()})
    return states


CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "sgd": {"optimizer": {"type": "sgd", "lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "list"])
def test_runs_that_are_cut_have_the_bits_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool, case: str, long: bool
) -> None:
    steps = 200 if long else 20
    cuts = set(random.Random(case).sample(range(1, steps), 6 if long else 2))
    monkeypatch.setattr(parameter_grouping, "SMALL_UNIT_NUMEL", 0)
    monkeypatch.setattr(parameter_grouping, "SMALL_TABLE_NUMEL", 1 << 40)
    whole = Run(tmp_path / "whole", packed=packed, steps=steps, **CASES[case])
    expected = whole.go(HOST)
    monkeypatch.setattr(parameter_grouping, "SMALL_TABLE_NUMEL", 0)
    split = Run(tmp_path / "split", packed=packed, steps=steps, **CASES[case])
    actual = split.go(NVME, cuts)
    assert_same_bits(actual, expected)
    assert all(torch.equal(*pair) for pair in zip(split.losses, whole.losses, strict=True))
