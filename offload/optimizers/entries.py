"""`engine.optimizer.state`: the states in the tiers as the mapping that torch's optimizers have.

    for param, state in optimizer.state.items():    parameters that have states, as in torch
        state["exp_avg"]                            a PagedTensor: read when used

No values are read before an operation needs them, and those of one state at a time. It is only
read: a write is an UnsupportedError. What was given out before `load_state_dict` raises StateError:
it has other values in torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from offload.optimizers.state_dict import Kept
from offload.tiers.errors import StateError, UnsupportedError
from offload.zero.groups.values import ParameterValues
from offload.zero.tensors.local_tensors import is_dtensor
from offload.zero.tensors.paged import Operation, PagedTensor

if TYPE_CHECKING:
    _Methods = dict[Any, Any]
else:

    class _Methods(Mapping, dict):
        """A dict whose methods are derived from the three that a mapping has to have."""


def refuse_writing(*_: Any, **__: Any) -> NoReturn:
    """Raise UnsupportedError for a change of `optimizer.state`, or of anything in it."""
    raise UnsupportedError(
        "optimizer.state is only read: the states live in the engine's tiers; change a copy, "
        "`states = optimizer.state_dict()`, and give it back, `optimizer.load_state_dict(states)` "
        "(a parameter without an entry in states['state'] starts over)"
    )


class _Mapping(_Methods):
    """A dict for those that ask for one (also below Python: `dict(x)`, `{**x}`), whose contents
    come from `__iter__` and `__getitem__`."""

    __hash__ = None
    # those of a dict would not see what is in the tiers
    __or__ = __ror__ = __reversed__ = None  # type: ignore[assignment]
    __setitem__ = __delitem__ = __ior__ = refuse_writing
    update = setdefault = pop = popitem = clear = refuse_writing

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def copy(self) -> Any:
        return dict(self)

    __copy__ = copy


class StateOfParameter(_Mapping):
    """`optimizer.state[param]`; empty where `kept` is None."""

    def __init__(self, entries: OptimizerEntries, kept: Kept | None, param: Any) -> None:
        dict.__init__(self)
        self.kept = kept
        self.param = param
        self._entries = entries
        self._loads = entries.loads

    @property
    def in_tiers(self) -> ParameterValues:
        """The values in the tiers. Raises StateError if others were loaded since."""
        if self._loads != self._entries.loads:
            raise StateError(
                "optimizer.state[parameter] was taken before optimizer.load_state_dict put others "
                "in the place of its states; take it again from optimizer.state, and keep "
                "copy.deepcopy of what is to stay as it was"
            )
        return self._entries.in_tiers

    def __iter__(self) -> Iterator[str]:
        return iter(() if self.kept is None else self.in_tiers.state_names(self.param))

    def __contains__(self, key: object) -> bool:
        return key in tuple(self)

    def __getitem__(self, key: str) -> Any:
        if self.kept is None or key not in self:
            raise KeyError(key)
        source = _StateSource(self, key)
        if key == "step":
            return PagedTensor(source, torch.empty((), device="meta"), torch.device("cpu"))
        if is_dtensor(self.param):
            raise UnsupportedError(
                f"optimizer.state[parameter][{key!r}] of {self.kept.name}, a DTensor: "
                "optimizer.state_dict()['state'] has copies, and optimizer.load_state_dict takes "
                "them back"
            )
        return PagedTensor(source, torch.empty(self.kept.shape, device="meta"), self.param.device)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle as an ordinary dict with all values."""
        return dict, (), None, None, iter(self.items())

    def __repr__(self) -> str:
        """Return a text without reading values."""
        return f"{{{', '.join(f'{key!r}: ...' for key in self)}}}"


@dataclass(frozen=True)
class _StateSource:
    """The source of a PagedTensor's values: one state of one parameter."""

    states: StateOfParameter
    field: str

    @property
    def name(self) -> str:
        kept = self.states.kept
        return self.field if kept is None else f"{self.field} of {kept.name}"

    @contextmanager
    def reading(self) -> Iterator[torch.Tensor]:
        values, param = self.states.in_tiers, self.states.param
        if self.field == "step":
            yield torch.tensor(float(values.read_steps(param)))
        else:
            yield values.read(param, self.field).to(param.device)

    def writing(self) -> NoReturn:
        refuse_writing()

    def answer(self, operation: Operation, args: Any, kwargs: Any) -> Any:
        return NotImplemented


class OptimizerEntries(_Mapping):
    """`optimizer.state`, a `defaultdict(dict)` in torch. `params()` returns all parameters,
    `kept_of` the states that one has."""

    def __init__(
        self, values: ParameterValues, params: Callable[[], list[Any]],
        kept_of: Callable[[Any], Kept | None],
    ) -> None:  # fmt: skip
        dict.__init__(self)
        self.in_tiers = values
        self.loads = 0  # how often other states were put in the place of all
        self._params = params
        self._kept_of = kept_of

    def __iter__(self) -> Iterator[Any]:
        return iter([p for p in self._params() if self.in_tiers.state_names(p)])

    def __contains__(self, param: Any) -> bool:
        return self._kept_of(param) is not None and bool(self.in_tiers.state_names(param))

    def __getitem__(self, param: Any) -> StateOfParameter:
        """Return a parameter's states, as in torch empty without any."""
        return StateOfParameter(self, self._kept_of(param), param)

    def get(self, param: Any, default: Any = None) -> Any:
        if param not in self:  # else an empty one would be the answer
            return default
        return self[param]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())

    def __repr__(self) -> str:
        """Return a text without reading values."""
        return f"<optimizer states of {len(self)} parameters, in the engine's tiers>"
