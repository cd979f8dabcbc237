"""`offload bench step`: whole training steps of one model, each system in a process of its own.

Systems step in turn, so that a machine whose speed drifts treats all alike. What bounds a step here
is measured in the same rounds: see `step_limits`. How a turn is timed: see `step_child`.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from offload import machine
from offload.bench.adam_peers import INSTALL_DEEPSPEED, has_deepspeed
from offload.bench.record import Kind, Record, Row
from offload.bench.rounds import Say, interleaved
from offload.bench.step_limits import BusLimit, DiskLimit, DiskSpeed
from offload.bench.step_process import SystemFailed, SystemProcess, SystemSpec
from offload.bench.step_rows import (
    EXTRA_SYSTEMS,
    SYSTEMS,
    Contender,
    Results,
    add_roofline,
    add_rows,
    compare,
    last_line,
    notes_on,
)
from offload.bench.step_systems import DTYPES
from offload.config import OffloadConfig
from offload.tiers.errors import ConfigError, IntegrityError, PathError
from offload.tiers.units import format_bytes

# The 151 M Llama shape of examples/llama-151m.yaml, at hand wherever the package is installed.
LLAMA_151M: Mapping[str, Any] = {
    "precision": "fp32",
    "budget": {"host": "512MiB", "nvme": "8GiB"},
    "placement": {"activations": {"tier": "device", "checkpoint": True}},
    "optimizer": {"type": "adamw", "lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
    "clip_grad_norm": 1.0,
    "train": {
        "model": {
            "shape": "llama", "layers": 8, "hidden": 1024, "heads": 16, "mlp": 4096,
            "vocab": 8192, "max_sequence": 256, "tied": False,
        },
        "text": "python", "batch": 2, "sequence": 256,
    },
}  # fmt: skip


_PROCESS_NBYTES = 400 << 20  # interpreter, libraries, activations of a small batch
_EQUAL = ("host", "nvme")  # the systems of ours that train on the very same batches
_DISK, _BUS = "disk", "bus"  # turns of the limits
DISK_NBYTES = 512 << 20  # per pass of the raw loops
BUS_NUMEL = 1 << 24  # parameters the bus is timed with: beyond any cache


@dataclass(frozen=True)
class StepOptions:
    """`config` None trains the 151 M shape; `systems` empty takes all."""

    config: Path | None = None
    overrides: tuple[str, ...] = ()
    folder: Path | None = None
    systems: tuple[str, ...] = ()
    rounds: int = 7


def run_step(options: StepOptions, say: Say) -> Record:
    """Measure. IntegrityError if ours do not have the same losses everywhere; SystemFailed if one
    of ours ends early; ConfigError and PathError before anything is started."""
    base = OffloadConfig.load(options.config or LLAMA_151M, options.overrides)
    check_supported(base)
    folder = options.folder or Path(tempfile.gettempdir())
    if not folder.is_dir():
        raise PathError(f"--path: {folder} is not a folder; name one on the disk to be used")
    record = Record("step", {**asdict(options), **_texts(options, folder)})
    record.note_rounds(options.rounds)
    numel = count_parameters(base)
    specs, left_out = _choose(options, numel)
    with ExitStack() as stack:
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        # before the limits, which take a while: what is wrong with a system shows at once
        systems, failed = _start(specs, base, private, stack, say)
        disk = DiskLimit(private, DISK_NBYTES, say)
        stack.callback(disk.close)
        bus = BusLimit(base.precision, BUS_NUMEL, machine.cpu_count())
        stack.callback(bus.close)
        results = _run(systems, disk, bus, options.rounds, say)
        say("closing")
        for system in systems:
            _close(system)
    _check_losses(systems)
    add_rows(record, systems, results, [*left_out, *failed])
    add_roofline(record, results, bus.traffic * numel)
    compare(record)
    record.details["losses"] = {s.spec.name: s.losses() for s in systems}
    record.details["parameters"] = numel
    record.notes += notes_on(base, numel, disk, bus)
    return record


def check_supported(base: OffloadConfig) -> None:
    """ConfigError for what the other systems cannot train alike."""
    if base.optimizer.type != "adamw":
        raise ConfigError(
            f"optimizer.type: {base.optimizer.type} has no peers here; set optimizer.type: adamw"
        )
    if base.precision not in DTYPES:
        raise ConfigError(
            f"precision: {base.precision} is not measured here, where nobody scales the loss; "
            f"set precision: {' or '.join(DTYPES)}"
        )


def count_parameters(config: OffloadConfig) -> int:
    """Of the configured model; builds it without memory."""
    from offload.train.model import build_meta_model

    return sum(param.numel() for param in build_meta_model(config).parameters())


# ---------------------------------------------------------------- which systems
def _choose(options: StepOptions, numel: int) -> tuple[list[SystemSpec], list[Row]]:
    known = {spec.name: spec for spec in (*SYSTEMS, *EXTRA_SYSTEMS)}
    unknown = [name for name in options.systems if name not in known]
    if unknown:
        raise ConfigError(f"--systems: {unknown[0]!r} is unknown; choose from {', '.join(known)}")
    names = options.systems or tuple(spec.name for spec in SYSTEMS)
    wanted = [known[name] for name in dict.fromkeys(names)]  # each once: it has one row
    chosen, left_out = [], []
    room = machine.available_memory_nbytes()
    for spec in wanted:
        needed = spec.memory_per_parameter * numel + _PROCESS_NBYTES
        reason = ""
        if spec.program.startswith("deepspeed") and not has_deepspeed():
            reason = INSTALL_DEEPSPEED
        elif needed > room and spec.kind is Kind.PEER:
            reason = (
                f"left out: needs about {format_bytes(needed)} and the others leave "
                f"{format_bytes(max(0, room))}; run it with fewer: --systems nvme,{spec.name}"
            )
        if reason:
            left_out.append(Row(spec.label, spec.kind, note=reason))
        else:
            chosen.append(spec)
            room -= needed
    return chosen, left_out


def _start(
    specs: Sequence[SystemSpec], base: OffloadConfig, folder: Path, stack: ExitStack, say: Say
) -> tuple[list[Contender], list[Row]]:
    systems, failed = [], []
    for spec, file in [_configured(spec, base, folder) for spec in specs]:
        say(f"starting {spec.label}")
        try:
            process = SystemProcess(spec, file, folder)
        except SystemFailed as error:
            if spec.kind is not Kind.PEER:
                raise
            failed.append(Row(spec.label, spec.kind, note=last_line(error)))
            continue
        stack.callback(process.kill)
        systems.append(Contender(process))
    return systems, failed


def _configured(spec: SystemSpec, base: OffloadConfig, folder: Path) -> tuple[SystemSpec, Path]:
    """The system with the batches of its steps, and the file of its configuration."""
    config = OffloadConfig.load(base, (*spec.overrides, f"nvme.paths=[{folder}]"))
    file = folder / f"{spec.name}.yaml"
    file.write_text(config.to_yaml())
    return replace(spec, batches=max(spec.batches, config.gradient_accumulation_steps)), file


def _close(system: Contender) -> None:
    try:
        system.process.close()
    except SystemFailed:
        if system.spec.kind is not Kind.PEER:
            raise
        system.reason = system.reason or "measured, but failed when it was closed"


# ---------------------------------------------------------------- rounds
def _run(
    systems: Sequence[Contender], disk: DiskLimit, bus: BusLimit, rounds: int, say: Say
) -> Results:
    nvme = next((system for system in systems if system.spec.name == "nvme"), None)

    def measure_disk() -> DiskSpeed:
        last = nvme.turns[-1] if nvme is not None and nvme.turns else None
        moved = 0 if last is None else last.read_nbytes + last.written_nbytes
        return disk.measure(last.read_nbytes / moved if last is not None and moved else 0.5)

    runs: dict[str, Callable[[], Any]] = {s.spec.label: s.turn for s in systems}
    runs |= {_DISK: measure_disk, _BUS: bus.measure}
    results = interleaved(runs, rounds, say)
    return Results(results, results.pop(_DISK), results.pop(_BUS))


def _check_losses(systems: Sequence[Contender]) -> None:
    ours = [s for s in systems if s.spec.kind is Kind.OURS and s.spec.name in _EQUAL]
    for other in ours[1:]:
        pairs = zip(ours[0].losses(), other.losses(), strict=True)
        for step, (a, b) in enumerate(pairs):
            if struct.pack("<d", a) != struct.pack("<d", b):  # bits: NaN is equal to NaN
                raise IntegrityError(
                    f"step {step}: the loss is {a!r} with {ours[0].spec.label} and {b!r} with "
                    f"{other.spec.label}; where states live must not change a bit: please report it"
                )


def _texts(options: StepOptions, folder: Path) -> dict[str, Any]:
    return {"config": str(options.config or "151 M Llama shape"), "folder": str(folder)}
