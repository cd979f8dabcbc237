"""The process of one system: trains one turn for each line it is sent, and answers with JSON.

    python -m offload.bench.step_child SPEC.json

The parent's commands are lines on standard input; answers go to what was standard output when the
process began. Everything that libraries print goes to standard error, which the parent keeps.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import IO, Any

import torch

from offload.bench.step_systems import Moved, Offloaded, Plain, System, batch_of
from offload.config import OffloadConfig
from offload.machine import peak_rss_nbytes
from offload.tiers.errors import OffloadError


def make(program: str, config: OffloadConfig, folder: Path) -> System:
    """The system called `program`; its files, if it needs any, in `folder`."""
    if program == "plain":
        return Plain(config)
    if program == "offload":
        return Offloaded(config)
    if program in ("ddp", "fsdp2", "fsdp2-offload"):
        from offload.bench.rank_systems import FullySharded, Replicated

        if program == "ddp":
            return Replicated(config)
        return FullySharded(config, offload=program == "fsdp2-offload")
    from offload.bench.step_deepspeed import DeepSpeedZero3

    _, device, *options = program.split("-")
    return DeepSpeedZero3(config, device, folder, kept="kept" in options)


class Turns:
    """Trains a turn: one timed step, found as a long run would find it.

    A system that defers work leaves some of each step to the next. Stepping in turn with others, it
    would do that while nobody looks at the clock, and in the others' time. So such a system makes a
    step that is not timed first, then the timed one, which has the former's work to do, and then
    settles before it is somebody else's turn:

        not timed          timed                    not timed
        step k       |     step k + 1         |     settle
                     |  deferred work of k    |  deferred work of k + 1
    """

    def __init__(
        self, system: System, config: OffloadConfig, batches: int, *, in_one_piece: bool
    ) -> None:
        """A step takes `batches` of the configuration's, `in_one_piece` or one after the other."""
        self._system = system
        self._count = batches
        self._in_one_piece = in_one_piece
        # each of several ranks has every so-manieth batch
        rank, ranks = (int(os.environ.get(n, d)) for n, d in (("RANK", "0"), ("WORLD_SIZE", "1")))
        self._batches = (batch_of(config, number) for number in count(rank, ranks))

    def turn(self) -> dict[str, Any]:
        """What was measured, with the losses of all steps of the turn."""
        system = self._system
        losses = [self._step()[0]] if system.defers else []
        before = system.moved()
        loss, times = self._step()
        moved = _between(before, system.moved())
        system.settle()
        return {
            "losses": [*losses, loss], **times, **asdict(moved),
            "peak_rss_nbytes": peak_rss_nbytes(),
        }  # fmt: skip

    def _step(self) -> tuple[float, dict[str, float]]:
        micro_batches = [next(self._batches) for _ in range(self._count)]
        if self._in_one_piece:
            inputs, targets = zip(*micro_batches, strict=True)
            micro_batches = [(torch.cat(inputs), torch.cat(targets))]
        times = asdict(self._system.step(micro_batches))
        return times.pop("loss"), times


def _between(before: Moved, after: Moved) -> Moved:
    return Moved(
        after.read_nbytes - before.read_nbytes, after.written_nbytes - before.written_nbytes
    )


def serve(spec: dict[str, Any], answers: IO[str]) -> None:
    """Say `ready`, then one answer per line of standard input, until it is closed."""
    config = OffloadConfig.load(spec["config"])
    system = make(spec["program"], config, Path(spec["folder"]))
    turns = Turns(system, config, spec["batches"], in_one_piece=spec["in_one_piece"])
    _say(answers, {"ready": True, "peak_rss_nbytes": peak_rss_nbytes()})
    for _ in sys.stdin:
        _say(answers, turns.turn())
    system.close()


def _say(answers: IO[str], answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not stand between the answers
    try:
        serve(json.loads(Path(sys.argv[1]).read_text()), answers)
    except OffloadError as error:  # expected, and shown by the parent: no traceback
        sys.exit(str(error))


if __name__ == "__main__":
    main()
