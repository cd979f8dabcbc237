"""`engine.optimizer.state`: the states in the tiers, to be read as those of torch's optimizers.

    for param, state in optimizer.state.items():    parameters that have states, as in torch
        state["exp_avg"]                            a PagedTensor: read when used

No values are read before an operation needs them, and those of one state at a time: an operation on
a state sees the values of that moment. `optimizer.state.clear()` lets every parameter start over;
no other method writes, and a write to a tensor of them is an UnsupportedError.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from offload.optimizers.state_dict import Kept
from offload.tiers.errors import UnsupportedError
from offload.zero.groups.values import ParameterValues
from offload.zero.tensors.local_tensors import is_dtensor
from offload.zero.tensors.paged import Operation, PagedTensor


def refuse_writing(*_: Any, **__: Any) -> NoReturn:
    """Raise UnsupportedError for a change of `optimizer.state`, or of anything in it."""
    raise UnsupportedError(
        "optimizer.state is only read: the states live in the engine's tiers; change a copy, "
        "`states = optimizer.state_dict()`, and give it back, `optimizer.load_state_dict(states)` "
        "(a parameter without an entry in states['state'] starts over)"
    )


class OptimizerEntries(Mapping[Any, Mapping[str, torch.Tensor]]):
    """`optimizer.state`, a `defaultdict(dict)` in torch. `params()` returns all parameters,
    `kept_of` the states that one has."""

    def __init__(
        self, values: ParameterValues, params: Callable[[], list[Any]],
        kept_of: Callable[[Any], Kept | None], clear: Callable[[], None],
    ) -> None:  # fmt: skip
        self._values = values
        self.clear = clear
        self._params = params
        self._kept_of = kept_of

    def __iter__(self) -> Iterator[Any]:
        return iter([p for p in self._params() if self._values.state_names(p)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, param: Any) -> bool:
        return self._kept_of(param) is not None and bool(self._values.state_names(param))

    def __getitem__(self, param: Any) -> Mapping[str, torch.Tensor]:
        """Return a parameter's states, as in torch empty without any."""
        kept = self._kept_of(param)
        if kept is None:
            return MappingProxyType({})
        names = self._values.state_names(param)
        return MappingProxyType({name: self._paged(name, kept, param) for name in names})

    def get(self, param: Any, default: Any = None) -> Any:
        """Return a parameter's states; `default` if it has none, which `self[param]` never says."""
        if param not in self:
            return default
        return self[param]

    def _paged(self, name: str, kept: Kept, param: Any) -> PagedTensor:
        source = _StateSource(self._values, param, name, f"{name} of {kept.name}")
        if name == "step":
            return PagedTensor(source, torch.empty((), device="meta"), torch.device("cpu"))
        if is_dtensor(param):
            raise UnsupportedError(
                f"optimizer.state[parameter] of {kept.name}, a DTensor: "
                "optimizer.state_dict()['state'] has copies, and optimizer.load_state_dict takes "
                "them back"
            )
        return PagedTensor(source, torch.empty(kept.shape, device="meta"), param.device)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise UnsupportedError. Called by copy and pickle."""
        refuse_writing()

    def __repr__(self) -> str:
        """Return a text without reading values."""
        return f"<optimizer states of {len(self)} parameters, in the engine's tiers>"


@dataclass(frozen=True)
class _StateSource:
    """The source of a PagedTensor's values: one state of one parameter."""

    values: ParameterValues
    param: Any
    field: str
    name: str

    @contextmanager
    def reading(self) -> Iterator[torch.Tensor]:
        if self.field == "step":
            yield torch.tensor(float(self.values.read_steps(self.param)))
        else:
            yield self.values.read(self.param, self.field).to(self.param.device)

    def writing(self) -> NoReturn:
        refuse_writing()

    def answer(self, operation: Operation, args: Any, kwargs: Any) -> Any:
        return NotImplemented
