"""What trains in a child process: plain PyTorch, and ours. `step_child` drives it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from offload.materialise import MetaInitialiser
from offload.train.model import LanguageModel, build_meta_model

if TYPE_CHECKING:
    from offload.config import OffloadConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets, both BS


@dataclass(frozen=True)
class Moved:
    """Bytes between memory and the disk since the process began."""

    read_nbytes: int
    written_nbytes: int

    @classmethod
    def by_the_kernel(cls) -> Moved:
        """As /proc counts them for this process, whoever asked for them."""
        lines = Path("/proc/self/io").read_text().splitlines()
        counts = dict(line.split(": ") for line in lines)
        return cls(int(counts["read_bytes"]), int(counts["write_bytes"]))


@dataclass(frozen=True)
class StepTimes:
    """One optimizer step. `forward_backward_s` is a part of `seconds`."""

    loss: float
    seconds: float
    forward_backward_s: float


class System(Protocol):
    """Trains one step at a time."""

    defers: bool  # whether a part of the step's work is done during the next one

    def step(self, micro_batches: Sequence[Batch]) -> StepTimes:
        """One optimizer step over all of `micro_batches`; its loss is their mean."""
        ...

    def settle(self) -> None:
        """Block until nothing of earlier steps is left to do."""
        ...

    def moved(self) -> Moved: ...

    def close(self) -> None: ...


def batch_of(config: OffloadConfig, number: int) -> Batch:
    """Random tokens, the same for every system."""
    generator = torch.Generator().manual_seed(number)
    shape = (config.train.batch, config.train.sequence + 1)
    tokens = torch.randint(0, config.train.model.vocab, shape, generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def build_model(config: OffloadConfig) -> LanguageModel:
    """The whole model in memory, with the very weights that ours begins with."""
    meta = build_meta_model(config)
    values = MetaInitialiser(meta, config.seed).values(dict(meta.named_parameters()))
    checkpoint = config.placement.activations.checkpoint is not False
    model = LanguageModel(config.train.model, checkpoint_activations=checkpoint)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(values.pop(name))
    return model.to(DTYPES[config.precision])


def adamw_arguments(config: OffloadConfig) -> dict[str, Any]:
    """What torch and DeepSpeed call the numbers of an AdamW."""
    adam = config.optimizer
    assert adam.betas is not None, "an adamw configuration has them filled in"
    return {
        "lr": adam.lr, "betas": tuple(adam.betas), "eps": adam.eps,
        "weight_decay": adam.weight_decay,
    }  # fmt: skip


class Plain:
    """PyTorch as one writes it without offload: fused AdamW; with bf16 weights, fp32 masters."""

    defers = False

    def __init__(self, config: OffloadConfig) -> None:
        self.model = build_model(config)
        self._clip = config.clip_grad_norm
        params = list(self.model.parameters())
        self._params = self._masters = params
        self._mixed = config.precision != "fp32"
        if self._mixed:
            self._masters = [p.detach().float().requires_grad_() for p in params]  # type: ignore[misc]
        arguments = adamw_arguments(config)
        self._optimizer = torch.optim.AdamW(self._masters, fused=True, **arguments)

    def step(self, micro_batches: Sequence[Batch]) -> StepTimes:
        started = time.perf_counter()
        losses = []
        for inputs, targets in micro_batches:
            loss = self.model(inputs, targets).loss / len(micro_batches)
            loss.backward()
            losses.append(loss.item())
        computed = time.perf_counter()
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self._params, self._clip)
        self._update()
        ended = time.perf_counter()
        return StepTimes(sum(losses), ended - started, computed - started)

    def _update(self) -> None:
        if self._mixed:
            for master, param in zip(self._masters, self._params, strict=True):
                assert param.grad is not None, "every parameter takes part"
                master.grad, param.grad = param.grad.float(), None
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._mixed:
            with torch.no_grad():
                for master, param in zip(self._masters, self._params, strict=True):
                    param.copy_(master)

    def settle(self) -> None:
        """Nothing is ever left to do."""

    def moved(self) -> Moved:
        return Moved.by_the_kernel()

    def close(self) -> None:
        """Nothing to give back."""


class Offloaded:
    """The same model through `offload.initialize`."""

    defers = True

    def __init__(self, config: OffloadConfig) -> None:
        import offload

        self.model = build_meta_model(config)
        self._engine = offload.initialize(self.model, config)

    def step(self, micro_batches: Sequence[Batch]) -> StepTimes:
        started = time.perf_counter()
        losses = []
        for inputs, targets in micro_batches:
            loss = self.model(inputs, targets).loss / len(micro_batches)
            loss.backward()
            losses.append(loss.item())
        computed = time.perf_counter()
        self._engine.optimizer.step()
        self._engine.optimizer.zero_grad()
        ended = time.perf_counter()
        return StepTimes(sum(losses), ended - started, computed - started)

    def settle(self) -> None:
        self._engine.settle()

    def moved(self) -> Moved:
        links = self._engine.report().bytes_moved
        return Moved(links["nvme read"], links["nvme write"])

    def close(self) -> None:
        self._engine.check_integrity()
        self._engine.close()
