"""The sentences of an estimate that more than one format shows, and its numbers in words.
Bytes in words: `tiers.units.format_bytes`."""

from collections.abc import Sequence

from offload.display.words import counted, three_digits
from offload.planning.plan.estimate import PlaceEstimate
from offload.tiers.tier import TIERS, Tier
from offload.tiers.units import format_bytes
from offload.tools.memest.estimate.result import Estimate


def place_title(tier: Tier) -> str:
    """Return the name of a tier's place in tables."""
    return "Disk (nvme)" if tier.is_file else tier.title


def per_second(rate: float) -> str:
    """Return `12,300` or `0.0431`: three digits, no unit."""
    return f"{float(f'{rate:.3g}'):,.0f}" if rate >= 100 else three_digits(rate)


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


def has_drawbacks(estimate: Estimate) -> bool:
    """Whether a plan that fits is barely usable as it is."""
    return estimate.fits and (estimate.is_slow or estimate.wears_out_ssds)


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


def short_of(estimate: Estimate) -> dict[Tier, int]:
    """Return the bytes that each place lacks: by as much as its peak is above its capacity, or more
    if what the plan needs is not in a budget, which leaves a part of the place free."""
    short: dict[Tier, int] = {}
    for each in estimate.shortfalls:
        place = estimate.memory.places.get(each.tier)
        over = 0 if place is None else place.peak_nbytes - place.capacity_nbytes
        lacking = max(0, over, each.needed_nbytes - each.capacity_nbytes)
        short[each.tier] = max(lacking, short.get(each.tier, 0))
    return short


def missing_text(estimate: Estimate) -> str:
    """Return `RAM is 1.2 GiB short; ...` for every place that is short."""
    short = short_of(estimate).items()
    return "; ".join(f"{place_title(tier)} is {format_bytes(n)} short" for tier, n in short)


def workload_text(estimate: Estimate) -> str:
    """Return `batch 4 x 2,048 tokens, 8 passes per step`, or `4 prompts of 512 tokens, 128 new
    ones`."""
    workload = estimate.workload
    if estimate.inference is not None:
        asked = estimate.inference.generation
        prompts = "prompt" if asked.batch == 1 else "prompts"
        return (
            f"{asked.batch:,} {prompts} of {asked.prompt:,} tokens, {asked.new_tokens:,} new "
            f"{'token' if asked.new_tokens == 1 else 'tokens'} each"
        )
    passes = f", {workload.passes} passes per step" if workload.passes > 1 else ""
    return f"batch {workload.batch:,} x {workload.sequence:,} tokens{passes}"


def model_text(estimate: Estimate, name: str = "") -> str:
    """Return `name: 6.74 B parameters`, and how many of them are trained; a count only once."""
    text = f"{counted(estimate.numel)} parameters"
    if name and name != text:
        text = f"{name}: {text}"
    if estimate.numel_trainable != estimate.numel and estimate.inference is None:
        text += f", {counted(estimate.numel_trainable)} trained"
    if estimate.active_numel not in (None, estimate.numel):
        text += f", {counted(estimate.active_numel)} active per token"
    return text


def places_of(estimate: Estimate) -> Sequence[tuple[Tier, PlaceEstimate]]:
    """Return the places, fastest first."""
    places = estimate.memory.places
    return [(tier, places[tier]) for tier in TIERS if tier in places]
