"""The operations that torch's functions choose on a GPU, for traces whose tensors are on the CPU.

A trace for a GPU must work on machines without one, where no tensor can claim to be on it. Most
functions save the same tensors on both devices; the others are replaced by the operations that they
call on a GPU. Attention assumes the fused kernels of Ampere and later; the choice among them
follows `sdp_utils` of torch 2.11 to 2.13 as far as it affects memory (type, mask, grouped heads,
head size).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from offload.planning.activations.traced_blocks import replaced_forward
from offload.zero.groups.parameter_grouping import Unit

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_MAX_FLASH_WIDTH = 256  # of a head
_FLASH_ALIGN = 8  # heads of other sizes are padded


@contextmanager
def choosing_for_cuda(model: nn.Module, units: Sequence[Unit]) -> Iterator[None]:
    """Make the forward of `model` choose operations as on a GPU, also that of a repeated block that
    is called alone for recomputation: `backward` disables the modes that were active around it."""
    modules = [model, *(unit.module for unit in units if unit.repeated)]
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(replaced_forward(module, _choosing(module.forward)))
        yield


def _choosing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(*args: Any, **kwargs: Any) -> Any:
        with _CudaChoices():
            return forward(*args, **kwargs)

    return chosen


class _CudaChoices(TorchFunctionMode):
    """A mode in which functions call the operations that they call on a GPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        chosen = _INSTEAD.get(func, func)
        return chosen(*args, **(kwargs or {}))


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    tensors = (query, key, value)
    plain = all(x.dim() == 4 for x in tensors) and query.shape[-1] == value.shape[-1]
    half = query.dtype in _HALVES
    if plain and half and attn_mask is None and query.shape[-1] <= _MAX_FLASH_WIDTH:
        return _flash(tensors, dropout_p, is_causal, scale)
    if plain and key.shape[1] == query.shape[1]:
        bias = _bias(attn_mask, query, key)
        output: Tensor = _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )[0]
        return output
    result: Tensor = _aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return result


def _flash(
    tensors: Sequence[Tensor], dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    width = tensors[0].shape[-1]
    missing = -width % _FLASH_ALIGN
    padded = [F.pad(x, (0, missing)) for x in tensors] if missing else tensors
    scale = width**-0.5 if scale is None else scale
    output: Tensor = _aten._scaled_dot_product_flash_attention(
        *padded, dropout_p, is_causal, False, scale=scale
    )[0]
    return output[..., :width] if missing else output


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask as an additive bias, expanded to every head."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


class _FusedRmsNorm(torch.autograd.Function):
    """Saves and returns what the fused GPU kernel does; the CPU has several operations instead."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, normalized: int, weight: Tensor | None) -> Tensor:
        kept = source.shape[: source.dim() - normalized]
        inverse = torch.zeros((*kept, *[1] * normalized), dtype=torch.float32)
        ctx.save_for_backward(source, weight, inverse)
        return source.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _, weight, _ = ctx.saved_tensors
        return gradients[0].clone(), None, None if weight is None else torch.zeros_like(weight)


def _rms_norm(
    input: Tensor,  # noqa: A002 - the names are those of what is replaced
    normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None,
) -> Tensor:  # fmt: skip
    if weight is not None and weight.dtype is not input.dtype:
        return F.rms_norm(input, normalized_shape, weight, eps)
    output: Tensor = _FusedRmsNorm.apply(input, len(normalized_shape), weight)
    return output


def _dropout(
    input: Tensor,  # noqa: A002
    p: float = 0.5, training: bool = True, inplace: bool = False,
) -> Tensor:  # fmt: skip
    if inplace or not training or not p:
        return F.dropout(input, p, training, inplace)
    output: Tensor = torch.native_dropout(input, p, True)[0]
    return output


def _fp32_of_halves(function: Callable[..., Tensor], kernel: Any) -> Callable[..., Tensor]:
    """Return `function` as on a GPU, where its kernel converts 16-bit inputs to fp32 itself."""

    def chosen(
        input: Tensor,  # noqa: A002
        dim: int, _stacklevel: int = 3, dtype: Any = None,
    ) -> Tensor:  # fmt: skip
        if dtype is torch.float32 and input.dtype in _HALVES:
            output: Tensor = kernel(input, dim, True)
            return output
        return function(input, dim, dtype=dtype)

    return chosen


_INSTEAD: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    F.rms_norm: _rms_norm,
    F.dropout: _dropout,
    F.softmax: _fp32_of_halves(F.softmax, _aten._softmax),
    F.log_softmax: _fp32_of_halves(F.log_softmax, _aten._log_softmax),
}
