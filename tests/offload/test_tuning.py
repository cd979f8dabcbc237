"""Chunk size and prefetch depth follow budget and sizes; an explicit value stays."""

from __future__ import annotations

import torch
from torch import nn

from offload.config import OffloadConfig
from offload.planning.choice.planner import make_plan
from offload.planning.plan.plan import Hardware
from offload.planning.plan.tuning import LEAST_CHUNK_NUMEL, prefetch_depth, streamed_chunk
from offload.zero.groups.discovery import discover

MIB, GIB = 1 << 20, 1 << 30


def test_buffers_stay_a_small_part_of_the_host_budget() -> None:
    for budget in (64 * MIB, GIB, 64 * GIB):
        chunk = streamed_chunk(4 * GIB, 14.0 * 4, budget)
        assert chunk * 14 * 4 <= max(budget / 7, LEAST_CHUNK_NUMEL * 14 * 4)


def test_smaller_groups_are_fetched_further_ahead() -> None:
    depths = [prefetch_depth([nbytes] * 600) for nbytes in (MIB, 8 * MIB, 64 * MIB)]
    assert depths == [16, 6, 2]


def test_what_streams_has_shorter_chunks_and_an_explicit_value_stays() -> None:
    with torch.device("meta"):
        shape = discover(nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8)))).shape()
    hardware = Hardware(0, 64 * GIB, 64 * GIB, 256 * GIB, cores=16)

    def planned(placement: str, **keys: object) -> tuple[int, int]:
        classes = dict.fromkeys(("parameters", "gradients", "optimizer"), placement)
        config = OffloadConfig.load({"placement": classes, "budget": {"host": "32GiB"}, **keys})
        plan = make_plan(config, shape, hardware)
        return plan.chunk_numel, plan.prefetch

    assert planned("nvme")[0] < planned("host")[0]
    assert planned("nvme", optimizer={"chunk": 4096}, prefetch=3) == (4096, 3)
