"""`offload bench adam`: optimizer steps on flat arrays against the memory bus.

All systems pass over the same arrays in turn, with the same number of threads. The limit of a
variant is a loop with the same traffic and no arithmetic (`stream`).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from offload.bench.record import Kind, Record
from offload.bench.rounds import Say, Timed, measure, sharing, timed
from offload.bench.stream import GROUP, BusLoop
from offload.bench.table import Column, number
from offload.planning.machine.optimizer_variants import (
    SPLIT,
    SPLIT_BF16,
    SPLIT_INT8,
    VARIANTS,
    Arrays,
    Stream,
    stepper,
)
from offload.process import machine
from offload.swap.threads.worker import ParallelRunner
from offload.tiers.errors import BudgetError
from offload.tiers.units import format_bytes, round_up

DEFAULT_NUMEL = 100_000_000

COLUMNS = (
    Column("B/param", number("traffic_nbytes_per_parameter", digits=0)),
    Column("ms", number("seconds", 1e-3, 1)),
    Column("G params/s", number("parameters_per_s", 1e9)),
    Column("GB/s", number("bytes_per_s", 1e9, 1)),
)


@dataclass(frozen=True)
class AdamOptions:
    """`numel` parameters; None takes 100 M, or what fits in a quarter of the free memory."""

    numel: int | None = None
    rounds: int = 7
    threads: int | None = None


def run_adam(options: AdamOptions, say: Say) -> Record:
    """Run the bench. BudgetError if `numel` parameters do not fit in memory."""
    threads = options.threads or machine.cpu_count()
    streams = [stream for variant in VARIANTS for stream in variant.streams]
    numel = _numel(options, streams)
    record = Record("adam", {**asdict(options), "numel": numel, "threads": threads})
    record.note_rounds(options.rounds)
    say("filling the arrays")
    arrays = Arrays(numel, streams)
    with sharing(threads) as runner:
        systems = _systems(arrays, runner)
        measure(record, systems, options.rounds, say)
    _compare(record)
    record.notes.append(
        f"{numel / 1e6:.4g} M parameters, {threads} threads; a limit is a loop in "
        f"{systems[0].note} over the same arrays with the same traffic"
    )
    return record


def _numel(options: AdamOptions, streams: Sequence[Stream]) -> int:
    unique = {stream.name: stream for stream in streams}.values()
    each = sum(stream.itemsize / stream.elements_each for stream in unique)
    available = machine.available_memory_nbytes()
    default = min(DEFAULT_NUMEL, int(available / 4 / each))
    numel = default if options.numel is None else options.numel
    if numel * each > available * 0.8:
        max_numel = int(available * 0.8 / each)
        raise BudgetError(
            f"--numel: {numel} parameters take {format_bytes(int(numel * each))}, "
            f"{format_bytes(available)} are free; at most {max_numel}"
        )
    return round_up(numel, GROUP * 4)


def _passing(
    name: str, kind: Kind, traffic: float, arrays: Arrays, step: Callable[[], object],
    note: str = "",
) -> Timed:  # fmt: skip
    """A system that moves `traffic` bytes per parameter."""
    amounts = {"parameters_per_s": float(arrays.numel), "bytes_per_s": traffic * arrays.numel}
    facts = {"traffic_nbytes_per_parameter": traffic}
    return Timed(name, kind, timed(step), amounts, note, facts)


def _systems(arrays: Arrays, runner: ParallelRunner) -> list[Timed]:
    """The systems of all variants, limits first."""
    limits: dict[str, Timed] = {}
    steps: list[Timed] = []
    for variant in VARIANTS:
        held = [arrays[stream] for stream in variant.streams]
        bus = BusLoop(variant.streams, held, runner)
        name = _limit(variant.streams)
        limits.setdefault(name, _passing(name, Kind.LIMIT, bus.traffic, arrays, bus, "C"))
        step = stepper(variant, arrays, runner)
        steps.append(_passing(variant.name, Kind.OFFLOAD, variant.traffic, arrays, step))
    return [*limits.values(), *steps]


def _limit(streams: Sequence[Stream]) -> str:
    wide = sum(stream.traffic for stream in streams if stream.elements_each == 1)
    return f"bus loop, {wide:g} B"


def _compare(record: Record) -> None:
    speed = "parameters_per_s"
    for variant in VARIANTS:
        record.compare(variant.name, _limit(variant.streams), speed)
    for states in (SPLIT_BF16, SPLIT_INT8):
        record.compare(states.name, SPLIT.name, speed)
