"""`engine.optimizer.state`: the states in the tiers as the mapping that torch's optimizers have.

    for param, state in optimizer.state.items():    parameters that have states, as in torch
        state["exp_avg"]                            a PagedTensor: read when used, written through
        state["exp_avg"] = tensor                   written to the tiers, after a check
        state["mine"] = anything                    an entry of the user's own, kept here
    optimizer.state.clear()                         all states as before the first update

No values are read before an operation needs them, and those of one state at a time. What was given
out before a parameter's states start over raises StateError: it has other values in torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from offload.optimizers.state_dict import Kept, check_state, check_tensor, count_of_steps
from offload.tiers.errors import StateError, UnsupportedError
from offload.zero.groups.values import ParameterValues
from offload.zero.tensors.local_tensors import is_dtensor
from offload.zero.tensors.paged import Operation, PagedTensor

if TYPE_CHECKING:
    _Methods = dict[Any, Any]
else:

    class _Methods(MutableMapping, dict):
        """A dict whose methods are derived from the five that a mapping has to have."""


class _Mapping(_Methods):
    """A dict for those that ask for one (also below Python: `dict(x)`, `{**x}`), whose contents
    come from `__iter__` and `__getitem__`."""

    __hash__ = None
    # those of a dict would not see what is in the tiers
    __or__ = __ror__ = __ior__ = __reversed__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def copy(self) -> Any:
        return dict(self)

    __copy__ = copy


class _States:
    """The states of one parameter in the tiers, until they start over."""

    def __init__(self, values: ParameterValues, kept: Kept, param: Any) -> None:
        self.kept = kept
        self.param = param
        self.fields = ("step", *values.fields(param)) if values.is_trained(param) else ()
        self.is_current = True
        self._values = values

    @property
    def values(self) -> ParameterValues:
        """The values in the tiers. Raises StateError if the states have started over."""
        if not self.is_current:
            raise StateError(
                f"optimizer.state[parameter] of {self.kept.name} was taken before its states "
                "started over (del, clear, load_state_dict or others put in their place); take it "
                "again from optimizer.state, and keep copy.deepcopy of what is to stay as it was"
            )
        return self._values

    def names(self) -> tuple[str, ...]:
        """Return the names of the states that exist, as in `state_dict`."""
        return self.values.state_names(self.param)

    def tensor(self, name: str) -> torch.Tensor:
        if name == "step":
            return PagedTensor(
                _StateSource(self, name), torch.empty((), device="meta"), torch.device("cpu")
            )
        if is_dtensor(self.param):
            raise UnsupportedError(
                f"optimizer.state[parameter][{name!r}] of {self.kept.name}, a DTensor: "
                "optimizer.state_dict()['state'] has copies, and optimizer.load_state_dict takes "
                "them back"
            )
        like = torch.empty(self.kept.shape, device="meta")
        return PagedTensor(_StateSource(self, name), like, self.param.device)

    def started_over(self) -> _States:
        """Let them be as before the first update; what was given out is not of now any more."""
        self.values.write_state(self.param, {})
        self.is_current = False
        return _States(self._values, self.kept, self.param)

    def gave(self, name: str, value: Any) -> bool:
        """Return whether `value` is what `tensor` returned."""
        is_whole = isinstance(value, PagedTensor) and not value.views
        return is_whole and value.source == _StateSource(self, name)

    def set(self, name: str, value: Any) -> None:
        """Write one state. Raises ValueError for a value that is no such state."""
        if self.gave(name, value):
            return
        source = _StateSource(self, name)
        if name != "step" and not self.values.read_steps(self.param):
            if self.kept.counts_steps:
                raise ValueError(
                    f"{name} of {self.kept.name} is set before the first step; set step first, as "
                    "torch's optimizers do"
                )
            source.write(value)
            self.values.write_steps(self.param, 1)
            return
        source.write(value)


@dataclass(frozen=True)
class _StateSource:
    """The source of a PagedTensor's values: one state of one parameter."""

    states: _States
    field: str

    @property
    def name(self) -> str:
        return f"{self.field} of {self.states.kept.name}"

    def write(self, value: Any) -> None:
        states = self.states
        if self.field == "step":
            states.values.write_steps(states.param, count_of_steps(states.kept.name, value))
        else:
            check_tensor(self.name, states.kept, states.param, value)
            states.values.write(states.param, self.field, value)

    @contextmanager
    def reading(self) -> Iterator[torch.Tensor]:
        states = self.states
        if self.field == "step":
            yield torch.tensor(float(states.values.read_steps(states.param)))
        else:
            yield states.values.read(states.param, self.field).to(states.param.device)

    @contextmanager
    def writing(self) -> Iterator[torch.Tensor]:
        with self.reading() as value:
            yield value
            self.write(value)

    def answer(self, operation: Operation, args: Any, kwargs: Any) -> Any:
        return NotImplemented


class StateOfParameter(_Mapping):
    """`optimizer.state[param]`. Made of a mapping, as libraries do that map a function over all
    tensors, it is an ordinary dict."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        dict.__init__(self, *args, **kwargs)
        self.tiers: _States | None = None

    def _names(self) -> tuple[str, ...]:
        return () if self.tiers is None else self.tiers.names()

    def __iter__(self) -> Iterator[str]:
        return iter((*self._names(), *dict.keys(self)))

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or key in self._names()

    def __getitem__(self, key: str) -> Any:
        if self.tiers is not None and key in self._names():
            return self.tiers.tensor(key)
        return dict.__getitem__(self, key)

    def __setitem__(self, key: str, value: Any) -> None:
        if self.tiers is None or key not in self.tiers.fields:
            dict.__setitem__(self, key, value)
        else:
            self.tiers.set(key, value)

    def __delitem__(self, key: str) -> None:
        if self.tiers is not None and key in self._names():
            raise UnsupportedError(
                f"del optimizer.state[parameter][{key!r}]: {self.tiers.kept.name} has all of its "
                "optimizer's states or none; set it to zeros, or start all of them over with "
                "del optimizer.state[parameter]"
            )
        dict.__delitem__(self, key)

    def clear(self) -> None:
        if self.tiers is not None:
            self.tiers = self.tiers.started_over()
        dict.clear(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle as an ordinary dict with all values."""
        return dict, (), None, None, iter(self.items())

    def __repr__(self) -> str:
        """Return a text without reading values."""
        return f"{{{', '.join(f'{key!r}: ...' for key in self)}}}"


class OptimizerEntries(_Mapping):
    """`optimizer.state`, a `defaultdict(dict)` in torch. `params()` returns all parameters,
    `kept_of` the states that one has."""

    def __init__(
        self, values: ParameterValues, params: Callable[[], list[Any]],
        kept_of: Callable[[Any], Kept | None],
    ) -> None:  # fmt: skip
        dict.__init__(self)
        self._values = values
        self._params = params
        self._kept_of = kept_of

    def _has_states(self, param: Any) -> bool:
        return self._kept_of(param) is not None and bool(self._values.state_names(param))

    def __iter__(self) -> Iterator[Any]:
        there = [param for param in self._params() if self._values.state_names(param)]
        known = {id(param) for param in there}
        return iter([*there, *(key for key in dict.keys(self) if id(key) not in known)])

    def __contains__(self, param: object) -> bool:
        return dict.__contains__(self, param) or self._has_states(param)

    def __getitem__(self, param: Any) -> Any:
        """Return a parameter's states; without any, a new empty entry is kept, as in torch."""
        if not dict.__contains__(self, param):
            made, kept = StateOfParameter(), self._kept_of(param)
            if kept is not None:
                made.tiers = _States(self._values, kept, param)
            dict.__setitem__(self, param, made)
        return dict.__getitem__(self, param)

    def get(self, param: Any, default: Any = None) -> Any:
        if param not in self:  # looking it up would make an entry
            return default
        return self[param]

    def setdefault(self, param: Any, default: Any = None) -> Any:
        if param not in self:
            self[param] = default
        return self[param]

    def __setitem__(self, param: Any, state: Any) -> None:
        """Write states of a parameter to its tiers; other entries stay here. Raises ValueError, and
        changes nothing, for states that are not its own kind's, or not all of them."""
        kept = self._kept_of(param)
        if kept is None or not isinstance(state, Mapping):
            dict.__setitem__(self, param, state)
            return
        tiers = self[param].tiers
        own = {key: value for key, value in state.items() if key not in tiers.fields}
        states = {key: value for key, value in state.items() if key in tiers.fields}
        if own and not states and len(tiers.fields) > 1:
            states = own  # of another rule, and refused: an update would miss its own
        if not states or not all(tiers.gave(key, value) for key, value in states.items()):
            checked = check_state(kept, param, copied(states))
            self.forget(param)
            self._values.write_state(param, checked)
        made = self[param]
        dict.clear(made)
        dict.update(made, own)

    def __delitem__(self, param: Any) -> None:
        if param not in self:
            raise KeyError(param)
        self.forget(param)
        if self._kept_of(param) is not None:
            self._values.write_state(param, {})

    def forget(self, param: Any) -> None:
        """Drop an entry whose states are about to change."""
        entry = dict.pop(self, param, None)
        if isinstance(entry, StateOfParameter) and entry.tiers is not None:
            entry.tiers.is_current = False

    def pop(self, param: Any, *default: Any) -> Any:
        """Remove an entry, and return it with its values."""
        if param not in self:
            return dict.pop(self, param, *default)
        found = copied(self[param])
        del self[param]
        return found

    def clear(self) -> None:
        for param in [*self]:
            del self[param]

    def end(self) -> None:
        """Start all states over: another mapping takes this one's place."""
        self.clear()
        self._params = self._kept_of = _ended

    def __reduce_ex__(self, protocol: Any) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())

    def __repr__(self) -> str:
        """Return a text without reading values."""
        return f"<optimizer states of {len(self)} parameters, in the engine's tiers>"


def copied(state: Any) -> Any:
    """Return a parameter's states with values of their own."""
    if not isinstance(state, Mapping):
        return state
    return {
        key: value.clone() if isinstance(value, PagedTensor) else value
        for key, value in state.items()
    }


def _ended(*_: Any) -> NoReturn:
    raise StateError(
        "this mapping was optimizer.state before another one took its place, and its states "
        "went; optimizer.state_dict() keeps them, and load_state_dict brings them back"
    )
