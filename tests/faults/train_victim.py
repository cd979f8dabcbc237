"""Runs of `offload train` that are killed: `python -m tests.faults.train_victim`.

Each line of input is a `Request`; for each one a child is forked (imports and kernels are paid for
once), which runs the command and is killed by SIGKILL after some seconds, if it still lives. A line
of output for each: its status, as `os.waitpid` has it. What the children print goes to a file.
"""

import json
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from offload.cli.app import app

_POLL_S = 0.002
TRAINING = """
device: cpu
precision: bf16
seed: 1
budget: {host: 16MiB, nvme: 16MiB}
placement: {parameters: nvme, gradients: host, optimizer: nvme}
optimizer: {type: adamw, lr: 1e-3, chunk: 1024}
clip_grad_norm: 1.0
train:
  model: {layers: 1, hidden: 16, heads: 2, mlp: 32, max_sequence: 16}
  text: text.txt
  validation: 0
  steps: STEPS
  batch: 2
  sequence: 16
  checkpoint_every: 1
  sample: {length: 0}
"""


@dataclass(frozen=True)
class Request:
    folder: str  # with what `write_inputs` wrote
    run: str  # the run's folder, in it
    resume: bool
    kill_after_s: float | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def write_inputs(folder: Path, steps: int) -> None:
    (folder / "train.yaml").write_text(TRAINING.replace("STEPS", str(steps)))
    (folder / "text.txt").write_text("".join(f"to be or not to be, {n}\n" for n in range(200)))


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name), 2)
        quiet = os.open(os.devnull, os.O_WRONLY)
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(quiet, 1)
        assert _train(Request(name, "run", resume=False)) == 0
        assert _train(Request(name, "run", resume=True)) == 0
    deadline = time.monotonic() + 10
    while threading.active_count() > 1:  # the watchdog over calls ends when there are none
        assert time.monotonic() < deadline, "a fork would lose the others"
        time.sleep(0.01)
    for line in sys.stdin:
        print(_fork(Request(**json.loads(line))), file=answers, flush=True)


def _fork(request: Request) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            output = Path(request.folder) / "output.txt"
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
            os.dup2(1, 2)
            status = _train(request)
        finally:
            os._exit(status)
    ended, status = 0, 0
    if request.kill_after_s is not None:
        until = time.monotonic() + request.kill_after_s
        while not ended and time.monotonic() < until:
            time.sleep(_POLL_S)
            ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            os.kill(pid, signal.SIGKILL)
    if not ended:
        _, status = os.waitpid(pid, 0)
    return status


def _train(request: Request) -> int:
    os.chdir(request.folder)
    more = ["--resume"] if request.resume else []
    try:
        app(["train", "train.yaml", "--run-dir", request.run, *more])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


if __name__ == "__main__":
    main()
