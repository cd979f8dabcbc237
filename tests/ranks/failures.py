"""Ranks that train, until one of them fails in a way of its own."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from torch import Tensor

import offload
from tests.offload.engine_cases import TinyLM, batches, config, losses_of, seeded

TIMEOUT_S = 3.0
CLOSING_TIMEOUT_S = 30.0  # no rank waits for it: it costs nothing where closing is right
_GOOD_STEPS = 2


def train_until(fault: str, culprit: int, stage: int, folder: str) -> None:
    """Train for some steps, in which nothing happens; then rank `culprit` has its `fault`."""
    swap, here = Path(folder) / "swap", dist.get_rank() if dist.is_initialized() else None
    keys: dict[str, Any] = {"zero": {"stage": stage, "timeout_s": TIMEOUT_S}}
    with offload.initialize(seeded(TinyLM), config(swap, **keys)) as engine:
        here = dist.get_rank() if here is None else here
        data = batches(_GOOD_STEPS + 3, seed=here)
        losses_of(engine, data[:_GOOD_STEPS])
        if here == culprit:
            FAULTS[fault](engine, data[-1], lambda: _note(Path(folder)))
        losses_of(engine, data[_GOOD_STEPS:])


def close_after_steps(stage: int, folder: str) -> float:
    """The longest that closing took, of engines that are closed as soon as a step is taken, by one
    rank somewhat later than by the others."""
    took = []
    for turn in range(4):
        zero = {"stage": stage, "timeout_s": CLOSING_TIMEOUT_S}
        engine = offload.initialize(seeded(TinyLM), config(Path(folder) / "swap", zero=zero))
        losses_of(engine, batches(1, seed=dist.get_rank()))
        time.sleep(0.05 * dist.get_rank() * (turn % 2))
        began = time.monotonic()
        engine.close()
        took.append(time.monotonic() - began)
    return max(took)


def _note(folder: Path) -> None:
    """When it happened: the clock is the same in all processes."""
    (folder / "fault.part").write_text(str(time.monotonic()))
    (folder / "fault.part").rename(folder / "fault")


Note = Callable[[], None]


def _signalled(number: int) -> Callable[[offload.Engine, Tensor, Note], None]:
    def fault(engine: offload.Engine, tokens: Tensor, note: Note) -> None:
        """In the middle of the backward pass."""

        def hook(*_: object) -> None:
            note()
            os.kill(os.getpid(), number)

        _model(engine).blocks[0].register_full_backward_hook(hook)

    return fault


def _raised(engine: offload.Engine, tokens: Tensor, note: Note) -> None:
    _model(engine).loss(tokens).backward()
    note()
    raise ValueError("the data of this rank has come to its end")


def _sleeping(engine: offload.Engine, tokens: Tensor, note: Note) -> None:
    _model(engine).loss(tokens).backward()
    note()
    time.sleep(120.0)


def _saves_alone(engine: offload.Engine, tokens: Tensor, note: Note) -> None:
    note()
    with TemporaryDirectory() as folder:
        engine.save_checkpoint(folder)


def _ends_earlier(engine: offload.Engine, tokens: Tensor, note: Note) -> None:
    note()
    engine.close()
    time.sleep(120.0)  # it goes on with other things


def _model(engine: offload.Engine) -> Any:
    return engine.module


FAULTS: dict[str, Callable[[offload.Engine, Tensor, Note], None]] = {
    "killed": _signalled(signal.SIGKILL),
    "stopped": _signalled(signal.SIGSTOP),
    "raised": _raised,
    "sleeping": _sleeping,
    "saves alone": _saves_alone,
    "ends earlier": _ends_earlier,
}

if __name__ == "__main__":
    # A launcher that sees one rank die ends the others at once: they are to speak first, however
    # slow the machine. It waits for them half a minute.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    train_until(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
