"""Experts with homes of their own: the same bits wherever they are, of each table the same share,
and a refusal where experts do not move one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import offload
import offload.tiered_model
from offload.errors import ConfigError, UnsupportedError
from offload.zero.groups import discovery
from tests.offload.engine_cases import (
    HOST,
    NVME,
    WIDTH,
    TinyLM,
    assert_same_bits,
    batches,
    config,
    losses_of,
    plan_for_a_gpu,
    seeded,
    states_of,
)

EXPERTS = 8


class Routed(nn.Module):
    """Each token goes to one expert: some get none."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        y = 0 * weights.unsqueeze(-1) * x
        for index in chosen.unique().tolist():
            here = chosen == index
            y[here] = weights[here].unsqueeze(-1) * self.experts[index](x[here])
        return x + y


class RoutedLM(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routed() for _ in range(2))


@pytest.fixture(autouse=True)
def _one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "SMALL_TABLE_NUMEL", 0)


@contextmanager
def _as_with_a_gpu(mirrored: bool, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Planned as for a GPU, with host memory in its place."""
    with patch.context() as patched:
        if mirrored:
            plan_for_a_gpu(patched)
        yield


def _settings(folder: Path, placement: dict[str, Any], **keys: Any) -> dict[str, Any]:
    keys = {"optimizer": {"lr": 3e-3, "weight_decay": 0.1, "chunk": 1024}, **keys}
    return config(folder, placement, **keys)


def _trained(folder: Path, placement: dict[str, Any], **keys: Any) -> tuple[Any, ...]:
    keys.setdefault("budget", {"device": "1MiB", "host": "16MiB", "nvme": "64MiB"})
    settings = _settings(folder, placement, **keys)
    with offload.initialize(seeded(RoutedLM), settings) as engine:
        losses = losses_of(engine, batches(5))
        report = engine.report()
        states = states_of(engine)
        engine.check_integrity()
        for tier in report.tiers.values():
            assert tier.peak_nbytes <= tier.budget_nbytes
        return losses, states, report, engine.plan


def _drawn(draw: random.Random, *, mirrored: bool) -> Any:
    """A home for each class, in whichever way it can be written."""

    def home(state_class: str) -> Any:
        tiers = ["host", "nvme"]
        if not mirrored or state_class == "parameters":
            tiers.append("device")
        some = draw.sample(tiers, draw.randint(1, len(tiers)))
        cuts = sorted(draw.sample(range(1, 100), len(some) - 1))
        shares = [b - a for a, b in zip([0, *cuts], [*cuts, 100], strict=True)]
        return (
            some[0]
            if len(some) == 1
            else dict(zip(some, (f"{share}%" for share in shares), strict=True))
        )

    rest = {name: home(name) for name in NVME}
    experts = {name: home(name) for name in NVME}
    return {**rest, "experts": draw.choice([experts, home("gradients")])}


@pytest.mark.sample("mirrored-fp32")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mirrored", [False, True], ids=["cpu", "mirrored"])
def test_no_home_of_experts_changes_a_bit(
    precision: str, mirrored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    losses, states, *_ = _trained(tmp_path, HOST, precision=precision)
    for seed in range(20 if long else 2):
        placement = _drawn(random.Random(f"{seed} {precision}"), mirrored=mirrored)
        with _as_with_a_gpu(mirrored, monkeypatch):
            found = _trained(tmp_path, placement, precision=precision)
        assert found[0] == losses, placement
        assert_same_bits(found[1], states)


@pytest.mark.slow
def test_training_goes_on_where_experts_have_other_homes(tmp_path: Path) -> None:
    data = batches(6)
    placements: list[dict[str, Any]] = [
        HOST, {**HOST, "experts": "nvme"}, {**NVME, "experts": {"host": "50%", "nvme": "50%"}},
    ]  # fmt: skip
    with offload.initialize(seeded(RoutedLM), _settings(tmp_path, HOST)) as engine:
        losses_of(engine, data)
        wanted = states_of(engine)
    path = None
    for number, placement in enumerate(placements):
        with offload.initialize(seeded(RoutedLM, number), _settings(tmp_path, placement)) as engine:
            if path is not None:
                engine.load_checkpoint(path)
            losses_of(engine, data[2 * number : 2 * number + 2])
            path = tmp_path / f"saved {number}"
            engine.save_checkpoint(path)
            found = states_of(engine)
    assert_same_bits(found, wanted)


@pytest.mark.parametrize(
    ("build", "least", "keys", "said"),
    [
        (TinyLM, 0, {}, "no experts that move one by one"),
        (RoutedLM, 1 << 16, {}, "more than 65,536 parameters per table"),
        (RoutedLM, 0, {"micro_batches": 2}, "contradicts micro_batches: 2"),
    ],
    ids=["dense", "small tables", "micro-batches"],
)
def test_experts_that_do_not_move_one_by_one_have_no_home(
    build: Any, least: int, keys: dict[str, Any], said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(discovery, "SMALL_TABLE_NUMEL", least)
    for experts in "host", "auto":
        with pytest.raises(ConfigError, match=said):
            offload.initialize(build(), _settings(tmp_path, {**HOST, "experts": experts}, **keys))


def test_what_needs_a_gpu_kernel_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = {**HOST, "experts": {**HOST, "optimizer": "device"}}
    with (
        _as_with_a_gpu(True, monkeypatch),
        pytest.raises(UnsupportedError, match=r"placement.experts.optimizer: device"),
    ):
        offload.initialize(RoutedLM(), _settings(tmp_path, placement))


def test_memory_that_lacks_names_the_home_of_experts(tmp_path: Path) -> None:
    budget = {"host": "256KiB", "nvme": "64MiB"}
    placement = {**NVME, "experts": "host"}
    with pytest.raises(offload.BudgetError, match=r"placement\.experts\.\w+: nvme"):
        offload.initialize(RoutedLM(), _settings(tmp_path, placement, budget=budget))
