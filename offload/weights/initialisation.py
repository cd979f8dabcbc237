"""The sources of the first values of a model's tensors.

lazy     values that are in files still (`weights=`, `offload.open_pretrained`)
meta     what the model's constructor would call
given    all others: the tensors have values

A packed parameter is read one row at a time. One that its module initialises is made whole, as in
a model whose experts are in one group, and dropped with the last row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from offload.weights.lazy_tensors import LazyWeights
from offload.weights.materialise import MetaInitialiser
from offload.zero.experts.packed import PackedParam
from offload.zero.groups.layout import ParamSpec
from offload.zero.ranks.tensor_parallel import TensorParallel
from offload.zero.tensors.local_tensors import local_of


class WeightInitialisation:
    """The first values of one model. It is made before the model's meta tensors are replaced."""

    def __init__(
        self, model: nn.Module, seed: int, dtype: torch.dtype, lazy: LazyWeights,
        packed: Sequence[PackedParam] = (),
    ) -> None:  # fmt: skip
        """Raises UnsupportedError for a tensor on the meta device that nothing will set."""
        self._model = model
        self._dtype = dtype
        self._lazy = lazy
        self._packed = {
            id(row): (each, number) for each in packed for number, row in enumerate(each.rows)
        }
        self._made: dict[PackedParam, torch.Tensor] = {}  # initialised, for the rows still to come
        anything = [*model.parameters(), *model.buffers()]
        self._initialiser = None
        if any(tensor.is_meta and tensor not in lazy for tensor in anything):
            self._initialiser = MetaInitialiser(model, seed, lazy)
            self._initialiser.check()

    @property
    def doing(self) -> str:
        """The operation that takes the time, in words."""
        return "loading weights" if self._lazy else "initialising"

    def of(
        self, params: Mapping[ParamSpec, nn.Parameter], tensor_parallel: TensorParallel | None
    ) -> Callable[[ParamSpec], torch.Tensor]:
        """Return a function for the values of a group's parameters, each read or made on demand."""
        rows = {spec: self._packed[id(p)] for spec, p in params.items() if id(p) in self._packed}
        fresh: dict[str, torch.Tensor] = {}
        if self._initialiser is not None:
            plain = {spec.name: param for spec, param in params.items() if spec not in rows}
            fresh = self._initialiser.values(plain) | self._fresh_rows(rows)

        def value(spec: ParamSpec) -> torch.Tensor:
            param, whole, number = params[spec], spec, None
            if spec in rows:
                packed, number = rows[spec]
                param, whole = packed.param, packed.spec
            stored = self._lazy.get(param)
            if stored is not None:
                return stored.checked(spec.name, whole.shape, self._dtype, number)
            if spec.name in fresh:
                return fresh[spec.name]
            given = local_of(params[spec]).detach()
            return given if tensor_parallel is None else tensor_parallel.agree_on(param, given)

        return value

    def _fresh_rows(
        self, rows: Mapping[ParamSpec, tuple[PackedParam, int]]
    ) -> dict[str, torch.Tensor]:
        """Return one expert's rows of the parameters that its module initialises."""
        assert self._initialiser is not None, "set for every module with rows"
        wanted = {packed.name: packed for packed, _ in rows.values()}
        if not all(packed in self._made for packed in wanted.values()):
            made = self._initialiser.values({n: packed.param for n, packed in wanted.items()})
            self._made = {wanted[name]: value for name, value in made.items()}
        values = {
            spec.name: self._made[packed][number]
            for spec, (packed, number) in rows.items() if packed in self._made
        }  # fmt: skip
        for packed, number in rows.values():
            if number == len(packed.rows) - 1:
                self._made.pop(packed, None)
        return values

    def fill_the_rest(self, others: Iterable[nn.Parameter], device: torch.device) -> None:
        """Give values to buffers and to `others`, the parameters that stay in the model. All are on
        `device` then, and the same objects if they had values."""
        if self._initialiser is not None:
            self._initialiser.finish(device)
        for tensor in (*self._model.buffers(), *others):
            if tensor.device != device:
                tensor.data = tensor.data.to(device)
