"""`.grad` of packed parameters: one handle for the gradients of all rows.

    backward         a row gets a gradient; the packed parameter's `.grad` is a handle
    grad = None      no row has one
    grad = tensor    each row's is a view of it
    mul_, norm, ...  of all rows; anything else reads or writes the whole

Rows without a gradient are zero where others have one, as in PyTorch, where all are one tensor: a
step moves them, too (weight decay, moments), once they are needed (lazy_updates.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from offload.tiers.errors import StateError
from offload.zero.experts.packed import PackedParam
from offload.zero.gradients.gradient_handles import (
    CLEARED,
    GradientHandles,
    GradientSource,
    there,
)
from offload.zero.tensors.local_tensors import local_of
from offload.zero.tensors.paged import Operation, PagedTensor

aten = torch.ops.aten


class PackedGradientSource:
    """The gradient of a packed parameter. It keeps no model (see `GradientSource`)."""

    def __init__(self, table: PackedGradients, packed: PackedParam) -> None:
        self._table = weakref.ref(table)
        self._packed = weakref.ref(packed)
        self.used_up: str | None = None  # why its value is gone

    @property
    def table(self) -> PackedGradients:
        return there(self._table)

    @property
    def packed(self) -> PackedParam:
        return there(self._packed)

    @property
    def name(self) -> str:
        return f"{self.packed.name}.grad"

    @contextmanager
    def reading(self) -> Iterator[torch.Tensor]:
        self._check()
        yield self.table.value_of(self)

    @contextmanager
    def writing(self) -> Iterator[torch.Tensor]:
        self._check()
        value = self.table.value_of(self)
        yield value
        self.table.write(self.packed, value)

    def answer(self, operation: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self._check()
        return self.table.answer(self, operation, args, kwargs)

    def _check(self) -> None:
        if self.used_up is not None:
            raise StateError(f"{self.name} has no value any more: {self.used_up}")


class PackedGradients:
    """The gradients of a model's packed parameters. For the thread of the model and the thread that
    runs backward."""

    def __init__(self, packed: Sequence[PackedParam], rows: GradientHandles) -> None:
        """`rows` has the gradients of the rows, and reports to this object those that arrive."""
        self._all = packed
        self._rows = rows
        rows.packed = self
        self._of_row = {id(row): each for each in packed for row in each.rows}
        self._shown: dict[PackedParam, PagedTensor] = {}
        self._given: set[PackedParam] = set()  # rows' gradients are views of a user's tensor

    def prepare(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for packed in self._all:
                packed.param.grad = None

    def came(self, row: torch.Tensor) -> None:
        packed = self._of_row.get(id(row))
        if packed is not None and packed not in self._shown:
            self._show(packed)

    def _show(self, packed: PackedParam) -> None:
        param = packed.param
        with torch._C.DisableTorchFunctionSubclass():
            if param.grad is not None:
                return  # a user's tensor, of which the rows' are views
            shape = torch.empty(param.shape, dtype=param.dtype, device=torch.device("meta"))
            handle = PagedTensor(PackedGradientSource(self, packed), shape, param.device)
            self._shown[packed] = handle
            param.grad = handle

    def follow(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for packed in self._all:
                gradient = packed.param.grad
                if isinstance(gradient, PagedTensor) and gradient is not self._shown.get(packed):
                    packed.param.grad = gradient.values()  # while its source has some
            for packed in list(self._shown):
                if packed.param.grad is not self._shown[packed]:
                    self._part(packed)
            for packed in self._all:
                gradient = packed.param.grad
                if gradient is None or self._shown.get(packed) is gradient:
                    # what a row has beside it is of a backward that was interrupted
                    if gradient is None or packed in self._given:
                        self._given.discard(packed)
                        _clear_rows(packed)
                    continue
                self._given.add(packed)
                for row, own in zip(packed.rows, gradient.detach(), strict=True):
                    if row.grad is None or local_of(row.grad).data_ptr() != own.data_ptr():
                        row.grad = own

    def _part(self, packed: PackedParam) -> None:
        """Separate a handle from `.grad`, which was set to something else."""
        source = self._shown.pop(packed).source
        assert isinstance(source, PackedGradientSource), "made here"
        source.used_up = CLEARED
        _clear_rows(packed)

    def forget(self, why: str) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for packed, handle in list(self._shown.items()):
                if packed.param.grad is handle and all(row.grad is None for row in packed.rows):
                    packed.param.grad = None
                if packed.param.grad is not handle:
                    assert isinstance(handle.source, PackedGradientSource), "made here"
                    handle.source.used_up = why
                    del self._shown[packed]

    # ---------------------------------------------------------------- values
    def value(self, packed: PackedParam) -> torch.Tensor | None:
        """Return a copy, in the accumulators' format; None if there is none."""
        self._rows.drop_cleared()
        if packed.param.grad is None:
            return None
        rows = [self._rows.value_of_row(row) for row in packed.rows]
        dtype = next((row.dtype for row in rows if row is not None), packed.param.dtype)
        return _whole(packed, rows, dtype)

    def value_of(self, source: PackedGradientSource) -> torch.Tensor:
        """Return a copy, in the parameter's format."""
        sources = (self._rows.source_of(row) for row in source.packed.rows)
        rows = (None if each is None else self._rows.value_of(each) for each in sources)
        return _whole(source.packed, rows, source.packed.param.dtype)

    def write(self, packed: PackedParam, value: torch.Tensor) -> None:
        """Let `value` be the gradient."""
        for row, own in zip(packed.rows, value, strict=True):
            self._rows.write(self._rows.source_of(row) or self._rows.begin(row), own)

    def answer(
        self, source: PackedGradientSource, operation: Operation, args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        """Return the result of an operation on the whole gradient, from the rows' answers."""
        rows = self._sources_of(source.packed)
        if operation is aten.add_.Tensor or not rows:
            return source if operation is aten.zero_.default else NotImplemented
        if operation in _NORMS:
            answer = rows[0].answer(operation, args, kwargs)
            return answer if answer is NotImplemented else self._rows.norm_of(rows)
        if len(rows) < len(source.packed.rows) and not _keeps_zeros(args):
            return NotImplemented
        answers = [row.answer(operation, args, kwargs) for row in rows]
        # rules of rows answer all alike, for they look at the arguments alone
        return NotImplemented if answers[0] is NotImplemented else source

    def _sources_of(self, packed: PackedParam) -> list[GradientSource]:
        """Return the sources of those rows that have a gradient."""
        found = [self._rows.source_of(row) for row in packed.rows]
        return [source for source in found if source is not None]


def _whole(
    packed: PackedParam, rows: Iterable[torch.Tensor | None], dtype: torch.dtype
) -> torch.Tensor:
    """Return the gradients of rows as one tensor; a row without one is zero."""
    whole = torch.zeros(packed.param.shape, dtype=dtype, device=packed.param.device)
    for into, row in zip(whole, rows, strict=True):
        if row is not None:
            into.copy_(row)
    return whole


def _keeps_zeros(args: Sequence[Any]) -> bool:
    """Return whether rows without a gradient stay zero times (or by) these."""
    return all(bool(torch.as_tensor(each).isfinite().all()) for each in args)


def _clear_rows(packed: PackedParam) -> None:
    for row in packed.rows:
        if row.grad is not None:
            row.grad = None


_NORMS = (aten.linalg_vector_norm.default, aten.norm.Scalar)
