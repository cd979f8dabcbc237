"""The parent's end of a system that trains in a process of its own."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import offload
from offload.bench.record import Kind
from offload.tiers.errors import OffloadError

_ANSWER_TIMEOUT_S = 1800.0  # the first turn of a peer may compile its operators
_CLOSE_TIMEOUT_S = 120.0
_SHOWN_LINES = 12


class SystemFailed(OffloadError):
    """A system's process ended early, or does not answer."""


@dataclass(frozen=True)
class SystemSpec:
    """A system and what its configuration changes. Adding one to `step.SYSTEMS` is all it takes."""

    name: str  # as --systems takes it
    label: str
    kind: Kind
    program: str  # plain, offload, deepspeed-cpu, deepspeed-nvme
    overrides: tuple[str, ...] = ()
    memory_per_parameter: int = 0  # bytes at most, roughly, in fp32: to know what fits
    batches: int = 1  # of the configuration's size per step
    in_one_piece: bool = False  # the model gets them as one batch, and splits it itself


@dataclass(frozen=True)
class Turn:
    """What one turn measured; see `step_child`."""

    losses: tuple[float, ...]
    seconds: float
    forward_backward_s: float
    read_nbytes: int
    written_nbytes: int
    peak_rss_nbytes: int


class SystemProcess:
    """Starts the process; `turn` trains. Its output is kept in `folder`."""

    def __init__(
        self, spec: SystemSpec, config: Path, folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Blocks until the model is built; one of several ranks, which has an `environment` that
        says which, does not (see `await_start`). SystemFailed with the end of its output."""
        self.spec = spec
        self._log = (folder / f"{spec.name}.log").open("w+")
        files = folder / spec.name
        files.mkdir()
        described = folder / f"{spec.name}.json"
        described.write_text(
            json.dumps(
                {
                    "program": spec.program,
                    "config": str(config),
                    "folder": str(files),
                    "batches": spec.batches,
                    "in_one_piece": spec.in_one_piece,
                }
            )
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "offload.bench.step_child", str(described)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**_environment(), **(environment or {})},
            start_new_session=True,  # Ctrl-C is for us, and we end the child
        )  # fmt: skip
        if environment is None:
            self.await_start()

    def await_start(self) -> None:
        """Until it is ready for its first turn. SystemFailed."""
        try:
            self._answer()
        except BaseException:
            self.kill()
            raise

    def turn(self) -> Turn:
        """Train one turn. SystemFailed."""
        self.begin_turn()
        return self.end_turn()

    def begin_turn(self) -> None:
        """Ask for a turn, which goes on meanwhile. SystemFailed."""
        pipe = self._pipe(self._process.stdin)
        try:
            pipe.write("turn\n")
            pipe.flush()
        except BrokenPipeError as error:
            raise self._failed("ended early") from error

    def end_turn(self) -> Turn:
        """Wait for the turn that was asked for. SystemFailed."""
        answer = self._answer()
        return Turn(**{**answer, "losses": tuple(answer["losses"])})

    def close(self) -> None:
        """Let the process end by itself, with its own checks. SystemFailed if they fail."""
        self._hang_up()
        try:
            status = self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise self._failed(f"did not end in {_CLOSE_TIMEOUT_S:.0f} s") from error
        if status != 0:
            raise self._failed(f"ended with status {status}")
        self.kill()

    def kill(self) -> None:
        """End it now, whatever it does, with all that it started, and close the pipes. Calling it
        again does nothing."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._hang_up()
        self._pipe(self._process.stdout).close()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        pipe = self._pipe(self._process.stdout)
        if not select.select([pipe], [], [], _ANSWER_TIMEOUT_S)[0]:
            raise self._failed(f"gave no answer in {_ANSWER_TIMEOUT_S:.0f} s")
        line = pipe.readline()
        if not line:
            raise self._failed(self._end())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> str:
        """How it ended that gives no more answers. It may be held up by threads of its own."""
        try:
            return f"ended early with status {self._process.wait(_CLOSE_TIMEOUT_S)}"
        except subprocess.TimeoutExpired:
            return f"closed its output and did not end in {_CLOSE_TIMEOUT_S:.0f} s"

    def _hang_up(self) -> None:
        """Close its standard input: it has no more turns to make."""
        with suppress(BrokenPipeError):  # it died before it read the last line; closed all the same
            self._pipe(self._process.stdin).close()

    def _failed(self, how: str) -> SystemFailed:
        self._log.seek(0)
        end = "".join(self._log.readlines()[-_SHOWN_LINES:]).strip()
        return SystemFailed(f"{self.spec.label} {how}; the end of what it printed:\n{end}")

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None, "pipes were asked for"
        return pipe


def _environment() -> dict[str, str]:
    """Ours, with the folder of this very package first, wherever the child is started from."""
    here = str(Path(offload.__file__).resolve().parent.parent)
    others = os.environ.get("PYTHONPATH")
    paths = [here, *(others.split(os.pathsep) if others else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
