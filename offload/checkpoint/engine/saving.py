"""Saving an engine's state into a checkpoint folder, one piece at a time.

Every rank goes through the same groups: rank 0 writes, the others send their parts to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from offload.checkpoint.engine import model
from offload.checkpoint.engine.run_state import RunState
from offload.checkpoint.engine.shards import PieceAccess, ShardReader, Snapshots, on_all, refresh
from offload.checkpoint.format.folder import PendingFolder
from offload.checkpoint.format.manifest import (
    BUFFERS,
    RUN,
    GroupRecord,
    LossScaleRecord,
    Manifest,
    ParameterRecord,
)
from offload.checkpoint.format.safetensors_file import (
    SafetensorsWriter,
    TensorInfo,
    info_of,
    optimizer_sections,
)
from offload.checkpoint.format.user_state import tensor_records
from offload.checkpoint.format.writer import CheckpointWriter, Sections, group_record
from offload.display.byte_progress import progress
from offload.kernels.floats import Array
from offload.swap.states.state import State
from offload.tiers.errors import IntegrityError
from offload.zero.groups.group import ParamGroup
from offload.zero.ranks.ranks import Ranks
from offload.zero.step.optimizer_state import OptimizerState

if TYPE_CHECKING:
    from offload.models.trained import Trained


def save_engine(
    engine: Trained, path: Path, state: Mapping[str, Any] | None, *, frozen: bool
) -> None:  # fmt: skip
    """Write the engine's state to the folder `path`, replacing an existing checkpoint, with
    random numbers, the configuration, registered objects, and `state`, which has plain values.
    Without `frozen` the frozen parameters are left out, and hashes of them written.

    Waits for pending updates first and changes nothing in the engine. Streams: beyond the engine's
    budgets it holds one chunk. Whenever the process dies, `path` holds the old checkpoint or the
    new one, complete. Gradients are not part of a checkpoint.

    Several processes may save at once. One that loads what another process replaces meanwhile gets
    a CheckpointError. Files that belong to no checkpoint are never replaced or removed.

    Raises StateError while gradients wait for a step, inside `engine.gathered`, or after a load
    that failed half-way; PathError if `path` cannot be written or holds something else;
    NoSpaceError and StorageError for errors of the disk. The old checkpoint is intact then. With
    several ranks an error of writing, or of reading on any rank, is raised on every rank, where
    they meet behind a group, so that none hangs.
    """
    saver = Saver(engine, path, state, engine.ranks, frozen=frozen)
    shown = progress(f"saving {path.name}", saver.nbytes())
    with on_all(engine.ranks, saver.failed), shown as saver.on_bytes, ExitStack() as held:
        saver.begin(held)
        for number in range(len(saver.saved)):
            saver.write_group(number)
        saver.commit()


def check_savable(engine: Trained) -> None:
    """Wait for pending updates. Raise StateError if the save would hold half of a step."""
    engine.store.check_usable()
    model.check_stepped(engine)
    engine.settle()
    engine.store.refuse_amid_use("a checkpoint cannot be saved")
    states = engine.optimizer_states
    for packed in engine.store.packed:
        if packed.spec.trainable:  # a checkpoint has one number of updates for all its rows
            steps = {int(states[group.index].steps[at]) for group, at in packed.places}
            if len(steps) > 1:
                raise IntegrityError(
                    f"{packed.name}: its experts were updated {sorted(steps)} times, and should be "
                    "even by now; no checkpoint was written (a fault of offload's)"
                )


class Saver:
    """Writes one checkpoint. `__init__` raises every error that is known before writing."""

    def __init__(
        self, engine: Trained, path: Path, state: Mapping[str, Any] | None, ranks: Ranks | None,
        snapshots_of: Callable[[Sequence[State]], Snapshots] = lambda states: {}, *, frozen: bool,
    ) -> None:  # fmt: skip
        """Prepare to save the engine's states as they are when they are read, or of those that
        `snapshots_of` returns the snapshots, which keep their bytes and can be read in any order.
        Without `frozen` the frozen parameters are left out. Parts are sent between `ranks`."""
        self._path, self.failed = path, f"{path} was not saved"
        with on_all(engine.ranks, self.failed):
            check_savable(engine)
        self._run = RunState.of(engine, state)
        refresh(engine.store)
        with on_all(engine.ranks, self.failed):
            base = None if frozen else engine.frozen_base.record(engine)
            self.snapshots = snapshots_of(model.saved_states(engine, frozen=base is None))
        self._states = engine.optimizer_states
        self._saved_format = model.saved_format(engine)
        self.saved = model.saved_groups(engine)  # by their numbers
        self._entries = model.Entries(engine)
        self._name_on = engine.spread.name_on  # maps an expert's name to its name on another rank
        scale = None
        if (kept := engine.loss_scale) is not None:
            scale = LossScaleRecord(scale=kept.scale, good_steps=kept.good_steps)
        self._manifest = Manifest(
            precision=engine.config.precision,
            steps_taken=engine.steps.taken,
            steps_skipped=engine.steps.skipped,
            loss_scale=scale,
            optimizer=model.optimizer_record(engine),
            groups=[self._group_record(number, base is None) for number in range(len(self.saved))],
            parameters=model.parameter_records(engine, model.steps_everywhere(engine)),
            buffers=tensor_records(self._run.others),
            buffers_file=BUFFERS,
            files={},
            model=model.model_record(engine.module),
            run=self._run.record,
            base=base,
        )
        access = PieceAccess(self.snapshots)
        self.reader = ShardReader(access, ranks, engine.store.own.nbytes)
        self.has_parameters: set[int] = set()  # groups whose parameters were written
        self.on_bytes: Callable[[int], None] = lambda nbytes: None  # called after each write
        # set by `begin`, on the rank that writes
        self.folder: PendingFolder
        self._files: CheckpointWriter
        self._file: SafetensorsWriter  # the one that is being filled

    def begin(self, held: ExitStack) -> None:
        """Make the checkpoint's folder, which is removed when `held` is closed after an error, and
        write the tensors that are in no group: buffers, random states and the caller's state."""
        self.reader.attempt(self._begin, held)
        self.reader.meet()

    def _begin(self, held: ExitStack) -> None:
        self.folder = held.enter_context(PendingFolder(self._path))
        self._files = CheckpointWriter(self.folder.path, self._manifest, self.nbytes())
        self._files.write_tensors(BUFFERS, self._manifest.buffers, self._run.others.values())
        self._files.write_tensors(RUN, self._run.record.tensors, self._run.tensors.values())

    def write_group(self, number: int) -> None:
        """Write the files of a group, except parameters already written by `write_parameters`."""
        self.write_parameters(number)
        name = self._manifest.groups[number].optimizer
        if name is not None:
            self._write(
                number, name, self._states_of(number), {}, self._records, self._append_records
            )  # fmt: skip

    def commit(self) -> None:
        """Write the manifest and give the folder its name, if no rank has failed."""
        self.reader.meet()
        self.reader.attempt(self._commit)
        self.reader.meet()

    def _commit(self) -> None:
        self._files.finish()
        self.folder.commit()

    def nbytes(self) -> int:
        """The number of bytes of all tensors."""
        infos = [info_of(record) for record in self._manifest.stored]
        infos += map(info_of, (*self._manifest.buffers, *self._run.record.tensors))
        for number in range(len(self.saved)):
            infos += chain(*self._states_of(number))
        return sum(info.nbytes for info in infos)

    def _group_record(self, number: int, frozen: bool) -> GroupRecord:
        saved = self.saved[number]
        kept = self._saved_format.of(matrices=True) if saved.groups[0].matrices else None
        is_trained = saved.is_trained
        return group_record(number, saved.name, is_trained=is_trained, frozen=frozen, kept=kept)

    def _states_of(self, number: int) -> list[list[TensorInfo]]:
        records = self._of(number)
        return optimizer_sections(records, self._manifest.fields_of(records[0])) if records else []

    def _of(self, number: int) -> list[ParameterRecord]:
        return [record for record in self._manifest.stored if record.group == number]

    # ---------------------------------------------------------------- writing
    def write_parameters(self, number: int) -> None:
        """Write a group's file of parameters, if it has one, and not yet."""
        name = self._manifest.groups[number].parameters
        if name is None or number in self.has_parameters:
            return
        sections = [[info_of(record) for record in self._of(number)]]
        weights = partial(
            self.reader.weights, frozen=None if self._manifest.base is None else False
        )
        self._write(number, name, sections, {"format": "pt"}, weights, self._append_weights)
        self.has_parameters.add(number)

    def _write(
        self, number: int, name: str, sections: Sections, metadata: Mapping[str, str],
        parts: Callable[[OptimizerState, int], Iterator[tuple[range, Any]]],
        append: Callable[[ParamGroup, range, Any, int], None],
    ) -> None:  # fmt: skip
        """Write one file of a group, one expert after another."""
        saved, reader = self.saved[number], self.reader
        if saved.packed:  # each parameter gets a section of its own: rows of one after another
            sections = [[info] for info in chain(*sections)]
        reader.attempt(self._open, name, sections, {**metadata, "group": saved.name})
        for group, rank in saved.of_all_ranks():
            for elements, part in parts(self._states[group.index], rank):
                reader.attempt(append, group, elements, part, rank)
                del part
            reader.meet()
        reader.attempt(lambda: self._files.close(name, self._file))

    def _records(self, state: OptimizerState, rank: int) -> Iterator[tuple[range, Any]]:
        if state.group.layout.numel_trainable:
            kept = self._saved_format.of(matrices=state.group.matrices)
            yield from self.reader.records(state, kept, rank)

    def _open(self, name: str, sections: Sections, metadata: Mapping[str, str]) -> None:
        self._file = self._files.open(name, sections, metadata)

    def _append_weights(
        self, group: ParamGroup, elements: range, raw: torch.Tensor, rank: int
    ) -> None:
        itemsize = group.dtype.itemsize
        for spec, here, _ in self._entries.overlaps(group.layout.params, elements):
            part = raw[here.start * itemsize : here.stop * itemsize]
            self._file.append(self._name_on(rank, spec.name), part.numpy().data)
        self.on_bytes(raw.nbytes)

    def _append_records(
        self, group: ParamGroup, elements: range, arrays: Mapping[str, Array], rank: int
    ) -> None:
        specs = [spec for spec in group.layout.params if spec.trainable]
        for spec, here, _ in self._entries.overlaps(specs, elements):
            kept = self._saved_format.of(matrices=group.matrices)
            for field, span in kept.field_spans(here).items():
                part = arrays[field][span].view(np.uint8)
                self._file.append(f"{self._name_on(rank, spec.name)}.{field}", part.data)
                self.on_bytes(part.nbytes)
