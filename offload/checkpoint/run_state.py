"""What goes on beside the engine: random numbers, what was registered, the user's own state.

    section     JSON
    config      the engine's configuration, every `auto` resolved
    random      a list, one entry per rank: generator -> its state
    objects     name -> a list of what `state_dict()` gave: one per rank, or one for all
    extra       module -> what its `get_extra_state()` gave
    state       what `save_checkpoint(state=)` was given

Tensors are not in the JSON: they lie in the checkpoint's file `RUN`, and what stands for one names
it. All of it is read, and tried as far as that changes nothing, before a load changes anything.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from zlib import crc32

import numpy as np
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import nn

from offload.checkpoint import bounded_json
from offload.checkpoint.manifest import BufferRecord, RunRecord
from offload.checkpoint.model import DTYPE_NAMES
from offload.checkpoint.plain_values import packed, unpacked
from offload.checkpoint.reader import CheckpointReader
from offload.swap.shield import uninterrupted
from offload.tiers.errors import CheckpointError, StateError, UnsupportedError
from offload.zero.block_state import modules_of
from offload.zero.random_state import (
    Generator,
    is_generator,
    named_generators,
    set_state,
    state_of,
)
from offload.zero.ranks import Ranks

if TYPE_CHECKING:
    from offload.engine import Engine

_log = logging.getLogger("offload")
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_MALFORMED = (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError)


@runtime_checkable
class Stateful(Protocol):
    """A scheduler, a data loader that knows its position, a sampler, ..."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


Carried = Stateful | Generator


def check_carried(name: str, value: object) -> None:
    """UnsupportedError, saying what to do, for what has no state that can be saved and loaded."""
    if isinstance(value, nn.Module | torch.optim.Optimizer):
        raise UnsupportedError(
            f"{name} is a {type(value).__name__}: the engine's model and optimizer are in each "
            "checkpoint; save others yourself"
        )
    if is_generator(value) or isinstance(value, Stateful):
        _Packer(0).packed("objects", _state_of(value), f"{name}.state_dict()")  # type: ignore[arg-type]
        return
    hint = "give it state_dict() and load_state_dict(), or put what counts into `state=`"
    if isinstance(value, torch.utils.data.DataLoader):
        hint = "use torchdata's StatefulDataLoader, or keep the position in `state=`"
    raise UnsupportedError(
        f"{name} is a {type(value).__name__}, which says nothing of its state; {hint}"
    )


# --------------------------------------------------------------------------- saving
class RunState:
    """What a checkpoint keeps of a run, as it was when this was made."""

    def __init__(self, record: RunRecord, tensors: Mapping[str, torch.Tensor]) -> None:
        self.record = record
        self.tensors = tensors

    @classmethod
    def of(cls, engine: Engine, state: Mapping[str, Any] | None) -> RunState:
        """Of all ranks, which call it together; the first one's has everything.

        UnsupportedError, with the name, for what is no plain value."""
        ranks = engine.runtime.ranks
        own = _Packer(0 if ranks is None else ranks.rank)
        error: Exception | None = None
        values: dict[str, Any] = {}
        try:
            values = _values_of(engine, state, own)
        except Exception as failure:  # noqa: BLE001 - raised below, on every rank
            error = failure
        _agree(ranks, error, "no checkpoint was saved")
        if ranks is not None:
            _check_names(ranks, engine.carried)
        found = [(values, own.tensors)] if ranks is None else _on_first(ranks, values, own.tensors)
        return cls(*_merged(found)) if found else cls(RunRecord(sections={}), {})


def _check_names(ranks: Ranks, carried: Mapping[str, Carried]) -> None:
    """StateError, on all ranks, unless all have registered the same names."""
    mine = crc32("\n".join(sorted(carried)).encode()) >> 1
    if len({*ranks.exchange([mine], "what is registered")[:, 0].tolist()}) > 1:
        raise StateError(
            f"ranks have registered different names for checkpoints (here: "
            f"{', '.join(carried) or 'none'}); register the same on all of them"
        )


class _Packer:
    """Values as JSON, and their tensors aside, of one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.tensors: dict[str, torch.Tensor] = {}

    def packed(self, section: str, value: Any, name: str) -> Any:
        def aside(tensor: torch.Tensor, what: str) -> dict[str, Any]:
            if tensor.dtype not in DTYPE_NAMES:
                raise UnsupportedError(
                    f"{what} is a tensor of {tensor.dtype}, which cannot be in a safetensors file"
                )
            key = f"{section}/{self._rank}/{len(self.tensors)}"
            # a copy: it may be changed while it is written
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.tensors[key] = whole.copy_(tensor.detach())
            return {"name": key}

        return packed(value, name, aside)


def _values_of(engine: Engine, state: Mapping[str, Any] | None, to: _Packer) -> dict[str, Any]:
    generators = named_generators(engine.module, engine.device)
    with uninterrupted:  # pydantic takes a Ctrl-C for an error of its own
        config = engine.config.to_dict()
    values = {
        "config": config,
        "objects": {
            name: to.packed("objects", _state_of(each), f"{name}.state_dict()")
            for name, each in engine.carried.items()
        },
        "extra": _extra_states(engine.module, to),
        "state": None if state is None else to.packed("state", dict(state), "state"),
    }  # fmt: skip
    # last: what the others do for it may draw
    values["random"] = {
        name: to.packed("random", _state_of(each), f"the state of the generator {name}")
        for name, each in generators.items()
    }
    _check_size(values)
    return values


def _check_size(values: dict[str, Any]) -> None:
    """UnsupportedError for what a manifest could not hold, before anything is written."""
    try:
        bounded_json.check_size(json.dumps(values).encode())
    except ValueError as error:
        raise UnsupportedError(
            f"the states of what is registered, and `state`, are too large: {error}; keep long "
            "lists in tensors"
        ) from None


def _extra_states(model: nn.Module, to: _Packer) -> dict[str, Any]:
    found = {}
    for path, module in _with_extra_state(model):
        try:
            found[path] = to.packed("extra", module.get_extra_state(), f"{path}.get_extra_state()")
        except UnsupportedError as error:
            _log.warning("the checkpoint leaves it out: %s", error)
    return found


def _with_extra_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    own = nn.Module.get_extra_state
    return [(path, each) for path, each in modules_of(model) if type(each).get_extra_state != own]


def _state_of(value: Carried) -> Any:
    if isinstance(value, random.Random):
        version, key, gauss = value.getstate()
        return {"version": version, "key": np.array(key, dtype=np.uint64), "gauss": gauss}
    return state_of(value) if is_generator(value) else value.state_dict()  # type: ignore[union-attr, arg-type]


def _on_first(
    ranks: Ranks, values: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> list[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    """Of every rank, on the first one; an empty list on the others."""
    raw = save_bytes(tensors, {"values": json.dumps(values)})
    sizes = ranks.exchange([len(raw)], "the states of a run")[:, 0].tolist()
    if ranks.rank:
        ranks.send(torch.frombuffer(bytearray(raw), dtype=torch.uint8), 0)
        return []
    found = [(values, tensors)]
    for source, size in enumerate(sizes[1:], start=1):
        came = ranks.receive(size, torch.uint8, source).numpy().tobytes()
        header = json.loads(came[8 : 8 + int.from_bytes(came[:8], "little")])
        found.append((json.loads(header["__metadata__"]["values"]), load_bytes(came)))
    return found


def _merged(
    found: list[tuple[dict[str, Any], dict[str, torch.Tensor]]],
) -> tuple[RunRecord, dict[str, torch.Tensor]]:
    """The states of random numbers and objects are every rank's own; the rest is the first's."""
    first = found[0][0]
    objects = {}
    for name in first["objects"]:
        each = [values["objects"].get(name) for values, _ in found]
        objects[name] = each[:1] if all(one == each[0] for one in each) else each
    sections = {**first, "random": [values["random"] for values, _ in found], "objects": objects}
    used = _names_in([sections["random"], objects, first["extra"], first["state"]])
    tensors = {name: t for _, own in found for name, t in own.items() if name in used}
    records = [
        BufferRecord(name=name, dtype=DTYPE_NAMES[tensor.dtype], shape=list(tensor.shape))
        for name, tensor in tensors.items()
    ]
    return RunRecord(sections=sections, tensors=records), tensors


def _names_in(value: Any) -> set[str]:
    """Of the tensors that values refer to."""
    if isinstance(value, dict):
        own = {value["name"]} if value.get("is") in ("tensor", "array") else set()
        return own.union(*map(_names_in, value.values()))
    return set().union(*map(_names_in, value)) if isinstance(value, list) else set()


# --------------------------------------------------------------------------- loading
class Restoring:
    """What is taken over of a checkpoint's run: found, read and tried before anything is changed.

    CheckpointError where something that was registered has no state there, or one of another number
    of ranks."""

    def __init__(self, engine: Engine, reader: CheckpointReader) -> None:
        self._engine, self._reader = engine, reader
        self._sets: list[tuple[str, Callable[[], object]]] = []
        self.state: dict[str, Any] | None = None
        ranks = engine.runtime.ranks
        self._rank, self._ranks = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
        record = reader.manifest.run
        if record is None:
            if engine.carried:
                self._refuse(
                    f"it has no state of {', '.join(engine.carried)}; load it before that is "
                    "registered"
                )
            _log.warning("%s has no state of random numbers: they go on as they are", reader.path)
            return
        self._tensors = {each.name: each for each in record.tensors}
        try:
            self._prepare(record.sections)
        except _MALFORMED as error:
            self._refuse(
                f"its state of the run is malformed: {type(error).__name__}: {error!s:.99}"
            )

    def apply(self) -> None:
        """Set everything, once weights and states are there."""
        for name, put in self._sets:
            try:
                put()
            except Exception as error:
                error.add_note(f"{self._reader.path} is loaded, but for {name}, and what follows")
                raise

    def _refuse(self, why: str) -> None:
        raise CheckpointError(f"{self._reader.path} was not loaded: {why}")

    def _prepare(self, sections: Mapping[str, Any]) -> None:
        if not all(isinstance(sections[name], dict) for name in ("extra", "objects")):
            raise TypeError("states by name are no dict")
        self._prepare_extra(sections["extra"])
        self._prepare_objects(sections["objects"])
        self._prepare_random(sections["random"])  # last: what is set before may draw
        saved = sections["state"]
        self.state = None if saved is None else self._unpacked(saved)
        if not isinstance(self.state, dict | None):
            raise TypeError("`state` is no dict")

    def _unpacked(self, value: Any) -> Any:
        return unpacked(value, self._read)

    def _read(self, value: dict[str, Any]) -> torch.Tensor:
        record = self._tensors[value["name"]]
        tensor = torch.empty(record.shape, dtype=_DTYPES[record.dtype])
        if tensor.numel():
            view = tensor.reshape(-1).view(torch.uint8).numpy().data
            self._reader.read_into(self._reader.run_tensor(record), 0, view)
        return tensor

    def _prepare_random(self, saved: list[dict[str, Any]]) -> None:
        if self._rank >= len(saved):
            _log.warning(
                "%s was saved by %d ranks: the random numbers of rank %d go on as they are",
                self._reader.path, len(saved), self._rank,
            )  # fmt: skip
            return
        mine = named_generators(self._engine.module, self._engine.device)
        for name, value in saved[self._rank].items():
            if name in mine:
                self._add_generator(f"the generator {name}", mine[name], self._unpacked(value))
        missing = [name for name in mine if name not in saved[self._rank]]
        if missing:
            _log.warning(
                "%s has no state of the generators %s: they go on as they are", self._reader.path,
                ", ".join(missing),
            )  # fmt: skip

    def _add_generator(self, name: str, generator: Generator, state: Any) -> None:
        if isinstance(generator, random.Random):
            state = (int(state["version"]), tuple(state["key"].tolist()), state["gauss"])
        set_state(_another(generator), state)  # whether it can be set
        self._sets.append((name, partial(set_state, generator, state)))

    def _prepare_extra(self, saved: dict[str, Any]) -> None:
        mine = dict(_with_extra_state(self._engine.module))
        for path, module in mine.items():
            if path not in saved:
                _log.warning("%s has no extra state of %s", self._reader.path, path)
                continue
            state = self._unpacked(saved[path])
            self._sets.append((f"{path}.set_extra_state()", partial(module.set_extra_state, state)))

    def _prepare_objects(self, saved: dict[str, list[Any]]) -> None:
        left = [name for name in saved if name not in self._engine.carried]
        if left:
            _log.warning(
                "%s has the state of %s, which is not taken over: nothing is registered by that "
                "name here", self._reader.path, ", ".join(left),
            )  # fmt: skip
        for name, each in self._engine.carried.items():
            if name not in saved:
                self._refuse(
                    f"it has no state of {name}; load it before that is registered, or register "
                    f"what was saved ({', '.join(saved) or 'nothing'})"
                )
            state = self._unpacked(self._own(name, saved[name]))
            if is_generator(each):
                self._add_generator(name, each, state)  # type: ignore[arg-type]
            else:
                load = each.load_state_dict  # type: ignore[union-attr]
                self._sets.append((f"{name}.load_state_dict()", partial(load, state)))

    def _own(self, name: str, saved: list[Any]) -> Any:
        if len(saved) not in (1, self._ranks):
            self._refuse(
                f"{name} has another state on each of the {len(saved)} ranks that saved it, and "
                f"there are {self._ranks} now; load it before that is registered, and set its "
                "state yourself"
            )
        return saved[0 if len(saved) == 1 else self._rank]


def _another(generator: Generator) -> Generator:
    """A new one of the same kind."""
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device)
    if isinstance(generator, np.random.Generator):
        return np.random.Generator(type(generator.bit_generator)())
    if isinstance(generator, np.random.RandomState):
        return np.random.RandomState(type(generator._bit_generator)())
    return random.Random()


def _agree(ranks: Ranks | None, error: Exception | None, doing: str) -> None:
    """An error on any rank is raised on every rank."""
    told = None if ranks is None else ranks.all_succeeded(error)
    if error is not None:
        raise error
    if told is not None:
        raise CheckpointError(f"{doing}; {told}")


def saved_run(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration and the `state=` of a checkpoint, without its tensors. CheckpointError
    where there is none of a run of its own."""
    with CheckpointReader(path) as reader:
        record = reader.manifest.run
    if record is None or not isinstance(record.sections.get("config"), dict):
        raise CheckpointError(f"{path} has no state of a run: it was saved by an older version")
    state = record.sections.get("state")
    return record.sections["config"], state if isinstance(state, dict) else {}


def check_unnamed(carried: Mapping[str, Carried], new: Mapping[str, object]) -> None:
    """StateError for a name that something else has."""
    for name, value in new.items():
        if carried.get(name, value) is not value:
            raise StateError(f"{name} is registered already, for another object; take another name")
