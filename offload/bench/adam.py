"""`offload bench adam`: optimizer steps on flat arrays against the memory bus and against others.

All systems pass over the same arrays in turn, with the same number of threads. The limit of a
variant is a loop with the same traffic and no arithmetic (`stream`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from offload import machine
from offload.bench import adam_peers as peers
from offload.bench.adam_ours import PLAIN, SPLIT, SPLIT_BF16, SPLIT_INT8, VARIANTS, filled, stepper
from offload.bench.arrays import Arrays, Stream
from offload.bench.quiet import quietly
from offload.bench.record import Kind, Record, Row, Target, timed_row
from offload.bench.rounds import Say, interleaved, seconds_of
from offload.bench.stream import GROUP, BusLoop
from offload.bench.table import Column, number
from offload.bench.threads import sharing
from offload.swap.worker import ParallelRunner
from offload.tiers.errors import BudgetError
from offload.tiers.units import format_bytes, round_up

DEFAULT_NUMEL = 100_000_000
_LEAST_NUMEL = 1 << 16
_TORCH, _TORCH_WHOLE = "torch fused, fp32", "torch fused, whole path"
_DEEPSPEED, _DEEPSPEED_WHOLE = "DeepSpeedCPUAdam, fp32", "DeepSpeedCPUAdam, whole path"

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


@dataclass(frozen=True)
class _System:
    """What is timed, and how many bytes per parameter it moves."""

    name: str
    kind: Kind
    traffic: float
    run: Callable[[], object]
    note: str = ""


def run_adam(options: AdamOptions, say: Say) -> Record:
    """Measure. BudgetError if `numel` parameters do not fit in memory."""
    threads = options.threads or machine.cpu_count()
    streams = _all_streams()
    numel = _numel(options, streams)
    record = Record("adam", {**asdict(options), "numel": numel, "threads": threads})
    record.note_rounds(options.rounds)
    arrays = Arrays(numel, streams)
    with sharing(threads) as runner:
        systems, missing = _systems(arrays, runner, say)
        runs = {s.name: lambda s=s: seconds_of(s.run) for s in systems}
        seconds = interleaved(runs, options.rounds, say)
    for system in systems:
        rates = {"parameters_per_s": float(numel), "bytes_per_s": system.traffic * numel}
        facts = {"traffic_nbytes_per_parameter": system.traffic}
        row = timed_row(system.name, system.kind, seconds[system.name], rates, facts, system.note)
        record.rows.append(row)
    record.rows += missing
    _compare(record)
    record.notes += [
        f"{numel / 1e6:.4g} M parameters, {threads} threads; a limit is a loop in "
        f"{systems[0].note} over the same arrays with the same traffic",
        "whole path: bf16 gradient to fp32, unscale and clip (torch: two passes, DeepSpeed: one), "
        "Adam, fp32 master to bf16; ours does all of it in its one pass",
    ]
    return record


def _all_streams() -> list[Stream]:
    ours = [stream for variant in VARIANTS for stream in variant.streams]
    return [*ours, *peers.WHOLE_STREAMS]


def _numel(options: AdamOptions, streams: Sequence[Stream]) -> int:
    unique = {stream.name: stream for stream in streams}.values()
    each = sum(stream.itemsize / stream.elements_each for stream in unique)
    available = machine.available_memory_nbytes()
    default = min(DEFAULT_NUMEL, int(available / 4 / each))
    numel = default if options.numel is None else options.numel
    if numel < _LEAST_NUMEL:
        raise BudgetError(f"--numel: {numel} is too few to time; at least {_LEAST_NUMEL}")
    if numel * each > available * 0.8:
        most = int(available * 0.8 / each)
        raise BudgetError(
            f"--numel: {numel} parameters take {format_bytes(int(numel * each))}, "
            f"{format_bytes(available)} are free; at most {most}"
        )
    return round_up(numel, GROUP * 4)


def _systems(arrays: Arrays, runner: ParallelRunner, say: Say) -> tuple[list[_System], list[Row]]:
    """Those that can run, limits first, and rows for those that cannot."""
    say("filling the arrays")
    limits: list[_System] = []
    ours: list[_System] = []
    for variant in VARIANTS:
        held = [filled(arrays, stream) for stream in variant.streams]
        bus = BusLoop(variant.streams, held, runner)
        name = _limit(variant.streams)
        if all(limit.name != name for limit in limits):
            limits.append(_System(name, Kind.LIMIT, bus.traffic, bus, bus.language))
        traffic = sum(stream.traffic for stream in variant.streams)
        ours.append(_System(variant.name, Kind.OURS, traffic, stepper(variant, arrays, runner)))
    others, missing = _peers(arrays, say)
    return [*limits, *ours, *others], missing


def _limit(streams: Sequence[Stream]) -> str:
    wide = sum(stream.traffic for stream in streams if stream.elements_each == 1)
    return f"bus loop, {wide:g} B"


def _peers(arrays: Arrays, say: Say) -> tuple[list[_System], list[Row]]:
    torch_alone = peers.alone(peers.torch_optimizer, arrays, torch.tensor(0.0))
    two = peers.whole(torch_alone, arrays, multiplications=2)
    systems = [
        _System(_TORCH, Kind.PEER, peers.ALONE_TRAFFIC, torch_alone),
        _System(_TORCH_WHOLE, Kind.PEER, peers.WHOLE_TRAFFIC["two multiplications"], two),
    ]
    reason = peers.INSTALL_DEEPSPEED
    if peers.has_deepspeed():
        say("loading DeepSpeed's CPU Adam; compiling it takes a minute the first time")
        found, reason = quietly(
            lambda: peers.alone(peers.deepspeed_optimizer, arrays, 0), "cannot be used"
        )
        if found is not None:
            one = peers.whole(found, arrays, multiplications=1)
            traffic = peers.WHOLE_TRAFFIC["one multiplication"]
            systems += [
                _System(_DEEPSPEED, Kind.PEER, peers.ALONE_TRAFFIC, found),
                _System(_DEEPSPEED_WHOLE, Kind.PEER, traffic, one),
            ]
            return systems, []
    return systems, [Row(name, Kind.PEER, note=reason) for name in (_DEEPSPEED, _DEEPSPEED_WHOLE)]


def _compare(record: Record) -> None:
    speed = "parameters_per_s"
    targets = {SPLIT.name: Target(0.95)}
    for variant in VARIANTS:
        record.compare(variant.name, _limit(variant.streams), speed, targets.get(variant.name))
    record.compare(SPLIT.name, _DEEPSPEED_WHOLE, speed, Target(2.0))
    record.compare(SPLIT.name, _TORCH_WHOLE, speed, Target(1.8))
    record.compare(PLAIN.name, _DEEPSPEED, speed, Target(0.98))
    record.compare(PLAIN.name, _TORCH, speed)
    record.compare(SPLIT_BF16.name, SPLIT.name, speed, Target(0.95))
    record.compare(SPLIT_INT8.name, SPLIT.name, speed, Target(0.55))
