"""The parts of a GPU check, each in a process of its own, and their outcomes. A crash, a hang, a
signal or a missing library is a line in the record, and the parts after it run all the same."""

from __future__ import annotations

import enum
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload.process.child import Child, ChildFailed, ChildTimedOut

_LOG_LINES = 60
PROGRAMS = {
    "probe": "benchmarks.gpu_machine:probe", "tests": "benchmarks.gpu_tests:run_tests",
    "inference": "benchmarks.gpu_step:generate", "step": "benchmarks.gpu_step:train",
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

    @property
    def ok(self) -> bool:
        return self.status is Status.DONE


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
