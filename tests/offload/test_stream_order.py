"""No two accesses to memory race, wherever states live: by happens-before, not by luck.

All placements, activations and in_backward, with memory that is short or is not. See
tests/swap/happens_before.py for what counts as a race.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import offload
from offload.zero.step import undo_codes
from tests.offload.engine_states import losses_of
from tests.offload.order_cases import (
    SLOT,
    Case,
    dropping,
    forward_last,
    loading,
    on_a_checked_device,
    saving,
    writing,
)

SPLIT = {"device": "30%", "host": "30%", "nvme": "40%"}
MIXED = {"host": "50%", "nvme": "50%"}
TIERS: tuple[Any, ...] = ("device", "host", "nvme", SPLIT)
PLACEMENTS = list(itertools.product(TIERS, TIERS, TIERS))  # of parameters, gradients, optimizer
ACTIVATIONS = [
    {"tier": tier, "checkpoint": check}
    for tier in ("device", "host", "nvme")
    for check in (False, True, "selective")
]
# activations, in_backward: each is drawn for three or four placements
WAYS = list(itertools.product(ACTIVATIONS, (False, True)))
DRAWN = random.Random(0).sample(WAYS, len(WAYS)) * 4
ROOMS = (None, (0, 0), (SLOT, 0), (2 * SLOT, SLOT), (SLOT, 4 * SLOT))
LOOPS = (losses_of, losses_of, dropping, forward_last, writing, loading)


def case_of(placement: Any, way: Any, chance: random.Random) -> Case:
    activations, in_backward = way
    kinds = ("parameters", "gradients", "optimizer")
    placed = {**dict(zip(kinds, placement, strict=True)), "activations": activations}
    keys: dict[str, Any] = {"optimizer": {"in_backward": in_backward}}
    accumulate = chance.choice((1, 1, 2))
    if accumulate > 1:
        keys["gradient_accumulation_steps"] = accumulate
    keys["precision"] = "fp32" if accumulate > 1 else chance.choice(("fp32", "bf16"))
    loops = LOOPS[:2] + LOOPS[3:] if in_backward else LOOPS  # an update begins at once
    return Case(placed, chance.choice(ROOMS), accumulate, chance.choice(loops), keys)


def undoing(engine: offload.Engine, data: list[Tensor], accumulate: int) -> None:
    """Speculative updates that count, that are redone, and that are taken back."""
    for what in ("read", "changed", "kept"):
        policy = engine._runtime.stepper.policy
        policy.on, policy.passes = True, accumulate
        for tokens in data:
            engine.backward(engine.module.loss(tokens))
        if what == "read":
            engine.module.blocks[1].up.weight.detach().sum()
        elif what == "changed":
            await_made_chunk(policy, time.monotonic() + 5)
            engine.optimizer.param_groups[0]["lr"] *= 0.9
        engine.optimizer.step()
        engine.optimizer.zero_grad()


def await_made_chunk(policy: Any, until: float) -> None:
    """Without a wait that would order anything: a busy machine may update later than this step."""
    while time.monotonic() < until:
        if any(update.codes and update.codes.made for update in list(policy._updates.values())):
            return
        time.sleep(0.002)


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(12))
def test_nothing_races_where_updates_of_the_host_are_undone(number: int, tmp_path: Path) -> None:
    chance, undone = random.Random(number), list[int]()
    places = {"parameters": ("host", "nvme"), "gradients": TIERS[:3], "optimizer": ("host", MIXED)}
    placed = {name: chance.choice(tiers) for name, tiers in places.items()}
    keys = {"precision": chance.choice(("fp32", "bf16"))}
    case = Case(placed, None, 1, undoing, keys)
    with pytest.MonkeyPatch.context() as patch:
        world = on_a_checked_device(patch, prompt=chance.choice((0.0, 0.3)))
        undo = undo_codes.Codes.undo

        def counted(codes: undo_codes.Codes, chunk: int, *args: Any) -> None:
            undone.append(chunk)
            undo(codes, chunk, *args)

        patch.setattr(undo_codes.Codes, "undo", counted)
        case.train(world, tmp_path, steps=1)
        assert not world.races, f"{case}\n{world.order.report()}"
        assert undone


def check(case: Case, folder: Path, chance: random.Random) -> None:
    with pytest.MonkeyPatch.context() as patch:
        world = on_a_checked_device(patch, prompt=chance.choice((0.0, 0.3)))
        case.train(world, folder)
        assert not world.races, f"{case}\n{world.order.report()}"
        assert world.delayed > 5


@pytest.mark.parametrize("number", range(0, len(PLACEMENTS), 12), ids=lambda n: str(PLACEMENTS[n]))
def test_nothing_races_beside_a_save(number: int, tmp_path: Path) -> None:
    chance = random.Random(number)
    case = case_of(PLACEMENTS[number], DRAWN[number], chance)
    check(dataclasses.replace(case, loop=saving), tmp_path, chance)


@pytest.mark.parametrize("number", range(len(PLACEMENTS)), ids=lambda n: str(PLACEMENTS[n]))
def test_nothing_races(number: int, tmp_path: Path, long: bool):
    if not long and sum(map(TIERS.index, PLACEMENTS[number])) % len(TIERS):
        pytest.skip("every fourth placement, in which all pairs of tiers are: --long has all")
    chance = random.Random(number)
    for way in WAYS if long else [DRAWN[number]]:
        check(case_of(PLACEMENTS[number], way, chance), tmp_path, chance)
