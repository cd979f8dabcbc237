"""A process that saves checkpoints and is killed: `python -m tests.offload.checkpoint_crash`.

Each line of input is a `Request`; for each one a child is forked (imports and kernels are paid for
once), which loads the checkpoint, if there is to be one, and saves the following steps. Lines of
output: `pid N`, `loaded STEP`, `saved STEP`, `calls N` (after a whole save), `ended STATUS`.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import offload
from offload.checkpoint import folder
from tests.offload.engine_cases import NVME, TinyLM, batches, config, losses_of, seeded

_CALLS = ["mkdir", "pwrite", "fsync", "rename", "unlink", "rmdir"]


@dataclass(frozen=True)
class Request:
    path: str
    swap: str
    fresh: bool = False  # there is nothing to load yet
    exchange: bool = True  # False: as on a system without RENAME_EXCHANGE
    stop_at: int | None = None  # the call during the first save at which to be killed; -1: count

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
        engine = offload.initialize(seeded(TinyLM), config(swap, NVME, precision="bf16"))
        losses_of(engine, batches(1))
        engine.save_checkpoint(swap / "saved")
        engine.load_checkpoint(swap / "saved")
        engine.close()
    assert threading.active_count() == 1


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
        folder._exchange = lambda a, b: False
    keys = config(Path(request.swap), NVME, precision="bf16")
    with offload.initialize(seeded(TinyLM), keys) as engine:
        if not request.fresh:
            engine.load_checkpoint(request.path)
        print("loaded", engine.report().steps, flush=True)
        calls = _watch_calls(request.stop_at) if request.stop_at is not None else iter(())
        for tokens in batches(1000, seed=engine.report().steps):
            losses_of(engine, [tokens])
            engine.save_checkpoint(request.path)
            print("saved", engine.report().steps, flush=True)
            if request.stop_at is not None:
                print("calls", next(calls), flush=True)
                return


def _watch_calls(stop_at: int) -> Iterator[int]:
    """Count the system calls of a save from now on; killed before call `stop_at`."""
    counter = itertools.count()

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if next(counter) == stop_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapper

    for name in _CALLS:
        setattr(os, name, watched(getattr(os, name)))
    folder._exchange = watched(folder._exchange)
    return counter


if __name__ == "__main__":
    main()
