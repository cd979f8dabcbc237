"""The cost of one operation: FLOPs of products, and bytes read and written by any operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload.tiers.units import round_up

Shape = Sequence[int]
Flops = Callable[[Sequence[Any], Any], int]

_GATHERS = frozenset({"embedding", "index_select", "gather", "index"})  # read what they give


def flops(op: Any, args: Sequence[Any], result: Any) -> int:
    """Return 2 per multiply-add of matrix products and attention, otherwise 0.

    Causal attention counts half, since kernels skip what the mask hides.
    """
    name = op._schema.name.rpartition("::")[2]
    counted = _FLOPS.get(name)
    if counted is not None:
        return counted(args, result)
    if "attention" in name and len(args) > 3 and isinstance(args[0], torch.Tensor):
        return _attention(name, op, args)
    return 0


def touched_nbytes(op: Any, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> int:
    """The bytes that an operation reads and writes at least."""
    name = op._schema.name.rpartition("::")[2]
    written = sum(map(_nbytes, results))
    if name in _GATHERS:
        return 2 * written + sum(map(_nbytes, given[1:]))
    if name in ("embedding_dense_backward", "zeros", "fill_", "zero_", "zeros_like", "ones_like"):
        made = {id(tensor) for tensor in results}
        return written + sum(_nbytes(tensor) for tensor in given if id(tensor) not in made)
    return written + sum(map(_nbytes, given))


def scratch_nbytes(op: Any, args: Sequence[Any]) -> int:
    """The scratch memory of a kernel, where it is large and known.

    For flash attention's backward on a GPU these are fp32 sums of the query's gradient, a number
    per row, and gradients of keys and values for each of their query heads (`mha_bwd` in its
    source).
    """
    if op is not torch.ops.aten._scaled_dot_product_flash_attention_backward.default:
        return 0
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows = batch * heads * round_up(length, 128)
    nbytes = 4 * rows * round_up(width, 32) + 4 * rows
    if key.shape[1] != heads:
        nbytes += 2 * key.itemsize * batch * heads * key.shape[2] * width
    return int(nbytes)


def is_kernel(op: Any) -> bool:
    """Whether the operation runs a kernel; views and empty tensors need none."""
    schema = op._schema
    name = schema.name.rpartition("::")[2]
    if name.startswith(("empty", "new_empty")) or name in ("_unsafe_view", "detach", "lift_fresh"):
        return False
    infos = [value.alias_info for value in schema.returns]
    return schema.is_mutable or not infos or any(info is None for info in infos)


def _nbytes(tensor: torch.Tensor) -> int:
    # an expanded tensor reads its few values again and again
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def _product(a: torch.Tensor, b: torch.Tensor) -> int:
    """The FLOPs of (..., m, k) by (..., k, n) or (k,), also of row groups with a matrix each."""
    return 2 * a.numel() * (int(b.shape[-1]) if b.dim() > 1 else 1)


_FLOPS: dict[str, Flops] = {
    **dict.fromkeys(
        ("mm", "bmm", "mv", "dot", "_grouped_mm"), lambda args, _: _product(args[0], args[1])
    ),
    **dict.fromkeys(  # what is added comes first
        ("addmm", "_addmm_activation", "baddbmm", "addmv"),
        lambda args, _: _product(args[1], args[2]),
    ),
}


def _attention(name: str, op: Any, args: Sequence[Any]) -> int:
    """The FLOPs of attention: 2 products forward, 5 backward (scores are computed again)."""
    backward = name.endswith("backward")
    query, key, value = args[1:4] if backward else args[:3]
    if query.dim() != 4:
        return 0
    batch, heads, length, width = query.shape
    pairs = int(batch * heads * length * key.shape[2])
    scores, mixed = 2 * pairs * int(width), 2 * pairs * int(value.shape[3])
    products = 3 * scores + 2 * mixed if backward else scores + mixed
    return products // 2 if _is_causal(op, args) else products


def _is_causal(op: Any, args: Sequence[Any]) -> bool:
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == "is_causal":
            return place < len(args) and bool(args[place])
    return False
