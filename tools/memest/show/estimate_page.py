"""An estimate as a page: the same tables for the terminal and for HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from offload.display.words import counted, duration, share
from offload.memory.preflight import gpu_line
from offload.planning.plan.estimate import MemoryClass, StepEstimate
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes
from offload.tools.memest.estimate.result import Change, Estimate, InferenceEstimate
from offload.tools.memest.show import view
from offload.tools.memest.show.page import Cell, Figure, Page, Section, Table
from offload.tools.memest.show.view import per_second

NO_CHANGE = "none of the changes that are tried makes it fit by itself"


def estimate_page(estimate: Estimate) -> Page:
    """Return a page with everything about an estimate, verdict first."""
    state = "good" if estimate.fits else "bad"
    return Page(
        name=f"{estimate.model}: memory and time",
        title=estimate.model,
        about=(
            f"{view.model_text(estimate)} · {_formats(estimate)}",
            f"{estimate.hardware} · {view.workload_text(estimate)}",
        ),
        verdict=view.verdict(estimate),
        state="" if view.has_drawbacks(estimate) else state,
        figures=tuple(_figures(estimate)),
        sections=tuple(_sections(estimate)),
    )


def _formats(estimate: Estimate) -> str:
    """Return `bf16, split master, fp32 states`; for inference the formats of weights."""
    config = estimate.config
    if estimate.inference is not None:
        stored = config.storage
        storage = f", stored in {stored.weights} by groups of {stored.group_size}" if stored else ""
        return f"{config.precision}{storage}, nothing is trained"
    master = "" if config.master == "none" else f", {config.master} master"
    recompute = config.placement.activations.checkpoint
    words = {True: ", checkpointing", "selective": ", selective checkpointing"}
    states = f", {config.optimizer.type} with {config.optimizer.states} states"
    return f"{config.precision}{master}{states}{words.get(recompute, '')}"


def _figures(estimate: Estimate) -> Iterator[Figure]:
    """Yield the key figures: time first, then the wear of disks."""
    if estimate.inference is not None:
        yield from _of_inference(estimate, estimate.inference)
        return
    step = estimate.step
    if step is not None:
        yield Figure("step", duration(step.seconds), f"bound by {step.bottleneck}")
        yield Figure("tokens/s", per_second(step.tokens_per_s), f"{step.tokens:,} tokens per step")
        yield Figure("written per step", format_bytes(step.written_nbytes), "to nvme")
        steps = estimate.ssd_life_steps
        if steps is not None:
            life = f"{duration(steps * step.seconds)}; rated "
            life += f"{format_bytes(estimate.endurance_nbytes)} written"
            yield Figure("SSD life", f"{counted(steps)} steps", life)
        elif step.written_nbytes:
            yield Figure("SSD life", "unknown", "name the SSD with --ssd")
    checkpoint = format_bytes(estimate.checkpoint_nbytes)
    yield Figure("checkpoint", checkpoint, "on disk, each")


def _of_inference(estimate: Estimate, inference: InferenceEstimate) -> Iterator[Figure]:
    step, asked, prefill = estimate.step, inference.generation, inference.prefill
    if prefill is not None and step is not None:
        rate = f"{per_second(prefill.tokens_per_s)} tokens/s"
        yield Figure("prefill", duration(prefill.seconds), rate)
        if asked.new_tokens > 1:
            rate = f"a pass; {per_second(step.tokens_per_s)} tokens/s"
            yield Figure("decoding", duration(step.seconds), rate)
        seconds = inference.seconds(step)
        if seconds is not None:
            tokens = f"{asked.batch * asked.new_tokens:,} new tokens"
            yield Figure("all of it", duration(seconds), tokens)
    if inference.token_nbytes is not None:
        cached = f"{format_bytes(inference.token_nbytes)} per token of a sequence"
        yield Figure("kv cache", format_bytes(inference.cache_nbytes or 0), cached)


def _sections(estimate: Estimate) -> Iterator[Section]:
    messages = dict.fromkeys(each.message for each in estimate.shortfalls)
    yield Section("Why not", lines=tuple(messages))
    if estimate.changes:
        yield Section("What would fit", tables=[_changes(estimate.changes)])
    elif not estimate.fits:
        yield Section("What would fit", lines=[NO_CHANGE])
    gpu = gpu_line(estimate.memory.places.get(Tier.DEVICE))
    yield Section("Peak memory", tables=[_memory(estimate)], lines=[gpu] if gpu else [])
    step, inference = estimate.step, estimate.inference
    passes = {"One step": step}
    if inference is not None:
        decodes = inference.generation.new_tokens > 1
        passes = {"Prefill": inference.prefill, "Decoding, one pass": step if decodes else None}
    for title, each in passes.items():
        if step is not None and each is not None:
            title = f"{title}: {duration(each.seconds)}, bound by {each.bottleneck}"
            yield Section(title, tables=[_links(estimate, each)])
    yield _homes(estimate)
    yield Section("Notes", lines=tuple(dict.fromkeys(estimate.notes)))


def _changes(changes: Sequence[Change]) -> Table:
    """Return changes, each with its cost in time and its settings as the command line takes
    them."""
    rows = []
    for change in changes:
        factor = change.step_factor
        cost = "unknown" if factor is None else view.factor_of_time(factor)
        settings = [
            f"{key} {value}" if key.startswith("--") else f"-o {key}={value}"
            for key, value in change.settings.items()
        ]
        rows.append((Cell(cost, strong=True), Cell(change.text, code=settings)))
    return Table(("step time", "change"), rows, left=frozenset({1}))


def _memory(estimate: Estimate) -> Table:
    """Return the bytes of each class, or another figure, in each place; `-` for nothing."""
    tiers, places = zip(*view.places_of(estimate), strict=True)
    rows: list[Sequence[Cell]] = []

    def add(name: str, sizes: Sequence[int], state: str = "") -> None:
        strong = name == "peak"
        cells = [
            Cell(format_bytes(n), state=state, strong=strong) if n else Cell("-") for n in sizes
        ]
        rows.append([Cell(name, strong=strong), *cells])

    for name in MemoryClass:
        held = [place.by_class.get(name, 0) for place in places]
        if any(held):
            add(name, held)
    add("peak", [place.peak_nbytes for place in places])
    add("capacity", [place.capacity_nbytes for place in places])
    if estimate.system_nbytes:
        add("for the system", [estimate.system_nbytes * (tier is Tier.HOST) for tier in tiers])
    add("budget", [estimate.plan.budgets[tier] for tier in tiers])
    short = view.short_of(estimate)
    if short:  # also where what there is and what is needed are rounded to the same figure
        add("short", [short.get(tier, 0) for tier in tiers], "bad")
    return Table(("", *(view.place_title(tier) for tier in tiers)), rows)


def _links(estimate: Estimate, step: StepEstimate) -> Table:
    """Return the links, the time each is busy (for inference also per token), its share of the
    step, and the bytes that cross it; for inference only links with work."""
    trains = estimate.inference is None
    rows = []
    for link in step.links:
        if not (trains or link.seconds or link.nbytes):
            continue
        is_bound = link.name == step.bottleneck
        name: str | Cell = Cell(f"{link.name} (bottleneck)", strong=True) if is_bound else link.name
        token = () if trains else (duration(link.seconds / step.tokens),)
        busy = share(link.seconds / step.seconds if step.seconds else 0.0)
        nbytes = format_bytes(link.nbytes) if link.nbytes else "-"
        rows.append((name, duration(link.seconds), *token, busy, nbytes))
    if trains:
        return Table(("link", "busy", "share of the step", "bytes"), rows)
    return Table(("link", "busy", "per token", "share of the pass", "bytes"), rows)


def _homes(estimate: Estimate) -> Section:
    """Return the home of each class of states; for inference, only that of the weights."""
    plan = estimate.plan
    about = (
        f"{len(plan.groups):,} groups, {plan.prefetch} fetched ahead, chunks of "
        f"{plan.chunk_numel:,} elements"
    )
    rows = tuple(
        (str(name), each.describe())
        for name, each in plan.placements.items()
        if estimate.inference is None or name is StateClass.PARAMETERS
    )
    homes = Table(("", ""), rows, left=frozenset({0, 1}))
    return Section("Where each state lives", tables=[homes], lines=[about])
