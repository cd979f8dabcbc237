"""A part of the check in a process of its own: what became of it, whatever becomes of it.

A part ends by writing its answer to a file. A crash, a hang, a signal or a missing library leaves
no answer, and is then a line in the record; the parts after it run all the same.
"""

from __future__ import annotations

import enum
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import offload

_SHOWN_LINES = 12
_SHOWN_CHARACTERS = 2000


class Status(enum.StrEnum):
    """How a part ended."""

    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    LEFT_OUT = "left out"


@dataclass(frozen=True)
class Outcome:
    """One part. `result` is its answer, empty without one; `note` says why there is none."""

    name: str
    status: Status
    seconds: float = 0.0
    limit_s: float = 0.0
    note: str = ""
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status is Status.DONE


def run_part(name: str, options: Mapping[str, Any], limit_s: float, folder: Path) -> Outcome:
    """Run a part of `gpu_parts`, at most for `limit_s`. Its output stays in `folder`."""
    described, answer = folder / f"{name}.in.json", folder / f"{name}.out.json"
    described.write_text(json.dumps(dict(options)))
    module = "offload.bench.gpu_parts"
    command = [sys.executable, "-m", module, name.split(":")[0], str(described), str(answer)]
    return run_command(name, command, answer, limit_s, folder)


def run_command(
    name: str, command: list[str], answer: Path, limit_s: float, folder: Path
) -> Outcome:
    """Run `command`; its answer is the JSON object that it leaves in `answer`, also where it did
    not come to its end afterwards.

    All that it started, and left in its session, is ended with it.
    """
    log = folder / f"{name}.log"
    started = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env=environment(), start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    seconds = time.perf_counter() - started
    result, wrong = _read(answer)
    if code is None:
        note = _note(f"did not end in {limit_s:.0f} s", log)
        return Outcome(name, Status.TIMED_OUT, seconds, limit_s, note, result)
    if code != 0 or wrong:
        note = _note(_ended(code) if code else wrong, log)
        return Outcome(name, Status.FAILED, seconds, limit_s, note, result)
    return Outcome(name, Status.DONE, seconds, limit_s, "", result)


def environment() -> dict[str, str]:
    """This process's, with the folder of this very package first on the path."""
    here = str(repository())
    others = os.environ.get("PYTHONPATH")
    paths = [here, *(others.split(os.pathsep) if others else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def repository() -> Path:
    """The folder that holds the package: a checkout's root, or where packages are installed."""
    return Path(offload.__file__).resolve().parent.parent


def leave_answer(answer: Path, result: Mapping[str, Any]) -> None:
    """For a part: write its answer in one go. Again is allowed; the last one counts."""
    beside = answer.with_suffix(".writing")
    beside.write_text(json.dumps(dict(result), allow_nan=False))
    beside.replace(answer)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process's whole session: a compiler or a test that hangs may outlive its parent."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all of it has ended
    finally:
        process.wait()


def _read(answer: Path) -> tuple[dict[str, Any], str]:
    """The answer, and what is wrong with it."""
    try:
        found = json.loads(answer.read_text())
    except FileNotFoundError:
        return {}, "ended without an answer"
    except ValueError as error:
        return {}, f"its answer is no JSON ({error})"
    if not isinstance(found, dict):
        return {}, f"its answer is a {type(found).__name__}, not an object"
    return found, ""


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"was ended by signal {-code}"


def _note(what: str, log: Path) -> str:
    """In the first line what happened and the last thing it said, then what it said before."""
    lines = log.read_text(errors="replace").strip().splitlines()[-_SHOWN_LINES:]
    last = lines[-1] if lines else "it said nothing"
    return "\n".join([f"{what}: {last}", *lines[:-1]])[:_SHOWN_CHARACTERS]
