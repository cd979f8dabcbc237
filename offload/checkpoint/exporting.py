"""A checkpoint's weights as ordinary safetensors files, for other programs to load.

    OUT.safetensors    one file
    OUT                a folder: one file per group and model.safetensors.index.json, the layout
                       that Hugging Face loaders read

Streams: one piece of one parameter is in memory at a time.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from offload.checkpoint.disk import check_room, storage_errors, sync_folder
from offload.checkpoint.manifest import BufferRecord, ParameterRecord
from offload.checkpoint.reader import CheckpointReader
from offload.checkpoint.safetensors_file import (
    SafetensorsWriter,
    StoredTensor,
    TensorInfo,
    file_nbytes,
)
from offload.kernels.convert import decode, encode, join_master
from offload.kernels.floats import Array, Float
from offload.tiers.errors import PathError

_PIECE_NUMEL = 1 << 20
_FLOATS = {"F32": Float.FP32, "BF16": Float.BF16, "F16": Float.FP16}
DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_METADATA = {"format": "pt"}
INDEX = "model.safetensors.index.json"

Pieces = Callable[[], Iterator[memoryview]]


@dataclass(frozen=True)
class _Tensor:
    info: TensorInfo
    pieces: Pieces  # its bytes, in order; may be asked for again (tied weights)


def export(path: Path, out: Path, dtype: str | None = None) -> list[Path]:
    """Write the model of checkpoint `path` to `out`; the files written.

    `dtype` fp32 gives full-precision (master) weights, bf16 and fp16 16-bit ones, None those that
    the model computed with. Every name is there, tied weights under each of theirs; persistent
    buffers keep their own dtype. Checks all hashes first. `out` is complete or absent, and must not
    exist: PathError.
    """
    if os.path.lexists(out):
        raise PathError(f"{out} exists; remove it, or name another file or folder")
    if not out.parent.is_dir():
        raise PathError(f"{out.parent} is no folder; make it, or name another place for {out.name}")
    with CheckpointReader(path) as reader:
        reader.check(contents=True)
        weights = _Weights(reader, dtype)
        pending = out.with_name(f".{out.name}.tmp-{secrets.token_hex(6)}")
        try:
            names = _write(weights, out, pending)
            os.rename(pending, out)
        except BaseException:
            shutil.rmtree(pending) if pending.is_dir() else pending.unlink(missing_ok=True)
            raise
    sync_folder(out.parent)
    return [out / name for name in names] or [out]


def _write(weights: _Weights, out: Path, pending: Path) -> list[str]:
    groups = [*weights.by_group(), weights.buffers()]
    if out.suffix == ".safetensors":
        _write_file(pending, [tensor for group in groups for tensor in group])
        return []
    with storage_errors("creating", pending):
        pending.mkdir()
    files = _named([group for group in groups if group])
    for name, tensors in files.items():
        _write_file(pending / name, tensors)
    with storage_errors("writing", pending / INDEX):
        (pending / INDEX).write_text(_index(files))
    return [*files, INDEX]


def _named(groups: Sequence[Sequence[_Tensor]]) -> dict[str, Sequence[_Tensor]]:
    count = len(groups)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": group
        for number, group in enumerate(groups, 1)
    }


def _index(files: Mapping[str, Sequence[_Tensor]]) -> str:
    total = sum(tensor.info.nbytes for tensors in files.values() for tensor in tensors)
    weight_map = {t.info.name: file for file, tensors in files.items() for t in tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)


def _write_file(path: Path, tensors: Sequence[_Tensor]) -> None:
    sections = {"tensors": [tensor.info for tensor in tensors]}
    check_room(path.parent, file_nbytes(sections, _METADATA))
    with SafetensorsWriter(path, sections, _METADATA) as file:
        for tensor in tensors:
            for piece in tensor.pieces():
                file.append("tensors", piece)
        file.finish()


class _Weights:
    """The tensors of a checkpoint in another precision, piece by piece."""

    def __init__(self, reader: CheckpointReader, dtype: str | None) -> None:
        self._reader = reader
        self._manifest = reader.manifest
        self._dtype = DTYPES[dtype] if dtype is not None else None

    def by_group(self) -> Iterator[list[_Tensor]]:
        for index in range(len(self._manifest.groups)):
            records = [r for r in self._manifest.parameters if r.group == index]
            yield [tensor for record in records for tensor in self._parameter(record)]

    def buffers(self) -> list[_Tensor]:
        return [self._buffer(record) for record in self._manifest.buffers]

    def _buffer(self, record: BufferRecord) -> _Tensor:
        stored = self._reader.buffer(record)
        return _Tensor(stored.info, lambda: self._raw(stored))

    def _parameter(self, record: ParameterRecord) -> Iterator[_Tensor]:
        """The parameter under each of its names."""
        stored = self._reader.parameter(record)
        target = self._dtype or record.dtype

        def pieces() -> Iterator[memoryview]:
            if target == record.dtype:
                return self._raw(stored)
            return self._converted(record, stored, _FLOATS[target])

        for name in record.names:
            yield _Tensor(replace(stored.info, name=name, dtype=target), pieces)

    # ---------------------------------------------------------------- pieces
    def _raw(self, stored: StoredTensor) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(4 * _PIECE_NUMEL, stored.info.nbytes)))
        for start in range(0, stored.info.nbytes, max(1, len(buffer))):
            piece = buffer[: min(len(buffer), stored.info.nbytes - start)]
            self._reader.read_into(stored, start, piece)
            yield piece

    def _converted(
        self, record: ParameterRecord, stored: StoredTensor, target: Float
    ) -> Iterator[memoryview]:
        numel = stored.info.nbytes // _FLOATS[record.dtype].nbytes
        for start in range(0, numel, _PIECE_NUMEL):
            span = slice(start, min(start + _PIECE_NUMEL, numel))
            full = self._full(record, stored, span)
            if target is not Float.FP32:
                rounded = np.empty(full.size, dtype=target.storage)
                encode(full, rounded, target)
                full = rounded
            yield full.view(np.uint8).data

    def _full(self, record: ParameterRecord, stored: StoredTensor, span: slice) -> Array:
        """A piece of a parameter in fp32: its master where it has one."""
        own = _FLOATS[record.dtype]
        fields = self._manifest.optimizer.fields if record.trainable else {}
        if "master" in fields:
            return self._read(self._reader.field(record, "master"), np.dtype(np.float32), span)
        weights = self._read(stored, own.storage, span)
        full = np.empty(weights.size, dtype=np.float32)
        if "low" in fields:
            low = self._read(self._reader.field(record, "low"), np.dtype(np.int16), span)
            join_master(weights, low, full)
        else:
            decode(weights, full, own)
        return full

    def _read(self, stored: StoredTensor, dtype: np.dtype[np.generic], span: slice) -> Array:
        array: Array = np.empty(span.stop - span.start, dtype=dtype)
        view = array.view(np.uint8).data
        self._reader.read_into(stored, span.start * dtype.itemsize, view)
        return array
