"""The sentences and figures of an estimate that table and pictures share."""

from __future__ import annotations

from dataclasses import dataclass

from offload.planning.plan.estimate import Estimate, StepEstimate
from offload.planning.plan.plan import Plan
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes
from offload.tools.memest.show import wording
from offload.tools.memest.show.picture import PLACE_TITLES, Bar


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
    text = f"{wording.counted(estimate.numel)} parameters"
    if name and name != text:
        text = f"{name}: {text}"
    if estimate.numel_trainable != estimate.numel:
        text += f", {wording.counted(estimate.numel_trainable)} trained"
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
    return f"One step: {wording.duration(step.seconds)}, bound by {step.bottleneck}"


def used_text(bar: Bar) -> str:
    """`12.0 GiB of 24.0 GiB (50 %)`."""
    used = f"{format_bytes(bar.peak_nbytes)} of {format_bytes(bar.capacity_nbytes)}"
    return f"{used} ({wording.share(bar.filled)})" if bar.capacity_nbytes else used


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
            Figure("step", wording.duration(step.seconds), f"bound by {step.bottleneck}"),
            Figure("tokens/s", wording.per_second(step.tokens_per_s),
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
    time = wording.duration(steps * estimate.step.seconds)
    rated = format_bytes(estimate.endurance_nbytes)
    return Figure("SSD life", f"{wording.counted(steps)} steps", f"{time}; rated {rated} written")


def setting_text(key: str, value: str) -> str:
    """As the command line takes it: `-o micro_batches=4`, `--ram 96GiB`."""
    return f"{key} {value}" if key.startswith("--") else f"-o {key}={value}"
