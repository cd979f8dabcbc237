"""Loading a checkpoint into an engine, one piece at a time, each compared with its hashes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from offload.checkpoint.engine import model
from offload.checkpoint.engine.run_state import Restoring
from offload.checkpoint.engine.shards import (
    PieceAccess,
    elements_of,
    on_all,
    own_ranges,
    shifted,
    whole_state,
)
from offload.checkpoint.format.folder import adopt
from offload.checkpoint.format.manifest import Manifest, OptimizerRecord, ParameterRecord
from offload.checkpoint.format.reader import CheckpointReader
from offload.checkpoint.format.writer import fields_of
from offload.display.byte_progress import progress
from offload.kernels.floats import Array
from offload.tiers.errors import CheckpointError, UnsupportedError
from offload.zero.groups.group import ParamGroup
from offload.zero.groups.layout import ParamSpec
from offload.zero.ranks.rank_weights import RankWeights
from offload.zero.step.optimizer_state import OptimizerState
from offload.zero.step.records import RecordFormat

if TYPE_CHECKING:
    from offload.models.trained import Trained

_log = logging.getLogger("offload")
_WEIGHTS = (
    "to start from its weights alone: `offload checkpoint export` and "
    "offload.initialize(..., weights=)"
)


def load_engine(engine: Trained, path: Path) -> dict[str, Any]:
    """Load the checkpoint `path`, saved under any placement, budget or chunk size. Returns the
    `state` that it was saved with.

    Sets parameters, optimizer states, step counts, the param groups' numbers, the loss scale,
    persistent buffers, random numbers and registered objects; forgets gradients. Training then
    goes on bit for bit as it would have.

    Everything is read once, and each block is compared with its hash as it comes. Whether the
    checkpoint is of this engine, and has all files and tensors, is known before: such a
    CheckpointError leaves the engine as it was. A damaged block, a StorageError, or a module whose
    `load_state_dict` refuses its buffers or extra state is met half-way and leaves a mixture, so
    the engine then refuses to train, read or save (StateError) until a load succeeds. `offload
    checkpoint verify` looks without loading.
    """
    engine.settle()
    engine.store.refuse_amid_use("a checkpoint cannot be loaded")
    ranks, failed = engine.ranks, f"{path} was not loaded"
    with ExitStack() as stack:
        with on_all(ranks, failed):
            loader, beside = _open(engine, path, stack)
        loader.check_alike(engine.store.ranks)
        with on_all(ranks, failed):
            engine.frozen_base.check(engine, loader.manifest, loader.records, path)
        half_way = engine.store.unusable = (
            f"loading {path} failed half-way, so parameters and optimizer states are a mixture; "
            "load a checkpoint again, or make a new engine"
        )
        with on_all(ranks, failed), progress(f"loading {path.name}", loader.nbytes) as on_bytes:
            loader.apply(on_bytes)
        engine.store.unusable = None  # modules may look at their parameters
        try:
            with on_all(ranks, failed):
                beside.modules.apply()
        except BaseException:
            engine.store.unusable = half_way  # on every rank: one alone would wait for this one
            raise
        with on_all(ranks, failed):
            beside.apply()
        return beside.state


def _open(engine: Trained, path: Path, stack: ExitStack) -> tuple[_Loader, Restoring]:
    """Open the checkpoint and check that it belongs to this engine, and that its files have all
    tensors: later steps find no reason to refuse it but damage."""
    adopt(path)
    reader = stack.enter_context(CheckpointReader(path))
    reader.check(contents=False)
    records = _match(engine, reader.manifest, path)
    reader.check_tensors()
    loader = _Loader(engine, reader, records)
    return loader, Restoring(engine, reader)


class _Loader:
    def __init__(
        self, engine: Trained, reader: CheckpointReader, records: dict[str, ParameterRecord]
    ) -> None:
        self._engine = engine
        self._reader = reader
        self.manifest = reader.manifest
        self.records = records  # by the engine's first name
        self._entries = model.Entries(engine)
        self._saved_format = model.saved_format(engine)
        self._states = engine.optimizer_states
        self._access = PieceAccess()

    def check_alike(self, ranks: RankWeights) -> None:
        """Raise CheckpointError, on every rank, unless all of them have opened the same checkpoint:
        if each looks for the newest one, or has a disk of its own, one may find another."""
        steps, digest = self.manifest.steps_taken, self._reader.digest
        mine = [digest >> 33, digest & 0x7FFFFFFF, min(steps, 0x7FFFFFFF)]
        rows = ranks.exchange(mine, "which checkpoint is loaded").tolist()
        if all(row == rows[0] for row in rows):
            return
        taken = ", ".join(f"{row[2]} on rank {rank}" for rank, row in enumerate(rows))
        raise CheckpointError(
            f"{self._reader.path} was not loaded: ranks have opened different checkpoints (steps "
            f"taken: {taken}); name the same one on all of them, a copy of it where they do not "
            "share a disk"
        )

    # ---------------------------------------------------------------- applying
    @property
    def nbytes(self) -> int:
        """The number of bytes of all states that are loaded here."""
        return sum(state.nbytes for state in self._states)

    def apply(self, on_bytes: Callable[[int], None]) -> None:
        """Load everything, group by group; returns when every byte is home. `on_bytes` is called
        with the number of bytes that have arrived."""
        self._engine.steps.forget()
        if self.manifest.base is None:
            self._engine.frozen_base.forget()
        for state in self._states:
            self._read_parameters(state)
            self._read_optimizer(state)
            for index, spec in enumerate(state.group.layout.params):
                if spec.trainable:
                    state.steps[index] = self.records[self._entries.whole(spec).name].steps
            state.group.invalidate()  # handles of activations saved before are stale
            state.group.state.settle()
            for record in state.records:
                record.settle()
            on_bytes(state.nbytes)
        self._read_numbers()
        self._tell_of_rounding()

    def _read_parameters(self, state: OptimizerState) -> None:
        """Read the parameters that this rank keeps, of all of them or of its shard."""
        group, home, itemsize = state.group, whole_state(state.group), state.group.dtype.itemsize
        keeps = self.manifest.base is not None
        for piece in range(home.pieces):
            ranges = own_ranges(state, elements_of(home, piece, itemsize))
            read = [r for r in ranges if not keeps or r[1].start < group.layout.numel_trainable]
            if not read:
                continue
            with self._access.overwriting(home, piece, keeps=keeps) as raw:
                for here, elements in read:
                    raw[here.start * itemsize : here.stop * itemsize].zero_()  # padding, too
                    self._read_weights(group, elements, raw, here.start)
                del raw

    def _tell_of_rounding(self) -> None:
        """Warn about a checkpoint whose weights were stored otherwise than they are here."""
        here, run = self._engine.config.to_dict().get("storage"), self.manifest.run
        there = None if run is None or run.config is None else run.config.get("storage")
        if here is not None and here != there and self.manifest.base is None:
            _log.warning(
                "%s was saved with storage: %s: its weights are rounded to this engine's %s",
                self._reader.path, there, here["weights"],
            )  # fmt: skip

    def _read_weights(
        self, group: ParamGroup, elements: range, raw: torch.Tensor, start: int
    ) -> None:
        """Read the group's `elements` into `raw`, from its element `start` on."""
        itemsize = group.dtype.itemsize
        for spec, here, there in self._entries.overlaps(group.layout.params, elements):
            saved = self._reader.parameter(self.records[spec.name])
            mine = slice((here.start + start) * itemsize, (here.stop + start) * itemsize)
            view = raw[mine].numpy().data
            self._reader.read_into(saved, there.start * itemsize, view)
            del view

    def _read_optimizer(self, state: OptimizerState) -> None:
        specs = [spec for spec in state.group.layout.params if spec.trainable]
        kept, start = state.record_format, state.part.trainable.start
        for elements, record in zip(state.chunks, state.records, strict=True):
            with self._access.overwriting(record, 0, keeps=False) as raw:
                saved = self._saved_format.of(matrices=state.group.matrices)
                self._read_record(raw, shifted(elements, start), specs, kept, saved)
                del raw

    def _read_record(
        self, raw: torch.Tensor, elements: range, specs: list[ParamSpec], kept: RecordFormat,
        saved: RecordFormat,
    ) -> None:  # fmt: skip
        numel = len(elements)
        arrays = kept.arrays(raw, numel)
        raw.zero_()  # padding between parameters
        if kept == saved:
            self._read_fields(arrays, elements, specs, saved)
            return
        read = saved.arrays(torch.zeros(saved.nbytes(numel), dtype=torch.uint8), numel)
        self._read_fields(read, elements, specs, saved)
        kept.take_over(arrays, read)

    def _read_fields(
        self, arrays: dict[str, Array], elements: range, specs: list[ParamSpec], saved: RecordFormat
    ) -> None:
        for spec, here, there in self._entries.overlaps(specs, elements):
            theirs, mine = saved.field_spans(there), saved.field_spans(here)
            for field, array in arrays.items():
                view = array[mine[field]].view(np.uint8).data
                start = theirs[field].start * array.itemsize
                stored = self._reader.field(self.records[spec.name], field)
                self._reader.read_into(stored, start, view)

    def _read_numbers(self) -> None:
        manifest, engine = self.manifest, self._engine
        engine.steps.taken, engine.steps.skipped = manifest.steps_taken, manifest.steps_skipped
        if engine.loss_scale is not None and manifest.loss_scale is not None:
            engine.loss_scale.scale = manifest.loss_scale.scale
            engine.loss_scale.good_steps = manifest.loss_scale.good_steps
        saved = manifest.optimizer.param_groups
        for group, record in zip(engine.optimizer.param_groups, saved, strict=True):
            model.restore_numbers(group, record.numbers)


# --------------------------------------------------------------------------- what fits
def _match(engine: Trained, manifest: Manifest, path: Path) -> dict[str, ParameterRecord]:
    """A checkpoint's record for each of the engine's parameters, by the engine's first name.

    CheckpointError, saying what differs, unless the engine can take the checkpoint over.
    """
    _check_numbers_format(engine, manifest, path)
    parameters = _match_parameters(model.parameter_records(engine), manifest.parameters, path)
    aliases = {record.names[0]: name for name, record in parameters.items()}
    _check_states(engine, manifest, parameters, path)
    _check_param_groups(model.optimizer_record(engine), manifest.optimizer, aliases, path)
    _check_numbers(engine, manifest, path)
    return parameters


def _check_numbers_format(engine: Trained, manifest: Manifest, path: Path) -> None:
    mine, saved = model.optimizer_record(engine), manifest.optimizer
    pairs = [
        ("precision", engine.config.precision, manifest.precision),
        # rounding differs between the two, so a conversion could change weights by a bit
        ("optimizer.master", mine.master, saved.master),
        ("optimizer.type", mine.type, saved.type),
    ]
    for key, here, there in pairs:
        if here != there:
            raise CheckpointError(
                f"{path} was saved with {key}: {there}, this engine has {key}: {here}; set "
                f"{key}: {there} to go on training, or {_WEIGHTS}"
            )
    if mine.fields != saved.fields:
        raise CheckpointError(
            f"{path} has the optimizer states {_fields(saved)}, this engine keeps {_fields(mine)}; "
            f"set optimizer.states and amsgrad as when it was saved, or {_WEIGHTS}"
        )
    if (manifest.loss_scale is None) != (engine.loss_scale is None):
        has = "no loss scale" if manifest.loss_scale is None else "a loss scale"
        raise CheckpointError(f"{path} has {has}, unlike any with precision: {manifest.precision}")


def _check_states(
    engine: Trained, manifest: Manifest, parameters: Mapping[str, ParameterRecord], path: Path
) -> None:  # fmt: skip
    """Refuse a checkpoint in which another optimizer, Muon or AdamW, trains one of the matrices."""
    kept, entries = model.saved_format(engine), model.Entries(engine)
    for state in engine.optimizer_states:
        for spec in state.group.layout.params:
            if spec.trainable:
                saved = manifest.fields_of(parameters[entries.whole(spec).name])
                if saved != fields_of(kept.of(matrices=state.group.matrices)):
                    _refuse(path, f"{spec.name} has the optimizer states {', '.join(saved)}")


def _fields(record: OptimizerRecord) -> str:
    return ", ".join(f"{name} ({dtype})" for name, dtype in record.fields.items()) or "(none)"


def _match_parameters(
    mine: Sequence[ParameterRecord], saved: Sequence[ParameterRecord], path: Path
) -> dict[str, ParameterRecord]:
    by_name = {name: record for record in saved for name in record.names}
    known = {name for record in mine for name in record.names}
    matched = {}
    for here in mine:
        there = next((by_name[name] for name in here.names if name in by_name), None)
        if there is None:
            _refuse(path, f"{here.names[0]} is not in it")
        for what, of in _ALIKE.items():
            if of(here) != of(there):
                _refuse(path, f"{here.names[0]} has {what} {of(there)}, here {of(here)}")
        matched[here.names[0]] = there
    for record in saved:
        if not any(name in known for name in record.names):
            _refuse(path, f"{record.names[0]} is not in the model")
    return matched


_ALIKE: dict[str, Callable[[ParameterRecord], object]] = {
    "shape": lambda record: tuple(record.shape),
    "dtype": lambda record: record.dtype,
    "tie": lambda record: " = ".join(sorted(record.names)),
    "requires_grad": lambda record: record.trainable,
}


def _check_param_groups(
    mine: OptimizerRecord, saved: OptimizerRecord, aliases: Mapping[str, str], path: Path
) -> None:
    """`aliases`: the engine's first name of a parameter by the checkpoint's."""
    groups = [
        [frozenset(group.params) for group in mine.param_groups],
        [frozenset(map(aliases.get, group.params)) for group in saved.param_groups],
    ]
    if groups[0] != groups[1]:
        raise CheckpointError(
            f"{path} has other param groups than this optimizer, or other parameters in one of "
            "them; pass `parameters=` to offload.initialize as when it was saved"
        )


def _check_numbers(engine: Trained, manifest: Manifest, path: Path) -> None:
    """Raise CheckpointError unless the param groups could be trained with their new numbers."""
    optimizer = engine.optimizer
    pairs = zip(optimizer.param_groups, manifest.optimizer.param_groups, strict=True)
    for number, (group, record) in enumerate(pairs):
        try:
            optimizer.check_numbers(group, record.numbers)
        except (ValueError, UnsupportedError) as error:
            raise CheckpointError(
                f"{path} has a param group {number} that this optimizer cannot take over: {error}; "
                f"load another checkpoint, or {_WEIGHTS}"
            ) from None


def _refuse(path: Path, difference: str) -> NoReturn:
    raise CheckpointError(
        f"{path} is of another model: {difference}; build the model as it was saved"
    )
