"""What all formats show of an estimate: numbers in words, sentences, and drawings before they are
drawn. Bytes in words: `tiers.units.format_bytes`.

    place    ├ parameters ┤├ gradients ┤├── optimizer ──┤├ ... ┤     shares of the peak
    gauge    ├────────── peak ─────────┤        │ capacity           shares of the larger of both
    lanes    compute  ├ forward ┤├──── backward ────┤                shares of the step

All positions are fractions of the picture's width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from offload.pages.colours import SPANS
from offload.planning.choice.durations import counted as counted
from offload.planning.choice.durations import duration as duration
from offload.planning.choice.durations import three_digits
from offload.planning.plan.estimate import (
    Estimate,
    MemoryClass,
    MemoryEstimate,
    PlaceEstimate,
    StepEstimate,
)
from offload.planning.plan.plan import Plan
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes

PLACE_TITLES = {
    Tier.DEVICE: "GPU memory",
    Tier.HOST: "RAM",
    Tier.NVME: "Disk (nvme)",
}
LEAST_WIDTH = 0.004  # of a piece that is there at all: it can be seen, and pointed at


@dataclass(frozen=True, slots=True)
class Piece:
    """One coloured stretch of a bar or lane."""

    label: str
    value: str  # bytes or seconds, in words
    share: str  # of the bar or step, in words
    start: float
    stop: float
    colour: int  # of `colours.Theme.colours`


@dataclass(frozen=True, slots=True)
class Bar:
    """The peak of one place, by class."""

    tier: Tier
    title: str
    peak_nbytes: int
    capacity_nbytes: int
    pieces: tuple[Piece, ...]

    @property
    def filled(self) -> float:
        """Share of the capacity; infinite where there is none."""
        if not self.capacity_nbytes:
            return math.inf if self.peak_nbytes else 0.0
        return self.peak_nbytes / self.capacity_nbytes

    @property
    def fits(self) -> bool:
        return self.peak_nbytes <= self.capacity_nbytes

    @property
    def gauge_peak(self) -> float:
        """Where the peak ends on a line that holds both it and the capacity."""
        longest = max(self.peak_nbytes, self.capacity_nbytes)
        return self.peak_nbytes / longest if longest else 0.0

    @property
    def gauge_capacity(self) -> float:
        """Where the capacity ends on the same line."""
        longest = max(self.peak_nbytes, self.capacity_nbytes)
        return self.capacity_nbytes / longest if longest else 1.0


@dataclass(frozen=True, slots=True)
class Lane:
    """What one link does during a step."""

    link: str
    pieces: tuple[Piece, ...]


def bars(memory: MemoryEstimate) -> tuple[Bar, ...]:
    """One bar per place, fastest first."""
    return tuple(_bar(tier, memory.places[tier]) for tier in Tier if tier in memory.places)


def lanes(step: StepEstimate) -> tuple[Lane, ...]:
    """One lane per link that has spans, in the order of the links."""
    names = dict.fromkeys([*(link.name for link in step.links), *(s.link for s in step.spans)])
    length, colours = step_length(step), span_colours(step)
    found = []
    for name in names:
        pieces = tuple(
            Piece(s.label, duration(s.stop_s - s.start_s), share((s.stop_s - s.start_s) / length),
                  s.start_s / length, s.stop_s / length, colours[s.label])
            for s in step.spans if s.link == name
        )  # fmt: skip
        if pieces:
            found.append(Lane(name, pieces))
    return tuple(found)


def span_colours(step: StepEstimate) -> dict[str, int]:
    """Of what spans do, each once, in the order in which it is first done."""
    labels = dict.fromkeys(span.label for span in sorted(step.spans, key=lambda s: s.start_s))
    return {label: SPANS[index % len(SPANS)] for index, label in enumerate(labels)}


def step_length(step: StepEstimate) -> float:
    """Seconds that the time axis covers."""
    return max([step.seconds, *(span.stop_s for span in step.spans)]) or 1.0


def _bar(tier: Tier, place: PlaceEstimate) -> Bar:
    held = [(index, name, place.by_class.get(name, 0)) for index, name in enumerate(MemoryClass)]
    present = [each for each in held if each[2] > 0]
    edges = [0.0, *accumulate(_widths([nbytes for *_, nbytes in present]))]
    pieces = tuple(
        Piece(
            str(name), format_bytes(nbytes), share(nbytes / place.peak_nbytes), start, stop, index
        )
        for (index, name, nbytes), (start, stop) in zip(present, pairwise(edges), strict=True)
    )
    return Bar(tier, PLACE_TITLES[tier], place.peak_nbytes, place.capacity_nbytes, pieces)


def _widths(sizes: Sequence[int]) -> list[float]:
    """Shares of the sum, each at least `LEAST_WIDTH`, taken from those that are wider."""
    small: set[int] = set()
    while True:
        rest = sum(size for index, size in enumerate(sizes) if index not in small)
        room = 1.0 - LEAST_WIDTH * len(small)
        widths = [LEAST_WIDTH if i in small else room * n / rest for i, n in enumerate(sizes)]
        found = {index for index, width in enumerate(widths) if width < LEAST_WIDTH}
        if not found:
            return widths
        small |= found


def per_second(rate: float) -> str:
    """`12,300` or `0.0431`: three digits, no unit."""
    return f"{float(f'{rate:.3g}'):,.0f}" if rate >= 100 else three_digits(rate)


def share(fraction: float) -> str:
    """`37 %`; what is there is never shown as 0 %, and only all of it as 100 %."""
    percent = fraction * 100
    if percent <= 0:
        return "0 %"
    if percent < 0.1:
        return "<0.1 %"
    if percent < 9.95:
        return f"{percent:.1f} %"
    if 99.5 <= percent < 100:
        return ">99 %"
    return f"{percent:.0f} %" if percent < 995 else f"x {three_digits(fraction)}"


def factor_of_time(factor: float) -> str:
    """A step's time against another's: `+12 %`, `-18 %`, `x 3.4`."""
    percent = (factor - 1) * 100
    if factor >= 2:
        return f"x {three_digits(factor)}"
    if abs(percent) < 0.5:
        return "±0 %"
    return f"{percent:+.0f} %"


@dataclass(frozen=True, slots=True)
class Figure:
    """One key figure: a name, a value, and what is to be said beside it."""

    name: str
    value: str
    aside: str = ""


def verdict(estimate: Estimate) -> str:
    """`fits`, or what is short of what."""
    return "fits" if estimate.fits else f"does not fit: {missing_text(estimate)}"


def missing_text(estimate: Estimate) -> str:
    """`RAM is 1.2 GiB short; ...` for every place that is."""
    missing: dict[Tier, int] = {}
    for each in estimate.shortfalls:
        short = max(0, each.needed_nbytes - each.capacity_nbytes)
        missing[each.tier] = max(short, missing.get(each.tier, 0))
    texts = (f"{PLACE_TITLES[t]} is {format_bytes(n)} short" for t, n in missing.items())
    return "; ".join(texts)


def workload_text(estimate: Estimate) -> str:
    """`batch 4 x 2,048 tokens, 8 passes per step`."""
    workload = estimate.workload
    passes = f", {workload.passes} passes per step" if workload.passes > 1 else ""
    micro = estimate.config.micro_batches
    pieces = f", {micro} micro-batches" if micro > 1 else ""
    return f"batch {workload.batch:,} x {workload.sequence:,} tokens{passes}{pieces}"


def model_text(estimate: Estimate, name: str = "") -> str:
    """`name: 6.74 B parameters`, and how many of them are trained; a count only once."""
    text = f"{counted(estimate.numel)} parameters"
    if name and name != text:
        text = f"{name}: {text}"
    if estimate.numel_trainable != estimate.numel:
        text += f", {counted(estimate.numel_trainable)} trained"
    return text


def state_text(estimate: Estimate) -> str:
    """`bf16, split master, fp32 states`."""
    config = estimate.config
    master = "" if config.master == "none" else f", {config.master} master"
    recompute = config.placement.activations.checkpoint
    words = {True: ", checkpointing", "selective": ", selective checkpointing"}
    states = f", {config.optimizer.type} with {config.optimizer.states} states"
    return f"{config.precision}{master}{states}{words.get(recompute, '')}"


def step_text(step: StepEstimate) -> str:
    return f"One step: {duration(step.seconds)}, bound by {step.bottleneck}"


def used_text(bar: Bar) -> str:
    """`12.0 GiB of 24.0 GiB (50 %)`."""
    used = f"{format_bytes(bar.peak_nbytes)} of {format_bytes(bar.capacity_nbytes)}"
    return f"{used} ({share(bar.filled)})" if bar.capacity_nbytes else used


def what_text(estimate: Estimate) -> str:
    """The model, and its numbers' formats."""
    return f"{model_text(estimate)} · {state_text(estimate)}"


def where_text(estimate: Estimate) -> str:
    return f"{estimate.hardware} · {workload_text(estimate)}"


def homes_text(plan: Plan) -> str:
    """`parameters device; gradients host; ...`"""
    return "; ".join(f"{name} {each.describe()}" for name, each in plan.placements.items())


def figures(estimate: Estimate) -> tuple[Figure, ...]:
    """Time first, then what it does to disks."""
    step = estimate.step
    found = []
    if step is not None:
        found = [
            Figure("step", duration(step.seconds), f"bound by {step.bottleneck}"),
            Figure("tokens/s", per_second(step.tokens_per_s),
                   f"{step.tokens:,} tokens per step"),
            Figure("written per step", format_bytes(step.written_nbytes), "to nvme"),
        ]  # fmt: skip
        if step.written_nbytes:
            found.append(_life(estimate))
    checkpoint = format_bytes(estimate.memory.checkpoint_nbytes)
    return (*found, Figure("checkpoint", checkpoint, "on disk, each"))


def _life(estimate: Estimate) -> Figure:
    steps = estimate.ssd_life_steps
    if steps is None or estimate.step is None:
        return Figure("SSD life", "unknown", "name the SSD with --ssd")
    time = duration(steps * estimate.step.seconds)
    rated = format_bytes(estimate.endurance_nbytes)
    return Figure("SSD life", f"{counted(steps)} steps", f"{time}; rated {rated} written")


def setting_text(key: str, value: str) -> str:
    """As the command line takes it: `-o micro_batches=4`, `--ram 96GiB`."""
    return f"{key} {value}" if key.startswith("--") else f"-o {key}={value}"
