"""The state of a run beside the engine: random numbers, registered objects, the user's own.

Each is an archive of `torch.save` (see `user_state`) in the checkpoint's file `RUN`:

    random/RANK           generator -> its state
    objects/RANK/NAME     what `state_dict()` gave; of rank 0 alone where all ranks have the same
    entries/KEY           what modules have at this key of the state dict that is no tensor
    state                 what `save_checkpoint(state=)` was given

The configuration, every `auto` resolved, is in the manifest.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from zlib import crc32

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import nn

from offload.checkpoint.engine.module_state import ModuleLoading, ModuleState
from offload.checkpoint.engine.shards import on_all
from offload.checkpoint.format.manifest import BufferRecord, RunRecord
from offload.checkpoint.format.reader import CheckpointReader
from offload.checkpoint.format.user_state import (
    STATE,
    buffers_of,
    packed,
    state_in,
    tensor_records,
    value_of,
)
from offload.display.words import some_of
from offload.swap.threads.shield import defer_signals
from offload.tiers.errors import CheckpointError, StateError, UnsupportedError
from offload.zero.ranks.rank_weights import RankWeights
from offload.zero.ranks.ranks import Ranks
from offload.zero.recompute.random_state import (
    Generator,
    is_generator,
    named_generators,
    set_state,
    state_of,
)

if TYPE_CHECKING:
    from offload.models.trained import Trained

_log = logging.getLogger("offload")
_RANDOM, _OBJECTS, _ENTRIES = "random", "objects", "entries"
_MALFORMED = (
    KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError, OverflowError,
)  # fmt: skip
_MAX_NAMES = 8  # in one line

Archives = dict[str, torch.Tensor]


@runtime_checkable
class Stateful(Protocol):
    """A scheduler, a data loader that knows its position, a sampler, ..."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


Carried = Stateful | Generator


def check_carried(carried: Mapping[str, Carried], new: Mapping[str, object]) -> None:
    """Raise StateError for a name that another object has; UnsupportedError, with a remedy, for an
    object without a state to save and load."""
    for name, value in new.items():
        if carried.get(name, value) is not value:
            raise StateError(f"{name} is registered already, for another object; take another name")
        is_stateful = isinstance(value, Stateful) and not isinstance(value, type)
        problem = "which says nothing of its state; give it state_dict() and load_state_dict()"
        if isinstance(value, nn.Module | torch.optim.Optimizer):
            problem = "and the engine's model and optimizer are in each checkpoint; save others"
        elif isinstance(value, torch.utils.data.DataLoader) and not is_stateful:
            problem = "which says nothing of its state; use torchdata's StatefulDataLoader"
        elif is_stateful or is_generator(value):
            _check_state(name, value)  # type: ignore[arg-type]
            continue
        raise UnsupportedError(
            f"{name} is a {type(value).__name__}, {problem}, or put what counts into `state=`"
        )


def _check_state(name: str, value: Carried) -> None:
    state = _state_of(value)
    packed(state, f"{name}.state_dict()")
    if isinstance(value, Stateful):
        return
    try:
        _try_state(value, state)
    except _MALFORMED:
        raise UnsupportedError(
            f"{name} is a {type(value).__name__} with a getstate() of its own kind; give it "
            "state_dict() and load_state_dict()"
        ) from None


def _state_of(value: Carried) -> Any:
    # it may be a generator all the same
    return value.state_dict() if isinstance(value, Stateful) else state_of(value)


# --------------------------------------------------------------------------- saving
@dataclass(frozen=True)
class RunState:
    """The state of a run that a checkpoint keeps, from the moment at which this was made."""

    others: dict[str, torch.Tensor]  # the model's tensors that are not in tiers, live
    tensors: Archives
    record: RunRecord

    @classmethod
    def of(cls, engine: Trained, state: Mapping[str, Any] | None) -> RunState:
        """The state of all ranks, which call it together; that of the first rank has everything.

        UnsupportedError, with the name, for a value that cannot be kept."""
        ranks = engine.ranks
        with on_all(ranks, "no checkpoint was saved"):
            modules = ModuleState.of(engine)
            own = _own_archives(engine, state, modules)
        _check_names(engine.store.ranks, engine.carried)
        every = [own] if ranks is None else _on_first(ranks, own)
        with defer_signals:  # pydantic takes a Ctrl-C for an error of its own
            config = engine.config.to_dict()
        archives = _merged(every) if every else {}
        record = RunRecord(config=config, tensors=tensor_records(archives))
        return cls(modules.tensors, archives, record)


def _own_archives(
    engine: Trained, state: Mapping[str, Any] | None, modules: ModuleState
) -> Archives:
    """This rank's archives: random numbers and objects without the number of the rank."""
    generators = named_generators(engine.module, engine.device)
    archives = {
        f"{_OBJECTS}/{name}": packed(_state_of(each), f"{name}.state_dict()")
        for name, each in engine.carried.items()
    }
    for key, value in modules.values.items():
        try:
            archives[f"{_ENTRIES}/{key}"] = packed(value, f"{key} of the state dict")
        except UnsupportedError as error:
            _log.warning("the checkpoint leaves it out: %s", error)
    if state is not None:
        archives[STATE] = packed(dict(state), STATE)
    # last: what the others do for it may draw
    states = {name: _state_of(each) for name, each in generators.items()}
    archives[_RANDOM] = packed(states, "the state of the generators")
    return archives


def _check_names(ranks: RankWeights, names: Iterable[str]) -> None:
    """Raise StateError, on all ranks, unless all have registered the same names."""
    mine = crc32("\n".join(sorted(names)).encode()) >> 1
    if len({*ranks.exchange([mine], "what is registered")[:, 0].tolist()}) > 1:
        raise StateError(
            f"ranks have registered different names for checkpoints (here: "
            f"{', '.join(names) or 'none'}); register the same on all of them"
        )


def _on_first(ranks: Ranks, own: Archives) -> list[Archives]:
    """The archives of every rank, on the first rank; an empty list on the others."""
    raw = save_bytes(own)
    sizes = ranks.exchange([len(raw)], "the states of a run")[:, 0].tolist()
    if ranks.rank:
        ranks.send(torch.frombuffer(bytearray(raw), dtype=torch.uint8), 0)
        return []
    others = [
        ranks.receive(size, torch.uint8, source).numpy().tobytes()
        for source, size in enumerate(sizes[1:], start=1)
    ]
    return [own, *map(load_bytes, others)]


def _merged(every: Sequence[Archives]) -> Archives:
    """The random numbers and objects of every rank, and the rest of the first one's."""
    merged = {}
    for name, first in every[0].items():
        section, _, rest = name.partition("/")
        if section not in (_RANDOM, _OBJECTS):
            merged[name] = first
            continue
        each = [own[name] for own in every]
        if section == _OBJECTS and all(torch.equal(first, other) for other in each):
            each = each[:1]
        ending = f"/{rest}" if rest else ""
        merged |= {f"{section}/{rank}{ending}": one for rank, one in enumerate(each)}
    return merged


# --------------------------------------------------------------------------- restoring
class Restoring:
    """The part of a checkpoint's run to restore: found, read and tried before anything is changed.

    CheckpointError if a registered object has no state there, or one of another number of ranks."""

    def __init__(self, engine: Trained, reader: CheckpointReader) -> None:
        self._engine, self._reader = engine, reader
        self._sets: list[tuple[str, Callable[[], object]]] = []
        self.state: dict[str, Any] = {}
        ranks = engine.ranks
        self._rank, self._ranks = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
        buffers = {n: t.to(engine.device) for n, t in buffers_of(reader).items()}
        try:
            saved = ModuleState(buffers, self._prepare(reader.manifest.run or RunRecord()))
        except _MALFORMED as error:
            self._refuse(
                f"its state of the run is malformed: {type(error).__name__}: {error!s:.99}"
            )
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

    def _prepare(self, run: RunRecord) -> dict[str, Any]:
        """Prepare all sections, in the order in which they are in the file; returns the entries of
        modules that are no tensors."""
        self._prepare_objects(run)
        named = run.named(_ENTRIES).items()
        values = {key: value_of(self._reader, record) for key, record in named}
        self.state = state_in(self._reader)
        self._prepare_random(run.named(_RANDOM))  # last: what is set before may draw
        return values

    def _prepare_random(self, saved: Mapping[str, BufferRecord]) -> None:
        own = saved.get(str(self._rank))
        states = {} if own is None else dict(value_of(self._reader, own))
        mine = named_generators(self._engine.module, self._engine.device)
        self._tell_left(states, mine, "state of the generators", "no such generators are here")
        for name, generator in mine.items():
            if name in states:
                self._add(f"the generator {name}", generator, states[name])
        missing = [name for name in mine if name not in states]
        if missing:
            _log.warning(
                "%s has no state of the generators %s of rank %d: they go on as they are",
                self._reader.path, some_of(missing, _MAX_NAMES), self._rank,
            )  # fmt: skip

    def _prepare_objects(self, run: RunRecord) -> None:
        mine = self._engine.carried
        saved: dict[str, list[BufferRecord]] = defaultdict(list)
        for key, record in run.named(_OBJECTS).items():
            saved[key.partition("/")[2]].append(record)
        self._tell_left(saved, mine, "state of", "nothing is registered by that name here")
        for name, each in mine.items():
            if name not in saved:
                self._refuse(
                    f"it has no state of {name}; load it before that is registered, or register "
                    f"what was saved ({', '.join(saved) or 'nothing'})"
                )
            self._add(name, each, value_of(self._reader, self._own(name, saved[name])))

    def _add(self, name: str, value: Carried, state: Any) -> None:
        if isinstance(value, Stateful):
            put = partial(value.load_state_dict, state)
            self._sets.append((f"{name}.load_state_dict()", put))
            return
        _try_state(value, state)
        self._sets.append((name, partial(set_state, value, state)))

    def _tell_left(
        self, saved: Collection[str], mine: Collection[str], what: str, why: str
    ) -> None:
        left = [name for name in saved if name not in mine]
        if left:
            _log.warning(
                "%s has the %s %s, which is not taken over: %s", self._reader.path, what,
                some_of(left, _MAX_NAMES), why,
            )  # fmt: skip

    def _own(self, name: str, saved: Sequence[BufferRecord]) -> BufferRecord:
        if len(saved) not in (1, self._ranks):
            self._refuse(
                f"{name} has another state on each of the {len(saved)} ranks that saved it, and "
                f"there are {self._ranks} now; load it before that is registered, and set its "
                "state yourself"
            )
        return saved[0 if len(saved) == 1 else self._rank]


def _try_state(generator: Generator, state: Any) -> None:
    """Raise an error of `_MALFORMED` unless a generator can take a state over; it keeps its own."""
    own = state_of(generator)
    try:
        set_state(generator, state)
    finally:
        set_state(generator, own)
