"""Memory of one model under other systems: the papers' own examples, and orders that must hold."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest

from offload.config import OffloadConfig
from offload.planning.plan.estimate import MemoryClass as M
from offload.planning.plan.workload import Workload
from offload.tiers.errors import ConfigError
from offload.tiers.tier import Tier
from offload.tiers.units import round_up
from offload.tools.memest.estimate.answer import estimate
from offload.tools.memest.estimate.case import Case
from offload.tools.memest.hardware.profiles import HardwareProfile
from offload.tools.memest.hardware.read_profile import read_profile
from offload.tools.memest.source.read_model import read_stated
from offload.tools.memest.source.stated_sizes import StatedSizes
from offload.tools.memest.systems.compare import Row, compare
from offload.tools.memest.systems.largest import largest, largest_of_all
from offload.tools.memest.systems.memory import OTHERS, Framework, Numbers, System, memory_of
from offload.tools.memest.systems.ours import plan_ours
from offload.tools.memest.systems.shapes import (
    FamilyName,
    Shape,
    facts_of,
    model_of,
    shapes_of,
    subject_from,
)
from offload.tools.memest.systems.subject import Ranks, Subject, room_of, subject_of
from offload.zero.ranks.sharding import Sharding

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME
BILLION = 10**9
STATES = (M.PARAMETERS, M.GRADIENTS, M.MASTER, M.OPTIMIZER)


def subject(numel: int, **changes: int) -> Subject:
    plain = Subject(numel, numel, numel // 32, numel // 128, 0, 0, recomputed=True)
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def states(system: System, numel: int, ranks: Ranks, tier: Tier = DEVICE) -> int:
    held = memory_of(system, subject(numel), ranks, Numbers())[tier]
    return sum(held.get(each, 0) for each in STATES)


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
    numel, ranks = 15 * BILLION // 2, Ranks(16, 4)
    copies = 1 if system is System.DDP else ranks.count
    found = states(system, numel, ranks) - 4 * numel // copies
    assert found / 1e9 == pytest.approx(gb, abs=0.06)


def test_a_trillion_parameters_take_the_20_bytes_of_the_infinity_paper() -> None:
    """2104.07857, figure 2a: 1.01 T parameters have 18.31 TiB of states."""
    numel = 1_006_600_000_000
    found = states(System.INFINITY_NVME, numel, Ranks(16), NVME)
    assert found / 2**40 == pytest.approx(18.31, abs=0.01)


def test_zero_offload_leaves_two_bytes_a_parameter_on_the_gpu() -> None:
    """2101.06840, section 3: 2M of 16M stay; what is in RAM is cut over all GPUs."""
    numel = 10 * BILLION
    assert states(System.ZERO_OFFLOAD, numel, Ranks(1)) == 2 * numel
    one = states(System.ZERO_OFFLOAD, numel, Ranks(1), HOST)
    several = states(System.ZERO_OFFLOAD, numel, Ranks(4, 2), HOST)
    assert one == 16 * numel
    assert several == one // 2  # of each of two nodes


# ---------------------------------------------------------------- orders that must hold
@pytest.mark.parametrize("count", [1, 4, 64])
def test_what_is_shared_out_further_takes_no_more_of_a_gpu(count: int) -> None:
    order = [System.DDP, System.ZERO1, System.ZERO2, System.ZERO3, System.INFINITY_CPU]
    found = [states(system, 7 * BILLION, Ranks(count)) for system in order]
    assert all(later <= earlier for earlier, later in pairwise(found))


@pytest.mark.parametrize("system", OTHERS)
def test_more_parameters_and_more_activations_never_take_less(system: System) -> None:
    ranks, numbers = Ranks(4), Numbers()
    small = memory_of(system, subject(BILLION), ranks, numbers)
    large = memory_of(system, subject(2 * BILLION), ranks, numbers)
    active = memory_of(system, subject(BILLION, working_nbytes=BILLION), ranks, numbers)
    for tier in Tier:
        assert sum(large[tier].values()) >= sum(small[tier].values())
    assert sum(active[DEVICE].values()) > sum(small[DEVICE].values()) + BILLION


def test_frozen_parameters_have_no_gradient_and_no_states() -> None:
    whole = memory_of(System.DDP, subject(BILLION), Ranks(1), Numbers())[DEVICE]
    frozen = memory_of(System.DDP, subject(BILLION, numel_trainable=0), Ranks(1), Numbers())[DEVICE]
    assert frozen[M.PARAMETERS] == whole[M.PARAMETERS]
    assert not {M.GRADIENTS, M.MASTER, M.OPTIMIZER} & set(frozen)


def test_fp32_has_no_master_and_one_gradient() -> None:
    held = memory_of(System.DDP, subject(BILLION), Ranks(1), Numbers(parameter=4))[DEVICE]
    assert M.MASTER not in held
    assert sum(held[each] for each in (M.PARAMETERS, M.GRADIENTS, M.OPTIMIZER)) == 16 * BILLION


def test_inputs_of_recomputed_blocks_leave_the_gpu_under_zero_infinity_alone() -> None:
    busy = subject(BILLION, saved_nbytes=5 * BILLION)
    for system in OTHERS:
        held = memory_of(system, busy, Ranks(2), Numbers())
        leaves = system in (System.INFINITY_CPU, System.INFINITY_NVME)
        assert held[HOST].get(M.ACTIVATIONS, 0) == (10 * BILLION if leaves else 0)
    kept = dataclasses.replace(busy, recomputed=False)
    held = memory_of(System.INFINITY_CPU, kept, Ranks(2), Numbers())
    assert held[DEVICE][M.ACTIVATIONS] == 5 * BILLION


def test_experts_are_spread_and_what_is_dense_is_not() -> None:
    sparse = subject(65 * BILLION, expert_numel=64 * BILLION)
    held = memory_of(System.ZERO_OFFLOAD, sparse, Ranks(8, 8, experts=64), Numbers())
    assert held[DEVICE][M.PARAMETERS] == 2 * (BILLION + BILLION)


def test_tensor_parallelism_cuts_parameters_and_activations() -> None:
    busy = subject(16 * BILLION, saved_nbytes=16 * BILLION)
    held = memory_of(System.ZERO1, busy, Ranks(16, 4, tensor=16), Numbers())[DEVICE]
    assert held[M.PARAMETERS] == 2 * BILLION
    assert held[M.ACTIVATIONS] == BILLION


def test_libraries_are_counted_once_per_rank() -> None:
    framework = Framework(gpu_nbytes=7, host_nbytes=11)
    held = memory_of(System.DDP, subject(BILLION), Ranks(4, 2), Numbers(), framework)
    assert held[DEVICE][M.FRAMEWORK] == 7
    assert held[HOST][M.FRAMEWORK] == 44


# ---------------------------------------------------------------- families
@pytest.mark.parametrize("family", FamilyName)
def test_the_shapes_of_a_family_grow(family: FamilyName) -> None:
    numels = [shape.numel for shape in shapes_of(family, 64)]
    assert all(later > earlier for earlier, later in pairwise(numels))
    if family is not FamilyName.MOE:
        steps = [later / earlier for earlier, later in pairwise(numels) if earlier > BILLION]
        assert max(steps) < 1.2


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        (Shape(FamilyName.GPT, 96, 12288, 50_304), 175),  # GPT-3
        (Shape(FamilyName.GPT, 48, 1600, 50_304), 1.56),  # GPT-2 XL
        (Shape(FamilyName.LLAMA, 32, 4096, 128_256), 8.03),  # Llama 3 8B
        (Shape(FamilyName.LLAMA, 80, 8192, 128_256), 70.6),  # Llama 3 70B
    ],
)  # fmt: skip
def test_shapes_have_the_parameters_of_the_models_they_are_taken_from(
    shape: Shape, billions: float
) -> None:
    assert shape.numel / 1e9 == pytest.approx(billions, rel=0.03)


@pytest.mark.parametrize("family", FamilyName)
def test_the_groups_of_a_shape_have_its_parameters(family: FamilyName) -> None:
    shape = shapes_of(family, 8)[3]
    model = model_of(shape)
    assert model.numel == pytest.approx(shape.numel, rel=1e-3)
    facts = facts_of(shape, Workload(1, 512), itemsize=2, scores=False)
    seen, made = subject_of(model, facts, recomputed=True), subject_from(shape, facts)
    assert (seen.saved_nbytes, seen.working_nbytes) == (made.saved_nbytes, made.working_nbytes)


def test_our_rows_are_those_of_the_planner_that_trains(config: OffloadConfig) -> None:
    model, profile = model_of(SHAPE), desktop(gpus=4)
    subject, ranks = subject_from(SHAPE, FACTS), Ranks(4)
    for stage in range(4):
        zero = OffloadConfig.load({**config.to_dict(), "zero": {"stage": stage}})
        plan = plan_ours(zero, model, subject, ranks, room_of(profile)).plan
        sharding = Sharding.of(stage, None, 4, 0)
        assert plan.sharding == sharding
        layouts = [
            group.layout for group in model.sharded(sharding.ranks, sharding.replicas).groups
        ]
        assert [group.layout for group in plan.groups] == layouts
        states = sum(group.gradients for group in plan.groups)
        shards = [round_up(layout.shard_trainable * 2, 4096) for layout in layouts]
        assert states == sum(shards)
        assert (plan.shared is not None) == (sharding.world_size > 1)


def test_shard_groups_that_do_not_come_out_even_are_refused(config: OffloadConfig) -> None:
    uneven = OffloadConfig.load({**config.to_dict(), "zero": {"shard_group": 3}})
    room = room_of(desktop(gpus=4))
    with pytest.raises(ConfigError, match=r"zero\.shard_group: 3 does not divide the 4 ranks"):
        plan_ours(uneven, model_of(SHAPE), subject_from(SHAPE, FACTS), Ranks(4), room)


# ---------------------------------------------------------------- compare
@pytest.fixture(scope="module")
def config() -> OffloadConfig:
    return OffloadConfig.load(
        {"precision": "bf16", "placement": {"activations": {"checkpoint": True}}}
    )


SHAPE = Shape(FamilyName.LLAMA, 32, 4096, 128_256)
WORKLOAD = Workload(1, 1024)
FACTS = facts_of(SHAPE, WORKLOAD, itemsize=2, scores=False)


STATED = StatedSizes(
    layers=32, hidden=4096, heads=32, kv_heads=8, mlp=14336, vocab=128_256
)  # fmt: skip


def rows_of(profile: HardwareProfile, config: OffloadConfig, *, timed: bool = False) -> list[Row]:
    source, speeds = read_stated(STATED), profile.speeds() if timed else None
    ours = estimate(Case(source, config, WORKLOAD, profile, speeds))
    return compare(source.shape, FACTS, ours, profile, speeds)


def desktop(**more: int) -> HardwareProfile:
    return read_profile(gpu="RTX 4090", ram="192GiB", nvme="Gen4 SSD", **more)


def test_eight_billion_on_a_desktop_need_offload(config: OffloadConfig) -> None:
    profile = desktop()
    rows = rows_of(profile, config, timed=True)
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


def test_steps_are_told_for_one_gpu_alone(config: OffloadConfig) -> None:
    assert all(row.step_s for row in rows_of(desktop(), config, timed=True))
    assert not any(row.step_s for row in rows_of(desktop(gpus=4), config, timed=True))


def test_offloading_more_takes_longer_on_the_same_machine(config: OffloadConfig) -> None:
    profile = desktop()
    rows = rows_of(profile, config, timed=True)
    step = {row.system: row.step_s or 0.0 for row in rows}
    assert step[System.DDP] < step[System.INFINITY_CPU] < step[System.INFINITY_NVME]


def test_without_a_gpu_everything_is_in_ram(config: OffloadConfig) -> None:
    profile = read_profile(gpu="none", ram="256GiB", nvme="0")
    rows = rows_of(profile, config)
    assert all(DEVICE not in row.places for row in rows)
    plain = rows[0].places[HOST]
    assert plain.peak_nbytes > 20 * SHAPE.numel


# ---------------------------------------------------------------- the largest
def test_the_largest_fits_and_the_next_one_does_not() -> None:
    profile = read_profile(gpu="A100-80", ram="256GiB", nvme="0")
    found = largest("gpt", profile, System.ZERO_OFFLOAD)
    assert found.shape is not None
    assert found.bound
    shapes = list(shapes_of(FamilyName.GPT))
    following = shapes[shapes.index(found.shape) + 1]
    facts = facts_of(following, Workload(1, 2048), itemsize=2, scores=False)
    held = memory_of(
        System.ZERO_OFFLOAD, subject_from(following, facts), Ranks(1), Numbers()
    )  # fmt: skip
    full = {
        DEVICE: sum(held[DEVICE].values()) > profile.gpu_free_nbytes,
        HOST: sum(held[HOST].values()) > profile.ram_free_nbytes,
    }
    assert any(full.values())
    assert all(place.peak_nbytes <= place.capacity_nbytes for place in found.places.values())


def test_every_system_answers_and_ours_trains_more_than_those_without_nvme() -> None:
    profile = read_profile(gpu="RTX 4090", ram="64GiB", nvme="1TiB")
    found = {each.system: each.numel for each in largest_of_all("llama", profile)}
    assert list(found) == [*OTHERS, System.OURS]
    assert all(numel > 0 for numel in found.values())
    assert found[System.OURS] > 5 * found[System.ZERO_OFFLOAD]
    assert found[System.OURS] > found[System.INFINITY_NVME]


def test_a_step_of_the_largest_is_told_where_speeds_are_known() -> None:
    profile = read_profile(gpu="RTX 4090", ram="64GiB", ssd="Gen4 SSD")
    found = largest_of_all("llama", profile, Workload(2, 512), profile.speeds())
    for each in found:
        assert each.step_s is not None
        assert each.tokens_per_s == pytest.approx(2 * 512 / each.step_s)
    by_system = {each.system: each for each in found}
    on_disk = by_system[System.OURS]
    assert on_disk.step_s > 10 * by_system[System.DDP].step_s  # type: ignore[operator]
    # no faster than its products
    rate = profile.speeds().matmul_flops_per_s["bf16"]  # type: ignore[union-attr]
    assert on_disk.step_s > 6 * on_disk.numel * 2 * 512 / rate  # type: ignore[operator]


def test_steps_over_several_gpus_are_ours_alone_and_of_all_their_tokens() -> None:
    profile = read_profile(profile="DGX A100-40", nodes=2)
    ours = largest("llama", profile, System.OURS, Workload(1, 512), profile.speeds())
    assert ours.step_s is not None
    assert ours.tokens_per_s == pytest.approx(16 * 512 / ours.step_s)
    other = largest("llama", profile, System.ZERO3, Workload(1, 512), profile.speeds())
    assert other.step_s is other.tokens_per_s is None


def test_the_answer_is_the_same_every_time() -> None:
    profile = read_profile(gpu="H100", ram="512GiB", nvme="0")
    first = largest("llama", profile, System.OURS)
    again = largest("llama", profile, System.OURS)
    assert first.step_s is None
    assert (first.shape, first.places) == (again.shape, again.places)


def test_a_machine_too_small_for_the_family_has_no_largest() -> None:
    profile = read_profile(gpu="512MiB", ram="1GiB", nvme="0")
    found = largest("llama", profile, System.DDP)
    assert found.shape is None
    assert found.numel == 0
    assert DEVICE in found.bound


def test_experts_are_as_many_as_gpus_or_eight() -> None:
    few = largest("moe", read_profile(gpu="H100", ram="1TiB", nvme="0"), System.ZERO_OFFLOAD)
    many = largest("moe", read_profile(gpu="DGX-2"), System.ZERO_OFFLOAD)
    assert few.shape is not None
    assert many.shape is not None
    assert (few.shape.experts, many.shape.experts) == (8, 16)


def test_a_family_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="llama, gpt, moe"):
        largest("mamba", read_profile(gpu="H100"), System.DDP)
