"""Observes one forward and backward pass by operation: the bytes alive and the cost of each."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from offload.planning.activations.facts import NO_WORK, PassCost
from offload.tiers.units import round_up

_DEVICE = torch.ops.prim.device.default
_DETACH = torch.ops.aten.detach.default
# From this size on glibc takes every block from the system by itself (DEFAULT_MMAP_THRESHOLD_MAX).
_HEAP_LIMIT_NBYTES = 32 << 20
_GATHERS = frozenset({"embedding", "index_select", "gather", "index"})  # read what they give


@dataclass(frozen=True, slots=True)
class Alive:
    """A number of bytes in storages."""

    nbytes: int = 0
    heap_nbytes: int = 0  # of those below `_HEAP_LIMIT_NBYTES`

    @classmethod
    def of(cls, nbytes: int) -> Alive:
        """Return the bytes of one storage of `nbytes`."""
        return cls(nbytes, nbytes if nbytes < _HEAP_LIMIT_NBYTES else 0)

    def __add__(self, other: Alive) -> Alive:
        return Alive(self.nbytes + other.nbytes, self.heap_nbytes + other.heap_nbytes)

    def __sub__(self, other: Alive) -> Alive:
        return Alive(self.nbytes - other.nbytes, self.heap_nbytes - other.heap_nbytes)

    def __mul__(self, times: int) -> Alive:
        return Alive(self.nbytes * times, self.heap_nbytes * times)


class LiveBytes:
    """Counts each storage once, from the operation that made it until nothing refers to it.

    Storages that existed before (parameters, inputs) are not counted.
    """

    def __init__(self, grown: Callable[[], None]) -> None:
        """`grown` is called whenever the number of bytes has increased."""
        self.now = Alive()
        self._grown = grown
        self._counts = True
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._nbytes: dict[int, int] = {}

    def made(self, results: Iterable[Tensor], given: Sequence[Tensor]) -> None:
        """Register the `results` of an operation, which received the tensors in `given`."""
        before = self.now
        for tensor in results:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._alive:
                is_old = any(other.untyped_storage()._cdata == key for other in given)
                self._add(storage, storage.nbytes() if self._counts and not is_old else 0)
        if self.now.nbytes > before.nbytes:
            self._grown()

    @contextmanager
    def counting(self, counts: bool) -> Iterator[None]:
        """Set whether storages made inside are counted."""
        before, self._counts = self._counts, counts
        try:
            yield
        finally:
            self._counts = before

    def nbytes_of(self, tensor: Tensor) -> int:
        """The bytes counted for the storage of `tensor`."""
        return self._nbytes.get(tensor.untyped_storage()._cdata, 0)

    def forget(self) -> None:
        """Start again from zero: storages that are alive now are not counted."""
        self.now = Alive()
        for key in self._nbytes:
            self._nbytes[key] = 0

    def _add(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        key = storage._cdata
        self._alive[key] = weakref.ref(storage, partial(self._died, key))
        self._nbytes[key] = nbytes
        self.now += Alive.of(nbytes)

    def _died(self, key: int, _: Any) -> None:
        del self._alive[key]
        self.now -= Alive.of(self._nbytes.pop(key))


@dataclass(frozen=True, slots=True)
class _Mark:
    """The place that operations from here on, and the graph nodes that they add, belong to."""

    node: int  # sequence number of the first
    times: int  # how often they count
    more: Alive  # on account of blocks that are not run


class PassWatch(TorchDispatchMode):
    """Sees every operation. `enter` reports the position of the forward; an operation of the
    backward belongs to the place where its node was made."""

    def __init__(self) -> None:
        super().__init__()
        self.live = LiveBytes(self._grown)
        self.saved = Alive()
        self.peak = Alive()  # each of the two at its own peak
        self.forward = self.backward = NO_WORK
        self.ran = NO_WORK  # in forward, each operation once
        self._backward = False
        self._last_node = 0
        self._now = _Mark(0, 1, Alive())
        self._marks = [self._now]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE:
            return args[0].device
        if func is _DETACH:  # autograd's, of what it saves and gives back: nothing is made
            return func(*args)
        kwargs = kwargs or {}
        if self._backward:
            self._find_node()
        result = func(*args, **kwargs)
        given = list(tensors_of((args, tuple(kwargs.values()))))
        results = list(tensors_of((result,)))
        self.live.made(results, given)
        if self._backward and (scratch := _scratch_nbytes(func, args)):
            self._grown(Alive.of(scratch))
        self._count(func, args, given, results, result)
        return result

    def _count(
        self, func: Any, args: Sequence[Any], given: Sequence[Tensor], results: Sequence[Tensor],
        result: Any,
    ) -> None:  # fmt: skip
        if not _is_kernel(func):
            return
        cost = PassCost(_flops(func, args, result), _touched_nbytes(func, given, results), 1)
        if self._backward:
            self.backward += cost * self._now.times
        else:
            self.forward += cost * self._now.times
            self.ran += cost

    def _find_node(self) -> None:
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        if 0 <= number < self._last_node:  # no node of a leaf: those have no place in the order
            place = bisect.bisect_right(self._marks, number, key=lambda mark: mark.node)
            self._now = self._marks[max(place, 1) - 1]

    def _grown(self, scratch: Alive = Alive()) -> None:
        now = self.live.now + self._now.more + scratch
        self.peak = Alive(
            max(self.peak.nbytes, now.nbytes), max(self.peak.heap_nbytes, now.heap_nbytes)
        )

    # ---------------------------------------------------------------- where the forward is
    def begin(self) -> None:
        """Start when the model is called: tensors made before are its inputs."""
        self.live.forget()
        self.peak = Alive()
        self._mark(1, Alive())

    def enter(self, times: int = 1) -> None:
        """Enter a block, or a module outside of all blocks. Its operations, and those between it
        and the next, count `times` times."""
        if not self._backward:
            self._mark(times, self._now.more)

    def add_more(self, more: Alive) -> None:
        self._mark(self._now.times, self._now.more + more)

    def end_forward(self, loss: Tensor) -> None:
        own = Alive.of(self.live.nbytes_of(loss))
        self.saved = self.live.now + self._now.more - own
        self._last_node = _next_node()
        self._backward = True

    def _mark(self, times: int, more: Alive) -> None:
        self._now = _Mark(_next_node(), times, more)
        self._marks.append(self._now)


def _next_node() -> int:
    """The sequence number of the next node that is added to a graph."""
    return int(torch._C._autograd._get_sequence_nr())


def tensors_of(values: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in nested tuples and lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_of(value)


# ---------------------------------------------------------------- the cost of one operation
def _flops(op: Any, args: Sequence[Any], result: Any) -> int:
    """Return 2 per multiply-add of matrix products and attention, otherwise 0.

    Causal attention counts half, since kernels skip what the mask hides.
    """
    name = op._schema.name.rpartition("::")[2]
    counted = _FLOPS.get(name)
    if counted is not None:
        return counted(args, result)
    if "attention" in name and len(args) > 3 and isinstance(args[0], Tensor):
        return _attention(name, op, args)
    return 0


def _touched_nbytes(op: Any, given: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    """The bytes that an operation reads and writes at least."""
    name = op._schema.name.rpartition("::")[2]
    written = sum(map(_nbytes, results))
    if name in _GATHERS:
        return 2 * written + sum(map(_nbytes, given[1:]))
    if name in ("embedding_dense_backward", "zeros", "fill_", "zero_", "zeros_like", "ones_like"):
        made = {id(tensor) for tensor in results}
        return written + sum(_nbytes(tensor) for tensor in given if id(tensor) not in made)
    return written + sum(map(_nbytes, given))


def _scratch_nbytes(op: Any, args: Sequence[Any]) -> int:
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


@cache
def _is_kernel(op: Any) -> bool:
    """Whether the operation runs a kernel; views and empty tensors need none."""
    schema = op._schema
    name = schema.name.rpartition("::")[2]
    if name.startswith(("empty", "new_empty")) or name in ("_unsafe_view", "detach", "lift_fresh"):
        return False
    infos = [value.alias_info for value in schema.returns]
    return schema.is_mutable or not infos or any(info is None for info in infos)


def _nbytes(tensor: Tensor) -> int:
    # an expanded tensor reads its few values again and again
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def _product(a: Tensor, b: Tensor) -> int:
    """The FLOPs of (..., m, k) by (..., k, n) or (k,), also of row groups with a matrix each."""
    return 2 * a.numel() * (int(b.shape[-1]) if b.dim() > 1 else 1)


_FLOPS: dict[str, Callable[[Sequence[Any], Any], int]] = {
    **dict.fromkeys(
        ("mm", "bmm", "mv", "dot", "_grouped_mm"), lambda args, _: _product(args[0], args[1])
    ),
    **dict.fromkeys(  # what is added comes first
        ("addmm", "addmm_", "_addmm_activation", "baddbmm", "addmv"),
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
    names = [argument.name for argument in op._schema.arguments[: len(args)]]
    return "is_causal" in names and bool(args[names.index("is_causal")])
