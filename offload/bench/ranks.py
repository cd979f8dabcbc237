"""`offload bench ranks`: training steps of several ranks on this machine, ours and PyTorch's.

As in `step`, systems step in turn, each in processes of its own, one per rank. A turn takes as long
as its slowest rank; the memory is that of all ranks together.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from offload import machine
from offload.bench.adam_peers import INSTALL_DEEPSPEED, has_deepspeed
from offload.bench.record import Kind, Record, Row, Target
from offload.bench.rounds import Say, interleaved
from offload.bench.step import LLAMA_151M, check_supported, count_parameters
from offload.bench.step_process import SystemFailed, SystemProcess, SystemSpec, Turn
from offload.bench.step_rows import last_line
from offload.bench.table import Column, number
from offload.config import OffloadConfig
from offload.tiers.errors import ConfigError, PathError
from offload.tiers.units import format_bytes

_PROCESS_NBYTES = 700 << 20  # interpreter, libraries, activations of a small batch


def _ours(name: str, stage: int, tier: str, nbytes: int) -> SystemSpec:
    placed = tuple(f"placement.{each}={tier}" for each in ("parameters", "gradients", "optimizer"))
    label = f"ours, stage {stage}, {tier}"
    budget = ("budget.host=" + ("768MiB" if tier == "nvme" else "auto"),)
    overrides = (*placed, *budget, f"zero.stage={stage}")
    return SystemSpec(name, label, Kind.OURS, "offload", overrides, nbytes)


_FSDP2, _OFFLOADED, _DEEPSPEED = "FSDP2", "FSDP2, CPUOffloadPolicy", "DeepSpeed ZeRO-3, cpu"
SYSTEMS = (
    # the last number: bytes per parameter of all ranks together, to know what fits
    _ours("stage3", 3, "host", 24),
    _ours("stage2", 2, "host", 28),
    _ours("stage3-nvme", 3, "nvme", 12),
    SystemSpec("ddp", "DDP", Kind.PEER, "ddp", (), 48),
    SystemSpec("fsdp2", _FSDP2, Kind.PEER, "fsdp2", (), 24),
    SystemSpec("fsdp2-offload", _OFFLOADED, Kind.PEER, "fsdp2-offload", (), 24),
    SystemSpec("deepspeed", _DEEPSPEED, Kind.PEER, "deepspeed-cpu", (), 60),
)
COLUMNS = (
    Column("s/step", number("seconds")),
    Column("fwd+bwd", number("forward_backward_s")),
    Column("GiB of all ranks", number("peak_rss_nbytes", 2**30)),
)
_LOSS_BOUND = 1e-5  # between systems at equal steps, relative: sums in other orders


@dataclass(frozen=True)
class RanksOptions:
    """`config` None trains the 151 M shape; `systems` empty takes all."""

    ranks: int = 2
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    folder: Path | None = None
    systems: tuple[str, ...] = ()
    rounds: int = 7


class RankedSystem:
    """The processes of one system. A failure of a peer does not end the bench."""

    def __init__(self, spec: SystemSpec, ranks: int, base: OffloadConfig, folder: Path) -> None:
        """Blocks until the model is built on every rank. SystemFailed."""
        self.spec = spec
        self.reason = ""
        self.losses: list[tuple[float, ...]] = []  # by step, of each rank
        port = _free_port()
        self._ranks: list[SystemProcess] = []
        config = OffloadConfig.load(base, (*spec.overrides, f"nvme.paths=[{folder}]"))
        threads = max(1, machine.cpu_count() // ranks)
        for rank in range(ranks):
            here = folder / f"{spec.name}-{rank}"
            here.mkdir()
            file = here / "config.yaml"
            file.write_text(config.to_yaml())
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(threads),
            }  # fmt: skip
            self._ranks.append(SystemProcess(spec, file, here, environment))
        try:
            for process in self._ranks:
                process.await_start()
        except BaseException:
            self.kill()
            raise

    def turn(self) -> Turn | None:
        """The slowest rank's times, all ranks' bytes. None once it has failed."""
        if self.reason:
            return None
        try:
            turns = self._turns()
        except SystemFailed as error:
            self.kill()
            if self.spec.kind is not Kind.PEER:
                raise
            self.reason = last_line(error)
            return None
        self.losses += zip(*(turn.losses for turn in turns), strict=True)
        return Turn(
            turns[0].losses, max(turn.seconds for turn in turns),
            max(turn.forward_backward_s for turn in turns),
            sum(turn.read_nbytes for turn in turns), sum(turn.written_nbytes for turn in turns),
            sum(turn.peak_rss_nbytes for turn in turns),
        )  # fmt: skip

    def _turns(self) -> list[Turn]:
        for process in self._ranks:
            process.begin_turn()
        return [process.end_turn() for process in self._ranks]

    def kill(self) -> None:
        for process in self._ranks:
            process.kill()


def run_ranks(options: RanksOptions, say: Say) -> Record:
    """Measure. SystemFailed if one of ours ends early; ConfigError and PathError before anything is
    started."""
    base = OffloadConfig.load(options.config or LLAMA_151M, options.overrides)
    check_supported(base)
    if options.ranks < 2:
        raise ConfigError(f"--ranks: {options.ranks} is not several; `offload bench step` has one")
    folder = options.folder or Path(tempfile.gettempdir())
    if not folder.is_dir():
        raise PathError(f"--path: {folder} is not a folder; name one on the disk to be used")
    texts = {"config": str(options.config or "151 M Llama shape"), "folder": str(folder)}
    record = Record("ranks", {**asdict(options), **texts})
    record.note_rounds(options.rounds)
    with ExitStack() as stack:
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        systems, missing = _start(options, base, private, stack, say)
        if not systems:
            reasons = "".join(f"\n  {row.name}: {row.note}" for row in missing)
            raise ConfigError(f"--systems: none of them can be measured:{reasons}")
        results = interleaved({s.spec.label: s.turn for s in systems}, options.rounds, say)
    for system in systems:
        record.rows.append(_row(system, results[system.spec.label]))
    record.rows += missing
    _compare(record)
    _note_losses(record, systems)
    record.notes.append(
        f"{options.ranks} ranks, gloo; {count_parameters(base) / 1e6:.4g} M parameters, "
        f"{base.precision}, batch {base.train.batch} x {base.train.sequence} tokens per rank"
    )
    return record


def _start(
    options: RanksOptions, base: OffloadConfig, folder: Path, stack: ExitStack, say: Say
) -> tuple[list[RankedSystem], list[Row]]:
    known = {spec.name: spec for spec in SYSTEMS}
    unknown = [name for name in options.systems if name not in known]
    if unknown:
        raise ConfigError(f"--systems: {unknown[0]!r} is unknown; choose from {', '.join(known)}")
    systems: list[RankedSystem] = []
    missing: list[Row] = []
    numel, room = count_parameters(base), machine.available_memory_nbytes()
    names = options.systems or tuple(known)
    for spec in [known[name] for name in dict.fromkeys(names)]:  # each once: it has one row
        needed = spec.memory_per_parameter * numel + options.ranks * _PROCESS_NBYTES
        if needed > room:
            left = _left(spec, [system.spec for system in systems], room)
            reason = f"left out: needs about {format_bytes(needed)}, and {left}"
            missing.append(Row(spec.label, spec.kind, note=reason))
            continue
        if spec.program.startswith("deepspeed") and not has_deepspeed():
            missing.append(Row(spec.label, spec.kind, note=INSTALL_DEEPSPEED))
            continue
        say(f"starting {spec.label}")
        try:
            system = RankedSystem(spec, options.ranks, base, folder)
        except SystemFailed as error:
            if spec.kind is not Kind.PEER:
                raise
            missing.append(Row(spec.label, spec.kind, note=last_line(error)))
            continue
        room -= needed
        stack.callback(system.kill)
        systems.append(system)
    return systems, missing


def _left(spec: SystemSpec, started: Sequence[SystemSpec], room_nbytes: int) -> str:
    """What there is for one that does not fit, and how there would be more."""
    room = format_bytes(max(0, room_nbytes))
    if not started:
        return f"{room} of RAM are free; take fewer --ranks, or a smaller model"
    # ours beside it, to compare with, unless that alone has taken the room
    beside = len(started) > 1 and spec is not SYSTEMS[0]
    names = f"{SYSTEMS[0].name},{spec.name}" if beside else spec.name
    return f"the others leave {room}; run it with fewer: --systems {names}"


def _row(system: RankedSystem, turns: Sequence[Turn | None]) -> Row:
    done = [turn for turn in turns if turn is not None]
    if len(done) < len(turns):
        return Row(system.spec.label, system.spec.kind, note=system.reason)
    names = ("seconds", "forward_backward_s")
    measures = {name: [float(getattr(turn, name)) for turn in done] for name in names}
    facts = {"peak_rss_nbytes": float(max(turn.peak_rss_nbytes for turn in done))}
    return Row(system.spec.label, system.spec.kind, measures, facts)


def _compare(record: Record) -> None:
    measured = {row.name for row in record.rows if row.measured}
    full, partly = SYSTEMS[0].label, SYSTEMS[1].label
    at_most = Target(1.0, at_most=True)
    for of, to, target in (
        (full, _FSDP2, at_most), (full, _OFFLOADED, at_most), (full, _DEEPSPEED, at_most),
        (partly, "DDP", None),
    ):  # fmt: skip
        if {of, to} <= measured:
            record.compare(of, to, "seconds", target)
            record.compare(of, to, "peak_rss_nbytes", None)


def _note_losses(record: Record, systems: Sequence[RankedSystem]) -> None:
    """Whether all train the same: a faster system that does not is no faster one."""
    first = systems[0].losses
    record.details["losses"] = {s.spec.name: s.losses for s in systems}
    for system in systems[1:]:
        pairs = [(a, b) for x, y in zip(first, system.losses, strict=False)
                 for a, b in zip(x, y, strict=True)]  # fmt: skip
        worst = max((abs(a - b) / abs(a) for a, b in pairs), default=0.0)
        if not worst <= _LOSS_BOUND:
            record.notes.append(
                f"{system.spec.label} has other losses than {systems[0].spec.label}: by {worst:.2g}"
            )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
