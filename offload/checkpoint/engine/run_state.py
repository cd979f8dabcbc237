"""The state of a run beside the engine: random numbers, registered objects, the user's own.

    section     JSON
    config      the engine's configuration, every `auto` resolved
    random      a list, one entry per rank: generator -> its state
    objects     name -> a list of what `state_dict()` gave: one per rank, or one for all
    extra       module -> what its `get_extra_state()` gave
    entries     key of the state dict -> what modules have there that is no tensor
    versions    module -> the metadata of its state dict, where that is not just version 1
    state       what `save_checkpoint(state=)` was given

Tensors are not in the JSON: they lie in the checkpoint's file `RUN`, and what stands for one names
it.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from offload.checkpoint.engine.module_state import ModuleState
from offload.checkpoint.engine.run_merging import check_names, merged, on_first
from offload.checkpoint.engine.shards import on_all
from offload.checkpoint.format.manifest import RunRecord
from offload.checkpoint.format.user_state import Packer
from offload.process import bounded_json
from offload.swap.threads.shield import defer_signals
from offload.tiers.errors import StateError, UnsupportedError
from offload.zero.recompute.random_state import Generator, is_generator, named_generators, state_of

if TYPE_CHECKING:
    from offload.models.trained import Trained

_log = logging.getLogger("offload")


@runtime_checkable
class Stateful(Protocol):
    """A scheduler, a data loader that knows its position, a sampler, ..."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


Carried = Stateful | Generator


def check_carried(name: str, value: object) -> None:
    """Raise UnsupportedError, with a remedy, for an object without a state to save and load."""
    if isinstance(value, nn.Module | torch.optim.Optimizer):
        raise UnsupportedError(
            f"{name} is a {type(value).__name__}: the engine's model and optimizer are in each "
            "checkpoint; save others yourself, or give their state_dict() to `state=`"
        )
    if (isinstance(value, Stateful) and not isinstance(value, type)) or is_generator(value):
        Packer(0).packed("objects", _state_of(value, name), f"{name}.state_dict()")  # type: ignore[arg-type]
        return
    hint = "give it state_dict() and load_state_dict(), or put what counts into `state=`"
    if isinstance(value, torch.utils.data.DataLoader):
        hint = "use torchdata's StatefulDataLoader, or keep the position in `state=`"
    raise UnsupportedError(
        f"{name} is a {type(value).__name__}, which says nothing of its state; {hint}"
    )


def check_unnamed(carried: Mapping[str, Carried], new: Mapping[str, object]) -> None:
    """Raise StateError for a name that another object has."""
    for name, value in new.items():
        if carried.get(name, value) is not value:
            raise StateError(f"{name} is registered already, for another object; take another name")


class RunState:
    """The state of a run that a checkpoint keeps, from the moment at which this was made."""

    def __init__(
        self, others: dict[str, torch.Tensor], record: RunRecord,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:  # fmt: skip
        """`others` are the model's tensors that are not in tiers, live."""
        self.others = others
        self.record = record
        self.tensors = tensors

    @classmethod
    def of(cls, engine: Trained, state: Mapping[str, Any] | None) -> RunState:
        """The state of all ranks, which call it together; that of the first rank has everything.

        UnsupportedError, with the name, for a value that is not plain."""
        ranks = engine.runtime.ranks
        own = Packer(0 if ranks is None else ranks.rank)
        with on_all(ranks, "no checkpoint was saved"):
            modules = ModuleState.of(engine)
            values = _values_of(engine, state, own, modules)
        if ranks is not None:
            check_names(ranks, engine.carried)
        found = [(values, own.tensors)] if ranks is None else on_first(ranks, values, own.tensors)
        record, tensors = merged(found) if found else (RunRecord(sections={}), {})
        return cls(modules.tensors, record, tensors)


def _values_of(
    engine: Trained, state: Mapping[str, Any] | None, to: Packer, modules: ModuleState
) -> dict[str, Any]:
    generators = named_generators(engine.module, engine.device)
    with defer_signals:  # pydantic takes a Ctrl-C for an error of its own
        config = engine.config.to_dict()
    values = {
        "config": config,
        "objects": {
            name: to.packed("objects", _state_of(each, name), f"{name}.state_dict()")
            for name, each in engine.carried.items()
        },
        "extra": _packed_where_plain(modules.extra, to, "extra", "{}.get_extra_state()"),
        "entries": _packed_where_plain(modules.values, to, "entries", "{} of the state dict"),
        "versions": to.packed("versions", modules.versions, "the versions of state dicts"),
        "state": None if state is None else to.packed("state", dict(state), "state"),
    }  # fmt: skip
    # last: what the others do for it may draw
    values["random"] = {
        name: to.packed("random", _state_of(each, name), f"the state of the generator {name}")
        for name, each in generators.items()
    }
    _check_size(values)
    return values


def _check_size(values: dict[str, Any]) -> None:
    """Raise UnsupportedError for values too large for a manifest, before anything is written."""
    try:
        bounded_json.check_size(json.dumps(values).encode())
    except ValueError as error:
        raise UnsupportedError(
            f"the states of what is registered, and `state`, are too large: {error}; keep long "
            "lists in tensors"
        ) from None


def _packed_where_plain(
    values: Mapping[str, Any], to: Packer, section: str, name: str
) -> dict[str, Any]:
    found = {}
    for key, value in values.items():
        try:
            found[key] = to.packed(section, value, name.format(key))
        except UnsupportedError as error:
            _log.warning("the checkpoint leaves it out: %s", error)
    return found


def _state_of(value: Carried, name: str) -> Any:
    if isinstance(value, Stateful):  # it may be a generator all the same
        return value.state_dict()
    if not isinstance(value, random.Random):
        return state_of(value)
    try:
        version, key, gauss = value.getstate()
        return {"version": version, "key": np.array(key, dtype=np.uint64), "gauss": gauss}
    except (TypeError, ValueError, OverflowError, NotImplementedError):
        raise UnsupportedError(
            f"{name} is a {type(value).__name__} with a getstate() of its own kind; give it "
            "state_dict() and load_state_dict()"
        ) from None
