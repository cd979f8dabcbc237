"""What nvme holds at most follows from the budgets alone, whatever the order of moves."""

from __future__ import annotations

from typing import Any

from offload.config import OffloadConfig
from offload.planning.choice.planner import lay_out_plan
from offload.planning.plan.plan import Hardware, Plan
from offload.planning.plan.upper_bounds import nvme_upper_bound
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier
from offload.zero.ranks.sharding import Sharding
from tests.planning.test_copies import model

NVME = {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"}
MIB = 1 << 20


def plan(host: str = "4MiB", nvme: str = "8GiB", world_size: int = 1, **placement: Any) -> Plan:
    config = OffloadConfig.load({
        "device": "cpu", "precision": "bf16", "optimizer": {"chunk": 1 << 14},
        "placement": {**NVME, **placement}, "budget": {"host": host, "nvme": nvme},
    })  # fmt: skip
    sharding = Sharding.of(3, None, world_size, 0)
    shape = model().sharded(world_size)
    return lay_out_plan(config, shape, Hardware(0, 1 << 40, 1 << 40, 1 << 42, sharding=sharding))


def test_no_more_is_on_its_way_than_host_memory_is_left_to_come_from() -> None:
    most = nvme_upper_bound(plan("4MiB"), 0)
    assert most[StateClass.STAGING] == 4 * MIB
    with_homes = plan("5MiB", gradients="host")
    homes = with_homes.expected[Tier.HOST][StateClass.GRADIENTS]
    assert nvme_upper_bound(with_homes, 0)[StateClass.STAGING] == 5 * MIB - homes


def test_every_piece_has_one_new_version_on_its_way_and_gradients_none() -> None:
    ample = plan("1GiB")
    most = nvme_upper_bound(ample, 0)
    nvme = ample.expected[Tier.NVME]
    twice = nvme[StateClass.PARAMETERS] + nvme[StateClass.OPTIMIZER]
    assert most[StateClass.STAGING] == twice
    gradients_alone = nvme_upper_bound(plan("1GiB", parameters="host", optimizer="host"), 0)
    assert gradients_alone[StateClass.STAGING] == 0


def test_what_finds_no_room_in_the_budget_waits() -> None:
    ample = plan("1GiB")
    homes = ample.total(Tier.NVME)
    short = plan("1GiB", nvme=str(homes + 3 * MIB))
    most = nvme_upper_bound(short, 8 * MIB)
    assert sum(most.values()) == homes + 3 * MIB
    assert nvme_upper_bound(ample, 8 * MIB)[StateClass.ACTIVATIONS] == 8 * MIB


def test_memory_that_other_ranks_want_at_times_is_at_other_times_there_for_writes() -> None:
    laid_out = plan("4MiB", world_size=2)
    assert laid_out.shared is not None
    assert laid_out.shared.gather_nbytes > 0
    most = nvme_upper_bound(laid_out, 0)[StateClass.STAGING]
    nvme = laid_out.expected[Tier.NVME]
    moved = nvme[StateClass.PARAMETERS] + nvme[StateClass.OPTIMIZER]
    assert most == min(moved, 4 * MIB - laid_out.shared.workspace_nbytes)
