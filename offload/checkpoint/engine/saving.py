"""Saving an engine's state into a checkpoint folder, one piece at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from offload.checkpoint.engine import model
from offload.checkpoint.engine.model import SavedGroup
from offload.checkpoint.engine.pieces import PieceAccess, overlaps, pieces_of
from offload.checkpoint.engine.run_state import RunState
from offload.checkpoint.engine.shards import Records, ShardReader, Weights, raise_together
from offload.checkpoint.format.disk import check_room, make_folder, storage_errors, write_text
from offload.checkpoint.format.folder import PendingFolder
from offload.checkpoint.format.manifest import (
    BUFFERS,
    MANIFEST,
    OPTIMIZER,
    PARAMETERS,
    RUN,
    FileRecord,
    GroupRecord,
    Manifest,
    ParameterRecord,
)
from offload.checkpoint.format.safetensors_file import (
    SafetensorsWriter,
    TensorInfo,
    by_width,
    field_info,
    file_nbytes,
    info_of,
    optimizer_sections,
)
from offload.checkpoint.format.user_state import tensor_records
from offload.checkpoint.format.write_behind import WriteBehind
from offload.display.progress import progress
from offload.swap.states.state import Snapshot, State
from offload.zero.groups.group import ParamGroup
from offload.zero.groups.layout import ParamSpec
from offload.zero.ranks.ranks import Ranks

if TYPE_CHECKING:
    from offload.models.trained import Trained

Sections = Mapping[str, Sequence[TensorInfo]]
_TENSORS = "tensors"


def save_engine(engine: Trained, path: Path, state: Mapping[str, Any] | None = None) -> None:
    """Save an engine; see `offload.checkpoint.save`."""
    engine.checkpoint_saved()
    check_savable(engine)
    run = RunState.of(engine, state)
    if engine.runtime.ranks is not None:
        _save_together(engine, path, run, engine.runtime.ranks)
        return
    saver = Saver(engine, run)
    with PendingFolder(path) as folder:
        saver.write(folder.path, path.name)
        folder.commit()


def check_savable(engine: Trained) -> None:
    """Wait for updates under way. StateError if a save would be of half a step."""
    engine.runtime.store.check_usable()
    model.check_stepped(engine)
    engine.settle()
    model.check_at_rest(engine, "a checkpoint cannot be saved")
    model.check_caught_up(engine)


def _save_together(engine: Trained, path: Path, run: RunState, ranks: Ranks) -> None:
    """Save on several ranks: the first writes, the others send. An error of writing, or of reading
    on any rank, is raised on every rank after all parts were sent, so that none hangs."""
    error: Exception | None = None
    saver = Saver(engine, run)
    saver.refresh()
    if saver.writes:
        try:
            with PendingFolder(path) as folder:
                saver.write(folder.path, path.name)
                folder.commit()
        except Exception as failure:  # noqa: BLE001 - raised below, on every rank
            error = failure
            saver.drain()
    else:
        saver.drain()
        error = saver.failure
    raise_together(ranks, error, f"{path} was not saved")


def _packed_section(name: str, field: str) -> str:
    """The section of a packed parameter, whose rows are those of experts one after another."""
    return f"{name}: {field}"


class Saver:
    """Writes one checkpoint. Everything that can be refused is refused when it is made."""

    def __init__(
        self, engine: Trained, run: RunState, snapshots: Mapping[State, Snapshot] | None = None
    ) -> None:  # fmt: skip
        """Prepare to save the engine's states as they are when they are read, or `snapshots` of all
        of them, which are read in any order."""
        self._runtime = engine.runtime
        self._run = run
        self._others = run.others
        self._parameters = model.parameter_records(engine, model.steps_everywhere(engine))
        self._optimizer = model.optimizer_record(engine)
        self._saved_format = model.saved_format(engine)
        self._files: dict[str, FileRecord] = {}
        self._saved = model.saved_groups(engine)
        self._wholes = model.wholes(engine)
        self._groups = [self._group_record(*each) for each in enumerate(self._saved)]
        self._manifest = Manifest(
            precision=engine.config.precision,
            steps_taken=self._runtime.stepper.taken,
            steps_skipped=self._runtime.stepper.skipped,
            loss_scale=model.loss_scale_record(engine),
            optimizer=self._optimizer,
            groups=self._groups,
            parameters=self._parameters,
            buffers=tensor_records(self._others),
            buffers_file=BUFFERS,
            files={},
            model=model.model_record(engine.module),
            run=run.record,
        )
        states = [group.state for group in self._runtime.groups]
        records = [r for state in self._runtime.optimizer_states for r in state.records]
        self._access = PieceAccess([*states, *records], snapshots)
        self._reader = ShardReader(self._access, self._runtime.ranks, self._runtime.own.nbytes)
        if self._runtime.ranks is None and snapshots is None:
            self._access.expect(self._order())
        self._parts = self._all_parts()
        self._open: Iterator[Any] = iter(())
        self.came: Callable[[int], None] = lambda nbytes: None
        self._behind: WriteBehind

    @property
    def writes(self) -> bool:
        """Whether this rank is the one that writes."""
        return self._reader.writes

    @property
    def failure(self) -> Exception | None:
        """The error in reading this rank's parts, where there are several ranks."""
        return self._reader.failure

    def refresh(self) -> None:
        """Fetch the parts that other ranks have updated, where parameters are kept whole."""
        self._runtime.rank_work.refresh(self._runtime.groups)
        for group in self._runtime.groups:
            group.state.settle()

    @property
    def saved(self) -> Sequence[SavedGroup]:
        """The saved groups, by their numbers."""
        return self._saved

    def _all_parts(self) -> Iterator[Iterator[Any]]:
        """The parts in the order in which they are written: first what belongs to no group, then
        every group's parameters and records."""
        yield self._reader.meet()
        for saved in self._saved:
            yield from self._weights_of(saved)
            yield from self._records_of(saved)

    def _weights_of(self, saved: SavedGroup) -> Iterator[Iterator[Any]]:
        for group, rank in saved.of_all_ranks():
            yield self._reader.weights(self._runtime.optimizer_states[group.index], rank)
            yield self._reader.meet()

    def _records_of(self, saved: SavedGroup) -> Iterator[Iterator[Any]]:
        for group, rank in saved.of_all_ranks():
            if group.layout.numel_trainable:
                state = self._runtime.optimizer_states[group.index]
                yield self._reader.records(state, self._saved_format, rank)
                yield self._reader.meet()

    def _order(self) -> Iterator[tuple[State, int]]:
        """Pieces in the order of `_all_parts`, on one rank."""
        for saved in self._saved:
            yield from pieces_of(group.state for group in saved.groups)
            yield from pieces_of(self._records_in(saved))

    def _records_in(self, saved: SavedGroup) -> Iterator[State]:
        for group in saved.groups:
            yield from self._runtime.optimizer_states[group.index].records

    def _take(self) -> Iterator[Any]:
        """The next piece to be written."""
        self._open = next(self._parts)
        return self._open

    def drain(self) -> None:
        """Take this rank's part in the rest of the save, and write nothing."""
        for part in (self._open, *self._parts):
            for _ in part:
                pass

    def _group_record(self, number: int, saved: SavedGroup) -> GroupRecord:
        file = f"{number:03d}.safetensors"
        return GroupRecord(
            name=saved.name,
            parameters=f"{PARAMETERS}/{file}",
            optimizer=f"{OPTIMIZER}/{file}" if saved.is_trained else None,
        )

    def write(self, folder: Path, name: str) -> None:
        """Write every file, the manifest last. `name`: the final name of the folder."""
        with WriteBehind() as behind, progress(f"saving {name}", self.nbytes()) as self.came:
            self.begin(folder, behind)
            self._write_others(folder)
            self._meet()
            for number in range(len(self._saved)):
                self._write_weights(folder, number)
                self._write_records(folder, number)
            self.finish(folder)

    # ---------------------------------------------------------------- in steps of their own
    def begin(self, folder: Path, behind: WriteBehind) -> None:
        """Make the subfolders in `folder`, if there is room for the files."""
        self._behind = behind
        check_room(folder, self.nbytes())
        with storage_errors("creating", folder):
            make_folder(folder / PARAMETERS)
            make_folder(folder / OPTIMIZER)

    def write_fixed(self, folder: Path, numbers: Sequence[int]) -> None:
        """Write the tensors of no group, and the parameters of the groups of these numbers."""
        self._write_others(folder)
        for number in numbers:
            self._parts = self._weights_of(self._saved[number])
            self._access.expect(pieces_of(group.state for group in self._saved[number].groups))
            self._write_weights(folder, number)

    def write_rest(self, folder: Path, number: int) -> None:
        """Write the part of a group that `write_fixed` did not write."""
        saved = self._saved[number]
        if self._groups[number].parameters not in self._files:
            self._parts = self._weights_of(saved)
            self._access.expect(pieces_of(group.state for group in saved.groups))
            self._write_weights(folder, number)
        self._parts = self._records_of(saved)
        self._access.expect(pieces_of(self._records_in(saved)))
        self._write_records(folder, number)

    def finish(self, folder: Path) -> None:
        """Wait until all files are on the device, and write the manifest last."""
        self._behind.finish()
        names = [(group.parameters, group.optimizer) for group in self._groups]
        order = [*(file for both in names for file in both if file is not None), BUFFERS, RUN]
        files = {file: self._files[file] for file in order}
        manifest = self._manifest.model_copy(update={"files": files})
        write_text(folder / MANIFEST, manifest.to_json())

    # ---------------------------------------------------------------- what each file holds
    def nbytes(self) -> int:
        """The number of bytes of all files but the manifest."""
        total = file_nbytes(self._other_sections(), {}) + file_nbytes(self._run_sections(), {})
        for number, record in enumerate(self._groups):
            total += file_nbytes(self._parameter_sections(number), self._metadata(number))
            if record.optimizer is not None:
                total += file_nbytes(self._optimizer_sections(number), {})
        return total

    def _of(self, number: int) -> list[ParameterRecord]:
        return [record for record in self._parameters if record.group == number]

    def _parameter_sections(self, number: int) -> Sections:
        if self._saved[number].packed:
            return {
                _packed_section(record.names[0], _TENSORS): [info_of(record)]
                for record in self._of(number)
            }
        return {_TENSORS: [info_of(record) for record in self._of(number)]}

    def _optimizer_sections(self, number: int) -> Sections:
        fields = self._optimizer.fields
        if not self._saved[number].packed:
            return optimizer_sections(self._of(number), fields)
        return {
            _packed_section(record.names[0], field): [field_info(record, field, dtype)]
            for field, dtype in by_width(fields)
            for record in self._of(number) if record.trainable
        }  # fmt: skip

    def _other_sections(self) -> Sections:
        return {_TENSORS: [info_of(record) for record in self._manifest.buffers]}

    def _run_sections(self) -> Sections:
        return {_TENSORS: [info_of(record) for record in self._run.record.tensors]}

    def _metadata(self, number: int) -> dict[str, str]:
        tied = {alias: r.names[0] for r in self._of(number) for alias in r.names[1:]}
        metadata = {"format": "pt", "group": self._groups[number].name}
        return {**metadata, "tied": json.dumps(tied)} if tied else metadata

    # ---------------------------------------------------------------- writing
    def _write_weights(self, folder: Path, number: int) -> None:
        """Write one group's file of parameters: experts come one after another."""
        saved, record = self._saved[number], self._groups[number]
        with SafetensorsWriter(
            folder / record.parameters, self._parameter_sections(number), self._metadata(number),
            self._manifest.bound_to(record.parameters), self._behind,
        ) as file:  # fmt: skip
            for group, _ in saved.of_all_ranks():
                self._write_parameters(file, group, self._take(), packed=saved.packed)
                self._meet()
            self._files[record.parameters] = file.finish()

    def _write_records(self, folder: Path, number: int) -> None:
        """Write one group's file of optimizer states, if it is trained."""
        saved, record = self._saved[number], self._groups[number]
        if record.optimizer is None:
            return
        with SafetensorsWriter(
            folder / record.optimizer, self._optimizer_sections(number), {"group": record.name},
            self._manifest.bound_to(record.optimizer), self._behind,
        ) as file:  # fmt: skip
            for group, _ in saved.of_all_ranks():
                if group.layout.numel_trainable:
                    self._write_optimizer(file, group, self._take(), packed=saved.packed)
                    self._meet()
            self._files[record.optimizer] = file.finish()

    def _meet(self) -> None:
        """Finish a part, after all of it was read. Raises what went wrong in reading it."""
        for _ in self._take():
            pass
        if self.failure is not None:
            raise self.failure

    def _write_parameters(
        self, file: SafetensorsWriter, group: ParamGroup, weights: Weights, *, packed: bool
    ) -> None:
        itemsize = group.dtype.itemsize
        for elements, raw in weights:
            for spec, here, _ in overlaps(group.layout.params, elements):
                part = raw[here.start * itemsize : here.stop * itemsize]
                file.append(self._section(spec, packed, _TENSORS), part.numpy().data)
            self.came(raw.nbytes)
            del raw

    def _write_optimizer(
        self, file: SafetensorsWriter, group: ParamGroup, records: Records, *, packed: bool
    ) -> None:
        specs = [spec for spec in group.layout.params if spec.trainable]
        for elements, arrays in records:
            for spec, here, _ in overlaps(specs, elements):
                for field, span in self._saved_format.field_spans(here).items():
                    part = arrays[field][span].view(np.uint8)
                    file.append(self._section(spec, packed, field), part.data)
                    self.came(part.nbytes)
            arrays.clear()

    def _section(self, spec: ParamSpec, packed: bool, name: str) -> str:
        return _packed_section(self._wholes[spec.name].spec.name, name) if packed else name

    def _write_others(self, folder: Path) -> None:
        """Write what is not in tiers: buffers, and tensors of the run beside the engine."""
        self._write_tensors(folder, BUFFERS, self._other_sections(), self._others)
        self._write_tensors(folder, RUN, self._run_sections(), self._run.tensors)

    def _write_tensors(
        self, folder: Path, name: str, sections: Sections, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        with SafetensorsWriter(
            folder / name, sections, {"format": "pt"}, self._manifest.bound_to(name), self._behind
        ) as file:
            for tensor in tensors.values():
                if tensor.numel():
                    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
                    flat = flat.copy_(tensor.detach().reshape(-1)).view(torch.uint8)
                    file.append(_TENSORS, flat.numpy().data)
            self._files[name] = file.finish()
