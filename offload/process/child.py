"""A measured process of its own, both ends of it.

    python -m offload.process.child MODULE:FUNCTION FD

The function is called with the options, the first thing that comes through the pipe of that file
descriptor, and a `Parent`, whose commands and answers go through it as well. The parent process
keeps everything that is printed.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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
    """Starts the process and communicates with it. Its output stays in `folder`."""

    def __init__(
        self, label: str, program: str, options: Mapping[str, Any], folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Start `program`, given as MODULE:FUNCTION, and return at once."""
        self.label = label
        self._log = (folder / "log").open("w+", errors="replace")
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "offload.process.child", program, str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
                env={**child_environment(), **(environment or {})}, pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for this process, which ends the child
            )  # fmt: skip
        with suppress(ConnectionError):  # it has ended, as the first answer will say
            self._pipe.send(dict(options))

    def send(self, command: str) -> None:
        """Send a command. Raises ChildFailed if the process no longer reads."""
        try:
            self._pipe.send(command)
        except ConnectionError as error:
            raise self._failed("ended early") from error

    def answer(self, timeout_s: float = _ANSWER_TIMEOUT_S) -> Any:
        """Return the next answer. Raises ChildFailed if there is none."""
        answer = self.next_answer(timeout_s)
        if answer is None:
            raise self._failed(self._end())
        return answer

    def next_answer(self, timeout_s: float) -> Any:
        """Return the next answer, or None if there will be none. Raises ChildTimedOut if none
        arrives in time."""
        try:
            if not self._pipe.poll(timeout_s):
                raise self._failed(f"gave no answer in {timeout_s:.0f} s", ChildTimedOut)
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            return None

    def close(self, timeout_s: float | None = None) -> None:
        """Let the process end by itself, with its own checks. Raises ChildFailed if they fail."""
        timeout_s = _CLOSE_TIMEOUT_S if timeout_s is None else timeout_s
        self.hang_up()
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise self._failed(f"did not end in {timeout_s:.0f} s", ChildTimedOut) from error
        if status != 0:
            raise self._failed(f"ended {_ended(status)}")
        self.kill()

    def hang_up(self) -> None:
        """Close the pipe: there are no more commands, and no answer is wanted any more."""
        self._pipe.close()

    def kill(self) -> None:
        """End it at once, with all processes it started in its session, and close the pipe.
        Calling it again does nothing."""
        if self._log.closed:
            return
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.hang_up()
        self._log.close()

    def _end(self) -> str:
        """Describe the end of a process without more answers. Its own threads may delay it."""
        try:
            return f"ended early {_ended(self._process.wait(_CLOSE_TIMEOUT_S))}"
        except subprocess.TimeoutExpired:
            return f"closed its pipe and did not end in {_CLOSE_TIMEOUT_S:.0f} s"

    def _failed(self, how: str, kind: type[ChildFailed] = ChildFailed) -> ChildFailed:
        self._log.seek(0)
        return kind(self.label, how, self._log.read().strip().splitlines()[-_SHOWN_LINES:])


def child_environment() -> dict[str, str]:
    """Return this process's environment with the folder of this package first in PYTHONPATH."""
    others = os.environ.get("PYTHONPATH")
    paths = [str(repository()), *(others.split(os.pathsep) if others else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def repository() -> Path:
    """Return the folder that holds the package: a checkout's root, or an installation's."""
    return Path(offload.__file__).resolve().parent.parent


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

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def answer(self, result: Any) -> None:
        self._pipe.send(result)

    def commands(self) -> Iterator[Any]:
        """Yield the parent's commands until it hangs up."""
        with suppress(EOFError, ConnectionError):
            while True:
                yield self._pipe.recv()


def named(program: str) -> Any:
    """Return the object that MODULE:NAME names."""
    module, _, name = program.partition(":")
    return getattr(import_module(module), name)


def main() -> None:
    program, fd = sys.argv[1:]
    os.set_inheritable(int(fd), False)
    parent = Parent(Connection(int(fd)))
    try:
        named(program)(next(parent.commands()), parent)
    except OffloadError as error:  # expected, and shown by the parent: no traceback
        sys.exit(str(error))


if __name__ == "__main__":
    main()
