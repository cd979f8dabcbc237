"""`offload bench save`: a checkpoint beside raw sequential writing of as many bytes, in one run.

    raw write             a new file, O_DIRECT, one block after the other, and fsync
    raw read and write    the same while as many bytes are read as the states have on nvme: what a
                          save takes at least where swap files and checkpoints share a disk
    ours                  `engine.save_checkpoint` of a model that has made a step

Each leaves a file system as it found it: what was written is removed before the next one begins.

With `--steps N` instead, what a save beside training takes from it:

    steps                 N of them
    and a save            N of them, `engine.save_checkpoint(wait=False)` before the first

Both end when all deferred work is done and what was saved is complete.
"""

from __future__ import annotations

import gc
import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import offload
from offload import machine
from offload.bench.contenders import all_on, base_config
from offload.bench.io import noise
from offload.bench.record import Kind, Record, Target
from offload.bench.rounds import Say, Timed, measure, seconds_of
from offload.bench.step import folder_of
from offload.bench.systems import batch_of
from offload.bench.table import Column, number
from offload.engine import Engine
from offload.gpt import build_meta_model
from offload.swap.swap_file import file_system_of, free_space
from offload.tiers.errors import PathError
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes

COLUMNS = (
    Column("s", number("seconds")),
    Column("GB/s", number("bytes_per_s", 1e9)),
    Column("CPU-s", number("cpu_s")),
    Column("extra MiB", number("extra_rss_nbytes", 2**20, 0)),
)
WRITE, BOTH, OURS = "raw write", "raw read and write", "ours"
STEPS, BESIDE = "steps", "and a save"
# 8 M parameters: a hundred steps take seconds
_SMALL = tuple(
    f"train.model.{each}" for each in ("layers=4", "hidden=256", "heads=4", "mlp=1024")
)  # fmt: skip
_BLOCK_NBYTES = 8 << 20
_BLOCKS = 4  # read ahead of what is written
_KEPT = (StateClass.PARAMETERS, StateClass.OPTIMIZER)


@dataclass(frozen=True)
class SaveOptions:
    """`config` None saves the 151 M shape, all on nvme; an 8 M one beside `steps`, if there are
    any."""

    config: Path | None = None
    overrides: tuple[str, ...] = ()
    folder: Path | None = None
    rounds: int = 5
    steps: int = 0


def run_save(options: SaveOptions, say: Say) -> Record:
    """Measure. ConfigError and PathError before anything is written."""
    folder = folder_of(options.folder)
    shape = f"{'8 M' if options.steps else '151 M'} Llama shape"
    texts = {"config": str(options.config or shape), "folder": str(folder)}
    record = Record("save", {**asdict(options), **texts})
    record.note_rounds(options.rounds)
    with tempfile.TemporaryDirectory(prefix="offload-bench-save-", dir=folder) as name:
        private = Path(name)
        say("making a step")
        with _engine(options, private) as (engine, step):
            if options.steps:
                _measure_steps(record, engine, step, private, options, say)
            else:
                _measure(record, engine, private, options.rounds, say)
    record.compare(BESIDE, STEPS, "seconds", Target(1.05, at_most=True))
    record.compare(OURS, WRITE, "seconds", Target(1.1, at_most=True))
    record.compare(OURS, BOTH, "seconds", Target(1.1, at_most=True))
    return record


@contextmanager
def _engine(options: SaveOptions, folder: Path) -> Iterator[tuple[Engine, Callable[[], None]]]:
    """After a step, which is to be called: no device saves work with states that are all zeros."""
    placed = all_on("nvme") if options.config is None else ()
    if options.config is None and options.steps:
        placed = (*placed, *_SMALL)
    config = base_config(options.config, (*placed, *options.overrides, f"nvme.paths=[{folder}]"))
    model = build_meta_model(config)
    with offload.initialize(model, config) as engine:
        inputs, targets = batch_of(config, 0, engine.device)

        def step() -> None:
            engine.backward(model(inputs, targets).loss)
            engine.optimizer.step()
            engine.optimizer.zero_grad()

        step()
        yield engine, step


def _measure_steps(
    record: Record, engine: Engine, step: Callable[[], None], folder: Path, options: SaveOptions,
    say: Say,
) -> None:  # fmt: skip
    saved = folder / "saved"

    def steps() -> None:
        for _ in range(options.steps):
            step()
        engine.settle()

    def beside() -> None:
        engine.save_checkpoint(saved, wait=False)
        steps()
        engine.checkpoint_saved()

    systems = [
        _timed(STEPS, Kind.LIMIT, {}, steps, folder / "nothing"),
        _timed(BESIDE, Kind.OURS, {}, beside, saved),
    ]
    measure(record, systems, options.rounds, say)
    record.notes.append(
        f"{options.steps} steps, and one save of {format_bytes(_nbytes_of(saved))} on "
        f"{file_system_of(folder.resolve())}; CPU-s and memory are of all threads"
    )


def _nbytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _measure(record: Record, engine: Engine, folder: Path, rounds: int, say: Say) -> None:
    say("saving once")
    saved = folder / "saved"
    engine.save_checkpoint(saved)
    nbytes = _nbytes_of(saved)
    on_nvme = sum(engine.plan.expected[Tier.NVME].get(each, 0) for each in _KEPT)
    read = min(on_nvme, nbytes)  # homes there are whole pages
    _check_room(folder, nbytes)
    buffers = noise(_BLOCKS * _BLOCK_NBYTES)
    source, target = folder / "source", folder / "target"
    _write(source, nbytes, _blocks_of(buffers))

    def raw() -> None:
        _write(target, nbytes, _blocks_of(buffers))

    def both() -> None:
        with _reading(source, read, buffers) as blocks:
            _write(target, nbytes, blocks)

    def ours() -> None:
        engine.save_checkpoint(saved)

    moved = {"bytes_per_s": float(nbytes)}
    systems = [
        _timed(WRITE, Kind.LIMIT, moved, raw, target),
        _timed(BOTH, Kind.LIMIT, moved, both, target),
        _timed(OURS, Kind.OURS, moved, ours, saved),
    ]
    measure(record, systems, rounds, say)
    record.notes.append(
        f"{format_bytes(nbytes)} on {file_system_of(folder.resolve())}, of which "
        f"{format_bytes(read)} are read from nvme; CPU-s and memory are of all threads"
    )


def _timed(
    name: str, kind: Kind, amounts: Mapping[str, float], work: Callable[[], None], made: Path
) -> Timed:
    def run() -> dict[str, float]:
        shutil.rmtree(made) if made.is_dir() else made.unlink(missing_ok=True)
        os.sync()
        gc.collect()
        machine.trim_memory()
        machine.forget_peak_rss()
        before, cpu = machine.rss_nbytes(), os.times()
        seconds = seconds_of(work)
        now = os.times()
        return {
            "seconds": seconds,
            "cpu_s": now.user + now.system - cpu.user - cpu.system,
            "extra_rss_nbytes": float(machine.peak_rss_nbytes() - before),
        }

    return Timed(name, kind, run, amounts)


def _check_room(folder: Path, nbytes: int) -> None:
    needed, free = 2 * nbytes, free_space(folder)  # what is read, and what is written
    if needed > free:
        raise PathError(
            f"--path: {format_bytes(needed)} more are needed in {folder}, {format_bytes(free)} are "
            "free; name a folder on another disk, or a smaller model with --config or -o"
        )


# ---------------------------------------------------------------- raw loops
def _blocks_of(buffers: memoryview) -> Iterator[memoryview]:
    while True:
        for at in range(0, buffers.nbytes, _BLOCK_NBYTES):
            yield buffers[at : at + _BLOCK_NBYTES]


def _write(path: Path, nbytes: int, blocks: Iterator[memoryview]) -> None:
    fd = _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for at, block in zip(range(0, nbytes, _BLOCK_NBYTES), blocks, strict=False):
            done = 0
            while done < block.nbytes:
                done += os.pwrite(fd, block[done:], at + done)
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _reading(path: Path, nbytes: int, buffers: memoryview) -> Iterator[Iterator[memoryview]]:
    """Blocks to be written, while a thread reads so many bytes into others."""
    fd = _opened(path, os.O_RDONLY)
    count = -(-nbytes // _BLOCK_NBYTES)
    read: queue.Queue[memoryview] = queue.Queue(_BLOCKS - 2)

    def work() -> None:
        for at, block in zip(range(count), _blocks_of(buffers), strict=False):
            os.preadv(fd, [block], at * _BLOCK_NBYTES)
            read.put(block)

    def blocks() -> Iterator[memoryview]:
        yield from (read.get() for _ in range(count))
        yield from _blocks_of(buffers)

    thread = threading.Thread(target=work, name="offload-bench-read", daemon=True)
    thread.start()
    try:
        yield blocks()
        thread.join()
    finally:
        os.close(fd)


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:  # through the cache, as ours is there
        return os.open(path, flags, 0o600)
