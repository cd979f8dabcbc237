"""Files of `torch.save`, read as data: a zip archive with a pickle and the bytes of each storage.

    NAME/data.pkl     a pickle, in which a tensor is a call of `_rebuild_tensor_v2`
    NAME/data/0       bytes of the first storage, not compressed
    NAME/byteorder    little

An archive may lie within a larger file. Its pickle is read by `inert_pickle`: nothing is run. A
tensor is known by where it lies, and read when it is asked for.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint.foreign.inert_pickle import (
    Made,
    Named,
    Persistent,
    Walk,
    check_nbytes,
    load,
)
from offload.checkpoint.format.disk import read_all

_MOST_DIRECTORY_NBYTES = 32 << 20  # of some hundred thousand storages
_MOST_DIMENSIONS = 64
_END, _END_64, _LOCATOR, _ENTRY, _LOCAL = (
    b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07", b"PK\x01\x02", b"PK\x03\x04",
)  # fmt: skip
_STORAGES = {
    "FloatStorage": torch.float32, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool, "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip
_DTYPES = {name: each for name, each in vars(torch).items() if isinstance(each, torch.dtype)}
SIZE = ("torch", "Size")
_TENSOR = ("torch._utils", "_rebuild_tensor_v2")
_TENSOR_OF_BYTES = ("torch._utils", "_rebuild_tensor_v3")
_PARAMETERS = (
    ("torch._utils", "_rebuild_parameter"), ("torch._utils", "_rebuild_parameter_with_state"),
)  # fmt: skip
_WITH_ATTRIBUTES = ("torch._tensor", "_rebuild_from_type_v2")


@dataclass(frozen=True, slots=True)
class Window:
    """A range of a file, read as if it were a file."""

    fd: int
    start: int
    nbytes: int
    path: Path

    def read(self, offset_bytes: int, nbytes: int) -> bytes:
        """The bytes of a range. ValueError if it does not lie in the window."""
        if not 0 <= offset_bytes <= offset_bytes + nbytes <= self.nbytes:
            raise ValueError(f"it has no bytes {offset_bytes} to {offset_bytes + nbytes}")
        buffer = bytearray(nbytes)
        read_all(self.fd, memoryview(buffer), self.start + offset_bytes, self.path)
        return bytes(buffer)


@dataclass(frozen=True, slots=True)
class ArchivedTensor:
    """A tensor of an archive. Its values lie in the file as often as they are counted here."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    window: Window
    start: int  # of the values' range
    nbytes: int  # of that range

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self) -> torch.Tensor:
        """A contiguous copy of the tensor."""
        if not self.numel:
            return torch.empty(self.shape, dtype=self.dtype)
        raw = torch.empty(self.nbytes, dtype=torch.uint8)
        where = self.window.start + self.start
        read_all(self.window.fd, raw.numpy().data, where, self.window.path)
        flat = raw.view(self.dtype)
        return torch.as_strided(flat, self.shape, self.strides).contiguous()

    def within(self, file: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of the file's bytes, or a copy if these are not aligned."""
        if not self.numel:
            return torch.empty(self.shape, dtype=self.dtype)
        start = self.window.start + self.start
        raw = file[start : start + self.nbytes]
        flat = (raw.clone() if start % self.dtype.itemsize else raw).view(self.dtype)
        return flat.as_strided(self.shape, self.strides, flat.storage_offset())


@dataclass(frozen=True, slots=True)
class Opaque:
    """An object of an unknown class, as its pickle describes it."""

    arguments: Any
    state: Any


def read_archive(window: Window, *, opaque: bool = False) -> Any:
    """The value that was saved: plain values, containers, and `ArchivedTensor`s. ValueError for
    another kind of archive, or one that holds anything else; that may be `opaque`."""
    entries = dict(_entries(window))
    pickle = [name for name in entries if name.endswith("/data.pkl")]
    if len(pickle) != 1:
        raise ValueError("it is no archive of torch.save")
    home = pickle[0].removesuffix("data.pkl")
    order = entries.get(f"{home}byteorder")
    if order is not None and window.read(order[0], min(order[1], 16)) != b"little":
        raise ValueError("it was saved on a machine with another order of bytes")
    start, nbytes = entries[pickle[0]]
    check_nbytes(nbytes)
    values = _Values(window, entries, f"{home}data/", opaque)
    return Walk(values.of).plain(load(window.read(start, nbytes)))


def _bytes_of(arguments: tuple[Any, ...]) -> bytes:
    """Decode bytes, which pickles of protocol 2 store as a text."""
    if len(arguments) != 2 or not isinstance(arguments[0], str) or arguments[1] != "latin1":
        raise ValueError("it has a text in an unknown encoding")
    return arguments[0].encode("latin1")


def dtype_of(value: Any) -> torch.dtype | None:
    """The dtype of this name, or None if it is not the name of a dtype."""
    is_torchs = isinstance(value, Named) and value.module == "torch"
    return _DTYPES.get(value.name) if is_torchs else None


def sizes_of(value: Any) -> tuple[int, ...]:
    """The sizes of a `torch.Size`. ValueError for anything else."""
    given: tuple[Any, ...] = (
        value.arguments if isinstance(value, Made) and value.is_of(SIZE) else ()
    )
    found = given[0] if len(given) == 1 else None
    if not isinstance(found, tuple) or len(found) > _MOST_DIMENSIONS:
        raise ValueError("it has something else as a size")
    if any(type(each) is not int or not 0 <= each < 1 << 60 for each in found):
        raise ValueError("it has a size of what is no number")
    return found


class _Values:
    """Makes the values that a pickle of torch describes."""

    def __init__(
        self, window: Window, entries: Mapping[str, tuple[int, int]], storages: str, opaque: bool
    ) -> None:
        self._window = window
        self._entries = entries
        self._storages = storages
        self._opaque = opaque

    def of(self, value: Any, walk: Walk) -> Any:
        if isinstance(value, Made):
            if value.is_of(SIZE):
                return sizes_of(value)
            if value.is_of(("collections", "OrderedDict")) and not value.arguments:
                return dict(walk.pairs(value.pairs))
            if value.is_of(("_codecs", "encode")):
                return _bytes_of(value.arguments)
            if value.is_of(_TENSOR, _TENSOR_OF_BYTES):
                return self._tensor(value.arguments, walk)
            if value.is_of(*_PARAMETERS) and value.arguments:
                return walk.plain(value.arguments[0])
            if value.is_of(_WITH_ATTRIBUTES) and len(value.arguments) > 2:
                return walk.plain(Made(value.arguments[0], value.arguments[2]))
        found = dtype_of(value)
        if found is not None:
            return found
        if self._opaque:
            made = value if isinstance(value, Made) else Made(value, ())
            return Opaque(made.arguments, made.state)
        what = value.function if isinstance(value, Made) else value
        named = str(what) if isinstance(what, Named) else type(what).__name__
        raise ValueError(f"it holds a {named}, which is no plain value and no tensor")

    def _tensor(self, arguments: Sequence[Any], walk: Walk) -> ArchivedTensor:
        if len(arguments) < 6:
            raise ValueError("it has a tensor with too few arguments")
        offset, shape, strides = walk.plain(tuple(arguments[1:4]))
        if not isinstance(shape, tuple) or not isinstance(strides, tuple):
            raise ValueError("it has a tensor without a shape")
        start, nbytes, dtype = self._storage(arguments[0])
        if dtype is None:
            dtype = walk.plain(arguments[6]) if len(arguments) > 6 else None
        numbers = (offset, *shape, *strides)
        if any(type(each) is not int or not 0 <= each < 1 << 60 for each in numbers):
            raise ValueError("it has a tensor whose sizes are no sizes")
        if not isinstance(dtype, torch.dtype) or not len(shape) == len(strides) < _MOST_DIMENSIONS:
            raise ValueError("it has a tensor that does not say what it is")
        numel = math.prod(shape)
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1 if numel else 0
        if (offset + max(reach, numel)) * dtype.itemsize > nbytes:
            raise ValueError("it has a tensor that is larger than its storage")
        return ArchivedTensor(
            dtype, tuple(shape), tuple(strides), self._window, start + offset * dtype.itemsize,
            reach * dtype.itemsize,
        )  # fmt: skip

    def _storage(self, value: Any) -> tuple[int, int, torch.dtype | None]:
        """The location of a storage's bytes, and their dtype, if it has one."""
        key = value.key if isinstance(value, Persistent) else None
        if not isinstance(key, tuple) or len(key) != 5 or not isinstance(key[2], str):
            raise ValueError("it has a tensor without a storage")
        kind = key[1].path if isinstance(key[1], Named) else ("", "")
        place = self._entries.get(self._storages + key[2])
        if place is None:
            raise ValueError(f"it lacks the storage {key[2]!r:.40}")
        if place[0] + place[1] > self._window.nbytes:
            raise ValueError(f"the storage {key[2]!r:.40} does not lie in it")
        if kind in (("torch", "UntypedStorage"), ("torch.storage", "UntypedStorage")):
            return (*place, None)
        if kind[0] != "torch" or kind[1] not in _STORAGES:
            raise ValueError(f"it has a storage of kind {'.'.join(kind):.60}")
        return (*place, _STORAGES[kind[1]])


# --------------------------------------------------------------------------- the zip archive
def _entries(window: Window) -> Iterator[tuple[str, tuple[int, int]]]:
    """The location of each file's bytes: name -> (offset, bytes)."""
    offset, nbytes = _directory(window)
    if nbytes > _MOST_DIRECTORY_NBYTES:
        raise ValueError(f"its directory of {nbytes:,} bytes is more than any has")
    raw, at = window.read(offset, nbytes), 0
    while at + 46 <= len(raw) and raw[at : at + 4] == _ENTRY:
        (method,) = struct.unpack_from("<H", raw, at + 10)
        stored, size = struct.unpack_from("<II", raw, at + 20)
        name_nbytes, extra_nbytes, comment_nbytes = struct.unpack_from("<HHH", raw, at + 28)
        (local,) = struct.unpack_from("<I", raw, at + 42)
        name = raw[at + 46 : at + 46 + name_nbytes].decode()
        extra = raw[at + 46 + name_nbytes : at + 46 + name_nbytes + extra_nbytes]
        size, stored, local = _wide(extra, size, stored, local)
        if method or stored != size:
            raise ValueError(f"{name!r:.60} is compressed, as torch.save never does")
        yield name, (_data_start(window, local), size)
        at += 46 + name_nbytes + extra_nbytes + comment_nbytes


def _directory(window: Window) -> tuple[int, int]:
    """The location of the list of files: offset and bytes."""
    end = window.read(window.nbytes - 22, 22) if window.nbytes >= 22 else b""
    if end[:4] != _END:
        raise ValueError("it is no zip archive, as torch.save writes")
    nbytes, offset = struct.unpack_from("<II", end, 12)
    locator = window.read(window.nbytes - 42, 20) if window.nbytes >= 42 else b""
    if locator[:4] == _LOCATOR:
        (where,) = struct.unpack_from("<Q", locator, 8)
        wide = window.read(where, 56)
        if wide[:4] != _END_64:
            raise ValueError("its end is damaged")
        nbytes, offset = struct.unpack_from("<QQ", wide, 40)
    return offset, nbytes


def _wide(extra: bytes, *sizes: int) -> list[int]:
    """The sizes; those that need more than 32 bits are in `extra`."""
    wide, at = b"", 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = extra[at + 4 : at + 4 + nbytes]
        at += 4 + nbytes
    found, at = [], 0
    for size in sizes:
        if size == 0xFFFFFFFF and at + 8 <= len(wide):
            (size,) = struct.unpack_from("<Q", wide, at)
            at += 8
        found.append(size)
    return found


def _data_start(window: Window, local: int) -> int:
    header = window.read(local, 30)
    if header[:4] != _LOCAL:
        raise ValueError("a file of its directory is not there")
    name_nbytes, extra_nbytes = struct.unpack_from("<HH", header, 26)
    return local + 30 + int(name_nbytes) + int(extra_nbytes)
