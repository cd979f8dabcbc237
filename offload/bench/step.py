"""`offload bench step`: whole training steps of one model, each system in a process of its own.

Systems step in turn, so that a machine whose speed drifts treats all alike. How a turn is timed:
see `systems.train_a_turn`. What bounds a step here is measured in the same rounds:

    compute     forward and backward of the plain model, everything in RAM, no optimizer
    disk        the step's bytes through a raw loop
    bus         the optimizer's bytes through a loop without arithmetic

A step that overlaps all of them perfectly takes as long as the longest: the roofline (Williams,
Waterman, Patterson, 2009).
"""

import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from offload.bench.contenders import (
    OFFLOAD,
    PLAIN,
    Contender,
    StepOptions,
    SystemSpec,
    all_on,
    base_config,
    train_in_turn,
)
from offload.bench.io_raw import DiskSpeed, raw_loop
from offload.bench.record import Kind, Record, Row, Say
from offload.bench.stream import optimizer_loop
from offload.bench.table import Column, number
from offload.config import OffloadConfig
from offload.gpt import build_meta_model, parameter_count
from offload.process import machine
from offload.tiers.errors import IntegrityError

_ON_HOST = (*all_on("host"), "budget.host=auto")
HOST = SystemSpec("host", "offload, all on host", Kind.OFFLOAD, OFFLOAD, _ON_HOST)
NVME = SystemSpec("nvme", "offload, all on nvme", Kind.OFFLOAD, OFFLOAD, all_on("nvme"))
SYSTEMS = (PLAIN, HOST, NVME)

COLUMNS = (
    Column("s/step", number("seconds")),
    Column("fwd+bwd", number("forward_backward_s")),
    Column("peak GiB", number("peak_rss_nbytes", 2**30)),
    Column("GB read", number("read_nbytes", 1e9)),
    Column("written", number("written_nbytes", 1e9)),
    Column("loss diff", number("loss_difference", digits=6)),
)
_ROOFLINE = "roofline"
_DISK, _BUS = "disk", "bus"  # turns of the limits
DISK_NBYTES = 512 << 20  # per pass of the raw loops
BUS_NUMEL = 1 << 24  # parameters the bus is timed with: beyond any cache


def run_step(options: StepOptions, say: Say, peers: Sequence[SystemSpec] = ()) -> Record:
    """Run the bench. IntegrityError if offload's losses depend on the placement; otherwise raises
    as `train_in_turn` does."""
    base = base_config(options.config, options.overrides)
    record = Record("step", {})
    numel = parameter_count(build_meta_model(base))
    bounds = _Bounds(base.precision, say)
    systems, results = train_in_turn(
        record, options, (*SYSTEMS, *peers), base, say, limits=bounds.made
    )
    _check_losses(systems)
    _add_differences(record, systems)
    _add_roofline(record, results[_DISK], results[_BUS], bounds.bus.traffic * numel)
    record.compare(_ROOFLINE, NVME.label, "seconds")
    record.compare(HOST.label, PLAIN.label, "seconds")
    record.compare(NVME.label, PLAIN.label, "seconds")
    record.compare(NVME.label, PLAIN.label, "peak_rss_nbytes")
    record.details["losses"] = {s.spec.name: s.losses for s in systems}
    record.details["parameters"] = numel
    record.notes += _notes(base, numel, bounds)
    return record


class _Bounds:
    """The raw loops on disk and bus; the disk's reads are mixed with writes as `NVME` mixed them in
    its last turn."""

    def __init__(self, precision: str, say: Say) -> None:
        self._precision = precision
        self._say = say

    def made(
        self, systems: Sequence[Contender], folder: Path, opened: ExitStack
    ) -> dict[str, Callable[[], Any]]:
        self._nvme = next((system for system in systems if system.spec.name == NVME.name), None)
        self.disk = raw_loop(folder, DISK_NBYTES, self._say, opened)
        self.bus = optimizer_loop(self._precision, BUS_NUMEL, machine.cpu_count(), opened)
        return {_DISK: self._measure_disk, _BUS: self.bus.speed}

    def _measure_disk(self) -> DiskSpeed:
        turns = [] if self._nvme is None else self._nvme.turns
        read, written = (turns[-1].read_nbytes, turns[-1].written_nbytes) if turns else (1, 1)
        return self.disk.speed(read / (read + written) if read + written else 0.5)


# ---------------------------------------------------------------- losses
def _check_losses(systems: Sequence[Contender]) -> None:
    """Compare the losses of offload's placements, which train on the very same batches."""
    placements = [s for s in systems if s.spec in (HOST, NVME)]
    for other in placements[1:]:
        pairs = zip(placements[0].losses, other.losses, strict=True)
        for step, (a, b) in enumerate(pairs):
            if struct.pack("<d", a) != struct.pack("<d", b):  # bits: NaN is equal to NaN
                raise IntegrityError(
                    f"step {step}: the loss is {a!r} with {placements[0].spec.label} and {b!r} "
                    f"with {other.spec.label}; where states live must not change a bit: please "
                    "report it"
                )


# ---------------------------------------------------------------- rows
def _add_differences(record: Record, systems: Sequence[Contender]) -> None:
    """Add the largest difference from plain PyTorch's losses to the other systems' rows."""
    plain = next((s.losses for s in systems if s.spec.name == PLAIN.name), None)
    for system in systems:
        row = record.measured(system.spec.label)
        if row is not None and plain and system.spec.name != PLAIN.name:
            pairs = zip(plain, system.losses, strict=False)
            # `max` passes over a NaN
            row.facts["loss_difference"] = float(np.max([abs(a - b) for a, b in pairs]))


def _add_roofline(
    record: Record, disk: Sequence[DiskSpeed], bus: Sequence[float], adam_nbytes: float
) -> None:
    """Add one row per bound, and their maximum round by round, for the systems on nvme and host."""
    bounds = {"bus": [adam_nbytes / speed for speed in bus]}
    if (plain := record.measured(PLAIN.label)) is not None:
        bounds["compute"] = plain.measures["forward_backward_s"]
    if (nvme := record.measured(NVME.label)) is not None:
        moved = zip(nvme.measures["read_nbytes"], nvme.measures["written_nbytes"], strict=True)
        bounds["disk"] = [
            speed.seconds(int(read), int(written))
            for speed, (read, written) in zip(disk, moved, strict=True)
        ]
    for name in sorted(bounds):
        record.rows.append(Row(f"bound by {name}", Kind.LIMIT, {"seconds": bounds[name]}))
    if len(bounds) == 3:
        longest = [max(values) for values in zip(*bounds.values(), strict=True)]
        record.rows.append(Row(_ROOFLINE, Kind.LIMIT, {"seconds": longest}))
    record.details["disk"] = [asdict(speed) for speed in disk]
    record.details["bus_bytes_per_s"] = bus


def _notes(base: OffloadConfig, numel: int, bounds: _Bounds) -> list[str]:
    notes = [
        f"{numel / 1e6:.4g} M parameters, {base.precision}, batch {base.train.batch} x "
        f"{base.train.sequence} tokens, accumulation {base.gradient_accumulation_steps}",
        "bounds: compute is plain PyTorch's forward and backward; disk is offload's nvme bytes in "
        f"a raw loop ({bounds.disk.name}); bus is {bounds.bus.traffic:g} B per parameter in a loop "
        f"in C; {_ROOFLINE} is the largest of each round",
        "loss diff: the largest from plain PyTorch at equal steps; offload's losses are equal to "
        "the last bit, wherever states live",
    ]
    if base.precision != "fp32" and base.precision in machine.slow_matmul_precisions():
        notes.append(f"{base.precision} products are slow on this CPU: all systems wait for them")
    return notes
