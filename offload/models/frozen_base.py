"""The frozen parameters of an engine, named by a hash: a checkpoint of what trains names the base
that it belongs to, and is loaded onto no other.

Of each frozen parameter the hash is XXH3-64 of the bytes that a whole checkpoint has of it (for
quantized ones: dequantized), so neither placement nor ranks nor grouping change it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from offload.checkpoint.engine import model
from offload.checkpoint.engine.shards import PieceAccess, ShardReader, refresh
from offload.checkpoint.format.manifest import BaseRecord, Manifest, ParameterRecord
from offload.display.words import some_of
from offload.tiers.errors import CheckpointError, StateError
from offload.zero.groups.group import ParamGroup

if TYPE_CHECKING:
    from offload.models.trained import Trained


class FrozenBase:
    """Hashes an engine's frozen parameters once, and again those of a group that is written to."""

    def __init__(self) -> None:
        # by the number of a saved group: the writes that it had, and its hashes by name
        self._known: dict[int, tuple[int, dict[str, str]]] = {}

    def forget(self) -> None:
        """Note that all parameters are overwritten, which the groups do not count."""
        self._known.clear()

    def record(self, engine: Trained) -> BaseRecord | None:
        """The hashes of all frozen parameters; None if there are none. All ranks call it together,
        and the first one gets the hashes. Waits for pending updates. Reads the frozen parameters
        of a group that has no hashes yet, with a buffer of one piece beyond the budgets.

        StateError if nothing trains; errors of reading, once all ranks have sent a group."""
        refresh(engine.store)
        groups = model.saved_groups(engine)
        if not any(saved.is_trained for saved in groups):
            raise StateError(
                "save_checkpoint(frozen=False) would save no parameter: all are frozen; set "
                "requires_grad of what is to train before offload.initialize, or save the whole "
                "model (frozen=True)"
            )
        names: dict[int, list[str]] = defaultdict(list)
        for record in model.parameter_records(engine):
            if not record.trainable:
                names[record.group].append(record.names[0])
        if not names:
            return None
        frozen = sorted(names)
        writes = {n: sum(group.writes.kept for group in groups[n].groups) for n in frozen}
        is_old = [int(self._known.get(n, (-1,))[0] != writes[n]) for n in frozen]
        old = engine.store.ranks.exchange(is_old, "which frozen parameters were written")
        reader = ShardReader(PieceAccess(), engine.ranks, engine.store.own.nbytes)
        entries, hashes = model.Entries(engine), defaultdict[str, Any](xxhash.xxh3_64)

        def update(group: ParamGroup, rank: int, elements: range, raw: torch.Tensor) -> None:
            size = group.dtype.itemsize
            for spec, here, _ in entries.overlaps(group.layout.params, elements):
                part = raw[here.start * size : here.stop * size].numpy()
                hashes[engine.spread.name_on(rank, spec.name)].update(part.data)

        for number in (n for n, column in zip(frozen, old.T, strict=True) if column.any()):
            for group, rank in groups[number].of_all_ranks():
                state = engine.optimizer_states[group.index]
                for elements, raw in reader.weights(state, rank, frozen=True):
                    reader.attempt(update, group, rank, elements, raw)
                    del raw
                reader.meet()
            digests = {name: hashes.pop(name, xxhash.xxh3_64()) for name in names[number]}
            known = {name: digest.hexdigest() for name, digest in digests.items()}
            self._known[number] = (writes[number], known)
        known = {name: each for n in frozen for name, each in self._known[n][1].items()}
        return BaseRecord(xxh3=known if reader.writes else {})

    def check(
        self, engine: Trained, manifest: Manifest, records: Mapping[str, ParameterRecord],
        path: Path,
    ) -> None:  # fmt: skip
        """Raise CheckpointError unless the frozen parameters are those that a checkpoint, if it
        lacks them, was saved with. `records`: its record of each of the engine's parameters. All
        ranks call it together, and the first one compares."""
        if manifest.base is None:
            return
        mine, saved = self.record(engine), manifest.base
        assert mine is not None, "the same parameters are frozen"
        others = [n for n, xxh3 in mine.xxh3.items() if xxh3 != saved.xxh3[records[n].names[0]]]
        if others:
            here, run = engine.config.to_dict().get("storage"), manifest.run
            there = None if run is None or run.config is None else run.config.get("storage")
            raise CheckpointError(
                f"{path} was not loaded: it was saved without its frozen base {saved.name}, and "
                f"this engine's is {mine.name}: {some_of(others, 3)} differ ({len(others)} of "
                f"{len(mine.xxh3)} frozen parameters); load it onto the base that it was saved "
                "with, adapters not merged into it"
                + (f", and with storage: {there} (here: {here})" if here != there else "")
            )
