"""Ranks as processes of this machine, with gloo between them; a hang shows every rank's stacks."""

import faulthandler
import logging
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 60.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["offload", "offload.engine", "tests.offload.engine_cases", "tests.ranks.warm"]
)


class RanksFailed(AssertionError):
    """Some rank raised, died or hung; the message has what each of them said."""


@dataclass
class RankProcess:
    """One rank, running. What it says at its end comes through `pipe`."""

    rank: int
    process: Any
    pipe: Connection
    stacks: Path

    def answer(self, deadline: float) -> tuple[bool, Any] | None:
        """(True, what the function returned) or (False, why not); None if it is not done by
        `deadline` (monotonic)."""
        try:
            if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
                return None
            return pickle.loads(self.pipe.recv_bytes())  # type: ignore[no-any-return]
        except (EOFError, ConnectionResetError):
            return False, "died without a word"

    def await_end(self, deadline: float) -> bool:
        """Whether the process has ended by `deadline` (monotonic)."""
        self.process.join(timeout=max(0.0, deadline - time.monotonic()))
        return not self.process.is_alive()

    def kill(self) -> None:
        self.process.kill()  # also of a process that is stopped
        self.process.join()


def start_ranks(
    world_size: int, folder: Path, function: Callable[..., Any], *args: Any
) -> list[RankProcess]:
    """Processes of a new process group, each of which calls `function(*args)`."""
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / "store"
    store.unlink(missing_ok=True)
    ranks = []
    for rank in range(world_size):
        mine, theirs = _context.Pipe(duplex=False)
        stacks = folder / f"stacks-{rank}.txt"
        target = (rank, world_size, str(store), str(stacks), theirs, function, args)
        process = _context.Process(target=_rank_main, args=target, daemon=True)
        process.start()
        theirs.close()
        ranks.append(RankProcess(rank, process, mine, stacks))
    return ranks


def run_ranks(
    world_size: int, folder: Path, function: Callable[..., Any], *args: Any,
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:  # fmt: skip
    """What `function(*args)` returns on every rank of a new process group, by rank.

    RanksFailed where a rank raised, died, or was not done in time; then with all ranks' stacks.
    """
    ranks = start_ranks(world_size, folder, function, *args)
    deadline = time.monotonic() + timeout_s
    answers = [rank.answer(deadline) for rank in ranks]
    hung = None in answers
    stacks = stacks_of(ranks) if hung else ""
    for rank in ranks:
        rank.await_end(time.monotonic() + (0.0 if hung else 10.0))
        rank.kill()
    failed = [
        f"rank {number}: {text}" for number, (ok, text) in enumerate(a or (False, "no answer")
        for a in answers) if not ok
    ]  # fmt: skip
    if failed:
        raise RanksFailed("\n".join([*failed, stacks]))
    return [value for _, value in filter(None, answers)]


def stacks_of(ranks: list[RankProcess]) -> str:
    """The stacks of every rank that lives, all threads."""
    for rank in ranks:
        if rank.process.is_alive():
            os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(1.0)
    return "\n".join(f"stacks of rank {rank.rank}:\n{rank.stacks.read_text()}" for rank in ranks)


def _rank_main(
    rank: int, world_size: int, store: str, stacks: str, pipe: Connection,
    function: Callable[..., Any], args: Any,
) -> None:  # fmt: skip
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        torch.set_num_threads(1)
        try:
            dist.init_process_group(
                "gloo", store=dist.FileStore(store, world_size), rank=rank,
                world_size=world_size, timeout=timedelta(seconds=TIMEOUT_S / 2),
            )  # fmt: skip
            pipe.send_bytes(pickle.dumps((True, function(*args))))
            dist.destroy_process_group()
        except BaseException:  # noqa: BLE001 - sent to the waiting test
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))


def heard() -> list[str]:
    """What offload logs in this process from now on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("offload").addHandler(handler)
    return lines
