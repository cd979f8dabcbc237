"""Chunk size and prefetch depth follow the bandwidth; an explicit value stays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload.config import OffloadConfig
from offload.planning.choice.planner import make_plan
from offload.planning.plan.plan import Hardware
from offload.planning.plan.tuning import UNMEASURED, Streamed, choose
from offload.swap.io.measure import Bandwidth
from offload.zero.groups.discovery import discover

MIB, GIB = 1 << 20, 1 << 30


def streamed(host_budget: int = 64 * GIB) -> Streamed:
    return Streamed([32 * MIB] * 30, 14.0, 4, host_budget)


def test_a_faster_disk_gets_longer_chunks_and_more_in_flight() -> None:
    slow = choose(streamed(), lambda: Bandwidth(0.5e9, 0.5e9))
    usual = choose(streamed(), lambda: Bandwidth(3e9, 3e9))
    fast = choose(streamed(), lambda: Bandwidth(14e9, 10e9))
    assert slow.chunk_numel < usual.chunk_numel < fast.chunk_numel
    assert slow.prefetch <= usual.prefetch < fast.prefetch


def test_buffers_stay_a_small_part_of_the_host_budget() -> None:
    for budget in (64 * MIB, GIB, 64 * GIB):
        chosen = choose(streamed(budget), lambda: Bandwidth(30e9, 30e9))
        assert chosen.chunk_numel * 14 * 4 <= max(budget / 8, 65536 * 14 * 4)


def test_a_small_model_is_not_measured_for() -> None:
    def measure() -> Bandwidth:
        raise AssertionError("measured")

    assert choose(Streamed([MIB] * 4, 14.0, 4, GIB), measure) == UNMEASURED


@pytest.mark.parametrize(("placement", "measures"), [("host", 0), ("nvme", 1)])
def test_only_what_is_on_nvme_is_measured_for(placement: str, measures: int) -> None:
    calls: list[None] = []

    def measure() -> Bandwidth:
        calls.append(None)
        return Bandwidth(20e9, 20e9)

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8)))
    classes = dict.fromkeys(("parameters", "gradients", "optimizer"), placement)
    config = OffloadConfig.load({"placement": classes, "budget": {"host": "32GiB"}})
    hardware = Hardware(0, 64 * GIB, 64 * GIB, 256 * GIB, measure)
    plan = make_plan(config, discover(model).shape(), hardware)
    assert len(calls) == measures
    assert (plan.chunk_numel > UNMEASURED.chunk_numel) == bool(measures)

    explicit = {"chunk": 4096, "type": "adamw"}
    fixed = OffloadConfig.load(
        {"placement": classes, "budget": {"host": "32GiB"}, "optimizer": explicit, "prefetch": 3}
    )
    plan = make_plan(fixed, discover(model).shape(), hardware)
    assert (plan.chunk_numel, plan.prefetch) == (4096, 3)
    assert len(calls) == measures
