"""The files of a checkpoint that is being written, its manifest last; from tensors of an engine, or
of other files."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from offload.checkpoint.format.disk import check_room, make_folder, storage_errors, write_text
from offload.checkpoint.format.manifest import (
    MANIFEST,
    OPTIMIZER,
    PARAMETERS,
    BufferRecord,
    FileRecord,
    GroupRecord,
    Manifest,
    ParameterRecord,
)
from offload.checkpoint.format.safetensors_file import SafetensorsWriter, TensorInfo, info_of
from offload.zero.step.records import RecordFormat

Sections = Sequence[Sequence[TensorInfo]]
Record = ParameterRecord | BufferRecord
_FIELD_DTYPES = {"float32": "F32", "int16": "I16", "uint16": "BF16", "uint8": "U8"}


def fields_of(kept: RecordFormat) -> dict[str, str]:
    """The optimizer's arrays and their dtypes, as in a manifest."""
    return {field.name: _FIELD_DTYPES[field.dtype.name] for field in kept.fields}


def group_record(
    number: int, name: str, *, is_trained: bool, frozen: bool = True,
    kept: RecordFormat | None = None,
) -> GroupRecord:  # fmt: skip
    """The record of a group: a file of parameters, `frozen` ones, too, and one of optimizer states
    if it is trained, in the format `kept` where that is not most groups'."""
    file = f"{number:03d}.safetensors"
    return GroupRecord(
        name=name, parameters=f"{PARAMETERS}/{file}" if frozen or is_trained else None,
        optimizer=f"{OPTIMIZER}/{file}" if is_trained else None,
        fields=None if kept is None else fields_of(kept),
    )  # fmt: skip


class CheckpointWriter:
    """Writes the files of `manifest`, which lacks only them, into a new folder."""

    def __init__(self, folder: Path, manifest: Manifest, nbytes: int) -> None:
        """Makes the subfolders, if there is room for `nbytes`."""
        self._folder, self._manifest = folder, manifest
        self._files: dict[str, FileRecord] = {}
        self._last: SafetensorsWriter | None = None  # complete, and not durable yet
        check_room(folder, nbytes)
        with storage_errors("creating", folder):
            make_folder(folder / PARAMETERS)
            make_folder(folder / OPTIMIZER)

    def open(self, name: str, sections: Sections, metadata: Mapping[str, str]) -> SafetensorsWriter:
        """A new file, to be filled."""
        bound_to = self._manifest.bound_to(name)
        return SafetensorsWriter(self._folder / name, sections, metadata, bound_to)

    def close(self, name: str, file: SafetensorsWriter) -> None:
        """Complete a file that was filled. It is made durable after the next one, which is filled
        while the device writes this one."""
        self._files[name] = file.finish()
        self._sync_last()
        self._last = file

    def _sync_last(self) -> None:
        if self._last is not None:
            self._last.sync()

    def write_tensors(
        self, name: str, records: Sequence[Record], values: Iterable[torch.Tensor]
    ) -> None:  # fmt: skip
        """Write a file of whole tensors, in the order of their records."""
        infos = [info_of(record) for record in records]
        file = self.open(name, [infos], {"format": "pt"})
        for info, value in zip(infos, values, strict=True):
            if value.numel():
                flat = torch.empty(value.numel(), dtype=value.dtype)
                flat = flat.copy_(value.detach().reshape(-1)).view(torch.uint8)
                file.append(info.name, flat.numpy().data)
        self.close(name, file)

    def finish(self) -> None:
        """Write the manifest, once all files are durable. CheckpointError if it is inconsistent."""
        self._sync_last()
        files = dict(sorted(self._files.items()))  # groups may be written in any order
        text = self._manifest.model_copy(update={"files": files}).to_json()
        Manifest.from_json(text.encode(), str(self._folder / MANIFEST))
        write_text(self._folder / MANIFEST, text)
