"""Restoring a checkpoint's state of a run, in the run that loads it.

All of it is read, and tried as far as that changes nothing, before a load changes anything."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from offload.checkpoint.engine.module_state import ModuleLoading, ModuleState, with_extra_state
from offload.checkpoint.engine.run_state import Carried, Stateful
from offload.checkpoint.format.plain_values import unpacked
from offload.checkpoint.format.reader import CheckpointReader
from offload.checkpoint.format.user_state import buffers_of, tensors_of
from offload.tiers.errors import CheckpointError
from offload.zero.recompute.random_state import Generator, named_generators, set_state

if TYPE_CHECKING:
    from offload.models.trained import Trained

_log = logging.getLogger("offload")
_MALFORMED = (
    KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError, OverflowError,
)  # fmt: skip
_MOST_NAMES = 8  # in one line


class Restoring:
    """The part of a checkpoint's run to restore: found, read and tried before anything is changed.

    CheckpointError if a registered object has no state there, or one of another number of ranks."""

    def __init__(self, engine: Trained, reader: CheckpointReader) -> None:
        self._engine, self._reader = engine, reader
        self._sets: list[tuple[str, Callable[[], object]]] = []
        self.state: dict[str, Any] | None = None
        ranks = engine.runtime.ranks
        self._rank, self._ranks = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
        record = reader.manifest.run
        saved = ModuleState({n: t.to(engine.device) for n, t in buffers_of(reader).items()})
        if record is not None:
            self._read = tensors_of(record, reader)
            try:
                saved = self._prepare(record.sections, saved)
            except _MALFORMED as error:
                self._refuse(
                    f"its state of the run is malformed: {type(error).__name__}: {error!s:.99}"
                )
        elif engine.carried:
            self._refuse(
                f"it has no state of {', '.join(engine.carried)}; load it before that is registered"
            )
        else:
            self._tell_no_random()
        self.modules = ModuleLoading(engine, reader.path, saved)

    def apply(self) -> None:
        """Set everything but `modules`, after weights and states were loaded."""
        for name, put in self._sets:
            try:
                put()
            except Exception as error:
                error.add_note(f"{self._reader.path} is loaded, but for {name}, and what follows")
                raise

    def _refuse(self, why: str) -> None:
        raise CheckpointError(f"{self._reader.path} was not loaded: {why}")

    def _prepare(self, sections: Mapping[str, Any], modules: ModuleState) -> ModuleState:
        """Prepare all sections; returns all that modules have saved, `modules` included."""
        if not all(isinstance(sections[name], dict) for name in ("extra", "objects", "entries")):
            raise TypeError("states by name are no dict")
        extra = self._extra_of(sections["extra"])
        self._prepare_objects(sections["objects"])
        self._prepare_random(sections["random"])  # last: what is set before may draw
        saved = sections["state"]
        self.state = None if saved is None else self._unpacked(saved)
        if not isinstance(self.state, dict | None):
            raise TypeError("`state` is no dict")
        values = {key: self._unpacked(value) for key, value in sections["entries"].items()}
        versions = sections["versions"]
        if versions is not None:
            versions = {path: dict(each) for path, each in self._unpacked(versions).items()}
        return replace(modules, values=values, extra=extra, versions=versions)

    def _unpacked(self, value: Any) -> Any:
        return unpacked(value, self._read)

    def _tell_no_random(self) -> None:
        path = self._reader.path
        _log.warning("%s has no state of random numbers: they go on as they are", path)

    def _prepare_random(self, saved: list[dict[str, Any]]) -> None:
        if not saved:  # no engine has saved it
            self._tell_no_random()
            return
        if self._rank >= len(saved):
            _log.warning(
                "%s was saved by %d ranks: the random numbers of rank %d go on as they are",
                self._reader.path, len(saved), self._rank,
            )  # fmt: skip
            return
        if self._rank == 0 and len(saved) > self._ranks:
            _log.info(
                "%s was saved by %d ranks: the random numbers of the last %d are not taken over",
                self._reader.path, len(saved), len(saved) - self._ranks,
            )  # fmt: skip
        own = dict(saved[self._rank].items())
        mine = named_generators(self._engine.module, self._engine.device)
        self._tell_left(own, mine, "state of the generators", "there are no such generators here")
        for name, generator in mine.items():
            if name in own:
                self._add(f"the generator {name}", generator, self._unpacked(own[name]))
        missing = [name for name in mine if name not in own]
        if missing:
            _log.warning(
                "%s has no state of the generators %s: they go on as they are", self._reader.path,
                _listed(missing),
            )  # fmt: skip

    def _extra_of(self, saved: dict[str, Any]) -> dict[str, Any]:
        mine = with_extra_state(self._engine.module)
        self._tell_left(saved, mine, "extra state of the modules", "none by that name has one here")
        missing = [path for path in mine if path not in saved]
        if missing:
            _log.warning("%s has no extra state of %s", self._reader.path, _listed(missing))
        return {path: self._unpacked(saved[path]) for path in mine if path in saved}

    def _prepare_objects(self, saved: dict[str, list[Any]]) -> None:
        mine = self._engine.carried
        self._tell_left(saved, mine, "state of", "nothing is registered by that name here")
        for name, each in mine.items():
            if name not in saved:
                self._refuse(
                    f"it has no state of {name}; load it before that is registered, or register "
                    f"what was saved ({', '.join(saved) or 'nothing'})"
                )
            self._add(name, each, self._unpacked(self._own(name, saved[name])))

    def _add(self, name: str, value: Carried, state: Any) -> None:
        if isinstance(value, Stateful):
            put = partial(value.load_state_dict, state)
            self._sets.append((f"{name}.load_state_dict()", put))
            return
        if isinstance(value, random.Random):
            state = (int(state["version"]), tuple(state["key"].tolist()), state["gauss"])
        set_state(_another(value), state)  # whether it can be set
        self._sets.append((name, partial(set_state, value, state)))

    def _tell_left(
        self, saved: Collection[str], mine: Collection[str], what: str, why: str
    ) -> None:
        left = [name for name in saved if name not in mine]
        if left:
            _log.warning(
                "%s has the %s %s, which is not taken over: %s", self._reader.path, what,
                _listed(left), why,
            )  # fmt: skip

    def _own(self, name: str, saved: list[Any]) -> Any:
        if len(saved) not in (1, self._ranks):
            self._refuse(
                f"{name} has another state on each of the {len(saved)} ranks that saved it, and "
                f"there are {self._ranks} now; load it before that is registered, and set its "
                "state yourself"
            )
        return saved[0 if len(saved) == 1 else self._rank]


def _listed(names: Sequence[str]) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _another(generator: Generator) -> Generator:
    """A new generator of the same kind."""
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device)
    if isinstance(generator, np.random.Generator):
        return np.random.Generator(type(generator.bit_generator)())
    if isinstance(generator, np.random.RandomState):
        return np.random.RandomState(type(generator._bit_generator)())
    return random.Random()


def saved_run(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration and the `state=` of a checkpoint, without its tensors. CheckpointError if
    it has no run of its own."""
    with CheckpointReader(path) as reader:
        record = reader.manifest.run
    if record is None or not isinstance(record.sections.get("config"), dict):
        raise CheckpointError(f"{path} has no state of a run: it was saved by an older version")
    state = record.sections.get("state")
    return record.sections["config"], state if isinstance(state, dict) else {}
