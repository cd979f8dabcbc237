"""The possible changes to a case that does not fit, each from the mildest to the strongest.

Changes that keep the result come first, then approximations, then hardware to buy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from offload.config import OffloadConfig
from offload.planning.plan.estimate import Estimate
from offload.tiers.errors import ConfigError
from offload.tiers.tier import TIERS, Tier
from offload.tiers.units import format_bytes
from offload.tools.memest.estimate.case import Case
from offload.tools.memest.hardware.profiles import HardwareProfile
from offload.tools.memest.hardware.read_profile import with_assumed_drive
from offload.tools.memest.source.stated_sizes import divisors

GIB = 1 << 30
# Round figures, a quarter apart at most: the smallest that fits is named.
_MEMORY_SIZES = tuple(
    n * GIB for n in (1, 2, 3, *(k << p for p in range(11) for k in (4, 5, 6, 7)), 8192)
)
_STEP = 64 << 20  # of budgets to be raised
_GPU_SIZES = tuple(n * GIB for n in (4, 6, 8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192))
_DISK_SIZES = tuple(n * GIB for n in (*(k << p for p in range(16) for k in (2, 3)), 128 << 10))


@dataclass(frozen=True)
class Option:
    """One change: its settings, their effect in words, and a function that applies it to a case,
    which returns None if the configuration refuses it beside other settings."""

    settings: Mapping[str, str]
    text: str
    apply: Callable[[Case], Case | None]


Knob = Sequence[Option]


def knobs(case: Case, found: Estimate) -> list[Knob]:
    """Return every knob that could help with what `found` lacks, without empty ones."""
    tiers = {shortfall.tier for shortfall in found.shortfalls}
    return [knob for knob in _all(case, found, tiers) if knob]


def _all(case: Case, found: Estimate, tiers: set[Tier]) -> Iterator[Knob]:
    compute = Tier.DEVICE if case.profile.gpu_nbytes else Tier.HOST
    generates = case.generation is not None
    if compute in tiers:
        yield () if generates else _recompute(case)
        yield _sequences(case) if generates else _batch(case)
    if tiers - {Tier.NVME}:
        for tier in (each for each in TIERS if not each.is_file):
            yield from _budget(case, found, tier)
        yield from _placements(case)
    yield from _budget(case, found, Tier.NVME)
    if not generates:
        yield _chunk(case)
    yield _precision(case)
    if not generates:
        yield _states(case)
    yield from _hardware(case, tiers)


# ---------------------------------------------------------------- the configuration
def _set(text: str, settings: Mapping[str, str]) -> Option:
    overrides = [f"{key}={value}" for key, value in settings.items()]

    def apply(case: Case) -> Case | None:
        try:
            return replace(case, config=OffloadConfig.load(case.config, overrides))
        except ConfigError:
            return None

    return Option(dict(settings), text, apply)


def _recompute(case: Case) -> Knob:
    now = case.config.placement.activations.checkpoint
    key = "placement.activations.checkpoint"
    selective = _set("keep only products and attention of a block", {key: "selective"})
    whole = _set("recompute every block in backward", {key: "true"})
    all_knobs: dict[object, Knob] = {False: (selective, whole), "selective": (whole,)}
    return all_knobs.get(now, ())


def _batch(case: Case) -> Knob:
    """Return options with smaller and more passes: the same step, for a user's own loop."""
    work = case.workload

    def split(parts: int) -> Option:
        batch, passes = work.batch // parts, work.passes * parts
        text = f"{passes} passes of {batch} instead of {work.passes} of {work.batch} per step"
        accumulate = _set("", {"gradient_accumulation_steps": str(passes)})

        def apply(case: Case) -> Case | None:
            changed = accumulate.apply(case)
            workload = replace(case.workload, batch=batch, passes=passes)
            return None if changed is None else replace(changed, workload=workload)

        settings = {"--batch": str(batch), "gradient_accumulation_steps": str(passes)}
        return Option(settings, text, apply)

    return [split(parts) for parts in divisors(work.batch)[1:]]


def _sequences(case: Case) -> Knob:
    """Return options with fewer sequences at a time, for a user who has them all."""
    asked = case.generation
    assert asked is not None, "of inference"

    def split(parts: int) -> Option:
        fewer = replace(asked, batch=asked.batch // parts)
        text = f"{parts} batches of {fewer.batch}, one after the other"
        return Option(
            {"--batch": str(fewer.batch)},
            text,
            lambda case: replace(case, generation=fewer, workload=fewer.usual),
        )

    return [split(parts) for parts in divisors(asked.batch)[1:]]


def _budget(case: Case, found: Estimate, tier: Tier) -> Iterator[Knob]:
    """Yield options that raise a budget which was given and is too small, up to the machine's
    limit. Beside another change less may suffice; and with more room the chunks that are left open
    grow, so that somewhat more is needed than now."""
    if case.config.budget.of(tier) is None:
        return
    for shortfall in found.shortfalls:
        if shortfall.tier is tier and shortfall.key == f"budget.{tier}":
            needed = -(-shortfall.needed_nbytes // _STEP)
            sizes = (needed // 4, needed // 2, needed * 3 // 4, needed, needed + 1, needed + 2)
            text = f"instead of {format_bytes(shortfall.capacity_nbytes)}"
            yield [
                _set(text, {f"budget.{tier}": f"{n * _STEP >> 20}MiB"})
                for n in sizes if n * _STEP > shortfall.capacity_nbytes
            ]  # fmt: skip


def _placements(case: Case) -> Iterator[Knob]:
    """Yield knobs that give up requested homes, or move them to disk."""
    for name, split in reversed(case.config.placement.homes().items()):
        if split is None or split.tiers == (Tier.NVME,):
            continue
        if case.generation is not None and name != "parameters":
            continue
        key = f"placement.{name}"
        options = [_set(f"{name} wherever there is room", {key: "auto"})]
        if not (name == "gradients" and case.config.sums_gradients):
            options.append(_set(f"{name} on disk", {key: "nvme"}))
        yield options
    trains = case.generation is None
    if trains and case.config.placement.activations.tier != "nvme" and case.profile.nvme_nbytes:
        gpu = case.profile.gpu_nbytes > 0 and case.config.placement.activations.tier == "device"
        key = "placement.activations.tier"
        host = [_set("saved activations wait in RAM", {key: "host"})] if gpu else []
        yield (*host, _set("saved activations wait on disk", {key: "nvme"}))


def _chunk(case: Case) -> Knob:
    numel = case.config.chunk_numel if case.config.optimizer.chunk != "auto" else 1 << 20
    smaller = [n for n in (1 << 18, 1 << 16) if n < numel]
    return [_set(f"smaller buffers: {n:,} elements", {"optimizer.chunk": str(n)}) for n in smaller]


def _precision(case: Case) -> Knob:
    if case.config.precision != "fp32":
        return ()
    text = "parameters and gradients in 16 bits, with exact masters"
    if case.generation is not None:
        text = "weights in 16 bits"
    return (_set(text, {"precision": "bf16"}),)


def _states(case: Case) -> Knob:
    order = ("fp32", "bf16", "int8")
    now = order.index(case.config.optimizer.states)
    size = {"bf16": "2 bytes", "int8": "1 byte"}
    return [
        _set(f"optimizer states in {size[name]}, an approximation", {"optimizer.states": name})
        for name in order[now + 1 :]
    ]


# ---------------------------------------------------------------- hardware
def _hardware(case: Case, tiers: set[Tier]) -> Iterator[Knob]:
    profile = case.profile
    if Tier.HOST in tiers:
        sizes = [n for n in _MEMORY_SIZES if n > profile.ram_nbytes]
        yield [_bought("--ram", n, "more RAM", HardwareProfile.with_ram) for n in sizes]
    if Tier.DEVICE in tiers and profile.gpu_nbytes:
        sizes = [n for n in _GPU_SIZES if n > profile.gpu_nbytes]
        yield [_bought("--gpu", n, "a GPU with more memory, as fast", _with_gpu) for n in sizes]
    if profile.nvme_nbytes // profile.ranks_per_node < _DISK_SIZES[-1]:
        sizes = [n for n in _DISK_SIZES if n > profile.nvme_nbytes]
        yield [_bought("--nvme", n, "more free disk", _with_disk) for n in sizes]


def _bought(
    option: str, nbytes: int, text: str, change: Callable[[HardwareProfile, int], HardwareProfile]
) -> Option:
    def apply(case: Case) -> Case:
        profile = change(case.profile, nbytes)
        speeds = case.speeds
        if speeds is not None and profile.ssds != case.profile.ssds:
            speeds = profile.speeds(speeds)
        return replace(case, profile=profile, speeds=speeds)

    return Option({option: format_bytes(nbytes).replace(".0 ", "")}, text, apply)


def _with_gpu(profile: HardwareProfile, nbytes: int) -> HardwareProfile:
    return replace(profile, gpu_nbytes=nbytes, gpu_free_nbytes=nbytes)


def _with_disk(profile: HardwareProfile, nbytes: int) -> HardwareProfile:
    """Return the profile with more free disk; if there was none, on a drive of usual speed."""
    if profile.nvme_nbytes:
        return replace(profile, nvme_nbytes=nbytes)
    return with_assumed_drive(profile, nbytes)
