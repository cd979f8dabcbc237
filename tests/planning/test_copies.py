"""Copies of states on nvme, counted without a run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from offload.config import OffloadConfig
from offload.planning.copies import find_copies
from offload.planning.copy_totals import Run
from offload.planning.plan import Hardware, Plan
from offload.planning.planner import lay_out_plan
from offload.tiers.extent import TierName
from offload.tiers.ledger import StateClass
from offload.zero.layout import ParamShape
from offload.zero.model_shape import GroupShape, ModelShape, UnitShape

WIDTH, BLOCKS, CHUNK = 256, 6, 1 << 14
RUN = Run(itemsize=2)
MACHINE = Hardware(0, 1 << 40, 1 << 40, 1 << 42)


def model(blocks: int = BLOCKS, width: int = WIDTH) -> ModelShape:
    names = [f"blocks.{index}" for index in range(blocks)]
    groups = tuple(GroupShape(n, (ParamShape((f"{n}.w",), (width, width)),)) for n in names)
    units = tuple(UnitShape(n, (index,), repeated=True) for index, n in enumerate(names))
    return ModelShape(groups, units)


def plan(shape: ModelShape, **keys: Any) -> Plan:
    nvme = {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"}
    config = OffloadConfig.load({
        "device": "cpu", "precision": "bf16", "placement": nvme, "optimizer": {"chunk": CHUNK},
        "budget": {"host": "1GiB", "nvme": "8GiB"}, **keys,
    })  # fmt: skip
    return lay_out_plan(config, shape, MACHINE)


def test_with_room_everything_on_nvme_has_a_copy() -> None:
    laid_out = plan(model())
    found = find_copies(laid_out, model(), RUN, 1 << 30)
    assert found.nbytes == laid_out.total(TierName.NVME)
    assert found.touched_nbytes == found.nbytes
    assert not found.staged


def test_copies_never_exceed_the_room_and_come_close_to_it() -> None:
    laid_out = plan(model())
    for share in (0.4, 0.6, 0.8):
        room = int(laid_out.total(TierName.NVME) * share)
        found = find_copies(laid_out, model(), RUN, room)
        largest = max(max(g.parameters, *g.records) for g in laid_out.groups)
        assert room - largest <= found.nbytes <= found.touched_nbytes <= room


def test_gradients_used_up_within_backward_are_never_there_all_at_once() -> None:
    laid_out = plan(model())
    found = find_copies(laid_out, model(), replace(RUN, in_backward=True), 1 << 30)
    assert found.by_class[StateClass.GRADIENTS] == 2 * laid_out.groups[0].gradients


def test_where_memory_is_short_chunks_are_staged() -> None:
    laid_out = plan(model(), budget={"host": "1MiB", "nvme": "8GiB"})
    assert find_copies(laid_out, model(), RUN, 600 << 10).staged


def test_nothing_on_nvme_needs_no_copies() -> None:
    host = {"parameters": "host", "gradients": "host", "optimizer": "host"}
    found = find_copies(plan(model(), placement=host), model(), RUN, 1 << 30)
    assert found.nbytes == 0


@pytest.mark.parametrize("share", [0.3, 2.0])
def test_tens_of_thousands_of_pieces_are_counted_at_once(share: float) -> None:
    large = model(80, 16384)
    laid_out = plan(large)
    room = int(laid_out.total(TierName.NVME) * share)
    found = find_copies(laid_out, large, RUN, room)  # a run of them would take hours
    assert found.nbytes == min(room, laid_out.total(TierName.NVME))


def test_memory_is_predicted_without_torch() -> None:
    heavy = "{'torch', 'numba', 'transformers', 'matplotlib'}"
    code = (
        "import sys, offload.planning.memory, offload.planning.baseline, "
        f"offload.planning.checkpoint_size; sys.exit(bool({heavy} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
