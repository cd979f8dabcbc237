"""Training steps on a GPU, one system per process: what a step takes once it goes round.

A system that defers an update to the next forward has no step that begins and ends by itself. So
time is taken where the loss of a step has arrived in host memory, and a step is what lies between
two such moments: everything that any step does is in one of the intervals.

    forward, backward 0 │ step 0, forward, backward 1 │ step 1, forward, backward 2 │ ...
                     loss 0                        loss 1                        loss 2
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from offload.bench.step_systems import Batch
from offload.config import OffloadConfig
from offload.machine import peak_rss_nbytes
from offload.tiers.errors import IntegrityError
from offload.train.model import LanguageModel, build_meta_model

_PATTERN_NUMEL = (1 << 22) - 3  # odd: neighbouring rows never get the same values
_SEED = 1

Measured = Callable[[dict[str, Any]], None]


class GpuSystem(Protocol):
    """Trains one step at a time on the current CUDA device."""

    def step(self, batch: Batch) -> float:
        """Forward and backward, the loss, and then what ends the step, or begins to."""
        ...

    def losses_at(self) -> float:
        """When the last loss was known, on `time.perf_counter`."""
        ...

    def moved(self) -> dict[str, int]:
        """Bytes over each link since the start, as far as the system counts them."""
        ...

    def close(self) -> None: ...


class OffloadedOnGpu:
    """Ours, from a model on the meta device."""

    def __init__(self, config: OffloadConfig, device: torch.device) -> None:
        import offload

        self._model = build_meta_model(config)
        give_quick_values(self._model, config.train.model.init_std)
        self._engine = offload.initialize(self._model, config)
        self._at = 0.0

    def step(self, batch: Batch) -> float:
        loss = self._model(*batch).loss
        assert loss is not None, "targets were given"
        loss.backward()
        value = float(loss.item())
        self._at = time.perf_counter()
        self._engine.optimizer.step()
        self._engine.optimizer.zero_grad()
        return value

    def losses_at(self) -> float:
        return self._at

    def moved(self) -> dict[str, int]:
        return self._engine.report().bytes_moved

    def close(self) -> None:
        self._engine.settle()
        self._engine.check_integrity()
        self._engine.close()


def give_quick_values(model: nn.Module, std: float) -> None:
    """Let `model`, on the meta device, be initialised from one block of normal values, repeated.

    Billions of fresh normal values take a CPU minutes, and no speed depends on them: products of
    random numbers draw the power of random numbers, whether or not they repeat. Norms start at 1.
    """
    generator = torch.Generator().manual_seed(_SEED)
    pattern = torch.randn(_PATTERN_NUMEL, generator=generator) * std

    def fill(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            if param.ndim == 1:
                param.fill_(1.0)
            else:
                _repeat(pattern, param.view(-1))

    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters = partial(fill, module)  # type: ignore[assignment]


def _repeat(pattern: torch.Tensor, flat: torch.Tensor) -> None:
    for start in range(0, flat.numel(), pattern.numel()):
        part = flat[start : start + pattern.numel()]
        part.copy_(pattern[: part.numel()])


def batch_on(device: torch.device, config: OffloadConfig, number: int) -> Batch:
    """Random tokens, the same for every system and machine."""
    generator = torch.Generator().manual_seed(number)
    shape = (config.train.batch, config.train.sequence + 1)
    tokens = torch.randint(0, config.train.model.vocab, shape, generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def train(
    make: Callable[[OffloadConfig, torch.device], GpuSystem], settings: Mapping[str, Any],
    steps: int, device: torch.device, measured: Measured,
) -> dict[str, Any]:  # fmt: skip
    """Build, take `steps` steps, the first one to warm up; tell `measured`, and close.

    IntegrityError for a loss that is not finite.
    """
    config = OffloadConfig.load(settings)
    started = time.perf_counter()
    system = make(config, device)
    built_s = time.perf_counter() - started
    losses, ends, moved = [], [], []
    for number in range(steps):
        losses.append(system.step(batch_on(device, config, number)))
        ends.append(system.losses_at())
        moved.append(system.moved())
    _check(losses)
    result = {
        "losses": losses,
        "seconds": [b - a for a, b in pairwise(ends)],
        "moved_nbytes": [_between(a, b) for a, b in pairwise(moved)],
        "built_s": built_s,
        "first_step_s": ends[0] - started - built_s,
        "tokens": config.train.batch * config.train.sequence,
        "peak_rss_nbytes": peak_rss_nbytes(),
        "peak_device_nbytes": _peak_device_nbytes(device),
    }
    measured(result)
    system.close()
    return result


def _between(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {link: nbytes - before[link] for link, nbytes in after.items()}


def _peak_device_nbytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _check(losses: list[float]) -> None:
    if not all(math.isfinite(loss) for loss in losses):
        raise IntegrityError(f"losses are not finite: {losses}; no such step is worth its time")


def run_ours(
    config: Mapping[str, Any], steps: int, folder: Path, measured: Measured
) -> dict[str, Any]:
    """Ours, with swap files in `folder`, on the current CUDA device."""
    settings = {**config, "nvme": {"paths": [str(folder)]}}
    return train(OffloadedOnGpu, settings, steps, _current(), measured)


def run_deepspeed(config: Mapping[str, Any], steps: int, measured: Measured) -> dict[str, Any]:
    """DeepSpeed ZeRO-3 with everything offloaded to the host, on the current CUDA device."""
    from offload.bench.gpu_deepspeed import DeepSpeedOnGpu

    return train(DeepSpeedOnGpu, config, steps, _current(), measured)


def _current() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def whole_model(config: OffloadConfig) -> LanguageModel:
    """The model as a peer builds it, with its own first values."""
    checkpoint = config.placement.activations.checkpoint is not False
    return LanguageModel(config.train.model, checkpoint_activations=checkpoint)
