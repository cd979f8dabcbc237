"""Weight initialisation of a model that was built on the meta device.

Such a model has shapes and no values. Each module with tensors of its own is given real memory, one
group at a time, and initialised by what a constructor calls: `reset_parameters()` of the module and
of the modules around it, then `_init_weights` of the model for each of these. (Hugging Face models
promise that the latter initialises everything.) All other tensors are on the meta device meanwhile.
The seed is made from the run's seed and the module's name: values do not depend on grouping, order
or placement.

Two checks keep what a constructor did in another way from being lost in silence:

    filled     fresh memory holds a value that no initialiser writes (NaN, or first 0, then 1)
    counted    torch counts writes on the meta device, too: a tensor that was written more often
               when the model was built than the calls write there was set otherwise
               (`nn.init.zeros_(self.head.weight)`)

Writes through `.data`, by `trunc_normal_` and by `orthogonal_` are not counted there.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.display.words import some_of
from offload.tiers.errors import UnsupportedError
from offload.zero.groups.parameter_grouping import managed
from offload.zero.tensors.local_tensors import is_dtensor

_REMEDY = (
    "build the model on the CPU (not under torch.device('meta') or zero.Init), pass weights= with "
    "safetensors files, or give the module a reset_parameters() that sets its own parameters and "
    "buffers as its constructor does"
)


@dataclass(slots=True, eq=False)
class Owner:
    """A module that has a tensor as one of its own."""

    name: str  # of the tensor
    module: nn.Module
    tensors: dict[str, Any]  # the module's parameters, or its buffers
    key: str


@dataclass(slots=True, eq=False)
class Entry:
    """A parameter or buffer of the model, and every module that has it."""

    tensor: torch.Tensor
    is_parameter: bool
    is_meta: bool
    version: int  # the number of writes since it was made
    twin: torch.Tensor  # on the meta device, in the place of the tensor during initialisation
    owners: list[Owner] = field(default_factory=list)
    tied: list[Owner] = field(default_factory=list)  # by transformers, after all is initialised

    @property
    def name(self) -> str:
        return self.owners[0].name

    @property
    def has_nan(self) -> bool:
        return self.tensor.is_floating_point() or self.tensor.is_complex()

    def install(self, tensor: torch.Tensor, by: nn.Module | None = None) -> None:
        """Put `tensor` in its places; while `by` is initialised, in no other one's tied places."""
        for owner in (*self.owners, *self.tied):
            if by is None or owner.module is by or owner not in self.tied:
                owner.tensors[owner.key] = tensor

    def like(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values` as a tensor of this kind, with the attributes of the original."""
        if not self.is_parameter:
            return values
        made = nn.Parameter(values, requires_grad=self.tensor.requires_grad)
        vars(made).update(vars(self.tensor))
        vars(made).pop("_is_hf_initialized", None)
        return made


class MetaInitialiser:
    """Initialises the modules of a model that is on the meta device, or partly, one by one."""

    def __init__(
        self, model: nn.Module, seed: int, elsewhere: Container[torch.Tensor] = ()
    ) -> None:
        """`elsewhere` holds meta tensors whose values come from another source."""
        self._model = model
        self._seed = seed
        self._entries = _entries(model, elsewhere)
        self._entry = {id(entry.tensor): entry for entry in self._entries}
        self._of: dict[int, list[Entry]] = {}  # those that a module has
        for entry in self._entries:
            for owner in (*entry.owners, *entry.tied):
                self._of.setdefault(id(owner.module), []).append(entry)
        self._names: dict[int, str] = {}
        self._around: dict[int, list[nn.Module]] = {}  # a module and those around it, inside first
        self._note(model, "", [])

    def _note(self, module: nn.Module, name: str, around: list[nn.Module]) -> None:
        if id(module) in self._names:
            return
        self._names[id(module)] = name
        self._around[id(module)] = chain = [module, *around]
        for key, child in module.named_children():
            self._note(child, f"{name}.{key}" if name else key, chain)

    def check(self) -> None:
        """Raise UnsupportedError for tensors that nothing will give values to."""
        _refuse_unwritten([
            entry for entry in self._entries if entry.is_meta
            and not any(True for owner in entry.owners for _ in self._calls_for(owner.module))
        ])  # fmt: skip
        refuse_attributes(self._model)

    def values(self, params: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """Return values, in RAM, for those of `params` (by name, all of one group) without any."""
        entries = {name: self._entry[id(param)] for name, param in params.items()}
        entries = {name: entry for name, entry in entries.items() if entry.is_meta}
        made = self._initialise(entries.values())
        return {name: made[entry] for name, entry in entries.items()}

    def finish(self, device: torch.device) -> None:
        """Give values to all tensors that are in no group (buffers, integers)."""
        entries = [
            entry for entry in self._entries
            if entry.is_meta and not (entry.is_parameter and entry.tensor.is_floating_point())
        ]  # fmt: skip
        for entry, value in self._initialise(entries).items():
            old, new = entry.tensor, value.to(device)
            if entry.is_parameter:
                old.data = new
                continue
            entry.tensor = new
            entry.install(new)
            for owner in entry.owners:  # and other names that a module has for a buffer
                attributes = vars(owner.module)
                attributes.update((k, new) for k, v in list(attributes.items()) if v is old)

    # ---------------------------------------------------------------- the calls
    def _calls_for(self, module: nn.Module) -> Iterator[Call]:
        """Yield the calls that may write a module's own tensors, in a constructor's order."""
        chain = self._around[id(module)]
        library = sys.modules.get("transformers.modeling_utils")  # imported, if there is a model
        kind = () if library is None else library.PreTrainedModel
        theirs = [index for index, each in enumerate(chain) if isinstance(each, kind)]
        for index, outer in enumerate(chain):
            method = _reset_of(outer)
            if method is not None:
                yield Call(method, _times_reset(type(outer)))
            if theirs and index == theirs[-1]:
                for number, inner in enumerate(chain[: index + 1]):
                    nearest: Any = chain[next(place for place in theirs if place >= number)]
                    # in a constructor on the meta device it writes nothing
                    yield Call(partial(nearest._init_weights, inner), times=0)
            elif not theirs or index > theirs[-1]:
                yield from _model_calls(outer, chain[: index + 1])

    # ---------------------------------------------------------------- module by module
    def _initialise(self, entries: Collection[Entry]) -> dict[Entry, torch.Tensor]:
        values: dict[Entry, torch.Tensor] = {}
        with torch.random.fork_rng(devices=[]), self._twins_installed():
            for entry in entries:
                if entry not in values:
                    values.update(self._beside(entry))
        return {entry: values[entry] for entry in entries}

    @contextmanager
    def _twins_installed(self) -> Iterator[None]:
        """Inside, twins replace the model's tensors: writes to them do not change the model."""
        try:
            for entry in self._entries:
                entry.install(entry.twin)
            with torch.device("cpu"), torch.no_grad():
                yield
        finally:
            for entry in self._entries:
                entry.install(entry.tensor)

    def _beside(self, entry: Entry) -> dict[Entry, torch.Tensor]:
        """Return the values of a tensor, and of those that its module alone has beside it.

        Modules that share a tensor have to give it the same values under the first one's seed: the
        model does not say which of them initialised it."""
        first, *others = entry.owners
        values = self._of_module(first.module, first.module)
        made = {
            e: value for e, value in values.items() if e is entry or len(e.owners + e.tied) == 1
        }
        for other in others:
            again = self._of_module(other.module, first.module)[entry]
            if not torch.equal(again, made[entry]):
                raise UnsupportedError(
                    f"{entry.name} on the meta device is {other.name}, too, and their modules "
                    "would initialise it in different ways: it is not known which one the model "
                    f"began with; {_REMEDY}"
                )
        _refuse_unwritten([e for e, v in made.items() if v.sum().isnan() and v.isnan().any()])
        _refuse_otherwise([e for e in made if not self._accounts_for(e)])
        return made

    def _of_module(self, module: nn.Module, seeded_as: nn.Module) -> dict[Entry, torch.Tensor]:
        """Initialise a module's own tensors. NaN stays where nothing is written to them."""
        own = [entry for entry in self._of[id(module)] if entry.is_meta]
        name = self._names[id(seeded_as)]
        made = self._run(own, module, name, fill=0)
        if not all(entry.has_nan for entry in own):
            again = self._run(own, module, name, fill=1)
            _refuse_unwritten([
                e for e in own if not e.has_nan and not torch.equal(made[e], again[e])
            ])  # fmt: skip
        return made

    def _run(
        self, own: list[Entry], module: nn.Module, name: str, *, fill: int
    ) -> dict[Entry, torch.Tensor]:  # fmt: skip
        """Make the calls for a module whose own tensors are filled with NaN, or with `fill`."""
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        try:
            for entry in own:
                entry.install(entry.like(_filled(entry, fill)), by=module)
            for call in self._calls_for(module):
                call.run()
            return {entry: _checked(entry, module) for entry in own}
        finally:
            for entry in own:
                entry.install(entry.twin)

    def _accounts_for(self, entry: Entry) -> bool:
        """Return whether a constructor on the meta device that made the calls alone may have
        written a tensor as often as this one did."""
        modules = [owner.module for owner in entry.owners]
        writes = sum(self._writes(module, entry) for module in modules) if entry.version else 0
        if entry.version <= writes:
            return True
        # transformers' own call writes nothing in a constructor on the meta device, and then all
        return not writes and any(not c.times for each in modules for c in self._calls_for(each))

    def _writes(self, module: nn.Module, entry: Entry) -> float:
        """Return how often the calls for a module write to a tensor on the meta device."""
        before = entry.twin._version
        writes: float = math.inf
        with suppress(Exception):  # it needs values: what it writes is not known
            for call in self._calls_for(module):
                for _ in range(call.times):
                    call.run()
            written = _installed(entry, module)
            writes = written._version - (before if written is entry.twin else 0)
        entry.install(entry.twin)
        return writes


# ---------------------------------------------------------------- the tensors
def _entries(model: nn.Module, elsewhere: Container[torch.Tensor]) -> list[Entry]:
    """Return one entry per tensor: those that have values first."""
    entries: dict[int, Entry] = {}
    tied = _tied_names(model)
    for prefix, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in entries:
                    entries[id(tensor)] = _entry(
                        tensor, is_parameter=tensors is module._parameters,
                        is_meta=tensor.is_meta and tensor not in elsewhere,
                    )  # fmt: skip
                name = f"{prefix}.{key}" if prefix else key
                entry = entries[id(tensor)]
                owners = entry.tied if name in tied else entry.owners
                owners.append(Owner(name, module, tensors, key))
    for entry in entries.values():
        if not entry.owners:
            entry.owners, entry.tied = entry.tied[:1], entry.tied[1:]
    return list(entries.values())


def _tied_names(model: nn.Module) -> set[str]:
    """Return the names of parameters that a Hugging Face model ties to others."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in getattr(module, "all_tied_weights_keys", None) or {}
    }  # fmt: skip


def _entry(tensor: torch.Tensor, *, is_parameter: bool, is_meta: bool) -> Entry:
    if is_dtensor(tensor):
        raise UnsupportedError(
            "a model of DTensors is on the meta device, or a part of it is; build it on the CPU, "
            "or call parallelize_module on a model that has its values"
        )
    if tensor.layout is torch.strided and tensor.is_contiguous():
        # empty_like imports symbolic shapes for a tensor on the meta device, and sympy with them
        twin = torch.empty(tensor.shape, dtype=tensor.dtype, device=torch.device("meta"))
    else:
        twin = torch.empty_like(tensor, device="meta", requires_grad=False)
    entry = Entry(tensor, is_parameter, is_meta, tensor._version, twin)
    entry.twin = entry.like(twin)
    return entry


def _filled(entry: Entry, fill: int) -> torch.Tensor:
    value = float("nan") if entry.has_nan else fill
    return torch.full(entry.twin.shape, value, dtype=entry.twin.dtype, device="cpu")


# ---------------------------------------------------------------- calls
@dataclass(frozen=True, slots=True)
class Call:
    """One call that initialises tensors."""

    run: Callable[[], object]
    times: int = 1  # that a constructor on the meta device makes it


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method) and _takes(method):
            reset: Callable[[], object] = method
            return reset
    return None


def _model_calls(module: nn.Module, chain: Iterable[nn.Module]) -> Iterator[Call]:
    """Yield calls of `self.apply(self._init_weights)`, or of a method that does all modules."""
    method = getattr(module, "_init_weights", None)
    if not callable(method):
        return
    if _takes(method, module):
        for inner in chain:
            yield Call(partial(method, inner))
    elif _takes(method):
        yield Call(method)


def _takes(method: Callable[..., object], *args: object) -> bool:
    try:
        inspect.signature(method).bind(*args)
    except (TypeError, ValueError):
        return False
    return True


def _times_reset(kind: type) -> int:
    """Return how many constructors of a class and its bases call reset_parameters, at least 1."""
    codes = [getattr(vars(c).get("__init__"), "__code__", None) for c in kind.__mro__]
    names = {"reset_parameters", "_reset_parameters"}
    return max(1, sum(code is not None and not names.isdisjoint(code.co_names) for code in codes))


def _installed(entry: Entry, module: nn.Module) -> Any:
    """Return what a module has in the place of one of its own tensors."""
    owner = next(each for each in (*entry.owners, *entry.tied) if each.module is module)
    return owner.tensors.get(owner.key)


def _checked(entry: Entry, module: nn.Module) -> torch.Tensor:
    """Return a tensor that an initialiser may have replaced, after a check."""
    value = _installed(entry, module)
    if value is None or value.is_meta or value.shape != entry.twin.shape:
        raise UnsupportedError(
            f"{entry.name} on the meta device: its initialiser left "
            f"{'nothing' if value is None else f'{tuple(value.shape)} on {value.device}'} in the "
            f"place of {tuple(entry.twin.shape)}; build the model on the CPU"
        )
    checked: torch.Tensor = value.detach()
    return checked


# ---------------------------------------------------------------- what cannot be initialised
def _refuse_unwritten(entries: list[Entry]) -> None:
    if entries:
        kind, names = type(entries[0].owners[0].module).__name__, [entry.name for entry in entries]
        raise UnsupportedError(
            f"{some_of(names, 6)} on the meta device: nothing gives a value to all that the "
            f"constructor of {kind} filled, neither reset_parameters() nor _init_weights; {_REMEDY}"
        )


def _refuse_otherwise(entries: list[Entry]) -> None:
    if entries:
        names = some_of([entry.name for entry in entries], 6)
        raise UnsupportedError(
            f"{names} on the meta device: written {entries[0].version} times when the "
            "model was built, in other ways than reset_parameters() and _init_weights write again, "
            f"so that the values would not be the constructor's; {_REMEDY}"
        )


def refuse_attributes(model: nn.Module) -> None:
    """Raise UnsupportedError for a tensor on the meta device that is neither parameter nor buffer.
    PyTorch does not always: lookups by one read any memory, operations in place do nothing."""
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if not isinstance(value, torch.Tensor) or id(value) in known:
                continue
            if value.is_meta and value.numel():
                raise UnsupportedError(
                    f"{f'{name}.{key}' if name else key} is a tensor on the meta device that is "
                    "neither parameter nor buffer, and nothing gives it a value; set it again "
                    "after building the model, or build the model on the CPU"
                )


# ---------------------------------------------------------------- meta parameters become real
def make_real(
    named: Iterable[tuple[str, nn.Parameter]], dtype: torch.dtype, device: torch.device,
    only: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Turn every meta parameter into one on `device` without memory of its own. It stays the same
    object: references to it stay valid. The values follow when the groups are loaded. `only`: of
    parameters in other formats, later still."""
    for name, param in named:
        if not param.is_meta:
            continue
        new = _placeholder(param, dtype if managed(param, only) else param.dtype, device)
        try:
            # As torch.utils.swap_tensors does, which keeps off tensors with weak references
            # (nn.LSTM has them): they are to the object, and that stays.
            torch._C._swap_tensor_impl(param, new)
        except RuntimeError as error:
            raise UnsupportedError(
                f"{name} on the meta device is part of a graph ({error}); call offload.initialize "
                "before using the model"
            ) from error


def _placeholder(param: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    one = torch.zeros((), dtype=dtype, device=device)
    made = nn.Parameter(one.expand(param.shape), requires_grad=param.requires_grad)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(param, hooks):
            setattr(made, hooks, getattr(param, hooks))
    return made
