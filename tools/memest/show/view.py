"""The parts of an estimate that all formats show: numbers in words, sentences, and rows of tables.
Bytes in words: `tiers.units.format_bytes`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from offload.pages.page import Figure
from offload.planning.choice.durations import counted as counted
from offload.planning.choice.durations import duration as duration
from offload.planning.choice.durations import three_digits
from offload.planning.choice.plan_text import EXPERT_HEADS as EXPERT_HEADS
from offload.planning.choice.plan_text import expert_facts as expert_facts
from offload.planning.choice.plan_text import expert_rows as expert_rows
from offload.planning.plan.estimate import (
    Change,
    Estimate,
    InferenceEstimate,
    LinkTime,
    MemoryClass,
    PlaceEstimate,
    StepEstimate,
)
from offload.planning.plan.sizes import class_of
from offload.planning.step.step_time import COMPUTE, OPTIMIZER
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes

PLACE_TITLES = {
    Tier.DEVICE: "GPU memory",
    Tier.HOST: "RAM",
    Tier.NVME: "Disk (nvme)",
}


def per_second(rate: float) -> str:
    """Return `12,300` or `0.0431`: three digits, no unit."""
    return f"{float(f'{rate:.3g}'):,.0f}" if rate >= 100 else three_digits(rate)


def share(fraction: float) -> str:
    """Return `37 %`; only nothing is shown as 0 %, and only everything as 100 %."""
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
    """Return a step's time against another's: `+12 %`, `-18 %`, `-99.5 %`, `x 3.4`."""
    percent = (factor - 1) * 100
    if factor >= 2:
        return f"x {three_digits(factor)}"
    if abs(percent) < 0.5:
        return "±0 %"
    if percent < -99:
        return f"{max(-99.9, percent):.1f} %"
    return f"{percent:+.0f} %"


def verdict(estimate: Estimate) -> str:
    """Return `fits`, the drawbacks of a plan that fits, or the shortages of one that does not."""
    if not estimate.fits:
        return f"does not fit: {missing_text(estimate)}"
    step, life = estimate.step, estimate.ssd_life_steps
    if step is None or not has_drawbacks(estimate):
        return "fits"
    how = "slow" if estimate.is_slow else "hard on the SSD"
    wear = "" if life is None else f"; the SSD's rated writes last {life:,} steps"
    return f"fits, but {how}: {per_second(step.tokens_per_s)} tokens/s{wear}"


def has_drawbacks(estimate: Estimate) -> bool:
    """Whether a plan that fits is barely usable as it is."""
    return estimate.fits and (estimate.is_slow or estimate.wears_out_ssds)


def state(estimate: Estimate) -> str:
    """Return the state of the verdict: good, bad, or empty for a plan with drawbacks."""
    if has_drawbacks(estimate):
        return ""
    return "good" if estimate.fits else "bad"


def missing_text(estimate: Estimate) -> str:
    """Return `RAM is 1.2 GiB short; ...` for every place that is short."""
    missing: dict[Tier, int] = {}
    for each in estimate.shortfalls:
        short = max(0, each.needed_nbytes - each.capacity_nbytes)
        missing[each.tier] = max(short, missing.get(each.tier, 0))
    texts = (f"{PLACE_TITLES[t]} is {format_bytes(n)} short" for t, n in missing.items())
    return "; ".join(texts)


def workload_text(estimate: Estimate) -> str:
    """Return `batch 4 x 2,048 tokens, 8 passes per step`, or `4 prompts of 512 tokens, 128 new
    ones`."""
    workload = estimate.workload
    if estimate.inference is not None:
        asked, micro = estimate.inference.generation, estimate.config.micro_batches
        pieces = f", {micro} pieces of the batch" if micro > 1 else ""
        prompts = "prompt" if asked.batch == 1 else "prompts"
        return (
            f"{asked.batch:,} {prompts} of {asked.prompt:,} tokens, {asked.new_tokens:,} new "
            f"{'token' if asked.new_tokens == 1 else 'tokens'} each{pieces}"
        )
    micro = estimate.config.micro_batches
    passes = f", {workload.passes} passes per step" if workload.passes > 1 else ""
    pieces = f", {micro} micro-batches" if micro > 1 else ""
    return f"batch {workload.batch:,} x {workload.sequence:,} tokens{passes}{pieces}"


def model_text(estimate: Estimate, name: str = "") -> str:
    """Return `name: 6.74 B parameters`, and how many of them are trained; a count only once."""
    text = f"{counted(estimate.numel)} parameters"
    if name and name != text:
        text = f"{name}: {text}"
    if estimate.numel_trainable != estimate.numel and estimate.inference is None:
        text += f", {counted(estimate.numel_trainable)} trained"
    experts = estimate.experts
    if experts is not None and experts.active_numel != estimate.numel:
        text += f", {counted(experts.active_numel)} active per token"
    return text


def state_text(estimate: Estimate) -> str:
    """Return `bf16, split master, fp32 states`; for inference the formats of weights."""
    config = estimate.config
    if estimate.inference is not None:
        stored = config.storage
        coded = f", stored in {stored.weights} by groups of {stored.group_size}" if stored else ""
        return f"{config.precision}{coded}, nothing is trained"
    master = "" if config.master == "none" else f", {config.master} master"
    recompute = config.placement.activations.checkpoint
    words = {True: ", checkpointing", "selective": ", selective checkpointing"}
    states = f", {config.optimizer.type} with {config.optimizer.states} states"
    return f"{config.precision}{master}{states}{words.get(recompute, '')}"


def passes_of(estimate: Estimate) -> Iterator[tuple[str, StepEstimate]]:
    """Yield the timed passes, each with a title: a step, or the passes of inference."""
    step, inference = estimate.step, estimate.inference
    if step is None:
        return
    if inference is None:
        yield f"One step: {bound_text(step)}", step
        return
    if inference.prefill is not None:
        yield f"Prefill: {bound_text(inference.prefill)}", inference.prefill
    if inference.generation.new_tokens > 1:
        yield f"Decoding, one pass: {bound_text(step)}", step


def bound_text(step: StepEstimate) -> str:
    """Return `1.23 s, bound by nvme read`."""
    return f"{duration(step.seconds)}, bound by {step.bottleneck}"


def used_text(place: PlaceEstimate) -> str:
    """Return `12.0 GiB of 24.0 GiB (50 %)`."""
    used = f"{format_bytes(place.peak_nbytes)} of {format_bytes(place.capacity_nbytes)}"
    return f"{used} ({share(filled(place))})" if place.capacity_nbytes else used


def filled(place: PlaceEstimate) -> float:
    """Return the used share of the capacity; infinity for bytes in a place without capacity."""
    if not place.capacity_nbytes:
        return math.inf if place.peak_nbytes else 0.0
    return place.peak_nbytes / place.capacity_nbytes


def places_of(estimate: Estimate) -> Sequence[tuple[Tier, PlaceEstimate]]:
    """Return the places, fastest first."""
    return [(tier, estimate.memory.places[tier]) for tier in Tier if tier in estimate.memory.places]


def memory_rows(estimate: Estimate) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield a class or another figure, and its bytes in each of `places_of`; `-` for nothing."""
    tiers, places = zip(*places_of(estimate), strict=True)
    for name in MemoryClass:
        held = [place.by_class.get(name, 0) for place in places]
        if any(held):
            yield str(name), _bytes(held)
    yield "peak", tuple(format_bytes(place.peak_nbytes) for place in places)
    yield "capacity", tuple(format_bytes(place.capacity_nbytes) for place in places)
    short = [max(0, place.peak_nbytes - place.capacity_nbytes) for place in places]
    if any(short):  # also where peak and capacity are rounded to the same figure
        yield "short", _bytes(short)
    if estimate.system_nbytes:
        kept = [estimate.system_nbytes if tier is Tier.HOST else 0 for tier in tiers]
        yield "for the system", _bytes(kept)
    yield "budget", tuple(format_bytes(estimate.plan.budgets[tier]) for tier in tiers)


def _bytes(sizes: Sequence[int]) -> tuple[str, ...]:
    return tuple(format_bytes(nbytes) if nbytes else "-" for nbytes in sizes)


def links_of(estimate: Estimate, step: StepEstimate) -> Sequence[LinkTime]:
    """Return the links with work in a step; for training all of them."""
    trains = estimate.inference is None
    return [link for link in step.links if trains or link.seconds or link.nbytes]


def span_meaning(link: str, label: str) -> str:
    """Return the meaning of a span's colour: each link has one, the model's work two."""
    if link == COMPUTE:
        return "backward" if label == "backward" else "compute"
    return "update" if link == OPTIMIZER else link


def share_head(estimate: Estimate) -> str:
    """Return the heading of the column of shares in `link_rows`."""
    return "share of the step" if estimate.inference is None else "share of the pass"


def token_heads(estimate: Estimate) -> tuple[str, ...]:
    """Return the headings of the further columns of `link_rows` for inference."""
    return () if estimate.inference is None else ("per token",)


def link_rows(estimate: Estimate, step: StepEstimate) -> Iterator[tuple[str, ...]]:
    """Yield a link, the time it is busy (for inference also per token), its share of the step, and
    the bytes that cross it."""
    for link in links_of(estimate, step):
        busy = share(link.seconds / step.seconds if step.seconds else 0.0)
        nbytes = format_bytes(link.nbytes) if link.nbytes else "-"
        token = () if estimate.inference is None else (duration(link.seconds / step.tokens),)
        yield link.name, duration(link.seconds), *token, busy, nbytes


def changes_title(estimate: Estimate) -> str:
    return "What would help" if estimate.fits else "What would fit"


NO_CHANGE = "none of the changes that are tried makes it fit, nor up to three of them together"


def cost_text(change: Change) -> str:
    """Return a change of a step's time, such as `+12 %`."""
    return "unknown" if change.step_factor is None else factor_of_time(change.step_factor)


def settings_of(change: Change) -> tuple[str, ...]:
    """Return the settings as the command line takes them: `-o micro_batches=4`, `--ram 96GiB`."""
    return tuple(
        f"{key} {value}" if key.startswith("--") else f"-o {key}={value}"
        for key, value in change.settings.items()
    )


def what_text(estimate: Estimate) -> str:
    """Return the model, and the formats of its numbers."""
    return f"{model_text(estimate)} · {state_text(estimate)}"


def where_text(estimate: Estimate) -> str:
    return f"{estimate.hardware} · {workload_text(estimate)}"


def homes_of(estimate: Estimate) -> Iterator[tuple[str, str]]:
    """Yield the home of each class of states; for inference, only that of the weights."""
    for name, each in estimate.plan.placements.items():
        if estimate.inference is None or class_of(name) is StateClass.PARAMETERS:
            yield str(name), each.describe()


def figures(estimate: Estimate) -> tuple[Figure, ...]:
    """Return the key figures: time first, then the wear of disks."""
    if estimate.inference is not None:
        return tuple(_of_inference(estimate, estimate.inference))
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


def _of_inference(estimate: Estimate, found: InferenceEstimate) -> Iterator[Figure]:
    step, asked = estimate.step, found.generation
    if found.prefill is not None and step is not None:
        prefill = found.prefill
        yield Figure(
            "prefill", duration(prefill.seconds), f"{per_second(prefill.tokens_per_s)} tokens/s"
        )
        if asked.new_tokens > 1:
            rate = per_second(step.tokens_per_s)
            yield Figure("decoding", duration(step.seconds), f"a pass; {rate} tokens/s")
        seconds = found.seconds(step)
        if seconds is not None:
            yield Figure(
                "all of it", duration(seconds), f"{asked.batch * asked.new_tokens:,} new tokens"
            )
        if found.break_even_batch is not None:
            yield Figure(
                "break-even batch", f"{found.break_even_batch:,}",
                "sequences: from there on the model's work bounds a pass",
            )  # fmt: skip
    if found.token_nbytes is not None:
        cached = f"{format_bytes(found.token_nbytes)} per token of a sequence"
        yield Figure("kv cache", format_bytes(found.cache_nbytes or 0), cached)


def _life(estimate: Estimate) -> Figure:
    steps = estimate.ssd_life_steps
    if steps is None or estimate.step is None:
        return Figure("SSD life", "unknown", "name the SSD with --ssd")
    time = duration(steps * estimate.step.seconds)
    rated = format_bytes(estimate.endurance_nbytes)
    return Figure("SSD life", f"{counted(steps)} steps", f"{time}; rated {rated} written")
