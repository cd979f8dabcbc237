"""An engine's weights as a stream, for files that are not our checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from offload.checkpoint.engine import model
from offload.checkpoint.engine.pieces import PieceAccess
from offload.checkpoint.engine.shards import ShardReader, on_all, refresh, whole_state
from offload.display.byte_progress import progress
from offload.tiers.errors import UnsupportedError
from offload.zero.groups.layout import ParamSpec

if TYPE_CHECKING:
    from offload.models.trained import Trained

Part = tuple[ParamSpec, range, torch.Tensor]
Take = Callable[[ParamSpec, range, torch.Tensor], None]


def stream_weights(engine: Trained, take: Take) -> None:
    """Call `take(spec, elements, raw)` for every part of every parameter, from its first element to
    its last: `elements` of the parameter, and their bytes (1D uint8, valid during the call), in the
    format that the model computes in. Parts of one parameter may come between those of another.

    Waits for pending updates first and changes nothing in the engine; one piece is in memory at a
    time. With several ranks all have to call it; `take` is called on the first one, and its errors,
    and those of reading a rank's part, are raised on every rank.

    StateError inside `engine.gathered` or a forward, or after a load that failed half-way;
    UnsupportedError where experts are spread over ranks.
    """
    if engine.spread.ep_size > 1:
        raise UnsupportedError(
            f"this rank has 1 of {engine.spread.ep_size} parts of the model's experts, and would "
            "write no others; use engine.save_checkpoint, which writes all, and `offload "
            "checkpoint export`"
        )
    runtime = engine.runtime
    itemsize = runtime.own.nbytes
    nbytes = itemsize * sum(spec.numel for g in runtime.groups for spec in g.layout.params)
    access = PieceAccess([whole_state(group) for group in runtime.groups])
    reader = ShardReader(access, runtime.ranks, itemsize)
    with (
        on_all(runtime.ranks, "the model's weights were not saved"),
        progress("saving weights", nbytes) as came,
    ):
        for spec, elements, raw in _parts(engine, reader):
            reader.attempt(take, spec, elements, raw)
            came(len(elements) * itemsize)
            del raw
        reader.raise_failure()


def _parts(engine: Trained, reader: ShardReader) -> Iterator[Part]:
    runtime = engine.runtime
    runtime.store.check_usable()
    engine.values.adopt_changes()
    engine.settle()
    engine.runtime.store.refuse_amid_use("weights cannot be saved")
    refresh(runtime)
    itemsize = runtime.own.nbytes
    entries = model.Entries(engine)
    for state in runtime.optimizer_states:
        for elements, raw in reader.weights(state):
            for spec, here, there in entries.overlaps(state.group.layout.params, elements):
                part = raw[here.start * itemsize : here.stop * itemsize]
                yield spec, range(there.start, there.stop), part
                del part
            del raw
        reader.meet()
