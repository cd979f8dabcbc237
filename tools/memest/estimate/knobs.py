"""The possible changes to a case that does not fit, each from the mildest to the strongest.

Changes that keep the result come first, then approximations, then hardware to buy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from offload.config import OffloadConfig
from offload.tiers.errors import ConfigError
from offload.tiers.tier import TIERS, Tier
from offload.tiers.units import format_bytes, parse_bytes
from offload.tools.memest.estimate.case import Case
from offload.tools.memest.estimate.result import Change, Estimate
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

Knob = Sequence[Change]


def knobs(case: Case, estimate: Estimate) -> list[Knob]:
    """Return every knob that could help with what `estimate` lacks, without empty ones."""
    tiers = {shortfall.tier for shortfall in estimate.shortfalls}
    return [knob for knob in _all(case, estimate, tiers) if knob]


def _all(case: Case, estimate: Estimate, tiers: set[Tier]) -> Iterator[Knob]:
    compute = Tier.DEVICE if case.profile.gpu_nbytes else Tier.HOST
    if compute in tiers:
        if case.generation is None:
            yield _recompute(case)
        yield tuple(_batch(case))
    if tiers - {Tier.NVME}:
        for name in ("gpu", *(each.name for each in TIERS if not each.is_file)):
            yield from _budget(case, estimate, name)
        yield from _placements(case)
    yield from _budget(case, estimate, Tier.NVME.name)
    if case.generation is None:
        yield _chunk(case)
    yield _precision(case)
    if case.generation is None:
        yield _states(case)
    yield from _hardware(case, tiers)


def _recompute(case: Case) -> Knob:
    now = case.config.placement.activations.checkpoint
    key = "placement.activations.checkpoint"
    selective = Change({key: "selective"}, "keep only products and attention of a block")
    whole = Change({key: "true"}, "recompute every block in backward")
    all_knobs: dict[object, Knob] = {False: (selective, whole), "selective": (whole,)}
    return all_knobs.get(now, ())


def _batch(case: Case) -> Iterator[Change]:
    """Yield smaller and more passes: the same step, for a user's own loop; or smaller batches, one
    after the other, of all sequences to be generated."""
    work, asked = case.workload, case.generation
    for parts in divisors(work.batch if asked is None else asked.batch)[1:]:
        if asked is not None:
            batch = asked.batch // parts
            text = f"{parts} batches of {batch}, one after the other"
            yield Change({"--batch": str(batch)}, text)
            continue
        batch, passes = work.batch // parts, work.passes * parts
        settings = {"--batch": str(batch), "gradient_accumulation_steps": str(passes)}
        text = f"{passes} passes of {batch} instead of {work.passes} of {work.batch} per step"
        yield Change(settings, text)


def _budget(case: Case, estimate: Estimate, name: str) -> Iterator[Knob]:
    """Yield options that raise a budget which was given and is too small, up to the machine's
    limit. Beside another change less may suffice; and with more room the chunks that are left open
    grow, so that somewhat more is needed than now."""
    if dict(case.config.budget).get(name) is None:
        return
    for shortfall in estimate.shortfalls:
        if shortfall.key == f"budget.{name}":
            needed = -(-shortfall.needed_nbytes // _STEP)
            sizes = (needed // 4, needed // 2, needed * 3 // 4, needed, needed + 1, needed + 2)
            text = f"instead of {format_bytes(shortfall.capacity_nbytes)}"
            yield [
                Change({f"budget.{name}": f"{n * _STEP >> 20}MiB"}, text)
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
        options = [Change({key: "auto"}, f"{name} wherever there is room")]
        if not (name == "gradients" and case.config.sums_gradients):
            options.append(Change({key: "nvme"}, f"{name} on disk"))
        yield options
    trains = case.generation is None
    if trains and case.config.placement.activations.tier != "nvme" and case.profile.nvme_nbytes:
        gpu = case.profile.gpu_nbytes > 0 and case.config.placement.activations.tier == "device"
        key = "placement.activations.tier"
        host = [Change({key: "host"}, "saved activations wait in RAM")] if gpu else []
        yield (*host, Change({key: "nvme"}, "saved activations wait on disk"))


def _chunk(case: Case) -> Knob:
    numel = case.config.chunk_numel if case.config.optimizer.chunk != "auto" else 1 << 20
    smaller = [n for n in (1 << 18, 1 << 16) if n < numel]
    return [
        Change({"optimizer.chunk": str(n)}, f"smaller buffers: {n:,} elements") for n in smaller
    ]


def _precision(case: Case) -> Knob:
    if case.config.precision != "fp32":
        return ()
    text = "parameters and gradients in 16 bits, with exact masters"
    if case.generation is not None:
        text = "weights in 16 bits"
    return (Change({"precision": "bf16"}, text),)


def _states(case: Case) -> Knob:
    order = ("fp32", "bf16", "int8")
    now = order.index(case.config.optimizer.states)
    size = {"bf16": "2 bytes", "int8": "1 byte"}
    return [
        Change({"optimizer.states": name}, f"optimizer states in {size[name]}, an approximation")
        for name in order[now + 1 :]
    ]


def _hardware(case: Case, tiers: set[Tier]) -> Iterator[Knob]:
    profile = case.profile
    if Tier.HOST in tiers:
        sizes = [n for n in _MEMORY_SIZES if n > profile.ram_nbytes]
        yield [_bought("--ram", n, "more RAM") for n in sizes]
    if Tier.DEVICE in tiers and profile.gpu_nbytes:
        sizes = [n for n in _GPU_SIZES if n > profile.gpu_nbytes]
        yield [_bought("--gpu", n, "a GPU with more memory, as fast") for n in sizes]
    if profile.nvme_nbytes // profile.ranks_per_node < _DISK_SIZES[-1]:
        sizes = [n for n in _DISK_SIZES if n > profile.nvme_nbytes]
        yield [_bought("--nvme", n, "more free disk") for n in sizes]


def _bought(option: str, nbytes: int, text: str) -> Change:
    return Change({option: format_bytes(nbytes).replace(".0 ", "")}, text)


def applied(change: Change, case: Case) -> Case | None:
    """Return the case with the change; None if the configuration refuses it beside other
    settings."""
    options = {key: value for key, value in change.settings.items() if key.startswith("--")}
    keys = [f"{key}={value}" for key, value in change.settings.items() if key not in options]
    try:
        config = OffloadConfig.load(case.config, keys)
    except ConfigError:
        return None
    case = replace(case, config=config)
    for option, value in options.items():
        case = _with_option(case, option, value)
    return case


def _with_option(case: Case, option: str, value: str) -> Case:
    if option == "--batch" and case.generation is not None:
        fewer = replace(case.generation, batch=int(value))
        return replace(case, generation=fewer, workload=fewer.usual)
    if option == "--batch":
        passes = case.config.gradient_accumulation_steps
        return replace(case, workload=replace(case.workload, batch=int(value), passes=passes))
    profile, nbytes = case.profile, parse_bytes(value)
    if option == "--ram":
        return replace(case, profile=profile.with_ram(nbytes))
    if option == "--gpu":
        gpu = replace(profile, gpu_nbytes=nbytes, gpu_free_nbytes=nbytes)
        return replace(case, profile=gpu)
    if profile.nvme_nbytes:
        return replace(case, profile=replace(profile, nvme_nbytes=nbytes))
    profile = with_assumed_drive(profile, nbytes)  # of usual speed
    speeds = case.speeds and profile.speeds(case.speeds)
    return replace(case, profile=profile, speeds=speeds)
