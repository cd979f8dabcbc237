"""One safetensors file, written range by range without ever holding a tensor.

    8 bytes      length N of the header, little-endian
    N bytes      JSON: name -> dtype, shape, data_offsets; padded with spaces
    the rest     tensor after tensor, without gaps

A writer's data is cut into *sections*, runs of whole tensors that grow side by side, each from its
front to its end:

    ├ header ┤├── every exp_avg ──►      ┤├── every exp_avg_sq ──►      ┤├── every low ──► ┤

so that a chunk of all fields can be written at once and no hash needs a second look.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from offload.checkpoint.format.checked_files import BlockHashes
from offload.checkpoint.format.disk import new_file
from offload.checkpoint.format.manifest import (
    ITEMSIZE,
    BufferRecord,
    FileRecord,
    ParameterRecord,
    SectionRecord,
)
from offload.kernels.rules import BLOCK, SCALE_SUFFIX
from offload.process import bounded_json
from offload.process.bounded_json import MAX_NBYTES
from offload.tiers.errors import CheckpointError, IntegrityError
from offload.tiers.units import round_up

_PART_NBYTES = 1 << 20
_SENT_NBYTES = 16 << 20  # after so many the device begins to write, and need not at the end
_MAX_NUMEL = 1 << 60


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as a header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


def info_of(record: ParameterRecord | BufferRecord) -> TensorInfo:
    """A parameter or buffer as a checkpoint describes it."""
    name = record.name if isinstance(record, BufferRecord) else record.names[0]
    return TensorInfo(name, record.dtype, tuple(record.shape))


def field_info(parameter: ParameterRecord, field: str, dtype: str) -> TensorInfo:
    """A parameter's optimizer array as a checkpoint describes it."""
    shape = tuple(parameter.shape)
    if field.endswith(SCALE_SUFFIX):
        shape = (-(-math.prod(shape) // BLOCK),)
    return TensorInfo(f"{parameter.names[0]}.{field}", dtype, shape)


def optimizer_sections(
    parameters: Sequence[ParameterRecord], fields: Mapping[str, str]
) -> list[list[TensorInfo]]:
    """A group's optimizer tensors: one section per field, wide fields first (for alignment)."""
    by_width = sorted(fields.items(), key=lambda item: -ITEMSIZE[item[1]])
    trainable = [record for record in parameters if record.trainable]
    return [[field_info(record, field, dtype) for record in trainable] for field, dtype in by_width]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor, its file, and where it begins there."""

    info: TensorInfo
    file: str
    offset_bytes: int


@dataclass(slots=True)
class _Section:
    name: str  # of its first tensor
    start: int  # in the file
    nbytes: int
    hashes: BlockHashes
    filled: int = 0


def _header(tensors: Iterable[TensorInfo], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = text.ljust(round_up(len(text) + 8, 64) - 8)  # data starts on a cache line
    return len(padded).to_bytes(8, "little") + padded


class SafetensorsWriter:
    """Creates `path` and fills its sections, each a list of tensors.

    `bound_to`: of a checkpoint's file what its hashes are bound to (`Manifest.bound_to`).
    """

    def __init__(
        self, path: Path, sections: Sequence[Sequence[TensorInfo]],
        metadata: Mapping[str, str], bound_to: str = "",
    ) -> None:  # fmt: skip
        self.path = path
        header = _header(chain(*sections), metadata)
        self.nbytes = len(header) + sum(tensor.nbytes for tensor in chain(*sections))
        self._file = new_file(path)
        self._file.reserve(self.nbytes)
        self._unsent = 0  # bytes that the device was not told to write yet
        self._bound_to = bound_to
        self._sections: list[_Section] = []
        self._section_of: dict[str, _Section] = {}  # by a tensor's name
        end = self._append(self._section("header", 0, len(header)), memoryview(header))
        for tensors in filter(None, sections):
            nbytes = sum(tensor.nbytes for tensor in tensors)
            section = self._section(tensors[0].name, end, nbytes)
            self._section_of |= {tensor.name: section for tensor in tensors}
            end += nbytes

    def _section(self, name: str, start: int, nbytes: int) -> _Section:
        hashes = BlockHashes(self._bound_to, start)
        self._sections.append(_Section(name, start, nbytes, hashes))
        return self._sections[-1]

    def append(self, tensor: str, data: memoryview) -> None:
        """Append a tensor's next bytes; tensors of a section come one after another. Waits for a
        device that falls behind."""
        self._append(self._section_of[tensor], data)

    def _append(self, into: _Section, data: memoryview) -> int:
        if into.filled + data.nbytes > into.nbytes:
            raise IntegrityError(f"{self.path}: {data.nbytes} bytes too many for {into.name}")
        data = data.cast("B")
        for part in (data[at : at + _PART_NBYTES] for at in range(0, data.nbytes, _PART_NBYTES)):
            into.hashes.update(part)
            # while it is in the processor's cache
            self._file.write_all(part, into.start + into.filled)
            into.filled += part.nbytes
        self._unsent += data.nbytes
        if self._unsent >= _SENT_NBYTES:
            self._unsent = 0
            self._file.forget()
        return into.filled

    def finish(self) -> FileRecord:
        """Complete the file, which is not durable before `sync`; returns its bytes and hashes."""
        for section in self._sections:
            if section.filled != section.nbytes:
                raise IntegrityError(
                    f"{self.path}: {section.name} holds {section.filled} of {section.nbytes} bytes"
                )
        self._file.forget()  # the device writes its end meanwhile
        records = [
            SectionRecord(name=section.name, nbytes=section.nbytes, xxh3=section.hashes.text())
            for section in self._sections
        ]
        return FileRecord(nbytes=self.nbytes, sections=records)

    def sync(self) -> None:
        """Make the file durable, and close it."""
        self._file.sync()
        self._file.forget()  # not read soon: leave the page cache to the training data
        self._file.close()


def parse_header(
    read_into: Callable[[int, memoryview], None], nbytes: int, file: str, what: str
) -> dict[str, StoredTensor]:
    """The tensors of a file of `nbytes`; `read_into(offset, buffer)` reads its bytes.

    CheckpointError, naming it as `what`, unless its tensors fill the file.
    """

    def read(offset: int, count: int) -> bytearray:
        buffer = bytearray(count)
        read_into(offset, memoryview(buffer))
        return buffer

    length = int.from_bytes(read(0, 8), "little") if nbytes >= 8 else nbytes
    if length > min(nbytes - 8, MAX_NBYTES):
        raise CheckpointError(f"{what} is no safetensors file: its header would be {length} bytes")
    try:
        entries = bounded_json.parse(read(8, length))
        entries.pop("__metadata__", None)
        tensors = {name: _stored(name, entry, file, 8 + length) for name, entry in entries.items()}
        _check_places(tensors, 8 + length, nbytes)
        return tensors
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{what} has a damaged header ({error!s:.200}); load another checkpoint"
        ) from None


def _stored(name: str, entry: Any, file: str, data_start: int) -> StoredTensor:
    if entry["dtype"] not in ITEMSIZE:
        raise ValueError(f"{name} has dtype {entry['dtype']!s:.20}, which is not known here")
    info = TensorInfo(name, entry["dtype"], tuple(entry["shape"]))
    start, stop = entry["data_offsets"]
    if any(type(number) is not int for number in (*info.shape, start, stop)):
        raise TypeError(f"{name} has sizes that are no integers")
    if min(info.shape, default=0) < 0 or math.prod(max(1, n) for n in info.shape) > _MAX_NUMEL:
        raise ValueError(f"{name} has shape {info.shape}")
    if stop - start != info.nbytes:
        raise ValueError(f"{name} lies at {start}..{stop}")
    return StoredTensor(info, file, data_start + start)


def _check_places(tensors: Mapping[str, StoredTensor], data_start: int, nbytes: int) -> None:
    """Raise ValueError unless tensors fill the file one after another: of two tensors of one name
    JSON keeps the last, and the other would leave a gap."""
    end = data_start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset_bytes, t.info.nbytes)):
        if tensor.offset_bytes != end:
            at = tensor.offset_bytes - data_start
            raise ValueError(f"{tensor.info.name} lies at {at}, and not at {end - data_start}")
        end += tensor.info.nbytes
    if end != nbytes:
        raise ValueError(f"it describes {end} bytes, and the file has {nbytes}")
