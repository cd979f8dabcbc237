"""Where torch's meta kernels refuse, or give something else than the real ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_aten = torch.ops.aten
# Pointwise, and of their inputs' type where that is a floating one.
_SAME_TYPE = frozenset(
    {
        _aten.add, _aten.sub, _aten.mul, _aten.div, _aten.neg, _aten.reciprocal, _aten.pow,
        _aten.exp, _aten.sin, _aten.cos, _aten.sqrt, _aten.rsqrt, _aten.tanh, _aten.sigmoid,
        _aten.relu, _aten.silu, _aten.gelu, _aten.tanh_backward, _aten.sigmoid_backward,
        _aten.threshold_backward, _aten.silu_backward, _aten.gelu_backward,
    }
)  # fmt: skip
# Their shapes are found in Python, for every block again. Each makes one new tensor.
_SLOW = frozenset(
    {
        _aten.add, _aten.sub, _aten.mul, _aten.neg, _aten.sum, _aten.mean, _aten.cat, _aten.mm,
        _aten.slice_backward, _aten.div, _aten.cumsum, _aten.eq, _aten.ne, _aten.ge,
        _aten.floor_divide, _aten.masked_fill, _aten.index, _aten._softmax, _aten._log_softmax,
        _aten._softmax_backward_data, _aten._log_softmax_backward_data, _aten.nll_loss_backward,
    }
)  # fmt: skip
_MOST_REMEMBERED = 4096
_remembers: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}
_NORMS = frozenset({_aten.native_layer_norm.default, _aten.native_group_norm.default})


def run_on_meta(func: Any, args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Any:
    """What `func` of meta tensors gives, as its kernel on `device` (cpu or cuda) would."""
    if func is _aten._grouped_mm.default:
        return _grouped_mm(*args[:3], **kwargs)
    if torch.Tag.pointwise in func.tags:
        alike = _pointwise(func, args, kwargs)
        if alike is not None:
            return alike
    if func.overloadpacket in _SLOW:
        return _remembered(func, args, kwargs)
    result = func(*args, **kwargs)
    if func in _NORMS and device == "cpu":
        return _with_cpu_statistics(args, result)
    return result


def _remembered(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What `func` gave of inputs of the same shapes before."""
    if func._schema.is_mutable:
        return func(*args, **kwargs)
    key = id(func), _form(args), _form(tuple(kwargs.items()))  # its own hash is slow
    known = _remembers.get(key)
    if known is None:
        result = func(*args, **kwargs)
        if len(_remembers) >= _MOST_REMEMBERED:
            _remembers.clear()
        _remembers[key] = result.shape, result.stride(), result.dtype
        return result
    shape, stride, dtype = known
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _form(value: Any) -> Any:
    """All of an argument that shapes depend on, to look it up by."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(map(_form, value))
    return type(value), value  # 1, 1.0 and True are one key


def _pointwise(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The common case in a tenth of the time: inputs of one type, whole or dense in one way."""
    if func.overloadpacket not in _SAME_TYPE or kwargs.keys() - {"alpha", "approximate"}:
        return None
    inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
    first = inputs[0]
    dtype, shape, stride = first.dtype, first.shape, first.stride()
    if not dtype.is_floating_point or any(other.dtype is not dtype for other in inputs):
        return None
    if all(other.is_contiguous() for other in inputs):
        if any(other.shape != shape for other in inputs):
            shape = _broadcast([other.shape for other in inputs])
        return torch.empty(shape, dtype=dtype, device="meta")
    if any(other.shape != shape or other.stride() != stride for other in inputs):
        return None
    if not _is_dense(shape, stride):
        return None
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _broadcast(shapes: Sequence[torch.Size]) -> torch.Size:
    longest = max(map(len, shapes))
    padded = [(*([1] * (longest - len(shape))), *shape) for shape in shapes]
    # 1 gives way to any size, 0 included
    return torch.Size(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether it is contiguous but for the order of its dimensions."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def _with_cpu_statistics(args: Sequence[Any], result: Any) -> Any:
    """The mean and deviation that a norm saves are fp32 on a GPU, as the meta kernel says; on a CPU
    they are of the input's type, unless the weight is of another one."""
    source, weights = args[0], [x for x in args[1:] if isinstance(x, torch.Tensor)]
    if any(x.dtype is not source.dtype for x in weights):
        return result
    output, *statistics = result
    return (output, *(each.to(source.dtype) for each in statistics))


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor:
    """In any type: the meta kernel takes bf16 alone."""
    dtype = kwargs.get("out_dtype") or a.dtype
    shape: tuple[int, ...] = (a.shape[-2], b.shape[-1])
    if a.dim() == b.dim():  # matrices cut along what they share, or a product for each
        assert offs is not None or a.dim() == 3, "the kernel says so, too"
        shape = (a.shape[0] if offs is None else offs.shape[0], *shape)
    return a.new_empty(shape, dtype=dtype)
