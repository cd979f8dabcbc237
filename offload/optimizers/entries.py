"""`engine.optimizer.state`: the states in the tiers as the mapping that torch's optimizers have.

    for param, state in optimizer.state.items():    parameters that have states, as in torch
        state["exp_avg"]                            a PagedTensor: read when used, written through
        state["exp_avg"] = tensor                   written to the tiers, after a check
        state["mine"] = anything                    an entry of the user's own, kept here
    optimizer.state.clear()                         all states as before the first update

No values are read before an operation needs them, and those of one state at a time. What the user
still holds when states start over keeps their values, as in torch.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from offload.optimizers.state_dict import Kept, check_state, check_tensor, count_of_steps
from offload.tiers.errors import UnsupportedError
from offload.zero.groups.values import ParameterValues
from offload.zero.tensors.local_tensors import is_dtensor
from offload.zero.tensors.paged import Operation, PagedTensor


class _StateSource:
    """One state of one parameter, for a PagedTensor. After `part` it has a copy of its own."""

    def __init__(self, values: ParameterValues, kept: Kept, param: Any, field: str) -> None:
        self._values = values
        self._kept = kept
        self._param = param
        self._field = field
        self._parted: torch.Tensor | None = None

    @property
    def name(self) -> str:
        return f"{self._field} of {self._kept.name}"

    def part(self) -> None:
        """Keep the present values."""
        if self._parted is None:
            self._parted = self.read()

    def read(self) -> torch.Tensor:
        """Return a copy of the values in the tiers."""
        if self._field == "step":
            return torch.tensor(float(self._values.read_steps(self._param)))
        return self._values.read(self._param, self._field).to(self._param.device)

    def write(self, value: Any) -> None:
        """Write the values. Raises ValueError for a value that is no such state."""
        if self._field == "step":
            self._values.write_steps(self._param, count_of_steps(self._kept.name, value))
        else:
            check_tensor(self.name, self._kept, self._param, value)
            self._values.write(self._param, self._field, value)

    @contextmanager
    def reading(self) -> Iterator[torch.Tensor]:
        yield self.read() if self._parted is None else self._parted

    @contextmanager
    def writing(self) -> Iterator[torch.Tensor]:
        if self._parted is not None:
            yield self._parted
            return
        value = self.read()
        yield value
        self.write(value)

    def answer(self, operation: Operation, args: Any, kwargs: Any) -> Any:
        return NotImplemented


if TYPE_CHECKING:
    _Methods = dict[Any, Any]
else:

    class _Methods(MutableMapping, dict):
        """A dict whose methods are derived from the five that a mapping has to have."""


class _Mapping(_Methods):
    """A dict for those that ask for one (also below Python: `dict(x)`, `{**x}`), whose contents
    come from `__iter__` and `__getitem__`."""

    __hash__ = None

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def __reversed__(self) -> Iterator[Any]:
        return iter(list(self)[::-1])

    def copy(self) -> Any:
        return dict(self)

    __copy__ = copy

    def __or__(self, other: Any) -> Any:
        return {**self, **other}

    def __ror__(self, other: Any) -> Any:
        return {**other, **self}

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle as an ordinary dict with all values."""
        return dict, (), None, None, iter(self.items())


class StateOfParameter(_Mapping):
    """`optimizer.state[param]`. Made of a mapping, as libraries do that map a function over all
    tensors, or parted, it is an ordinary dict."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        dict.__init__(self, *args, **kwargs)
        self._tiers: _States | None = None

    @classmethod
    def lazy(cls, states: _States) -> StateOfParameter:
        made = cls()
        made._tiers = states
        return made

    def part(self) -> None:
        """Keep the present values: those in the tiers are about to change."""
        if self._tiers is not None:
            tiers, self._tiers = self._tiers, None
            tiers.part()
            dict.update(self, tiers.values())

    def __iter__(self) -> Iterator[str]:
        names = () if self._tiers is None else self._tiers.names()
        return iter(dict.fromkeys((*names, *dict.keys(self))))

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or (
            self._tiers is not None and key in self._tiers.names()
        )

    def __getitem__(self, key: str) -> Any:
        if self._tiers is not None and key in self._tiers.names():
            return self._tiers.tensor(key)
        return dict.__getitem__(self, key)

    def __setitem__(self, key: str, value: Any) -> None:
        if self._tiers is None or key not in self._tiers.fields:
            dict.__setitem__(self, key, value)
        else:
            self._tiers.set(key, value)

    def __delitem__(self, key: str) -> None:
        if self._tiers is not None and key in self._tiers.names():
            raise UnsupportedError(
                f"del optimizer.state[parameter][{key!r}]: {self._tiers.kept.name} has all of its "
                "optimizer's states or none; set it to zeros, or start all of them over with "
                "del optimizer.state[parameter]"
            )
        dict.__delitem__(self, key)

    def clear(self) -> None:
        if self._tiers is not None:
            self._tiers.start_over()
        dict.clear(self)

    def __repr__(self) -> str:
        """Return a text without reading values."""
        return f"{{{', '.join(f'{key!r}: ...' for key in self)}}}"


class _States:
    """The states of one parameter in the tiers."""

    def __init__(self, values: ParameterValues, kept: Kept, param: Any) -> None:
        self._values = values
        self.kept = kept
        self._param = param
        trained = values.is_trained(param)
        self.fields = ("step", *values.fields(param)) if trained else ()
        self._set: dict[str, None] = {}  # before the first update
        self._sources: weakref.WeakValueDictionary[str, _StateSource] = (
            weakref.WeakValueDictionary()
        )

    def names(self) -> tuple[str, ...]:
        """Return the names of the states that exist, as in `state_dict`, or that were set."""
        found = self._values.state_names(self._param)
        return tuple(dict.fromkeys((*found, *self._set))) if self._set else found

    def values(self) -> dict[str, torch.Tensor]:
        """Return copies of all states."""
        return {name: self.source(name).read() for name in self.names()}

    def source(self, name: str) -> _StateSource:
        found = self._sources.get(name)
        if found is None:
            found = _StateSource(self._values, self.kept, self._param, name)
            self._sources[name] = found
        return found

    def tensor(self, name: str) -> torch.Tensor:
        if is_dtensor(self._param) and name != "step":
            raise UnsupportedError(
                f"optimizer.state[parameter][{name!r}] of {self.kept.name}, a DTensor: "
                "optimizer.state_dict()['state'] has copies, and optimizer.load_state_dict takes "
                "them back"
            )
        if name == "step":
            like, device = torch.empty((), device="meta"), torch.device("cpu")
        else:
            like, device = torch.empty(self.kept.shape, device="meta"), self._param.device
        return PagedTensor(self.source(name), like, device)

    def set(self, name: str, value: Any) -> None:
        source = self.source(name)
        if getattr(value, "source", None) is source:
            return  # what `state[name]` gave
        source.write(value)
        self._set[name] = None

    def write(self, state: Mapping[str, Any]) -> None:
        """Write all states. Raises ValueError, and changes nothing, unless they fit."""
        given = [getattr(value, "source", None) for value in state.values()]
        if given and all(each is not None and each is self._sources.get(name)
                         for name, each in zip(state, given, strict=True)):  # fmt: skip
            return
        checked = check_state(self.kept, self._param, state)
        self.part()
        self._values.write_state(self._param, checked)

    def part(self) -> None:
        """Let tensors that were given out keep the present values."""
        for source in list(self._sources.values()):
            source.part()
        self._sources.clear()

    def start_over(self) -> None:
        self.part()
        self._set.clear()
        self._values.write_state(self._param, {})


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

    def __iter__(self) -> Iterator[Any]:
        there = [param for param in self._params() if self._values.state_names(param)]
        known = {id(param) for param in there}
        return iter([*there, *(key for key in dict.keys(self) if id(key) not in known)])

    def __contains__(self, param: object) -> bool:
        return dict.__contains__(self, param) or (
            self._kept_of(param) is not None and bool(self._values.state_names(param))  # type: ignore[arg-type]
        )

    def __getitem__(self, param: Any) -> Any:
        """Return a parameter's states; without any, a new empty entry is kept, as in torch."""
        if not dict.__contains__(self, param):
            dict.__setitem__(self, param, self._made(param))
        return dict.__getitem__(self, param)

    def _made(self, param: Any) -> StateOfParameter:
        kept = self._kept_of(param)
        if kept is None:
            return StateOfParameter()
        return StateOfParameter.lazy(_States(self._values, kept, param))

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
        made = self[param]
        if state is made:
            return
        tiers = made._tiers
        own = {key: value for key, value in state.items() if key not in tiers.fields}
        states = {key: value for key, value in state.items() if key in tiers.fields}
        is_another_rules = bool(own) and len(tiers.fields) > 1  # its update would miss its own
        if states or is_another_rules:
            tiers.write(states or own)
        else:
            tiers.start_over()
        dict.clear(made)
        dict.update(made, own)

    def __delitem__(self, param: Any) -> None:
        if param not in self:
            raise KeyError(param)
        self.forget(param)
        if self._kept_of(param) is not None:
            self._values.write_state(param, {})

    def forget(self, param: Any) -> None:
        """Drop an entry whose states are about to change. Given-out ones keep their values."""
        entry = dict.pop(self, param, None)
        if not isinstance(entry, StateOfParameter) or entry._tiers is None:
            return
        entry._tiers.part()
        held = weakref.ref(entry)
        del entry
        kept = held()
        if kept is not None:
            kept.part()

    def pop(self, param: Any, *default: Any) -> Any:
        """Remove and return the entry, with its values."""
        if param not in self:
            return dict.pop(self, param, *default)
        found = self[param]
        del self[param]
        return found

    def clear(self) -> None:
        for param in [*self._params(), *dict.keys(self)]:
            if dict.__contains__(self, param) or self._values.state_names(param):
                del self[param]

    def part(self) -> None:
        """Become an ordinary mapping that keeps the present values."""
        for param in list(self):
            entry = self[param]
            if isinstance(entry, StateOfParameter):
                entry.part()
        self._params = list
        self._kept_of = lambda param: None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())

    def __repr__(self) -> str:
        """Return a text without reading values."""
        return f"<optimizer states of {len(self)} parameters, in the engine's tiers>"
