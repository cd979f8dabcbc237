"""Errors for what micro-batches cannot do, and when two results count as equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.utils.checkpoint
from torch import nn

from offload.tiers.errors import UnsupportedError
from offload.zero.groups.discovery import Unit

SMALLER_BATCHES = (
    "set micro_batches: 1 and give the model smaller batches (to train, with "
    "gradient_accumulation_steps)"
)
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}  # of the norm; 16 bits: 5e-2


def check_joinable(tensors: Sequence[torch.Tensor], span: slice, name: str) -> None:
    """Raise UnsupportedError for an output of the block `name` that is not one row per sample."""
    for tensor in tensors:
        if tensor.dim() == 0 or tensor.shape[0] != span.stop - span.start:
            raise UnsupportedError(
                f"{name}: micro_batches cannot join an output of shape {tuple(tensor.shape)}, "
                f"whose first dimension is not the batch; {SMALLER_BATCHES}"
            )


def is_close(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether `a` is `b` but for the order of sums; integers, inf and NaN must be equal.
    `dtype` is the format that they were computed in, if it is not theirs."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite):
        return False
    if not torch.allclose(a[~finite], b[~finite], equal_nan=True):  # signs of inf, places of NaN
        return False
    finite_a, finite_b = a[finite].double(), b[finite].double()
    distance = (finite_a - finite_b).norm()
    return bool(distance <= _TOLERANCE.get(dtype or a.dtype, 5e-2) * finite_b.norm())


def refuse_batch_norm(unit: Unit, count: int) -> None:
    """Raise UnsupportedError for a block with a batch norm; `count` is that of micro-batches."""
    for name, module in unit.module.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UnsupportedError(
                f"micro_batches: {count}: {unit.name}.{name} is a {type(module).__name__}, which "
                "mixes the samples of a batch; use a norm over features (LayerNorm, GroupNorm), or "
                f"{SMALLER_BATCHES}"
            )


def refuse_chosen_gradients(unit: Unit) -> None:
    """Raise UnsupportedError in a backward pass that computes only chosen gradients."""
    if not torch.autograd._is_checkpoint_valid():
        raise UnsupportedError(
            f"{unit.name}: torch.autograd.grad and backward(inputs=...) cannot go through a block "
            "under micro_batches, since the gradients of all its parameters would be accumulated "
            "as well; call loss.backward(), or set micro_batches: 1"
        )


def refuse_output(what: str, name: str) -> NoReturn:
    """UnsupportedError for what the block `name` returned."""
    raise UnsupportedError(
        f"{name}: micro_batches cannot join {what}; return tensors, in tuples, lists and dicts, or "
        f"{SMALLER_BATCHES}"
    )


def refuse_outer_checkpoint(unit: Unit) -> None:
    """Raise UnsupportedError if the model itself recomputes the block that is being called."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__:
        raise UnsupportedError(
            f"{unit.name}: the model checkpoints its blocks itself, around all micro-batches; turn "
            "that off and set placement.activations.checkpoint: true, which works within them"
        )
