"""The systems that train in a child process, plain PyTorch and offload, and their turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

from offload.config import OffloadConfig
from offload.gpt import LanguageModel, build_meta_model
from offload.process.child import Parent, named
from offload.process.machine import peak_rss_nbytes
from offload.train import plain
from offload.train.plain import LossOnly, StepTimes, timed_step
from offload.train.text import Batch


class System:
    """Trains one step at a time. Made with a configuration and a folder for files."""

    defers = False  # whether a part of the step's work is done during the next one

    def step(self, micro_batches: Sequence[Batch]) -> StepTimes:
        """One optimizer step over all of `micro_batches`; its loss is their mean."""
        raise NotImplementedError

    def settle(self) -> None:
        """Block until nothing of earlier steps is left to do."""

    def moved(self) -> Mapping[str, int]:
        """Bytes over each link since the start; at least `nvme read` and `nvme write`. By default
        all bytes between memory and disk that /proc counts for this process."""
        lines = Path("/proc/self/io").read_text().splitlines()
        counts = dict(line.split(": ") for line in lines)
        return {"nvme read": int(counts["read_bytes"]), "nvme write": int(counts["write_bytes"])}

    def close(self) -> None:
        """Give back what the system holds."""


def batch_of(config: OffloadConfig, number: int, device: torch.device | None = None) -> Batch:
    """Random tokens, the same for every system and machine."""
    generator = torch.Generator().manual_seed(number)
    shape = (config.train.batch, config.train.sequence + 1)
    tokens = torch.randint(0, config.train.model.vocab, shape, generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


class Plain(plain.Plain, System):
    """Plain PyTorch, as it is written without offload."""

    def __init__(self, config: OffloadConfig, folder: Path) -> None:
        super().__init__(config)


class Offload(System):
    """The same model as `Plain`, trained through `offload.initialize`."""

    defers = True

    def __init__(self, config: OffloadConfig, folder: Path) -> None:
        import offload

        model = self.built(config)
        self._engine = offload.initialize(model, config)
        self._loss_of = LossOnly(model)

    def built(self, config: OffloadConfig) -> LanguageModel:
        return build_meta_model(config)

    def step(self, micro_batches: Sequence[Batch]) -> StepTimes:
        return timed_step(self._loss_of, micro_batches, self._update)

    def _update(self) -> None:
        self._engine.optimizer.step()
        self._engine.optimizer.zero_grad()

    def settle(self) -> None:
        self._engine.settle()

    def moved(self) -> dict[str, int]:
        return self._engine.report().bytes_moved

    def close(self) -> None:
        self._engine.settle()
        self._engine.check_integrity()
        self._engine.close("drop")


@dataclass(frozen=True)
class Turn:
    """One turn's measurements, with the losses of all its steps."""

    losses: tuple[float, ...]
    seconds: float
    forward_backward_s: float
    read_nbytes: int
    written_nbytes: int
    peak_rss_nbytes: int


def train_a_turn(system: System, batches: Iterator[Batch], each: int) -> Turn:
    """Train a turn: one timed step, of `each` batches, found as a long run would find it.

    A system that defers work leaves some of each step to the next. Stepping in turn with others,
    that work would be untimed, and would slow the others down. So such a system first takes a step
    that is not timed, then the timed one, which does the deferred work of the first, and then
    settles before the next system's turn:

        not timed          timed                    not timed
        step k       |     step k + 1         |     settle
                     |  deferred work of k    |  deferred work of k + 1
    """

    def step() -> StepTimes:
        return system.step(list(islice(batches, each)))

    losses = [step().loss] if system.defers else []
    before = system.moved()
    times = step()
    moved = between(before, system.moved())
    system.settle()
    return Turn(
        (*losses, times.loss), times.seconds, times.forward_backward_s, moved["nvme read"],
        moved["nvme write"], peak_rss_nbytes(),
    )  # fmt: skip


def between(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {link: nbytes - before[link] for link, nbytes in after.items()}


def made(options: Mapping[str, Any]) -> tuple[System, OffloadConfig]:
    """The system of a child's options, with its configuration."""
    config = OffloadConfig.load(options["config"])
    make = named(options["program"])
    return make(config, Path(options["folder"])), config


def serve(options: Mapping[str, Any], parent: Parent) -> None:
    """Report that the system is ready, then train a turn per command."""
    system, config = made(options)
    batches = (batch_of(config, number) for number in count())
    parent.answer({"ready": True})
    for _ in parent.commands():
        parent.answer(train_a_turn(system, batches, options["batches"]))
    system.close()
