"""Copies of states on nvme, counted without a run."""

from __future__ import annotations

from typing import Any

import pytest

from offload.config import OffloadConfig
from offload.planning.choice.planner import lay_out_plan
from offload.planning.plan.plan import Hardware, Plan
from offload.planning.step import planned_run
from offload.planning.step.traffic import PeakCopies, find_copies
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier
from offload.zero.groups.layout import ParamShape
from offload.zero.groups.model_shape import GroupShape, ModelShape, UnitShape

WIDTH, BLOCKS, CHUNK = 256, 6, 1 << 14
IN_BACKWARD = {"chunk": CHUNK, "in_backward": True}
NVME = {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"}
MACHINE = Hardware(0, 1 << 40, 1 << 40, 1 << 42)


def model(blocks: int = BLOCKS, width: int = WIDTH) -> ModelShape:
    names = [f"blocks.{index}" for index in range(blocks)]
    groups = tuple(GroupShape(n, (ParamShape((f"{n}.w",), (width, width)),)) for n in names)
    units = tuple(UnitShape(n, (index,), repeated=True) for index, n in enumerate(names))
    return ModelShape(groups, units)


def configuration(**keys: Any) -> OffloadConfig:
    return OffloadConfig.load({
        "device": "cpu", "precision": "bf16", "placement": NVME, "optimizer": {"chunk": CHUNK},
        "budget": {"host": "1GiB", "nvme": "8GiB"}, **keys,
    })  # fmt: skip


def plan(shape: ModelShape, **keys: Any) -> Plan:
    return lay_out_plan(configuration(**keys), shape, MACHINE)


def copies(
    laid_out: Plan, shape: ModelShape, room_nbytes: int, passes: int = 1, **keys: Any
) -> PeakCopies:
    return find_copies(laid_out, configuration(**keys), shape, passes, room_nbytes)


def test_with_room_everything_on_nvme_has_a_copy() -> None:
    laid_out = plan(model())
    found = copies(laid_out, model(), 1 << 30)
    assert found.nbytes == laid_out.total(Tier.NVME)
    assert found.touched_nbytes == found.nbytes
    assert not found.staged


def test_copies_never_exceed_the_room_and_come_close_to_it() -> None:
    laid_out = plan(model())
    for share in (0.4, 0.6, 0.8):
        room = int(laid_out.total(Tier.NVME) * share)
        found = copies(laid_out, model(), room)
        largest = max(max(g.parameters, *g.records) for g in laid_out.groups)
        assert room - largest <= found.nbytes <= found.touched_nbytes <= room


def test_gradients_used_up_within_backward_are_never_there_all_at_once() -> None:
    laid_out = plan(model())
    found = copies(laid_out, model(), 1 << 30, optimizer=IN_BACKWARD)
    assert found.by_class[StateClass.GRADIENTS] == 2 * laid_out.groups[0].gradients


def test_where_memory_is_short_chunks_are_staged() -> None:
    laid_out = plan(model(), budget={"host": "1MiB", "nvme": "8GiB"})
    assert copies(laid_out, model(), 600 << 10).staged


def test_nothing_on_nvme_needs_no_copies() -> None:
    host = {"parameters": "host", "gradients": "host", "optimizer": "host"}
    found = copies(plan(model(), placement=host), model(), 1 << 30)
    assert found.nbytes == 0


@pytest.mark.parametrize("share", [0.3, 2.0])
def test_more_than_a_million_pieces_fill_the_room_there_is(share: float) -> None:
    large = model(80, 16384)
    laid_out = plan(large)
    room = int(laid_out.total(Tier.NVME) * share)
    found = copies(laid_out, large, room)
    most = min(room, laid_out.total(Tier.NVME))
    assert 0.998 * most <= found.nbytes <= found.touched_nbytes <= most


def test_many_passes_hold_what_going_through_all_of_them_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = {"precision": "fp32", "gradient_accumulation_steps": 12, "optimizer": IN_BACKWARD}
    laid_out = plan(model(), **keys)
    rooms = [int(laid_out.total(Tier.NVME) * share) for share in (0.2, 0.4, 0.6, 0.8, 2.0)]
    quick = [copies(laid_out, model(), room, 12, **keys) for room in rooms]
    monkeypatch.setattr(planned_run, "_MOST_PASSES", 12)
    assert quick == [copies(laid_out, model(), room, 12, **keys) for room in rooms]
