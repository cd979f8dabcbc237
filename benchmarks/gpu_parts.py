"""The parts of a GPU check, each in a process of its own, and their outcomes. A crash, a hang, a
signal or a missing library is a line in the record, and the parts after it run all the same."""

from __future__ import annotations

import enum
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from offload.bench.copy import CopyOptions, copy_systems, run_copy
from offload.bench.record import Kind, Record
from offload.bench.rounds import Timed, measure, sharing, timed
from offload.planning.machine.optimizer_variants import SPLIT, Arrays, stepper
from offload.process import machine
from offload.process.child import Child, ChildFailed, ChildTimedOut, Parent
from offload.tiers import accelerator

COPY_NBYTES = 512 << 20
_PAGE_NBYTES = 4096
_LOG_LINES = 60
_BESIDE_NUMEL, _BESIDE_ROUNDS = 1 << 28, 5  # 7 GB over the bus
PROGRAMS = {
    "probe": "benchmarks.gpu_machine:probe", "tests": "benchmarks.gpu_tests:run_tests",
    "kernels": "benchmarks.gpu_kernels:run_kernels", "copies": "benchmarks.gpu_parts:run_copies",
    "inference": "benchmarks.gpu_step:generate", "beside": "benchmarks.gpu_parts:run_beside",
    "step": "benchmarks.gpu_step:train",
}  # fmt: skip


class Status(enum.StrEnum):
    """The outcome of a part."""

    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    LEFT_OUT = "left out"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a part. `result` is its answer, or empty; `note` says why there is none."""

    name: str
    status: Status
    seconds: float = 0.0
    limit_s: float = 0.0
    note: str = ""
    result: dict[str, Any] = field(default_factory=dict)
    log: str = ""  # the end of its output, if it did not end well
    call: int = 0  # of the record's calls, from 1

    @property
    def ok(self) -> bool:
        return self.status is Status.DONE

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Outcome:
        """ValueError or TypeError for values of another version's."""
        return cls(**{**values, "status": Status(values["status"])})


def run_part(name: str, options: Mapping[str, Any], limit_s: float, folder: Path) -> Outcome:
    """Run a part for `limit_s` at most, named by `name` up to a colon; output stays in `folder`.

    Its last answer counts, even if it did not finish afterwards. All that it started, and left in
    its session, is ended with it.
    """
    started = time.perf_counter()
    here = folder / name
    here.mkdir()
    child = Child(name, PROGRAMS[name.split(":")[0]], options, here)
    result: dict[str, Any] = {}
    status, note = Status.DONE, ""
    try:
        while (answer := child.next_answer(_left(started, limit_s))) is not None:
            result = answer
        child.close(_left(started, limit_s))
        if not result:
            status, note = Status.FAILED, "ended without an answer"
    except ChildFailed as error:
        timed_out = isinstance(error, ChildTimedOut)
        status = Status.TIMED_OUT if timed_out else Status.FAILED
        how = f"did not end in {limit_s:.0f} s" if timed_out else error.brief
        note = f"{how}\n{error}"
    finally:
        child.kill()
    seconds, log = time.perf_counter() - started, ""
    if status is not Status.DONE:
        log = "\n".join((here / "log").read_text(errors="replace").splitlines()[-_LOG_LINES:])
    return Outcome(name, status, seconds, limit_s, note, result, log)


def _left(started: float, limit_s: float) -> float:
    return max(0.1, started + limit_s - time.perf_counter())


def say(text: str) -> None:
    """Print `text` to a part's log."""
    print(text, file=sys.stderr, flush=True)


def run_copies(_: Mapping[str, Any], parent: Parent) -> None:
    """`offload bench copy`, as a child's program."""
    nbytes = min(COPY_NBYTES, _free_nbytes() // 16 // _PAGE_NBYTES * _PAGE_NBYTES)
    parent.answer(run_copy(CopyOptions(nbytes), say).to_dict())


def _free_nbytes() -> int:
    on_device = accelerator.free_nbytes(accelerator.default_device())
    return min(on_device, machine.available_memory_nbytes())


def run_beside(_: Mapping[str, Any], parent: Parent) -> None:
    """The optimizer's pass on the CPU and copies in both directions, as a child's program: each
    alone, and while the other goes on."""
    numel = min(_BESIDE_NUMEL, _free_nbytes() // 64 // _PAGE_NBYTES * _PAGE_NBYTES)
    copied = copy_systems(min(COPY_NBYTES, numel), accelerator.default_device())
    copies = next(each for each in copied if each.name == "offload, both at once")
    record = Record("updates beside copies", {"numel": numel, "rounds": _BESIDE_ROUNDS})
    with sharing(max(1, machine.cpu_count() - 2)) as runner:  # as many as beside a GPU
        arrays = Arrays(numel, SPLIT.streams)
        step = stepper(SPLIT, arrays, runner)
        traffic = {"bytes_per_s": SPLIT.traffic * numel}
        updates = Timed("updates", Kind.OFFLOAD, timed(step), traffic)
        systems = [updates, copies, _beside(updates, copies), _beside(copies, updates)]
        measure(record, systems, _BESIDE_ROUNDS, say)
    for of, to in ((updates, copies), (copies, updates)):
        record.compare(f"{of.name}, beside {to.name}", of.name, "bytes_per_s")
    parent.answer(record.to_dict())


def _beside(measured: Timed, other: Timed) -> Timed:
    """`measured` while `other` is repeated by another thread."""

    def run() -> Mapping[str, float]:
        began, ended = threading.Event(), threading.Event()

        def repeat() -> None:
            while not ended.is_set():
                began.set()
                other.run()

        with ThreadPoolExecutor(1) as thread:
            repeated = thread.submit(repeat)
            began.wait()
            try:
                return measured.run()
            finally:
                ended.set()
                repeated.result()

    return replace(measured, name=f"{measured.name}, beside {other.name}", run=run)
