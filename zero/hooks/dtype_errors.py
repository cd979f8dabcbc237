"""Torch's errors about tensors of two dtypes, with the module's name and what to change.

Nothing is refused beforehand: operations differ in the mixtures they accept (a norm takes fp32
parameters with bf16 inputs, a matrix product takes none).
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from offload.tiers.errors import DtypeError, OffloadError
from offload.zero.groups.bits import FLOAT_OF

_ABOUT_DTYPES = re.compile(
    r"same dtype|expected scalar type|mixed dtype|type .* should be the same|"
    r"does not match weight dtype|[Tt]ype promoting",
)


def explain_dtypes(error: Exception, name: str, module: nn.Module, given: Any) -> None:
    """Raise DtypeError if the cause of `error` is that the inputs `given` to the module `name`, or
    its buffers, have another dtype than its parameters."""
    own = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
    if own is None or isinstance(error, OffloadError) or not _ABOUT_DTYPES.search(str(error)):
        return
    what = f"{name or 'the model'} ({type(module).__name__}), whose parameters are {_name(own)}"
    inputs = _others(pytree.tree_leaves(given), own)
    buffers = _others(module.buffers(), own)
    low = torch.bfloat16 if own is torch.float32 else own
    autocast = f"precision: fp32 and call the model under torch.autocast(device, {low})"
    if buffers and not inputs:
        raise DtypeError(
            f"{what}, has buffers in {', '.join(buffers)}: {error}; cast the model before "
            f"offload.initialize (model.to({own}), its buffers too), or set {autocast}"
        ) from error
    of = f"is given {', '.join(inputs)}" if inputs else "meets another format"
    raise DtypeError(
        f"{what}, {of}: {error}; cast the inputs (x.to({own})), or set {autocast}"
    ) from error


def _others(tensors: Any, own: torch.dtype) -> list[str]:
    """Return the formats of floating point tensors that are not `own`."""
    found = {t.dtype for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point()}
    return sorted(_name(dtype) for dtype in found - {own})


def _name(dtype: torch.dtype) -> str:
    known = FLOAT_OF.get(dtype)
    return str(dtype).removeprefix("torch.") if known is None else known.name.lower()
