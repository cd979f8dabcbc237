"""Trains with everything on nvme in a memory cgroup that another process fills; reports in JSON.

python memory_program.py CGROUP FOLDER guarded|alone EAT_MIB...|all

`CGROUP/` is a memory cgroup of its own that this process enters. After so many steps it gets a
limit, `LEFT_MIB` more than it has taken, and a child of it touches EAT_MIB, and more with each
further number; `all`: until there is nothing to give up any more. `alone`: nobody guards.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

import offload
from offload.config import OffloadConfig
from offload.gpt import build_meta_model
from offload.memory.headroom import MemoryReader
from offload.process import machine
from offload.swap.threads.memory_guard import MemoryGuard

STEPS = 3  # before each meal, and after the last
MIB = 1 << 20
LEFT_MIB = 330
EATER = """
import mmap, sys
eaten = []
for line in sys.stdin:
    for _ in range(int(line)):
        part = mmap.mmap(-1, 1 << 20)
        part[::4096] = b"x" * 256
        eaten.append(part)
    print(len(eaten), flush=True)
"""


def config_of(folder: str, host: str = "512MiB") -> OffloadConfig:
    return OffloadConfig.load(
        {
            "budget": {"host": host, "nvme": "3GiB"},
            "nvme": {"paths": [folder]},
            "placement": {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"},
            "optimizer": {"chunk": 262144, "lr": 1e-3},
            "train": {"model": {"layers": 16, "hidden": 512, "heads": 8, "mlp": 2048}},
        }
    )  # fmt: skip


class Eater:
    """Another process, in the same cgroup."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", EATER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )  # fmt: skip

    def eat(self, mib: int) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{mib}\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def train(engine: offload.Engine, steps: int) -> list[float]:
    losses = []
    for number in range(steps):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 256, (1, 17), generator=generator)
        loss = engine.module(tokens[:, :-1], tokens[:, 1:]).loss
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        losses.append(loss.item())
    engine.settle()
    return losses


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    cgroup, folder, guarded, *meals = sys.argv[1:]
    Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
    if guarded == "alone":
        MemoryGuard.start = lambda self: None  # type: ignore[method-assign]
    config = config_of(folder)
    model = build_meta_model(config)
    with offload.initialize(model, config) as engine:
        eater = Eater()
        Path("/proc/self/oom_score_adj").write_text("1000")  # of the two the kernel kills this one
        try:
            run(engine, eater, meals, Path(cgroup), Path(folder))
        finally:
            eater.end()
        Path("/proc/self/oom_score_adj").write_text("0")
        deadline = time.monotonic() + 60
        after: int | None = 0
        while after is not None and time.monotonic() < deadline:
            losses = train(engine, STEPS)
            after = engine.report().memory.limit_nbytes
            say(losses=losses, after=after)


def limit(cgroup: Path) -> None:
    """What it has taken, page cache left out, and `LEFT_MIB`."""
    names = ("memory.limit_in_bytes", "memory.max")
    (file,) = (cgroup / name for name in names if (cgroup / name).exists())
    file.write_text(str(64 << 30))
    of = next(each for each in MemoryReader()().limits if str(cgroup) in each.where)
    file.write_text(str(of.limit_nbytes - of.room_nbytes + LEFT_MIB * MIB))
    time.sleep(2)  # as much was left before that nobody has looked for a second


def run(engine: offload.Engine, eater: Eater, meals: list[str], cgroup: Path, folder: Path) -> None:
    say(losses=train(engine, STEPS), rss=machine.rss_nbytes())
    limit(cgroup)
    for meal in meals:
        eaten = 0
        while engine._homes.guard.short is None if meal == "all" else eaten < int(meal):
            eater.eat(4)
            eaten += 4
            time.sleep(0.01)  # on a busy machine somebody else has to get his turn
        try:
            say(losses=train(engine, STEPS), rss=machine.rss_nbytes(),
                report=str(engine.report().memory))  # fmt: skip
        except offload.LowMemoryError as error:
            engine.save_checkpoint(folder / "saved")
            say(error=str(error), saved=sorted(p.name for p in (folder / "saved").iterdir()))


if __name__ == "__main__":
    main()
