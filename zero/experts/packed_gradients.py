"""`.grad` of packed parameters: one handle for the gradients of all rows.

    backward         a row gets a gradient; the packed parameter's `.grad` is a handle
    grad = None      no row has one
    mul_, norm, ...  of all rows; anything else reads the whole

Rows without a gradient are zero where others have one, as in PyTorch, where all are one tensor: a
step moves them, too (weight decay, moments), once they are needed (lazy_updates.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from offload.tiers.errors import StateError, UnsupportedError
from offload.zero.experts.packed import PackedParam
from offload.zero.gradients.gradient_handles import CLEARED, GradientHandles, there
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

    def writing(self) -> NoReturn:
        raise UnsupportedError(_refusal(self.packed, "is written"))

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

    def prepare(self) -> None:
        """Forget what is in `.grad` from before the engine."""
        with torch._C.DisableTorchFunctionSubclass():
            for packed in self._all:
                packed.param.grad = None

    def arrived(self, row: torch.Tensor) -> None:
        """Note that a parameter, which may be a row, got a gradient."""
        packed = self._of_row.get(id(row))
        if packed is None or packed in self._shown:
            return
        param = packed.param
        with torch._C.DisableTorchFunctionSubclass():
            if param.grad is not None:
                raise UnsupportedError(_refusal(packed, "was set to a tensor"))
            shape = torch.empty(param.shape, dtype=param.dtype, device=torch.device("meta"))
            handle = PagedTensor(PackedGradientSource(self, packed), shape, param.device)
            self._shown[packed] = handle
            param.grad = handle

    def follow(self) -> None:
        """Apply to the rows that users set `.grad` to None."""
        with torch._C.DisableTorchFunctionSubclass():
            for packed in self._all:
                gradient, handle = packed.param.grad, self._shown.get(packed)
                if gradient is not None and gradient is not handle:
                    raise UnsupportedError(_refusal(packed, "was set to a tensor"))
                if gradient is None:
                    if handle is not None:
                        source = self._shown.pop(packed).source
                        assert isinstance(source, PackedGradientSource), "made here"
                        source.used_up = CLEARED
                    for row in packed.rows:  # also those of a backward that was interrupted
                        if row.grad is not None:
                            row.grad = None

    def forget(self, why: str) -> None:
        """Forget all gradients, which are used up."""
        with torch._C.DisableTorchFunctionSubclass():
            for packed, handle in list(self._shown.items()):
                if packed.param.grad is handle and all(row.grad is None for row in packed.rows):
                    packed.param.grad = None
                if packed.param.grad is not handle:
                    assert isinstance(handle.source, PackedGradientSource), "made here"
                    handle.source.used_up = why
                    del self._shown[packed]

    def value(self, packed: PackedParam) -> torch.Tensor | None:
        """Return a copy, in the accumulators' format; None if there is none."""
        self._rows.drop_cleared()
        if packed.param.grad is None:
            return None
        rows = [self._rows.value(row) for row in packed.rows]
        dtype = next((row.dtype for row in rows if row is not None), packed.param.dtype)
        return _whole(packed, rows, dtype)

    def value_of(self, source: PackedGradientSource) -> torch.Tensor:
        """Return a copy, in the parameter's format."""
        sources = (self._rows.source_of(row) for row in source.packed.rows)
        rows = (None if each is None else self._rows.value_of(each) for each in sources)
        return _whole(source.packed, rows, source.packed.param.dtype)

    def answer(
        self, source: PackedGradientSource, operation: Operation, args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        """Return the result of an operation on the whole gradient, from the rows' answers."""
        sources = [self._rows.source_of(row) for row in source.packed.rows]
        rows = [each for each in sources if each is not None]  # those that have a gradient
        if operation is aten.add_.Tensor or not rows:
            return source if operation is aten.zero_.default else NotImplemented
        if operation in _NORMS:
            answer = rows[0].answer(operation, args, kwargs)
            return answer if answer is NotImplemented else self._rows.norm_of(rows)
        # rows without a gradient stay zero times (or by) finite numbers
        is_finite = all(bool(torch.as_tensor(each).isfinite().all()) for each in args)
        if len(rows) < len(source.packed.rows) and not is_finite:
            return NotImplemented
        answers = [row.answer(operation, args, kwargs) for row in rows]
        # rules of rows answer all alike, for they look at the arguments alone
        return NotImplemented if answers[0] is NotImplemented else source


def _whole(
    packed: PackedParam, rows: Iterable[torch.Tensor | None], dtype: torch.dtype
) -> torch.Tensor:
    """Return the gradients of rows as one tensor; a row without one is zero."""
    whole = torch.zeros(packed.param.shape, dtype=dtype, device=packed.param.device)
    for into, row in zip(whole, rows, strict=True):
        if row is not None:
            into.copy_(row)
    return whole


def _refusal(packed: PackedParam, what: str) -> str:
    return (
        f"{packed.name}.grad {what}, and the gradients of its experts are tensors of their own; "
        "multiply it by a number, zero it or clear it, and clip by its norm"
    )


_NORMS = (aten.linalg_vector_norm.default, aten.norm.Scalar)
