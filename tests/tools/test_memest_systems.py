"""Memory of one model under other systems: the papers' own examples, and orders that must hold."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest

from offload.config import OffloadConfig
from offload.planning.plan.estimate import MemoryClass as M
from offload.planning.plan.workload import Workload
from offload.tiers.tier import Tier
from offload.tools.memest.estimate.answer import estimate
from offload.tools.memest.estimate.case import Case
from offload.tools.memest.estimate.estimator import Estimator
from offload.tools.memest.estimate.other_systems import (
    OTHERS,
    Row,
    Subject,
    System,
    compare,
    memory_of,
)
from offload.tools.memest.hardware.profiles import HardwareProfile
from offload.tools.memest.hardware.read_profile import read_profile
from offload.tools.memest.source.read_model import read_stated
from offload.tools.memest.source.stated_sizes import StatedSizes

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME
BILLION = 10**9
STATES = (M.PARAMETERS, M.GRADIENTS, M.MASTER, M.OPTIMIZER)


def subject(numel: int, **changes: int) -> Subject:
    plain = Subject(
        numel=numel, numel_trainable=numel, block_numel=numel // 32, operator_numel=numel // 128
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def states(system: System, numel: int, ranks: int, tier: Tier = DEVICE) -> int:
    held = memory_of(system, subject(numel, ranks=ranks))[tier]
    return sum(held[each] for each in STATES)


# ---------------------------------------------------------------- the papers' own figures
@pytest.mark.parametrize(
    ("system", "gb"), [(System.DDP, 120.0), (System.ZERO1, 31.4), (System.ZERO2, 16.6),
                       (System.ZERO3, 1.9)],
)  # fmt: skip
def test_states_of_7_5_billion_over_64_gpus_are_those_of_the_zero_paper(
    system: System, gb: float
) -> None:
    """1910.02054, figure 1 and table 1: 120, 31.4, 16.6 and 1.9 GB, which count 16 bytes: the fp32
    gradient of the step is not among them."""
    numel, ranks = 15 * BILLION // 2, 64
    copies = 1 if system is System.DDP else ranks
    found = states(system, numel, ranks) - 4 * numel // copies
    assert found / 1e9 == pytest.approx(gb, abs=0.06)


def test_a_trillion_parameters_take_the_20_bytes_of_the_infinity_paper() -> None:
    """2104.07857, figure 2a: 1.01 T parameters have 18.31 TiB of states."""
    numel = 1_006_600_000_000
    found = 16 * states(System.INFINITY_NVME, numel, 16, NVME)
    assert found / 2**40 == pytest.approx(18.31, abs=0.01)


def test_zero_offload_leaves_two_bytes_a_parameter_on_the_gpu() -> None:
    """2101.06840, section 3: 2M of 16M stay; what is in RAM is cut over all GPUs."""
    numel = 10 * BILLION
    assert states(System.ZERO_OFFLOAD, numel, 1) == 2 * numel
    one = states(System.ZERO_OFFLOAD, numel, 1, HOST)
    several = states(System.ZERO_OFFLOAD, numel, 8, HOST)
    assert one == 16 * numel
    assert several == one // 8


# ---------------------------------------------------------------- orders that must hold
@pytest.mark.parametrize("count", [1, 4, 64])
def test_what_is_shared_out_further_takes_no_more_of_a_gpu(count: int) -> None:
    order = [System.DDP, System.ZERO1, System.ZERO2, System.ZERO3, System.INFINITY_CPU]
    found = [states(system, 7 * BILLION, count) for system in order]
    assert all(later <= earlier for earlier, later in pairwise(found))


@pytest.mark.parametrize("system", OTHERS)
def test_more_parameters_and_more_activations_never_take_less(system: System) -> None:
    small = memory_of(system, subject(BILLION, ranks=4))
    large = memory_of(system, subject(2 * BILLION, ranks=4))
    active = memory_of(system, subject(BILLION, ranks=4, working_nbytes=BILLION))
    for tier in Tier:
        assert sum(large[tier].values()) >= sum(small[tier].values())
    assert sum(active[DEVICE].values()) > sum(small[DEVICE].values()) + BILLION


def test_frozen_parameters_have_no_gradient_and_no_states() -> None:
    whole = memory_of(System.DDP, subject(BILLION))[DEVICE]
    frozen = memory_of(System.DDP, subject(BILLION, numel_trainable=0))[DEVICE]
    assert frozen[M.PARAMETERS] == whole[M.PARAMETERS]
    assert not any(frozen[each] for each in (M.GRADIENTS, M.MASTER, M.OPTIMIZER))


def test_fp32_has_no_master_and_one_gradient() -> None:
    held = memory_of(System.DDP, subject(BILLION, itemsize=4))[DEVICE]
    assert held[M.MASTER] == 0
    assert sum(held[each] for each in (M.PARAMETERS, M.GRADIENTS, M.OPTIMIZER)) == 16 * BILLION


def test_inputs_of_recomputed_blocks_leave_the_gpu_under_zero_infinity_alone() -> None:
    busy = subject(BILLION, ranks=2, saved_nbytes=5 * BILLION)
    for system in OTHERS:
        held = memory_of(system, busy)
        leaves = system in (System.INFINITY_CPU, System.INFINITY_NVME)
        assert held[HOST][M.ACTIVATIONS] == (5 * BILLION if leaves else 0)
    kept = dataclasses.replace(busy, recomputed=False)
    held = memory_of(System.INFINITY_CPU, kept)
    assert held[DEVICE][M.ACTIVATIONS] == 5 * BILLION


def test_experts_are_spread_and_what_is_dense_is_not() -> None:
    sparse = subject(65 * BILLION, expert_numel=64 * BILLION, ranks=64, ep_size=64)
    held = memory_of(System.ZERO_OFFLOAD, sparse)
    assert held[DEVICE][M.PARAMETERS] == 2 * (BILLION + BILLION)


# ---------------------------------------------------------------- compare
@pytest.fixture(scope="module")
def config() -> OffloadConfig:
    return OffloadConfig.load(
        {"precision": "bf16", "placement": {"activations": {"checkpoint": True}}}
    )


WORKLOAD = Workload(1, 1024)
STATED = StatedSizes(
    layers=32, hidden=4096, heads=32, kv_heads=8, mlp=14336, vocab=128_256
)  # fmt: skip


def rows_of(profile: HardwareProfile, config: OffloadConfig) -> list[Row]:
    case = Case(read_stated(STATED), config, WORKLOAD, profile, None)
    estimator = Estimator()
    ours = estimate(case, estimator)
    return compare(case.shape, estimator.facts(case, ours.config), ours, profile)


def desktop(**more: int) -> HardwareProfile:
    return read_profile(gpu="RTX 4090", ram="192GiB", ssd="Gen4 SSD", **more)


def test_eight_billion_on_a_desktop_need_offload(config: OffloadConfig) -> None:
    profile = desktop()
    rows = rows_of(profile, config)
    fits = {row.system: row.fits for row in rows}
    assert [row.system for row in rows] == [*OTHERS, System.OURS]
    assert not any(fits[s] for s in (System.DDP, System.ZERO1, System.ZERO2, System.FSDP))
    assert fits[System.INFINITY_CPU]
    assert fits[System.INFINITY_NVME]
    assert fits[System.OURS]
    ours, infinity = rows[-1], next(r for r in rows if r.system is System.INFINITY_CPU)
    assert ours.places[HOST].peak_nbytes < infinity.places[HOST].peak_nbytes


def test_a_row_that_does_not_fit_names_the_places_that_are_short(config: OffloadConfig) -> None:
    rows = rows_of(desktop(), config)
    assert len(rows) == len(OTHERS) + 1
    for row in rows:
        short = [tier for tier, each in row.places.items()
                 if each.peak_nbytes > each.capacity_nbytes]  # fmt: skip
        assert list(row.full) == short
        assert row.fits == (not short)


def test_libraries_and_nodes_are_counted_once_per_rank(config: OffloadConfig) -> None:
    alone, four = rows_of(desktop(), config)[0], rows_of(desktop(gpus=4), config)[0]
    assert four.places[DEVICE].by_class[M.FRAMEWORK] == alone.places[DEVICE].by_class[M.FRAMEWORK]
    host = [row.places[HOST].by_class[M.FRAMEWORK] for row in (alone, four)]
    assert host[1] == 4 * host[0] > 0


def test_without_a_gpu_everything_is_in_ram(config: OffloadConfig) -> None:
    profile = read_profile(gpu="none", ram="256GiB", nvme="0")
    rows = rows_of(profile, config)
    assert all(DEVICE not in row.places for row in rows)
    plain = rows[0].places[HOST]
    assert plain.peak_nbytes > 20 * read_stated(STATED).shape.numel
