"""Several ranks train what one rank trains: stages agree to the last bit, worlds to rounding."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from tests.offload.engine_cases import HOST, NVME, assert_same_bits, config, seeded, states_of
from tests.ranks import programs
from tests.ranks.processes import run_ranks
from tests.ranks.programs import (
    BUDGET,
    OPTIMIZER,
    Branches,
    Case,
    Experts,
    Outcome,
    assert_near,
    data_of,
    loss_of,
)

MIXED: dict[str, Any] = {
    "parameters": {"host": "50%", "nvme": "50%"},
    "gradients": {"host": "30%", "nvme": "70%"},
    "optimizer": {"host": "40%", "nvme": "60%"},
}
SPLIT = {"device": "30%", "host": "30%", "nvme": "40%"}
WORLDS = [2, 3, pytest.param(4, marks=pytest.mark.slow)]
MUON = {  # fp32 products: in bf16 a last bit of averaged gradients grows
    "optimizer": {"type": "muon", "ns_dtype": "fp32", "lr": 3e-3, "adamw_lr": 3e-3, "chunk": 2048}
}
BF16 = {"precision": "bf16"}
HOST_SUMS = {**NVME, "gradients": "host"}  # sums in fp32 are refused on nvme


def every_stage(case: Case) -> list[Case]:
    return [replace(case, stage=stage) for stage in (0, 1, 2, 3)]


# Cases that only differ in stage and placement must not differ in a bit.
FAMILIES: dict[str, list[Case]] = {
    "fp32": [c for homes in (HOST, NVME, MIXED) for c in every_stage(Case(3, homes))],
    "bf16": [c for homes in (HOST, NVME) for c in every_stage(Case(3, homes, keys=BF16))],
    "two passes": every_stage(Case(3, HOST, passes=2)),
    "no_sync": [
        case for homes in (HOST, HOST_SUMS)
        for case in every_stage(Case(3, homes, passes=3, local=True, keys=BF16))
    ],
    "branches": [
        case for homes in (HOST, NVME)
        for case in every_stage(Case(3, homes, Branches, keys={"groups": {"blocks": ["Choice"]}}))
    ],
    # one pass: sums of several that not all ranks had gradients in are rounded per group
    "experts": [
        case for homes in (HOST, NVME) for case in every_stage(Case(3, homes, Experts))
    ],
    "branches apart": every_stage(Case(3, HOST, Branches))[:3],  # groups that not all ranks use
    "in backward": [
        case for homes in (HOST, NVME) for case in every_stage(
            Case(3, homes, keys={"clip_grad_norm": None,
                                 "optimizer": {**OPTIMIZER, "in_backward": True}})
        )
    ],
    "recomputed": every_stage(
        Case(3, {**NVME, "activations": {"tier": "nvme", "checkpoint": True}})
    ),
    "int8": every_stage(Case(3, HOST, keys={**BF16, "optimizer": {**OPTIMIZER, "states": "int8"}})),
    "mirrored": [
        *every_stage(Case(3, HOST)),
        *(
            case for homes in ("host", "nvme", SPLIT)
            for case in every_stage(Case(3, {**HOST, "parameters": homes}, mirrored=True))
        ),
    ],
    "muon": [
        *(c for homes in (HOST, NVME) for c in every_stage(Case(3, homes, keys=MUON))),
        *every_stage(Case(3, {**HOST, "parameters": SPLIT}, mirrored=True, keys=MUON)),
    ],
    "idle": every_stage(Case(3, HOST, idle=(1, 2))),
    "rounded": [
        Case(stage, HOST, keys={"zero": {"stage": stage, "reduce_dtype": "bf16"}})
        for stage in (0, 1, 2, 3)
    ],
}  # fmt: skip
# In `make test`; `make test-long` takes all families.
OF_WORLD = {
    2: ("fp32", "bf16", "no_sync", "experts", "in backward", "mirrored", "rounded", "muon"),
    3: ("idle",),
}  # fmt: skip
World = tuple[int, tuple[str, ...], list[dict[int, Outcome]]]


def cases_of(family: str, *, every: bool) -> list[Case]:
    """`make test`: with the first placement the stages that shard least and most (of fp32 all),
    with the others the one that shards most."""
    cases = FAMILIES[family]
    if every:
        return cases
    first = cases[:4] if family == "fp32" else [cases[0], cases[:4][-1]]
    return first + [case for case in cases[4:] if case.stage == 3]


@pytest.fixture(scope="module", params=WORLDS)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, long: bool
) -> World:
    """The world size, and every rank's outcome of every case."""
    families = tuple(FAMILIES) if long else OF_WORLD[request.param]
    cases: list[Case] = []
    for family in families:
        cases += [case for case in cases_of(family, every=long) if case not in cases]
    folder = tmp_path_factory.mktemp("ranks")
    ranks = run_ranks(
        request.param, folder, programs.train_all, cases, str(folder), timeout_s=200
    )  # fmt: skip
    # cases that are equal were run once
    every = [case for family in families for case in cases_of(family, every=long)]
    by_rank = [{id(case): rank[cases.index(case)] for case in every} for rank in ranks]
    return request.param, families, by_rank


@pytest.mark.parametrize("family", FAMILIES)
def test_no_stage_and_no_placement_changes_a_bit(world: World, family: str) -> None:
    _, families, by_rank = world
    if family not in families:
        pytest.skip("in make test-long")
    cases = [case for case in FAMILIES[family] if id(case) in by_rank[0]]
    first, sharded = (by_rank[0][id(case)] for case in cases[:2])
    for rank, outcomes in enumerate(by_rank):
        for case in cases:
            outcome: Outcome = outcomes[id(case)]
            # whole or in parts, squares are added up in another order: fp64 differs in its last bit
            assert outcome.norms == (sharded if case.stage else first).norms, case
            assert outcome.norms == pytest.approx(first.norms, rel=1e-12), case
            assert_same_bits(outcome.states, first.states)
            assert outcome.losses == outcomes[id(cases[0])].losses, (rank, case)


def alone(case: Case, world_size: int, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """One rank with the batches of all."""
    keys = config(folder, HOST, budget=BUDGET, optimizer=OPTIMIZER, clip_grad_norm=0.5)
    losses = []
    with offload.initialize(seeded(case.model), {**keys, **case.keys}) as engine:
        for number, step in enumerate(data_of(case, world_size)):
            for per_rank in step:
                here = per_rank[:-1] if number in case.idle else per_rank
                for tokens in here:
                    loss = loss_of(engine.module, tokens)
                    engine.backward(loss / (case.passes * world_size))
                    losses.append(loss.item())
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        return losses, states_of(engine)


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", ["fp32", "two passes", "branches", "idle", "muon"])
def test_several_ranks_train_as_one_with_all_their_data(
    world: World, family: str, tmp_path: Path
) -> None:
    world_size, families, by_rank = world
    if family not in families:
        pytest.skip("in make test-long")
    case = FAMILIES[family][-1]
    losses, states = alone(case, world_size, tmp_path)

    of_ranks = [iter(outcomes[id(case)].losses) for outcomes in by_rank]
    actual = [
        next(of_ranks[rank])
        for number, step in enumerate(data_of(case, world_size)) for _ in step
        for rank in range(world_size - (number in case.idle))
    ]  # fmt: skip
    assert actual == pytest.approx(losses, rel=1e-6)
    for name, value in by_rank[0][id(case)].states.items():
        bound = 2e-6 if name.endswith(("exp_avg", "exp_avg_sq")) else 1e-6
        assert_near(value, states[name], bound, name)


def test_gradients_rounded_for_the_wire_are_approximate_and_take_half_the_bytes(
    world: World,
) -> None:
    world_size, _, (outcomes, *_) = world
    if world_size != 2:
        pytest.skip("of two ranks")
    exact, rounded = (
        next(outcomes[id(case)] for case in FAMILIES[family] if case.stage == 3)
        for family in ("fp32", "rounded")
    )
    assert rounded.losses[0] == exact.losses[0]
    assert rounded.losses != exact.losses
    assert rounded.losses == pytest.approx(exact.losses, rel=0.05)
    assert rounded.moved["reduce-scatter"] * 2 == exact.moved["reduce-scatter"]


def test_an_unused_parameter_is_not_touched(world: World) -> None:
    _, families, by_rank = world
    if "branches" not in families:
        pytest.skip("in make test-long")
    case = FAMILIES["branches"][-1]
    states = by_rank[0][id(case)].states
    untrained = seeded(Branches).state_dict()
    assert torch.equal(states["unused.weight"], untrained["unused.weight"])  # no weight decay
    assert "unused.weight exp_avg" not in states
    used = [int(states.get(f"choice.branches.{b}.weight step", torch.zeros(()))) for b in range(2)]
    assert max(used) > 0
