"""A measured process of its own, both ends of it.

    python -m offload.process.child MODULE:FUNCTION OPTIONS.json

The function is called with the options and a `Parent`. Its answers are JSON objects, one per line,
written to what was standard output when the process began; commands are lines on standard input.
Everything that libraries print goes to standard error, which the parent keeps.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

import offload
from offload.tiers.errors import OffloadError

_ANSWER_TIMEOUT_S = 1800.0  # the first turn of a peer may compile its operators
_CLOSE_TIMEOUT_S = 120.0
_SHOWN_LINES = 12


class ChildFailed(OffloadError):
    """Raised when a process ended early or does not answer; `brief` describes it in one line."""

    def __init__(self, label: str, how: str, said: Sequence[str]) -> None:
        end = "\n".join(said)
        super().__init__(f"{label} {how}; the end of what it printed:\n{end}")
        self.brief = f"{how}: {said[-1] if said else 'it said nothing'}"


class ChildTimedOut(ChildFailed):
    """Raised when a process gave no answer in time."""


class Child:
    """Starts the process and communicates with it. Its options and its output stay in `folder`."""

    def __init__(
        self, label: str, program: str, options: Mapping[str, Any], folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Start `program`, given as MODULE:FUNCTION, and return at once."""
        self.label = label
        described = folder / "options.json"
        described.write_text(json.dumps(dict(options)))
        self._log = (folder / "log").open("w+", errors="replace")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "offload.process.child", program, str(described)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            env={**child_environment(), **(environment or {})},
            start_new_session=True,  # Ctrl-C is for us, and we end the child
        )  # fmt: skip
        self._unread = b""

    def send(self, command: str) -> None:
        """Send one line. Raises ChildFailed if the process no longer reads."""
        pipe = _pipe(self._process.stdin)
        try:
            pipe.write(f"{command}\n".encode())
            pipe.flush()
        except BrokenPipeError as error:
            raise self._failed("ended early") from error

    def answer(self, timeout_s: float = _ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """Return the next answer. Raises ChildFailed if there is none."""
        found = self.next_answer(timeout_s)
        if found is None:
            raise self._failed(self._end())
        return found

    def next_answer(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next answer, or None at the end of the output. Raises ChildTimedOut if none
        arrives in time, and ChildFailed if the output is not an answer."""
        line = self._line(timeout_s)
        if line is None:
            return None
        try:
            found = json.loads(line)
        except ValueError as error:
            raise self._failed(f"gave an answer that is no JSON ({error})") from error
        if not isinstance(found, dict):
            raise self._failed(f"gave an answer that is a {type(found).__name__}, not an object")
        return found

    def close(self, timeout_s: float | None = None) -> None:
        """Let the process end by itself, with its own checks. Raises ChildFailed if they fail."""
        timeout_s = _CLOSE_TIMEOUT_S if timeout_s is None else timeout_s
        self.hang_up()
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise self._timed_out(f"did not end in {timeout_s:.0f} s") from error
        if status != 0:
            raise self._failed(f"ended {_ended(status)}")
        self.kill()

    def hang_up(self) -> None:
        """Close its standard input: there are no more commands."""
        with suppress(BrokenPipeError):  # it died before it read the last line; closed all the same
            _pipe(self._process.stdin).close()

    def kill(self) -> None:
        """End it at once, with all processes it started in its session, and close the pipes.
        Calling it again does nothing."""
        if self._log.closed:
            return
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.hang_up()
        _pipe(self._process.stdout).close()
        self._log.close()

    def _line(self, timeout_s: float) -> bytes | None:
        """Return a line of output. Never blocks longer: half a line may be all that arrives."""
        pipe, ends = _pipe(self._process.stdout), time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            if not wait([pipe.fileno()], max(0.0, ends - time.monotonic())):
                raise self._timed_out(f"gave no answer in {timeout_s:.0f} s")
            more = os.read(pipe.fileno(), 1 << 16)
            if not more:
                return None
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _end(self) -> str:
        """Describe the end of a process without more answers. Its own threads may delay it."""
        try:
            return f"ended early {_ended(self._process.wait(_CLOSE_TIMEOUT_S))}"
        except subprocess.TimeoutExpired:
            return f"closed its output and did not end in {_CLOSE_TIMEOUT_S:.0f} s"

    def _failed(self, how: str) -> ChildFailed:
        return ChildFailed(self.label, how, self._said())

    def _timed_out(self, how: str) -> ChildTimedOut:
        return ChildTimedOut(self.label, how, self._said())

    def _said(self) -> list[str]:
        self._log.seek(0)
        return self._log.read().strip().splitlines()[-_SHOWN_LINES:]


def child_environment() -> dict[str, str]:
    """Return this process's environment with the folder of this package first in PYTHONPATH."""
    others = os.environ.get("PYTHONPATH")
    paths = [str(repository()), *(others.split(os.pathsep) if others else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def repository() -> Path:
    """Return the folder that holds the package: a checkout's root, or an installation's."""
    return Path(offload.__file__).resolve().parent.parent


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None, "pipes were asked for"
    return pipe


def _ended(status: int) -> str:
    if status >= 0:
        return f"with status {status}"
    try:
        return f"by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name
        return f"by signal {-status}"


# ---------------------------------------------------------------- in the child
class Parent:
    """The process that started this one."""

    def __init__(self, answers: IO[str]) -> None:
        self._answers = answers

    def answer(self, found: Mapping[str, Any]) -> None:
        self._answers.write(json.dumps(dict(found)) + "\n")
        self._answers.flush()

    def commands(self) -> Iterator[str]:
        """Yield the parent's commands until it hangs up."""
        return (line.rstrip("\n") for line in sys.stdin)


def named(program: str) -> Any:
    """Return the object that MODULE:NAME names."""
    module, _, name = program.partition(":")
    return getattr(import_module(module), name)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not stand between the answers
    program, options = sys.argv[1:]
    try:
        named(program)(json.loads(Path(options).read_text()), Parent(answers))
    except OffloadError as error:  # expected, and shown by the parent: no traceback
        sys.exit(str(error))


if __name__ == "__main__":
    main()
