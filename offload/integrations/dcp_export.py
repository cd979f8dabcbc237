"""`offload checkpoint export-dcp`: write a checkpoint as a folder of torch.distributed.checkpoint.

    app        {"model": ..., "optim": ...}, named as torch's get_state_dict names them
    offload    the rest of the manifest, as JSON, and the tensors of its `run`

`dcp.load({"app": EngineState(engine)}, storage_reader=SafeReader(OUT))` takes over the first, as
torch's own `set_state_dict` does; `import-dcp` both, to the bit. One tensor at a time is in memory.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from offload.checkpoint.foreign.exporting import check_new, pending_output
from offload.checkpoint.format.disk import check_room, storage_errors
from offload.checkpoint.format.manifest import Manifest, ParameterRecord
from offload.checkpoint.format.reader import CheckpointReader
from offload.checkpoint.format.safetensors_file import StoredTensor, TensorInfo
from offload.integrations.entry_tensors import Entry, EntryTensor
from offload.kernels.cpu.convert import join_master
from offload.kernels.floats import Array
from offload.kernels.rules import SCALE_SUFFIX, StateFormat
from offload.kernels.variants import Master
from offload.zero.groups.bits import DTYPES
from offload.zero.step.records import RecordFormat

APP, OURS, MANIFEST_KEY = "app", "offload", "manifest"
# Entries of a manifest that do not follow from the tensors.
ABOUT = (
    "offload", "precision", "steps_taken", "steps_skipped", "loss_scale", "optimizer", "model",
    "buffers", "parameters", "run",
)  # fmt: skip
_NUMPY = {"F32": np.float32, "BF16": np.uint16, "I16": np.int16, "U8": np.uint8}


def export_dcp(path: Path, out: Path) -> Path:
    """Write checkpoint `path` to the folder `out`; raise PathError if that exists. The data read
    are compared with their hashes; `out` is complete or absent."""
    check_new(out)
    with CheckpointReader(path) as reader:
        reader.check(contents=False)
        content = _Content(reader)
        state = content.state()
        check_room(out.parent, content.nbytes)
        with pending_output(out) as pending:
            _save(state, pending)
    return out


def _save(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings(), storage_errors("writing", folder):
        warnings.simplefilter("ignore")  # it says that it assumes one process
        try:
            save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None


class _Content:
    """The tensors of a checkpoint, which have values only while they are written."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._manifest = reader.manifest
        self._lock = threading.Lock()
        self.nbytes = 0

    def state(self) -> dict[str, Any]:
        run = self._manifest.run
        ours: dict[str, Any] = {MANIFEST_KEY: about(self._manifest)}
        if run is not None and run.tensors:
            ours["run"] = {r.name: self._plain(self._reader.run_tensor(r)) for r in run.tensors}
        app = {"model": self._model(), "optim": self._optimizer()}
        return {APP: app, OURS: ours}

    def _model(self) -> dict[str, Tensor]:
        found = {}
        for record in self._manifest.parameters:
            stored = self._reader.parameter(record)
            found.update({name: self._plain(stored) for name in record.names})
        buffers = {r.name: self._plain(self._reader.buffer(r)) for r in self._manifest.buffers}
        return {**found, **buffers}

    def _optimizer(self) -> dict[str, Any]:
        groups = [
            {
                **{k: tuple(v) if isinstance(v, list) else v for k, v in group.numbers.items()},
                "params": list(group.params),
            }
            for group in self._manifest.optimizer.param_groups
        ]
        trained = [record for record in self._manifest.parameters if record.trainable]
        return {"state": {r.names[0]: self._states(r) for r in trained}, "param_groups": groups}

    def _states(self, record: ParameterRecord) -> dict[str, Tensor]:
        found = {"step": torch.tensor(float(record.steps))}
        for name in states_of(self._manifest):
            found[name] = self._entry(record, torch.float32, self._state_reader(record, name))
        if self._manifest.optimizer.master != "none":
            found["master"] = self._entry(record, torch.float32, self._master_reader(record))
        return found

    # ---------------------------------------------------------------- tensors
    def _plain(self, stored: StoredTensor) -> Tensor:
        def read() -> Tensor:
            raw = torch.empty(stored.info.nbytes, dtype=torch.uint8)
            if stored.info.nbytes:
                self._reader.read_into(stored, 0, raw.numpy().data)
            return raw.view(DTYPES[stored.info.dtype])

        return self._entry(stored.info, DTYPES[stored.info.dtype], read)

    def _entry(
        self, like: ParameterRecord | TensorInfo, dtype: torch.dtype, read: Callable[[], Tensor]
    ) -> Tensor:
        shape = tuple(like.shape)
        meta = torch.empty(shape, dtype=dtype, device="meta")
        self.nbytes += meta.nbytes
        if not meta.numel():
            return torch.empty(shape, dtype=dtype)
        return EntryTensor(Entry(self._access, meta.nbytes, lambda: read().view(shape)), (), meta)

    @contextmanager
    def _access(self, nbytes: int, *, changes: bool) -> Iterator[None]:
        with self._lock:
            yield

    def _state_reader(self, record: ParameterRecord, name: str) -> Callable[[], Tensor]:
        kept = RecordFormat(Master.NONE, (name,), state_format_of(self._manifest))

        def read() -> Tensor:
            arrays = {field.name: self._field(record, field.name) for field in kept.fields}
            values = kept.read_state(arrays, name, slice(0, len(arrays[name])))
            return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))

        return read

    def _master_reader(self, record: ParameterRecord) -> Callable[[], Tensor]:
        def read() -> Tensor:
            if self._manifest.optimizer.master == "fp32":
                return torch.from_numpy(self._field(record, "master"))
            high = self._array(self._reader.parameter(record))
            full = np.empty(high.size, dtype=np.float32)
            join_master(high, self._field(record, "low"), full)
            return torch.from_numpy(full)

        return read

    def _field(self, record: ParameterRecord, name: str) -> Array:
        return self._array(self._reader.field(record, name))

    def _array(self, stored: StoredTensor) -> Array:
        dtype = np.dtype(_NUMPY[stored.info.dtype])
        array: Array = np.empty(stored.info.nbytes // dtype.itemsize, dtype=dtype)
        self._reader.read_into(stored, 0, array.view(np.uint8).data)
        return array


def states_of(manifest: Manifest) -> tuple[str, ...]:
    """Return the names of the optimizer's states, without masters and scales of 8-bit states."""
    return tuple(
        name for name in manifest.optimizer.fields
        if name not in ("low", "master") and not name.endswith(SCALE_SUFFIX)
    )  # fmt: skip


def state_format_of(manifest: Manifest) -> StateFormat:
    """Return the format of a checkpoint's states. Raise KeyError for an unknown one."""
    return StateFormat[manifest.optimizer.states.upper()]


def about(manifest: Manifest) -> str:
    content = manifest.model_dump(include=set(ABOUT))
    return json.dumps(content, separators=(",", ":"))
