"""What is advised where a budget is short."""

from typing import Any

import pytest

from offload.config import OffloadConfig
from offload.planning.choice.solver import solve
from offload.planning.plan.plan import Hardware
from offload.planning.plan.shortfalls import shortfalls
from offload.zero.groups.layout import ParamShape
from offload.zero.groups.model_shape import GroupShape, ModelShape, UnitShape
from offload.zero.ranks.sharding import ALONE, Sharding

GIB = 1 << 30
BLOCKS = 6
HERE = {"parameters": "host", "gradients": "host", "optimizer": "host"}


def model() -> ModelShape:
    """4.7 M parameters: 18 MiB in fp32, 72 MiB with gradients and moments."""
    groups = tuple(
        GroupShape(f"blocks.{i}", (ParamShape((f"blocks.{i}.weight",), (768, 1024)),))
        for i in range(BLOCKS)
    )
    units = tuple(UnitShape(group.name, (i,), True) for i, group in enumerate(groups))
    return ModelShape(groups, units)


def said(keys: dict[str, Any], sharding: Sharding = ALONE, device: int = 0) -> list[str]:
    hardware = Hardware(device, GIB, GIB, GIB, sharding=sharding)
    lacking = shortfalls(solve(OffloadConfig.load(keys), model(), hardware).best.plan, hardware)
    return [each.message for each in lacking]


@pytest.mark.parametrize(
    ("budget", "placement", "remedy"),
    [
        ({"host": "40MiB", "nvme": "1GiB"}, HERE, "move a class of states to nvme (placement)"),
        ({"host": "40MiB", "nvme": 0}, HERE, "raise budget.host or budget.nvme (0 B)"),
        (
            {"device": "12MiB", "host": "200MiB"}, {**HERE, "parameters": "device"},
            "move a class of states to host (placement)",
        ),
    ],
)  # fmt: skip
def test_another_home_is_named_where_states_are_what_does_not_fit(
    budget: dict[str, Any], placement: dict[str, str], remedy: str
) -> None:
    keys = {
        "precision": "fp32", "budget": budget, "placement": placement, "optimizer": {"chunk": 65536}
    }  # fmt: skip
    message = said(keys, device=GIB if "device" in budget else 0)[0]
    assert message.endswith(remedy)


def test_a_chunk_is_named_where_buffers_are_what_does_not_fit() -> None:
    nvme = dict.fromkeys(HERE, "nvme")
    keys = {
        "precision": "fp32", "budget": {"host": "24MiB", "nvme": "1GiB"}, "placement": nvme,
        "optimizer": {"chunk": 1 << 20},
    }  # fmt: skip
    (message,) = said(keys)
    assert message.endswith("; raise budget.host, or lower optimizer.chunk")


def test_fewer_ranks_are_named_where_buffers_for_exchanges_do_not_fit() -> None:
    keys = {
        "precision": "fp32", "budget": {"host": "100MiB", "nvme": "1GiB"}, "placement": HERE,
    }  # fmt: skip
    assert said(keys, Sharding.of(3, None, 8, 0)) == []
    (message,) = said(keys, Sharding.of(3, None, 4096, 0))
    assert message.endswith("or lower optimizer.chunk, or train on fewer ranks")
