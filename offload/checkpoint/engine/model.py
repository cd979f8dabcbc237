"""A checkpoint's view of an engine, apart from the bytes in its tiers."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from offload.checkpoint.engine.shards import whole_state
from offload.checkpoint.format.manifest import (
    MasterName,
    ModelRecord,
    OptimizerRecord,
    ParameterRecord,
    ParamGroupRecord,
)
from offload.checkpoint.format.user_state import DTYPE_NAMES
from offload.checkpoint.format.writer import fields_of
from offload.kernels.floats import Array
from offload.kernels.rules import BLOCK, StateFormat
from offload.kernels.variants import Master
from offload.swap.states.state import State
from offload.tiers.errors import StateError, UnsupportedError
from offload.zero.groups.group import ParamGroup
from offload.zero.groups.layout import ParamSpec
from offload.zero.step.records import RecordFormat

if TYPE_CHECKING:
    from offload.models.trained import Trained

_log = logging.getLogger("offload")


def check_stepped(engine: Trained) -> None:
    """Raise StateError if a save would lose gradients."""
    if engine.has_unstepped_gradients():
        raise StateError(
            "gradients wait for optimizer.step() and are no part of a checkpoint: what is resumed "
            "from it would differ; save after the step, or drop them with optimizer.zero_grad()"
        )


# --------------------------------------------------------------------------- tensors
@dataclass(frozen=True)
class SavedGroup:
    """A unit with one file for its parameters and one for its records: a group, or all experts of a
    module, including those on other ranks. Packed parameters are whole in it, as if no expert were
    a group of its own."""

    name: str
    groups: list[ParamGroup]
    packed: bool = False

    def of_all_ranks(self) -> Iterator[tuple[ParamGroup, int]]:
        """The groups in the order in which they are written, each with the rank that owns it."""
        for rank in range(self.groups[0].ep_size):
            yield from ((group, rank) for group in self.groups)

    @property
    def is_trained(self) -> bool:
        return any(group.layout.numel_trainable for group in self.groups)


def saved_states(engine: Trained, *, frozen: bool = True) -> list[State]:
    """The states that this rank reads for a checkpoint: of each group the parameters, then the
    records; one rank alone reads what all have whole. Without `frozen` those of groups with trained
    parameters."""
    states, rank = list[State](), engine.store.ranks.rank
    for each in engine.optimizer_states:
        if frozen or each.group.layout.numel_trainable:
            senders = each.part.layout.ranks * each.group.ep_size  # the first replica's ranks
            if rank < (senders if each.part.is_shard else each.group.ep_size):
                states.append(whole_state(each.group))
            states += each.records if rank < senders else ()
    return [state for state in states if state.nbytes]


def saved_groups(engine: Trained) -> list[SavedGroup]:
    """The saved groups in the order of groups: the experts of a module are side by side."""
    groups: list[SavedGroup] = []
    store = engine.store
    for group in store.groups:
        table = store.table_of(group)
        if table is None:
            groups.append(SavedGroup(group.name, [group]))
        elif group is table.groups[0]:
            groups.append(SavedGroup(table.name, table.groups, bool(table.packed)))
    return groups


class Entries:
    """The entries of a checkpoint: parameters as the model has them, of which a group may have a
    part (the row of one expert)."""

    def __init__(self, engine: Trained) -> None:
        store = engine.store
        # by the name in the group: the whole parameter, and the number of the part's first element
        self._wholes = {
            spec.name: store.whole_of(param)
            for group in store.groups
            for spec, param in zip(group.layout.params, group.params, strict=True)
        }

    def whole(self, spec: ParamSpec) -> ParamSpec:
        """The entry that a group's parameter is in."""
        return self._wholes[spec.name][0]

    def overlaps(
        self, specs: Sequence[ParamSpec], elements: range
    ) -> Iterator[tuple[ParamSpec, slice, slice]]:
        """The entries in a range of a group's flat buffer, each with its slices there and in
        itself."""
        for spec in specs:
            lo, hi = max(spec.offset, elements.start), min(spec.stop, elements.stop)
            if lo < hi:
                whole, first = self._wholes[spec.name]
                here = slice(lo - elements.start, hi - elements.start)
                yield whole, here, slice(first + lo - spec.offset, first + hi - spec.offset)


StepsOf = Callable[[ParamGroup, int], Array]  # of the trained parameters of a group, on a rank


def parameter_records(engine: Trained, steps_of: StepsOf | None = None) -> list[ParameterRecord]:
    """Every managed parameter of all ranks, in the order of groups and layouts. Without `steps_of`
    (see `steps_everywhere`) all ranks' experts have the numbers of steps of this rank's."""
    dtype = DTYPE_NAMES[engine.store.dtype]
    records = []
    for number, saved in enumerate(saved_groups(engine)):
        for group, rank in [*saved.of_all_ranks()][: 1 if saved.packed else None]:
            own = engine.optimizer_states[group.index].steps
            steps = own if steps_of is None else steps_of(group, rank)
            for index, param in enumerate(group.params):
                spec, _ = engine.store.whole_of(param)
                records.append(
                    ParameterRecord(
                        names=[engine.spread.name_on(rank, name) for name in spec.names],
                        dtype=dtype, shape=list(spec.shape), trainable=spec.trainable,
                        # trainable parameters come first in a layout, so both indices agree
                        steps=int(steps[index]) if spec.trainable else 0, group=number,
                    )
                )  # fmt: skip
    return records


def steps_everywhere(engine: Trained) -> StepsOf:
    """The numbers of updates of parameters, on all ranks together where experts are spread."""
    mine = [state.steps for state in engine.optimizer_states]
    if engine.spread.ep_size == 1:
        return lambda group, _: mine[group.index]
    updates = np.concatenate(mine).tolist()
    rows = engine.store.ranks.exchange(updates, "how often each was updated")
    ends = np.cumsum([len(each) for each in mine])
    return lambda group, rank: np.split(rows[rank], ends)[group.index]


def model_record(model: nn.Module) -> ModelRecord | None:
    """The record of a transformers model; None for others."""
    library = sys.modules.get("transformers.modeling_utils")  # imported, if there is such a model
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    known: Any = model
    generation = known.generation_config if known.can_generate() else None
    folder = Path(known.name_or_path) if known.name_or_path else None
    try:
        config = json.loads(known.config.to_json_string())
        made = None if generation is None else json.loads(generation.to_json_string())
    except (TypeError, ValueError) as error:
        _log.warning(
            "the checkpoint does not keep the configuration of %s, which is no JSON: %s; name a "
            "folder that has it when you export it", type(model).__name__, error,
        )  # fmt: skip
        return None
    return ModelRecord(
        config={**config, "architectures": [type(model).__name__]},
        generation_config=made,
        tied=sorted(getattr(known, "all_tied_weights_keys", None) or {}),
        folder=str(folder.resolve()) if folder is not None and folder.is_dir() else None,
    )


def saved_format(engine: Trained) -> RecordFormat:
    """The format in which a checkpoint keeps optimizer records: that of the engine; fp32 if rows of
    a packed parameter would share a block of 8-bit states."""
    states = engine.optimizer_states
    trained = [state for state in states if state.records]
    trained.sort(key=lambda state: state.group.matrices)  # Muon's have another format
    kept = next((state.record_format for state in trained), _EMPTY)
    uneven = kept.state_format is StateFormat.INT8 and any(
        packed.rows[0].numel() % BLOCK for packed in engine.store.packed
    )
    return replace(kept, state_format=StateFormat.FP32) if uneven else kept


_EMPTY = RecordFormat(Master.NONE)  # of a frozen model
_MASTERS: dict[Master, MasterName] = {
    Master.NONE: "none", Master.SPLIT: "split", Master.FP32: "fp32"
}  # fmt: skip


# --------------------------------------------------------------------------- numbers
def optimizer_record(engine: Trained) -> OptimizerRecord:
    """The optimizer's kind and the numbers of its param groups."""
    saved, spread = saved_format(engine), engine.spread

    def names_of(param: nn.Parameter) -> list[str]:
        """The names of a parameter; of an expert that is spread, also those on other ranks."""
        spec = engine.store.spec_of(param)
        assert spec is not None, "the optimizer takes managed parameters only"
        return [spread.name_on(rank, spec.name) for rank in spread.owners(spec.name)]

    return OptimizerRecord(
        type=engine.config.optimizer.type,
        master=_MASTERS[saved.master],
        states=saved.state_format.name.lower(),
        fields=fields_of(saved),
        param_groups=[
            ParamGroupRecord(
                numbers={
                    key: _plain(key, value) for key, value in group.items() if key != "params"
                },
                params=[name for param in group["params"] for name in names_of(param)],
            )
            for group in engine.optimizer.param_groups
        ],
    )


def _plain(key: str, value: Any) -> Any:
    """A param group's number as an exact JSON value."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(key, item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnsupportedError(
        f"param_groups[...]['{key}'] is a {type(value).__name__}, which a checkpoint cannot hold; "
        "keep numbers, strings or lists of them there"
    )


def restore_numbers(group: dict[str, Any], numbers: dict[str, Any]) -> None:
    """Undo `_plain`, into a param group; a learning rate in a tensor stays in the tensor."""
    for key, value in numbers.items():
        present = group.get(key)
        if isinstance(present, torch.Tensor):
            present.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, list) else value
