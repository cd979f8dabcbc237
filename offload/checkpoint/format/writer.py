"""A checkpoint written without an engine: from tensors that come one at a time, from other
files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.checkpoint.format.disk import check_room, make_folder, storage_errors, write_text
from offload.checkpoint.format.manifest import (
    BUFFERS,
    MANIFEST,
    OPTIMIZER,
    PARAMETERS,
    RUN,
    BufferRecord,
    FileRecord,
    GroupRecord,
    Manifest,
    ParameterRecord,
)
from offload.checkpoint.format.safetensors_file import (
    SafetensorsWriter,
    TensorInfo,
    info_of,
    optimizer_sections,
)
from offload.config.optimizer import KINDS
from offload.kernels.cpu.convert import split_master
from offload.kernels.floats import Array
from offload.zero.step.records import RecordFormat

Sections = Mapping[str, Sequence[TensorInfo]]
_FIELD_DTYPES = {"float32": "F32", "int16": "I16", "uint16": "BF16", "uint8": "U8"}


def fields_of(kept: RecordFormat) -> dict[str, str]:
    """The optimizer's arrays and their dtypes, as in a manifest."""
    return {field.name: _FIELD_DTYPES[field.dtype.name] for field in kept.fields}


def group_of(record: ParameterRecord) -> GroupRecord:
    """The group of a parameter's files: one of its own, which loads into any grouping."""
    file = f"{record.group:03d}.safetensors"
    return GroupRecord(
        name=record.names[0], parameters=f"{PARAMETERS}/{file}",
        optimizer=f"{OPTIMIZER}/{file}" if record.trainable else None,
    )  # fmt: skip


class Composer:
    """Writes the files of `manifest`, which lacks only them, into a new folder. Every parameter has
    a group of its own (`group_of`). `finish` writes the manifest."""

    def __init__(self, folder: Path, manifest: Manifest, kept: RecordFormat) -> None:
        self._folder = folder
        self._manifest = manifest
        self._kept = kept
        self._files: dict[str, FileRecord] = {}
        numel = sum(int(np.prod(record.shape)) for record in manifest.parameters)
        check_room(folder, 16 * numel)
        with storage_errors("creating", folder):
            make_folder(folder / PARAMETERS)
            make_folder(folder / OPTIMIZER)

    def add_trained(
        self, record: ParameterRecord, weight: torch.Tensor, states: Mapping[str, torch.Tensor],
        master: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Add a parameter, its states and, if the format has one, its master (all in fp32), from
        which a `low` is made, and the weight with it."""
        numel = weight.numel()
        arrays = self._kept.arrays(torch.zeros(self._kept.nbytes(numel), dtype=torch.uint8), numel)
        whole = slice(0, numel)
        for name in self._kept.states:
            self._kept.write_state(arrays, name, whole, _flat(states[name]))
        if master is not None and "low" in arrays:
            high = np.empty(numel, dtype=np.uint16)
            split_master(_flat(master), high, arrays["low"])
            weight = torch.from_numpy(high.view(np.int16)).view(torch.bfloat16)
        elif master is not None:
            arrays["master"][:] = _flat(master)
        self.add_weight(record, weight)
        self._add_fields(record, arrays)

    def _add_fields(self, record: ParameterRecord, arrays: Mapping[str, Array]) -> None:
        file = f"{OPTIMIZER}/{record.group:03d}.safetensors"
        sections = optimizer_sections([record], fields_of(self._kept))
        with self._writer(file, sections, {"group": record.names[0]}) as writer:
            for field in sections:
                if arrays[field].size:
                    writer.append(field, arrays[field].view(np.uint8).data)
            self._files[file] = writer.finish()

    def add_weight(self, record: ParameterRecord, value: torch.Tensor) -> None:
        """Add a parameter without states."""
        file = f"{PARAMETERS}/{record.group:03d}.safetensors"
        with self._writer(file, {"tensors": [info_of(record)]}, {"format": "pt"}) as writer:
            _append(writer, value)
            self._files[file] = writer.finish()

    def add_buffers(self, values: Iterable[torch.Tensor]) -> None:
        """Add the buffers of the manifest, in its order."""
        self._add_tensors(BUFFERS, self._manifest.buffers, values)

    def add_run(self, values: Iterable[torch.Tensor]) -> None:
        """Add the tensors of the manifest's `run`, in its order; not called if it has none."""
        assert self._manifest.run is not None, "its tensors are listed there"
        self._add_tensors(RUN, self._manifest.run.tensors, values)

    def _add_tensors(
        self, file: str, records: Sequence[BufferRecord], values: Iterable[torch.Tensor]
    ) -> None:
        sections = {"tensors": [info_of(record) for record in records]}
        with self._writer(file, sections, {"format": "pt"}) as writer:
            for value in values:
                _append(writer, value)
            self._files[file] = writer.finish()

    def finish(self) -> None:
        """Write the manifest, after everything was added. CheckpointError if the manifest is
        inconsistent."""
        manifest = self._manifest.model_copy(update={"files": self._files})
        text = manifest.to_json()
        Manifest.from_json(text.encode(), str(self._folder / MANIFEST))
        write_text(self._folder / MANIFEST, text)

    def _writer(
        self, file: str, sections: Sections, metadata: Mapping[str, str]
    ) -> SafetensorsWriter:
        bound_to = self._manifest.bound_to(file)
        return SafetensorsWriter(self._folder / file, sections, metadata, bound_to)


def _flat(value: torch.Tensor) -> Array:
    flat: Array = np.ascontiguousarray(value.detach().float().reshape(-1).numpy())
    return flat


def _append(writer: SafetensorsWriter, value: torch.Tensor) -> None:
    if value.numel():
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        writer.append("tensors", flat.numpy().data)


def numbers_of(kind: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """The param group's numbers that the rule has, and the program's own numbers and texts."""
    unlike = {"step", "bias_correction", "foreach", "capturable", "differentiable", "fused"}
    found = {}
    for key, value in group.items():
        if key in unlike or key == "decoupled_weight_decay":
            continue
        plain = list(value) if isinstance(value, tuple) else value
        plain = plain.item() if isinstance(plain, torch.Tensor) and plain.numel() == 1 else plain
        if key in KINDS[kind].defaults or isinstance(plain, str | int | float):
            found[key] = plain
    return {**{k: _listed(v) for k, v in KINDS[kind].defaults.items()}, **found}


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
