"""The systems of `step`, and what becomes of their turns: rows, bounds, ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from offload import machine
from offload.bench.record import Kind, Record, Row, Target
from offload.bench.step_limits import BusLimit, DiskLimit, DiskSpeed
from offload.bench.step_process import SystemFailed, SystemProcess, SystemSpec, Turn
from offload.bench.table import Column, number
from offload.config import OffloadConfig


def _all_on(tier: str) -> tuple[str, ...]:
    return tuple(f"placement.{name}={tier}" for name in ("parameters", "gradients", "optimizer"))


_CPU, _NVME, _KEPT = (f"DeepSpeed ZeRO-3, {name}" for name in ("cpu", "nvme", "nvme, kept"))
SYSTEMS = (
    SystemSpec("plain", "plain PyTorch", Kind.PEER, "plain", (), 22),
    SystemSpec(
        "host",
        "ours, all on host",
        Kind.OURS,
        "offload",
        (*_all_on("host"), "budget.host=auto"),
        22,
    ),
    SystemSpec("nvme", "ours, all on nvme", Kind.OURS, "offload", _all_on("nvme"), 4),
    SystemSpec("deepspeed-cpu", _CPU, Kind.PEER, "deepspeed-cpu", (), 42),
    SystemSpec("deepspeed-nvme", _NVME, Kind.PEER, "deepspeed-nvme", (), 55),
)
_ACCUMULATED, _PIECES = "ours on nvme, 4 passes", "ours on nvme, 4 micro-batches"
EXTRA_SYSTEMS = (
    # It keeps the parameters it has read until the step is over: faster, and more memory.
    SystemSpec("deepspeed-nvme-kept", _KEPT, Kind.PEER, "deepspeed-nvme-kept", (), 67),
    # Four times the tokens per step: as gradient accumulation, and block by block.
    SystemSpec(
        "accumulated", _ACCUMULATED, Kind.OURS, "offload",
        (*_all_on("nvme"), "gradient_accumulation_steps=4"), 4, batches=4,
    ),
    SystemSpec(
        "micro-batches", _PIECES, Kind.OURS, "offload", (*_all_on("nvme"), "micro_batches=4"),
        4, batches=4, in_one_piece=True,
    ),
)  # fmt: skip
_ROOFLINE = "roofline"

COLUMNS = (
    Column("s/step", number("seconds")),
    Column("fwd+bwd", number("forward_backward_s")),
    Column("peak GiB", number("peak_rss_nbytes", 2**30)),
    Column("GB read", number("read_nbytes", 1e9)),
    Column("written", number("written_nbytes", 1e9)),
    Column("loss diff", number("loss_difference", digits=6)),
)


def last_line(error: Exception) -> str:
    return f"failed: {str(error).strip().splitlines()[-1][:160]}"


class Contender:
    """A process whose failure does not end the bench, if it is a peer's."""

    def __init__(self, process: SystemProcess) -> None:
        self.process = process
        self.spec = process.spec
        self.reason = ""
        self.turns: list[Turn] = []  # the warm-up's, too

    def turn(self) -> Turn | None:
        if self.reason:
            return None
        try:
            self.turns.append(self.process.turn())
        except SystemFailed as error:
            if self.spec.kind is not Kind.PEER:
                raise
            self.reason = last_line(error)
            return None
        return self.turns[-1]

    def losses(self) -> list[float]:
        return [loss for turn in self.turns for loss in turn.losses]


@dataclass
class Results:
    """Per round. A system's turns hold None from where it failed."""

    turns: dict[str, list[Turn | None]]
    disk: list[DiskSpeed]
    bus: list[float]


def add_rows(
    record: Record, systems: Sequence[Contender], results: Results, missing: Sequence[Row]
) -> None:
    reference = next((s.losses() for s in systems if s.spec.name == "plain"), None)
    for system in systems:
        turns = [turn for turn in results.turns[system.spec.label] if turn is not None]
        if system.reason and len(turns) < len(results.disk):
            record.rows.append(Row(system.spec.label, system.spec.kind, note=system.reason))
            continue
        row = _row(system, turns)
        others = {"plain", "accumulated", "micro-batches"}  # ... which have other batches
        if reference is not None and system.spec.name not in others:
            row.facts["loss_difference"] = _difference(reference, system.losses())
        record.rows.append(row)
    record.rows += missing


def _difference(reference: Sequence[float], losses: Sequence[float]) -> float:
    """The largest; NaN if one of the losses is, which `max` would pass over."""
    each = [abs(a - b) for a, b in zip(reference, losses, strict=False)]
    return math.nan if any(map(math.isnan, each)) else max(each)


def _row(system: Contender, turns: Sequence[Turn]) -> Row:
    names = ("seconds", "forward_backward_s", "read_nbytes", "written_nbytes")
    measures = {name: [float(getattr(turn, name)) for turn in turns] for name in names}
    moved = zip(measures["read_nbytes"], measures["written_nbytes"], strict=True)
    measures["moved_nbytes"] = [read + written for read, written in moved]
    facts = {"peak_rss_nbytes": float(max(turn.peak_rss_nbytes for turn in turns))}
    return Row(system.spec.label, system.spec.kind, measures, facts, system.reason)


def add_roofline(record: Record, results: Results, adam_nbytes: float) -> None:
    """One row per bound, and their maximum round by round, for what runs on nvme and on host."""
    bus = [adam_nbytes / speed for speed in results.bus]
    parts = {"bus": bus}
    plain, nvme = (_measured(record, name) for name in ("plain PyTorch", "ours, all on nvme"))
    if plain is not None:
        parts["compute"] = plain.measures["forward_backward_s"]
    if nvme is not None:
        moved = zip(nvme.measures["read_nbytes"], nvme.measures["written_nbytes"], strict=True)
        parts["disk"] = [
            speed.seconds(int(read), int(written))
            for speed, (read, written) in zip(results.disk, moved, strict=True)
        ]
    for name in sorted(parts):
        record.rows.append(Row(f"bound by {name}", Kind.LIMIT, {"seconds": parts[name]}))
    if len(parts) == 3:
        highest = [max(values) for values in zip(*parts.values(), strict=True)]
        record.rows.append(Row(_ROOFLINE, Kind.LIMIT, {"seconds": highest}))
    record.details["disk"] = [asdict(speed) for speed in results.disk]
    record.details["bus_bytes_per_s"] = results.bus


def _measured(record: Record, name: str) -> Row | None:
    return next((row for row in record.rows if row.name == name and row.measured), None)


def compare(record: Record) -> None:
    host, nvme = "ours, all on host", "ours, all on nvme"
    wanted: tuple[tuple[str, str, str, Target | None], ...] = (
        (_ROOFLINE, nvme, "seconds", Target(0.90)),
        (_NVME, nvme, "seconds", Target(1.7)),
        (nvme, _NVME, "peak_rss_nbytes", Target(0.25, at_most=True)),
        (_KEPT, nvme, "seconds", Target(1.7)),
        (nvme, _KEPT, "peak_rss_nbytes", Target(0.25, at_most=True)),
        (host, "plain PyTorch", "seconds", Target(1.08, at_most=True)),
        (_CPU, host, "seconds", Target(1.4)),
        (host, _CPU, "peak_rss_nbytes", None),
        (nvme, "plain PyTorch", "seconds", None),
        (nvme, "plain PyTorch", "peak_rss_nbytes", None),
        (_PIECES, _ACCUMULATED, "moved_nbytes", Target(0.35, at_most=True)),
        (_PIECES, _ACCUMULATED, "seconds", None),
    )
    for of, to, measure, target in wanted:
        if _measured(record, of) is not None and _measured(record, to) is not None:
            record.compare(of, to, measure, target)


def notes_on(base: OffloadConfig, numel: int, disk: DiskLimit, bus: BusLimit) -> list[str]:
    notes = [
        f"{numel / 1e6:.4g} M parameters, {base.precision}, batch {base.train.batch} x "
        f"{base.train.sequence} tokens, accumulation {base.gradient_accumulation_steps}",
        f"bounds: compute is plain PyTorch's forward and backward; disk is our nvme bytes in a raw "
        f"loop ({disk.note}); bus is {bus.traffic:g} B per parameter in a loop in {bus.language}; "
        f"{_ROOFLINE} is the largest of each round",
        "loss diff: the largest from plain PyTorch at equal steps; ours are equal to the last bit",
    ]
    if base.precision != "fp32" and base.precision in machine.slow_matmul_precisions():
        notes.append(f"{base.precision} products are slow on this CPU: all systems wait for them")
    return notes
