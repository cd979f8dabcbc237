"""Plain PyTorch: the built-in model trained as usual without offload, from the same first weights.
`make demo` and the benches compare with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offload.gpt import LanguageModel, build_meta_model
from offload.train.text import Batch
from offload.weights.materialise import MetaInitialiser

if TYPE_CHECKING:
    from offload.config import OffloadConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class StepTimes:
    """The times of one optimizer step. `forward_backward_s` is a part of `seconds`; `known_at`, on
    `time.perf_counter`, is when the loss was known."""

    loss: float
    seconds: float
    forward_backward_s: float
    known_at: float


def timed_step(
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    micro_batches: Sequence[Batch], update: Callable[[], None],
) -> StepTimes:  # fmt: skip
    """Run forward and backward of all of `micro_batches`, whose mean is the loss, then `update`."""
    started = time.perf_counter()
    losses = []
    for inputs, targets in micro_batches:
        loss = loss_of(inputs, targets) / len(micro_batches)
        loss.backward()
        losses.append(loss.item())
    computed = time.perf_counter()
    update()
    ended = time.perf_counter()
    return StepTimes(sum(losses), ended - started, computed - started, computed)


class LossOnly(nn.Module):
    """Returns only the loss: hooks of other libraries find no tensors in a dataclass."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor | None = self.model(inputs, targets).loss
        assert loss is not None, "targets were given"
        return loss


def build_model(config: OffloadConfig) -> LanguageModel:
    """Build the whole model in memory, with the same initial weights as under offload."""
    meta = build_meta_model(config)
    values = MetaInitialiser(meta, config.seed).values(dict(meta.named_parameters()))
    checkpoint = config.placement.activations.checkpoint is not False
    model = LanguageModel(config.train.model, checkpoint_activations=checkpoint)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(values.pop(name))
    return model.to(DTYPES[config.precision])


def adamw_arguments(config: OffloadConfig) -> dict[str, Any]:
    """The hyperparameters of an AdamW, as torch and DeepSpeed name them."""
    adam = config.optimizer
    assert adam.betas is not None, "an adamw configuration has them filled in"
    return {
        "lr": adam.lr, "betas": tuple(adam.betas), "eps": adam.eps,
        "weight_decay": adam.weight_decay,
    }  # fmt: skip


class Plain:
    """Trains with fused AdamW, and with fp32 masters if weights are bf16."""

    keeps_masters = True

    def __init__(self, config: OffloadConfig, device: torch.device | None = None) -> None:
        self.model = self.wrapped(LossOnly(build_model(config).to(device)))
        self._clip = config.clip_grad_norm
        params = list(self.model.parameters())
        self._params = self._masters = params
        self._mixed = self.keeps_masters and config.precision != "fp32"
        if self._mixed:
            self._masters = [p.detach().float().requires_grad_() for p in params]  # type: ignore[misc]
        arguments = adamw_arguments(config)
        self.optimizer = torch.optim.AdamW(self._masters, fused=True, **arguments)

    def wrapped(self, model: LossOnly) -> nn.Module:
        """Return the model as it is trained; subclasses wrap it."""
        return model

    def step(self, micro_batches: Sequence[Batch]) -> StepTimes:
        """Take one optimizer step over all of `micro_batches`; its loss is their mean."""
        return timed_step(self.model, micro_batches, self._update)

    def _update(self) -> None:
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self._params, self._clip)
        if self._mixed:
            for master, param in zip(self._masters, self._params, strict=True):
                # an expert that no token chose has none
                master.grad = None if param.grad is None else param.grad.float()
                param.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self._mixed:
            with torch.no_grad():
                for master, param in zip(self._masters, self._params, strict=True):
                    param.copy_(master)
