"""Processes that save, read and prune in one folder: `python -m tests.offload.checkpoint_savers`.

Each forked child (imports and kernels are paid for once) draws what it does from its seed. Prints a
JSON of how often each thing was done and how it ended; `wrong` lists what must not happen. With
`--kill`, children are killed at random moments and others take their place.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import offload
from offload import checkpoint
from offload.checkpoint.format import folder as folders
from offload.checkpoint.format.folder import adopt
from offload.checkpoint.format.reader import CheckpointReader
from tests.offload.engine_cases import HOST, config

NAMES = ("one", "two")
KEEP = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill", type=int, default=0, help="how many children to kill")
    parser.add_argument("--no-exchange", action="store_true")
    chosen = parser.parse_args()
    if chosen.no_exchange:
        folders.exchange = lambda a, b: False
    with tempfile.TemporaryDirectory() as swap:
        with _engine(Path(swap)) as engine:  # compiles; no thread is left over for a fork to lose
            for name in NAMES:
                engine.save_checkpoint(chosen.folder / name)
                engine.load_checkpoint(chosen.folder / name)
        total: Counter[str] = Counter()
        wrong: list[str] = []
        _run(chosen, Path(swap), total, wrong)
        with _engine(Path(swap)) as engine:
            for name in NAMES:
                engine.load_checkpoint(chosen.folder / name)
                engine.save_checkpoint(chosen.folder / name)
    print(json.dumps({"done": dict(total), "wrong": wrong}))


def _engine(swap: Path) -> offload.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    return offload.initialize(model, config(swap, HOST))


def _run(
    chosen: argparse.Namespace, swap: Path, total: Counter[str], wrong: list[str]
) -> None:  # fmt: skip
    draw = random.Random(chosen.seed)
    children: dict[int, Path] = {}
    jobs = [_save, *[_save] * (chosen.processes - 3), _read, _prune][: max(chosen.processes, 3)]

    def start(job: Callable[..., None]) -> None:
        log = swap / f"log-{len(started)}"
        started.append(job)
        pid = os.fork()
        if pid == 0:
            _child(job, chosen, swap, log, chosen.seed + len(started))
        children[pid] = log
        by_pid[pid] = job

    started: list[Callable[..., None]] = []
    by_pid: dict[int, Callable[..., None]] = {}
    for job in jobs:
        start(job)
    while len(started) < chosen.kill + len(jobs):
        time.sleep(draw.uniform(0, 0.3))
        pid = draw.choice(list(children))
        os.kill(pid, signal.SIGKILL)
        start(by_pid[pid])
        _collect(pid, children.pop(pid), total, wrong, killed=True)
    for pid, log in children.items():
        _collect(pid, log, total, wrong)


def _collect(
    pid: int, log: Path, total: Counter[str], wrong: list[str], killed: bool = False
) -> None:
    _, status = os.waitpid(pid, 0)
    lines = log.read_text().splitlines() if log.exists() else []
    for line in lines:
        if line.startswith("wrong"):
            wrong.append(line)
        total[line.split(":")[0]] += 1
    if status and not (killed and status == signal.SIGKILL):
        wrong.append(f"a child ended with {status}")


def _child(
    job: Callable[..., None], chosen: argparse.Namespace, swap: Path, log: Path, seed: int
) -> None:
    status = 1
    try:
        with log.open("a", buffering=1) as file, _engine(swap) as engine:
            draw = random.Random(seed)
            for _ in range(chosen.rounds):
                try:
                    job(engine, chosen.folder, draw)
                    file.write(f"{job.__name__[1:]}\n")
                except (offload.CheckpointError, offload.StorageError) as error:
                    # replaced while it was read, or removed just before it was replaced
                    expected = job is _read or getattr(error, "errno", 0) == errno.ENOENT
                    file.write(f"{'missed' if expected else 'wrong'}: {job.__name__} {error}\n")
                except Exception as error:  # noqa: BLE001 - the parent tells
                    file.write(f"wrong: {job.__name__} {error!r}\n")
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def _save(engine: offload.Engine, folder: Path, draw: random.Random) -> None:
    step = draw.randrange(1, 30)
    engine.save_checkpoint(
        draw.choice([folder / draw.choice(NAMES), checkpoint.step_path(folder, step)])
    )


def _read(engine: offload.Engine, folder: Path, draw: random.Random) -> None:
    """What is read has the hashes of one checkpoint."""
    path = folder / draw.choice(NAMES)
    adopt(path)
    with CheckpointReader(path) as reader:
        time.sleep(draw.choice([0, 0, 0.02]))
        reader.check(contents=True)
    if draw.random() < 0.3:
        engine.load_checkpoint(path)
    if draw.random() < 0.5:
        checkpoint.latest(folder)


def _prune(engine: offload.Engine, folder: Path, draw: random.Random) -> None:
    draw.choice([lambda: checkpoint.prune(folder, KEEP), lambda: folders.recover(folder)])()
    time.sleep(draw.uniform(0, 0.02))


if __name__ == "__main__":
    main()
