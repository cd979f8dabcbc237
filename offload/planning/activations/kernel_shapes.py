"""Corrections where torch's meta kernels fail or return something other than the real kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

_aten = torch.ops.aten
_MOST_REMEMBERED = 4096
_remembers: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}
_makes_new: dict[Any, bool] = {}  # by operation: one tensor that is no view
_NORMS = frozenset({_aten.native_layer_norm.default, _aten.native_group_norm.default})


def run_on_meta(func: Any, args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Any:
    """Return meta tensors like those of the kernel of `func` on `device` (cpu or cuda)."""
    if func is _aten._grouped_mm.default:
        return _grouped_mm(*args[:3], **kwargs)
    if func not in _makes_new:
        _makes_new[func] = _is_functional(func)
    if _makes_new[func]:
        return _remembered(func, args, kwargs)
    result = func(*args, **kwargs)
    if func in _NORMS and device == "cpu":
        return _with_cpu_statistics(args, result)
    return result


def _is_functional(func: Any) -> bool:
    returns = func._schema.returns
    one = len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)
    return one and not func._schema.is_mutable and returns[0].alias_info is None


def _remembered(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of `func`, remembered by the shapes of its inputs: shape inference runs in
    Python, and every block would repeat it."""
    key = id(func), _form(args), _form(tuple(kwargs.items()))  # its own hash is slow
    known = _remembers.get(key)
    if known is not None:
        shape, stride, dtype = known
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    result = func(*args, **kwargs)
    given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if any(x.untyped_storage()._cdata == result.untyped_storage()._cdata for x in given):
        return result  # a view that its schema does not tell of
    if len(_remembers) >= _MOST_REMEMBERED:
        _remembers.clear()
    _remembers[key] = result.shape, result.stride(), result.dtype
    return result


def _form(value: Any) -> Any:
    """The part of an argument that result shapes depend on, as a hashable key."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(map(_form, value))
    return type(value), value  # 1, 1.0 and True are one key


def _with_cpu_statistics(args: Sequence[Any], result: Any) -> Any:
    """Convert the mean and deviation that a norm saves: they are fp32 on a GPU, as the meta kernel
    returns, but of the input's type on a CPU, unless the weight has another type."""
    source, weights = args[0], [x for x in args[1:] if isinstance(x, torch.Tensor)]
    if any(x.dtype is not source.dtype for x in weights):
        return result
    output, *statistics = result
    return (output, *(each.to(source.dtype) for each in statistics))


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor:
    """Return the result of a grouped product in any type; the meta kernel accepts only bf16."""
    dtype = kwargs.get("out_dtype") or a.dtype
    shape: tuple[int, ...] = (a.shape[-2], b.shape[-1])
    if a.dim() == b.dim():  # matrices cut along what they share, or a product for each
        assert offs is not None or a.dim() == 3, "the kernel says so, too"
        shape = (a.shape[0] if offs is None else offs.shape[0], *shape)
    return a.new_empty(shape, dtype=dtype)
