"""A process that saves checkpoints and is killed: `python -m tests.offload.checkpoint_crash`.

Each line of input is a `Request`; for each one a child is forked (imports and kernels are paid for
once), which loads the checkpoint, if there is to be one, and saves the following steps. Lines of
output: `pid N`, `loaded STEP`, `saved STEP BITS`, `ended STATUS`, and after a save whose calls were
counted `calls N` and `speculated N`, the number of speculative updates (none in a first step).
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

import offload
from offload import checkpoint
from offload.checkpoint.format import disk, folder
from offload.checkpoint.format.manifest import RUN
from offload.swap.io.block_store import BlockStore
from offload.swap.states.versioned_file import VersionedFile
from offload.zero.step.speculative_updates import SpeculativeUpdates
from tests.offload.engine_cases import NVME, TinyLM, batches, config, seeded

# of a save, those that change something, and so after which something else is there
_CALLS = {
    "mkdir", "create", "fallocate", "pwrite", "fsync", "fsync folder", "rename", "exchange",
    "rmtree",
}  # fmt: skip
# what happens to a speculative update, in whichever thread
_EVENTS: list[tuple[type, str]] = [
    (SpeculativeUpdates, "begin"), (SpeculativeUpdates, "_begun"),
    (SpeculativeUpdates, "take_back"), (SpeculativeUpdates, "_end"),
    (VersionedFile, "keep_old"), (VersionedFile, "_commit"), (VersionedFile, "drop_old"),
    (VersionedFile, "go_back"), (BlockStore, "write"), (BlockStore, "read"), (BlockStore, "free"),
]  # fmt: skip
KEYS: dict[str, Any] = {"precision": "bf16", "clip_grad_norm": 1e9}


@dataclass(frozen=True)
class Request:
    path: str
    swap: str
    fresh: bool = False  # there is nothing to load yet
    exchange: bool = True  # False: as on a system without RENAME_EXCHANGE
    stop_at: int | None = None  # the call during the first save at which to be killed; -1: count
    speculative: bool = False  # `stop_at` counts events of the second step's updates and save
    keep: int = 0  # so many steps, each in a folder of its own in `path`

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main() -> None:
    _warm_up()
    for line in sys.stdin:
        request = Request(**json.loads(line))
        pid = os.fork()
        if pid == 0:
            _child(request)
        print("pid", pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print("ended", status, flush=True)


def _warm_up() -> None:
    """Import and compile everything. No thread is left over that a fork could lose."""
    with tempfile.TemporaryDirectory() as name:
        swap = Path(name)
        engine = offload.initialize(seeded(TinyLM), config(swap, NVME, **KEYS))
        for _ in range(2):
            step_of(engine)
        engine.save_checkpoint(swap / "saved")
        engine.load_checkpoint(swap / "saved")
        engine.close()
    until = time.monotonic() + 30
    while threading.active_count() > 1:  # the watchdog over calls ends when there are none
        assert time.monotonic() < until
        time.sleep(0.1)


def _child(request: Request) -> None:
    try:
        _save_for_ever(request)
    except BaseException as error:
        print("failed", repr(error), flush=True)
        raise
    finally:
        os._exit(0)


def _save_for_ever(request: Request) -> None:
    if not request.exchange:
        folder.exchange = lambda a, b: False
    keys = config(Path(request.swap), NVME, **KEYS)
    with offload.initialize(seeded(TinyLM), keys) as engine:
        if not request.fresh:
            newest = checkpoint.latest(Path(request.path)) if request.keep else request.path
            assert newest is not None
            engine.load_checkpoint(newest)
        print("loaded", engine.report().steps, flush=True)
        calls: Iterator[int] = iter(())
        for taken in itertools.count():
            if request.stop_at is not None and taken == int(request.speculative):
                calls = _watch_calls(request.stop_at, speculative=request.speculative)
            step_of(engine)
            saved = Path(request.path)
            if request.keep:
                saved = checkpoint.step_path(saved, engine.report().steps)
            engine.save_checkpoint(saved)
            if request.keep:
                checkpoint.prune(saved.parent, request.keep)
            print("saved", engine.report().steps, bits_of(saved), flush=True)
            if request.stop_at is not None and taken == int(request.speculative):
                print("calls", next(calls), flush=True)
                counts = engine.report().trials
                print("speculated", counts.kept + counts.redone, flush=True)
                return


def step_of(engine: offload.Engine) -> None:
    """The next step. Every other one clips, unlike its speculative updates: they are undone."""
    number = engine.report().steps
    engine.backward(engine.module.loss(batches(1, seed=number)[0]))  # type: ignore[operator]
    if number % 2:
        nn.utils.clip_grad_norm_(engine.module.parameters(), 0.05)
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def bits_of(checkpoint: Path) -> int:
    """A checksum of all states of the model that are saved there."""
    checksum = 0
    for path in sorted(checkpoint.rglob("*.safetensors")):
        if path.name == RUN:  # random numbers, of which each process has drawn others
            continue
        checksum = zlib.crc32(path.read_bytes(), checksum)
    return checksum


def _watch_calls(stop_at: int, *, speculative: bool) -> Iterator[int]:
    """Count the system calls of a save from now on, with `speculative` the events of updates, too;
    killed before call `stop_at`."""
    counter = itertools.count()

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if next(counter) == stop_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapper

    perform = disk.perform
    counted = watched(perform)

    def made(operation: str, *args: Any) -> Any:
        return (counted if operation in _CALLS else perform)(operation, *args)

    disk.perform = made  # type: ignore[assignment]
    for kind, name in _EVENTS if speculative else ():
        setattr(kind, name, watched(getattr(kind, name)))
    return counter


if __name__ == "__main__":
    main()
