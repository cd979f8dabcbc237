"""Finds the calls that initialise the tensors of a meta-device model, without values.

A constructor leaves no record. What can be called again is: each module's `reset_parameters`, and
`_init_weights` of the model (or of a part of it) for every module, children first. Hugging Face
models promise that the latter initialises everything; its nearest one counts for a module.

    calls       in the order in which a constructor makes them
    rehearsal   each on shadows of all tensors: which ones does it write?
    history     and on twins on the meta device: how often does that count as written? A tensor
                that was written more often when the model was built was set in some other way
                (`nn.init.zeros_(self.head.weight)`)

Tensors that no call writes, or that were set in other ways, are refused by name. Writes that torch
does not count on the meta device are not seen: through `.data`, by `trunc_normal_` and
`orthogonal_`, and to modules that were copied afterwards.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.tiers.errors import UnsupportedError
from offload.weights.shadows import Dispatch, Notes, Shadow
from offload.zero.tensors.local_tensors import is_dtensor

_MOST_NAMES = 6  # in an error


class Kind(Enum):
    RESET = "reset_parameters"
    MODEL = "_init_weights"
    TRANSFORMERS = "transformers' _init_weights"  # not called in a constructor on the meta device


@dataclass(slots=True, eq=False)
class Call:
    """A call that initialises `module`; `run` performs it with the method of `by`."""

    module: nn.Module
    by: nn.Module
    run: Callable[[], object]
    kind: Kind
    # By the rehearsals: tensor -> how often it counts as written on the meta device
    writes: dict[Entry, int] = field(default_factory=dict)
    overwrites: set[Entry] = field(default_factory=set)  # ... all of, without looking at it
    failed: Exception | None = None  # it needs values: what it writes is not known


@dataclass(slots=True, eq=False)
class Owner:
    name: str  # of the tensor
    module: nn.Module
    key: str

    def put(self, tensor: torch.Tensor, *, is_parameter: bool) -> None:
        self._dictionary(is_parameter=is_parameter)[self.key] = tensor

    def get(self, *, is_parameter: bool) -> torch.Tensor | None:
        return self._dictionary(is_parameter=is_parameter).get(self.key)

    def _dictionary(self, *, is_parameter: bool) -> dict[str, Any]:
        module = self.module
        return module._parameters if is_parameter else module._buffers


@dataclass(slots=True, eq=False)
class Entry:
    """A parameter or buffer of the model, and every module that has it."""

    tensor: torch.Tensor
    is_parameter: bool
    is_meta: bool
    version: int  # writes since it was made, as torch counts them
    twin: torch.Tensor
    tied_to: Entry | None = None  # by a Hugging Face model, after all is initialised
    owners: list[Owner] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.owners[0].name

    def install(self, tensor: torch.Tensor) -> None:
        for owner in self.owners:
            owner.put(tensor, is_parameter=self.is_parameter)

    def is_installed(self, tensor: torch.Tensor) -> bool:
        return all(o.get(is_parameter=self.is_parameter) is tensor for o in self.owners)

    def like(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values` as a tensor of this kind, with what was hung on the original."""
        if not self.is_parameter:
            return values
        made = nn.Parameter(values, requires_grad=self.tensor.requires_grad)
        vars(made).update(vars(self.tensor))
        vars(made).pop("_is_hf_initialized", None)
        return made


class Initialisers:
    """The tensors of a model and the calls that give them values, rehearsed."""

    def __init__(self, model: nn.Module) -> None:
        self.entries = _entries(model)
        self.calls = _constructor_calls(model)
        self.of_module: dict[int, list[Entry]] = {}  # those that a module owns
        for entry in self.entries:
            for owner in entry.owners:
                self.of_module.setdefault(id(owner.module), []).append(entry)
        self._rehearse()
        with self.twins_installed():
            self._count()
        self._writers: dict[Entry, list[int]] = {entry: [] for entry in self.entries}
        self._failed: dict[int, list[int]] = {}  # module -> calls about it
        for number, call in enumerate(self.calls):
            for entry in call.writes:
                self._writers[entry].append(number)
            if call.failed is not None:
                self._failed.setdefault(id(call.module), []).append(number)
        for entry in self.entries:
            source = entry.tied_to
            if source is not None and self._writers[entry] and not self._writers[source]:
                entry.is_meta, source.is_meta = source.is_meta, False

    @contextmanager
    def twins_installed(self) -> Iterator[None]:
        """Inside, twins replace the model's tensors: writes to them do not change the model."""
        try:
            for entry in self.entries:
                entry.install(entry.twin)
            with torch.device("cpu"), torch.no_grad():
                yield
        finally:
            for entry in self.entries:
                entry.install(entry.tensor)

    def _rehearse(self) -> None:
        notes = Notes()
        with self.twins_installed(), Dispatch():
            shadows = {e: e.like(Shadow(_meta_like(e.twin), notes, e)) for e in self.entries}
            for entry, shadow in shadows.items():
                entry.install(shadow)
            for call in self.calls:
                notes.forget()
                try:
                    call.run()
                except Exception as error:  # noqa: BLE001 - told where it is called with values
                    call.failed = error
                own = self.of_module.get(id(call.module), [])
                replaced = [e for e in own if not e.is_installed(shadows[e])]
                for entry in replaced:
                    entry.install(shadows[entry])
                call.overwrites = {e for e in notes.overwritten if isinstance(e, Entry)}
                written = {e for e in notes.written if isinstance(e, Entry)}
                call.writes = dict.fromkeys([*written, *replaced], 0)

    def _count(self) -> None:
        """Count the writes of each call on the meta device, as the constructor's were counted."""
        for call in self.calls:
            before = {entry: entry.twin._version for entry in call.writes}
            try:
                call.run()
            except Exception as error:  # noqa: BLE001 - told where it is called with values
                call.failed = error
            for entry in call.writes:
                call.writes[entry] = entry.twin._version - before[entry]
                entry.install(entry.twin)

    def calls_for(self, module: nn.Module) -> list[Call]:
        """Return the calls that initialise a module's own tensors, without those that later calls
        overwrite."""
        own = self.of_module.get(id(module), [])
        others = {id(o.module) for entry in own for o in entry.owners} - {id(module)}
        numbers = {number for entry in own for number in self._writers[entry]}
        numbers.update(self._failed.get(id(module), []))
        found = [self.calls[number] for number in sorted(numbers)]
        found = [call for call in found if id(call.module) not in others]
        return [
            call for number, call in enumerate(found)
            if call.failed is not None or any(
                entry in call.writes and not any(entry in c.overwrites for c in found[number + 1 :])
                for entry in own
            )
        ]  # fmt: skip

    # ---------------------------------------------------------------- what cannot be initialised
    def refuse(self, entries: Iterable[Entry]) -> None:
        """Raise UnsupportedError unless calls write `entries` as often as the constructor did."""
        entries = [entry for entry in entries if entry.is_meta]
        _refuse_unwritten([entry for entry in entries if not self._is_written(entry)])
        _refuse_otherwise([entry for entry in entries if not self._is_as_constructed(entry)])
        self._refuse_unclear(entries)

    def _calls_of(self, entry: Entry) -> list[Call]:
        return [self.calls[number] for number in self._writers[entry]]

    def _is_written(self, entry: Entry) -> bool:
        return bool(self._writers[entry]) or self._is_unknown(entry)

    def _is_unknown(self, entry: Entry) -> bool:
        return any(id(owner.module) in self._failed for owner in entry.owners)

    def _is_as_constructed(self, entry: Entry) -> bool:
        """Return whether calls account for all writes, or the last ones, if it was copied."""
        kinds = {call.kind for call in self._calls_of(entry)}
        overwritten = Kind.TRANSFORMERS in kinds and Kind.RESET not in kinds
        if entry.version == 0 or self._is_unknown(entry) or overwritten:
            return True
        return any(entry.version in _sums(counts) for counts in self._histories(entry))

    def _histories(self, entry: Entry) -> Iterator[list[int]]:
        """Yield how often the constructor's calls may have written to a tensor, in order. A tied
        tensor began as one owner's, and got the others before or after `_init_weights`."""
        writers = self._calls_of(entry)
        owners = {id(owner.module) for owner in entry.owners}
        for owner in entry.owners:
            others = owners - {id(owner.module)}
            mine = [call for call in writers if id(call.module) not in others]
            tied = [c for c in writers if c.kind is not Kind.RESET or id(c.module) not in others]
            for calls in (mine, tied):
                yield [count for call in calls for count in _counts(call, entry)]

    def _refuse_unclear(self, entries: Iterable[Entry]) -> None:
        """Refuse tensors of an `_init_weights` that the constructor may not have called at all."""
        seen: dict[nn.Module, bool] = {}
        for entry in entries:
            if entry.version == 0 or len(entry.owners) > 1:
                continue
            writers = self._calls_of(entry)
            least = sum(c.writes[entry] for c in writers if c.kind is Kind.RESET)
            for call in writers:
                if call.kind is Kind.MODEL and call.writes[entry] and least:
                    known = seen.get(call.by, False)
                    seen[call.by] = known or entry.version >= least + call.writes[entry]
        for by, known in seen.items():
            if not known:
                raise UnsupportedError(
                    f"{type(by).__name__}._init_weights: its constructor wrote to each parameter "
                    "only as often as reset_parameters() does, so that it is not clear whether it "
                    f"called _init_weights; {_remedy()}"
                )


def _sums(counts: list[int]) -> set[int]:
    total, found = 0, {0}
    for count in reversed(counts):
        total += count
        found.add(total)
    return found


def _counts(call: Call, entry: Entry) -> list[int]:
    if call.kind is Kind.TRANSFORMERS:
        return []
    times = _times_reset(type(call.module)) if call.kind is Kind.RESET else 1
    return [call.writes[entry]] * times


def _times_reset(kind: type) -> int:
    """Return how many constructors of a class and its bases call reset_parameters, at least 1."""
    codes = [getattr(vars(c).get("__init__"), "__code__", None) for c in kind.__mro__]
    names = {"reset_parameters", "_reset_parameters"}
    return max(1, sum(code is not None and not names.isdisjoint(code.co_names) for code in codes))


def _refuse_unwritten(entries: list[Entry]) -> None:
    if not entries:
        return
    one = entries[0].owners[0]
    raise UnsupportedError(
        f"{_listed(entries)} on the meta device: nothing gives a value to what the constructor of "
        f"{type(one.module).__name__} filled, neither reset_parameters() nor _init_weights; "
        f"{_remedy()}"
    )


def _refuse_otherwise(entries: list[Entry]) -> None:
    if entries:
        raise UnsupportedError(
            f"{_listed(entries)} on the meta device: written {entries[0].version} times when the "
            "model was built, in other ways than reset_parameters() and _init_weights write again, "
            f"so that the values would not be the constructor's; {_remedy()}"
        )


def _remedy() -> str:
    return (
        "build the model on the CPU, pass weights= with safetensors files, or give the module a "
        "reset_parameters() that sets its own parameters and buffers as its constructor does"
    )


def _listed(entries: list[Entry]) -> str:
    kinds = {"parameter" if e.is_parameter else "buffer" for e in entries}
    names = ", ".join(e.name for e in entries[:_MOST_NAMES])
    more = len(entries) - _MOST_NAMES
    kind = " and ".join(sorted(kind + "s"[: len(entries) > 1] for kind in kinds))
    return f"{kind} {names}{f' and {more} more' if more > 0 else ''}"


# -------------------------------------------------------------------------------- the tensors
def _entries(model: nn.Module) -> list[Entry]:
    """Return one entry per tensor, and a second, tied one for ties of a Hugging Face model."""
    tied = _tied_names(model)
    sources: dict[int, Entry] = {}
    targets: dict[int, Entry] = {}
    for prefix, module in model.named_modules():
        for dictionary, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for key, tensor in dictionary.items():
                if tensor is None:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                found = targets if name in tied else sources
                if id(tensor) not in found:
                    found[id(tensor)] = _entry(tensor, is_parameter=is_parameter)
                found[id(tensor)].owners.append(Owner(name, module, key))
    for key, entry in targets.items():
        if key in sources:
            entry.tied_to, entry.is_meta = sources[key], False
    return [*sources.values(), *targets.values()]


def _tied_names(model: nn.Module) -> set[str]:
    """Return the names of parameters that a Hugging Face model ties to others."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in getattr(module, "all_tied_weights_keys", None) or {}
    }  # fmt: skip


def _entry(tensor: torch.Tensor, *, is_parameter: bool) -> Entry:
    if is_dtensor(tensor):
        raise UnsupportedError(
            "a model of DTensors is on the meta device, or a part of it is; build it on the CPU, "
            "or call parallelize_module on a model that has its values"
        )
    meta = _meta_like(tensor)
    entry = Entry(tensor, is_parameter, tensor.is_meta, tensor._version, meta)
    entry.twin = entry.like(meta)
    return entry


def _meta_like(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return torch.empty_like(tensor, device="meta", requires_grad=False)
    # empty_like imports symbolic shapes for a tensor on the meta device, and sympy with them
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=torch.device("meta"))


# -------------------------------------------------------------------------------- the calls
def _constructor_calls(model: nn.Module) -> list[Call]:
    nearest: dict[int, nn.Module] = {}  # module -> the Hugging Face model that it is in
    outermost: set[int] = set()
    _find_transformers(model, None, nearest, outermost)
    calls: list[Call] = []
    for module in _children_first(model, set()):
        calls += _reset(module)
        if id(module) not in nearest:
            calls += _model_calls(module)
        elif id(module) in outermost:
            for inner in _children_first(module, set()):
                by: Any = nearest[id(inner)]
                run = partial(by._init_weights, inner)
                calls.append(Call(inner, by, run, Kind.TRANSFORMERS))
    return calls


def _reset(module: nn.Module) -> Iterator[Call]:
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method) and _takes(method):
            yield Call(module, module, method, Kind.RESET)
            return


def _model_calls(module: nn.Module) -> Iterator[Call]:
    """Yield calls of `self.apply(self._init_weights)`, or of a method that does all modules."""
    method = getattr(module, "_init_weights", None)
    if not callable(method):
        return
    if _takes(method, module):
        for inner in _children_first(module, set()):
            yield Call(inner, module, partial(method, inner), Kind.MODEL)
    elif _takes(method):
        yield Call(module, module, method, Kind.MODEL)


def _takes(method: Callable[..., object], *args: object) -> bool:
    try:
        inspect.signature(method).bind(*args)
    except (TypeError, ValueError):
        return False
    return True


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    seen.add(id(module))
    for child in module.children():
        if id(child) not in seen:
            yield from _children_first(child, seen)
    yield module


def _find_transformers(
    module: nn.Module, inside: nn.Module | None, nearest: dict[int, nn.Module], outermost: set[int]
) -> None:
    """Fill `nearest` with the innermost Hugging Face model around each module, if there is one."""
    library = sys.modules.get("transformers.modeling_utils")  # imported, if there is such a model
    if library is not None and isinstance(module, library.PreTrainedModel):
        if inside is None:
            outermost.add(id(module))
        inside = module
    if inside is not None:
        nearest[id(module)] = inside
    for child in module.children():
        _find_transformers(child, inside, nearest, outermost)
