"""Ranks as processes of this machine, with gloo between them; a hang shows every rank's stacks."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

TIMEOUT_S = 60.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["offload", "offload.engine", "tests.offload.engine_cases"])


class RanksFailed(AssertionError):
    """Some rank raised, died or hung; the message has what each of them said."""


def run_ranks(
    world_size: int, folder: Path, function: Callable[..., Any], *args: Any,
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:  # fmt: skip
    """What `function(*args)` returns on every rank of a new process group, by rank.

    RanksFailed where a rank raised, died, or was not done in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / "store"
    store.unlink(missing_ok=True)
    pipes, processes = [], []
    for rank in range(world_size):
        mine, theirs = _context.Pipe(duplex=False)
        stacks = folder / f"stacks-{rank}.txt"
        target = (rank, world_size, str(store), str(stacks), theirs, function, args)
        process = _context.Process(target=_rank_main, args=target, daemon=True)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    answers = _collect(pipes, time.monotonic() + timeout_s)
    hung = [rank for rank, answer in enumerate(answers) if answer is None]
    if hung:
        _dump(processes, folder)
    for process in processes:
        process.join(timeout=0.0 if hung else 10.0)
        process.kill()
    failed = [
        f"rank {rank}: {text}" for rank, (ok, text) in enumerate(a or (False, "no answer")
        for a in answers) if not ok
    ]  # fmt: skip
    if failed:
        stacks_text = [p.read_text() for p in sorted(folder.glob("stacks-*.txt"))] if hung else []
        raise RanksFailed("\n".join([*failed, *stacks_text]))
    return [value for _, value in answers]


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    answers: list[Any] = []
    for pipe in pipes:
        try:
            left = max(0.0, deadline - time.monotonic())
            answers.append(pickle.loads(pipe.recv_bytes()) if pipe.poll(left) else None)
        except EOFError:
            answers.append((False, "died without a word"))
    return answers


def _dump(processes: list[Any], folder: Path) -> None:
    """Have every living rank write its stacks."""
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1.0)


def _rank_main(
    rank: int, world_size: int, store: str, stacks: str, pipe: Connection,
    function: Callable[..., Any], args: Any,
) -> None:  # fmt: skip
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        try:
            dist.init_process_group(
                "gloo", store=dist.FileStore(store, world_size), rank=rank,
                world_size=world_size, timeout=timedelta(seconds=TIMEOUT_S / 2),
            )  # fmt: skip
            pipe.send_bytes(pickle.dumps((True, function(*args))))
            dist.destroy_process_group()
        except BaseException:  # noqa: BLE001 - sent to whoever waits
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
