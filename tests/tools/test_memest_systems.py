"""Memory of one model under other systems: the papers' own examples, and orders that must hold."""

import dataclasses

import pytest

from offload.config import OffloadConfig
from offload.planning.plan.estimate import Workload
from offload.tiers.tier import TIERS, Tier
from offload.tools.memest.estimate.case import Case
from offload.tools.memest.estimate.estimator import Estimator
from offload.tools.memest.estimate.other_systems import (
    OFFLOAD,
    SYSTEMS,
    Row,
    Subject,
    System,
    compare,
    memory_of,
    states_of,
)
from offload.tools.memest.hardware.profiles import HardwareProfile
from offload.tools.memest.hardware.read_profile import read_profile
from offload.tools.memest.source.read_model import read_stated
from offload.tools.memest.source.stated_sizes import StatedSizes

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME
BILLION = 10**9
BY_NAME = {system.name: system for system in SYSTEMS}


def subject(numel: int, **changes: int) -> Subject:
    plain = Subject(
        numel=numel, numel_trainable=numel, block_numel=numel // 32, operator_numel=numel // 128
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def states(name: str, numel: int, tier: Tier = DEVICE, **changes: int) -> int:
    return states_of(BY_NAME[name], subject(numel, **changes))[tier]


# ---------------------------------------------------------------- the papers' own figures
@pytest.mark.parametrize(
    ("name", "gb"), [("DDP", 120.0), ("ZeRO-1", 31.4), ("ZeRO-2", 16.6), ("ZeRO-3", 1.9)]
)
def test_states_of_7_5_billion_over_64_gpus_are_those_of_the_zero_paper(
    name: str, gb: float
) -> None:
    """1910.02054, figure 1 and table 1: 120, 31.4, 16.6 and 1.9 GB, which count 16 bytes: the fp32
    gradient of the step is not among them."""
    numel, ranks = 15 * BILLION // 2, 64
    copies = 1 if name == "DDP" else ranks
    nbytes = states(name, numel, ranks=ranks) - 4 * numel // copies
    assert nbytes / 1e9 == pytest.approx(gb, abs=0.06)


def test_a_trillion_parameters_take_the_20_bytes_of_the_infinity_paper() -> None:
    """2104.07857, figure 2a: 1.01 T parameters have 18.31 TiB of states."""
    nbytes = 16 * states("ZeRO-Infinity, nvme", 1_006_600_000_000, NVME, ranks=16)
    assert nbytes / 2**40 == pytest.approx(18.31, abs=0.01)


def test_zero_offload_leaves_two_bytes_a_parameter_on_the_gpu() -> None:
    """2101.06840, section 3: 2M of 16M stay; what is in RAM is cut over all GPUs."""
    numel = 10 * BILLION
    assert states("ZeRO-Offload", numel) == 2 * numel
    assert states("ZeRO-Offload", numel, HOST) == 16 * numel
    assert states("ZeRO-Offload", numel, HOST, ranks=8) == 2 * numel


@pytest.mark.parametrize("system", SYSTEMS, ids=BY_NAME)
def test_more_parameters_and_more_activations_never_take_less(system: System) -> None:
    small = memory_of(system, subject(BILLION, ranks=4))
    large = memory_of(system, subject(2 * BILLION, ranks=4))
    active = memory_of(system, subject(BILLION, ranks=4, working_nbytes=BILLION))
    assert all(large[tier] >= small[tier] for tier in TIERS)
    assert active[DEVICE] > small[DEVICE] + BILLION


# ---------------------------------------------------------------- compare
@pytest.fixture(scope="module")
def config() -> OffloadConfig:
    return OffloadConfig.load(
        {"precision": "bf16", "placement": {"activations": {"checkpoint": True}}}
    )


WORKLOAD = Workload(1, 1024)
STATED = StatedSizes(params=8_030_000_000, layers=32, hidden=4096, vocab=128_256)


def rows_of(profile: HardwareProfile, config: OffloadConfig) -> dict[str, Row]:
    case = Case(read_stated(STATED), config, WORKLOAD, profile, None)
    estimator = Estimator()
    estimate = estimator(case)
    rows = compare(case.shape, estimator.facts(case, estimate.config), estimate, profile)
    assert [row.name for row in rows] == [*BY_NAME, OFFLOAD]
    return {row.name: row for row in rows}


def test_eight_billion_on_a_desktop_need_offload(config: OffloadConfig) -> None:
    profile = read_profile(gpu="RTX 4090", ram="192GiB", ssd="Gen4 SSD")
    rows = rows_of(profile, config)
    assert all(rows[name].full for name in ("DDP", "ZeRO-1", "ZeRO-2", "FSDP"))
    fitting = ("ZeRO-Infinity, cpu", "ZeRO-Infinity, nvme", OFFLOAD)
    assert not any(rows[name].full for name in fitting)
    assert rows[OFFLOAD].peaks[HOST] < rows["ZeRO-Infinity, cpu"].peaks[HOST]


def test_without_a_gpu_everything_is_in_ram(config: OffloadConfig) -> None:
    rows = rows_of(read_profile(gpu="none", ram="256GiB", nvme="0"), config)
    assert all(DEVICE not in row.peaks for row in rows.values())
    assert rows["DDP"].peaks[HOST] > 20 * read_stated(STATED).shape.numel
