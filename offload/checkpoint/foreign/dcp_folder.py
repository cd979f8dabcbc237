"""A folder of torch.distributed.checkpoint, of which nothing is run.

    .metadata       a pickle: tensors, their parts, and where each part lies
    __0_0.distcp    archives of `torch.save`, one after the other

Torch's own reader unpickles `.metadata`, and what is no tensor: both can be made to run anything.
Here the pickle may name the classes of torch's metadata and no others, and archives are read by
`torch.load(weights_only=True)`.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint.filesystem import _StorageInfo

from offload.checkpoint.foreign.model_files import own_file
from offload.checkpoint.foreign.torch_files import load_stream, refusals
from offload.display.plain_text import plain
from offload.tiers.errors import CheckpointError, NoCheckpointError

METADATA = ".metadata"
_MOST_NBYTES = 64 << 20  # of the metadata
_KNOWN = {
    (torchs.__name__, name)
    for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta",
    )
} | {
    (_StorageInfo.__module__, _StorageInfo.__name__), ("torch", "Size"),
    ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"),
    *(("torch", name) for name, each in vars(torch).items() if isinstance(each, torch.dtype)),
}  # fmt: skip
_MOST_INDEX = 1 << 20  # of a list in a path
_REMEDY = "load another checkpoint"

Path_ = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """The location of an archive."""

    file: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor, of which `parts` have every element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


class DcpFolder:
    """The contents of such a folder. A context manager, which closes the files that were read.

    `tensors` and `objects` by their names, `paths` the keys by which a name was reached.
    CheckpointError for contents that are damaged, forged or in another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, int] = {}
        try:
            raw = self._metadata()
            with refusals(str(path / METADATA), "is damaged", _REMEDY):
                found = _Metadata(_Unpickler(io.BytesIO(raw)).load())
                self.tensors, self.objects = found.tensors, found.objects
                self.paths = found.paths
                self._check_places()
        finally:
            self.close()

    def _metadata(self) -> bytes:
        if not self.path.is_dir():
            raise NoCheckpointError(f"{self.path}: there is no such folder")
        if not os.path.lexists(self.path / METADATA):
            ranks = sorted(self.path.glob(f"__*{METADATA}"))
            why = f"{ranks[0].name} is of one rank alone" if ranks else f"no {METADATA} in it"
            raise NoCheckpointError(
                f"{self.path} is no folder of torch.distributed.checkpoint ({why}); name one that "
                "dcp.save wrote"
            )
        fd = self._open(METADATA)
        nbytes = os.fstat(fd).st_size
        if nbytes > _MOST_NBYTES:
            raise CheckpointError(
                f"{self.path / METADATA} has {nbytes:,} bytes, more than the {_MOST_NBYTES:,} that "
                f"are read; {_REMEDY}"
            )
        return os.pread(fd, nbytes, 0)

    def _check_places(self) -> None:
        """Raise ValueError unless each archive lies in its own range of a file: no more is read
        than what is there."""
        ends: dict[str, int] = {}
        places = [part.place for tensor in self.tensors.values() for part in tensor.parts]
        for place in sorted([*places, *self.objects.values()], key=lambda p: (p.file, p.start)):
            if place.start < ends.get(place.file, 0):
                raise ValueError(f"two parts share bytes of {place.file!r:.80}")
            ends[place.file] = place.start + place.nbytes
        for file, end in ends.items():
            if end > os.fstat(self._open(file)).st_size:
                raise ValueError(f"{file!r:.80} has fewer than {end} bytes")

    # ---------------------------------------------------------------- values
    def read_part(self, name: str, part: Part) -> torch.Tensor:
        """A copy of a part. CheckpointError unless it is what the metadata says."""
        found, dtype = self._archive(name, part.place), self.tensors[name].dtype
        if type(found) is not torch.Tensor or found.layout is not torch.strided:
            raise self._unlike(name, part.place, "is no tensor with a value for each element")
        if found.shape != part.sizes or found.dtype != dtype or found.is_meta:
            here = f"{found.dtype} {tuple(found.shape)}, and should be {dtype} {part.sizes}"
            raise self._unlike(name, part.place, f"is {here}")
        return found.contiguous()

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, put together from its parts."""
        tensor = self.tensors[name]
        if len(tensor.parts) == 1 and tensor.parts[0].sizes == tensor.shape:
            return self.read_part(name, tensor.parts[0])
        whole = torch.zeros(tensor.shape, dtype=tensor.dtype)
        for part in tensor.parts:
            box = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))
            whole[box] = self.read_part(name, part)
        return whole

    def read_object(self, name: str) -> Any:
        """A value that is no tensor. CheckpointError for what `weights_only` refuses."""
        return self._archive(name, self.objects[name])

    def _archive(self, name: str, place: Place) -> Any:
        window = _Window(self._open(place.file), place)
        return load_stream(cast(BinaryIO, window), self._where(name, place))

    def _unlike(self, name: str, place: Place, why: str) -> CheckpointError:
        return CheckpointError(f"{self._where(name, place)} {why}; {_REMEDY}")

    def _where(self, name: str, place: Place) -> str:
        return f"{self.path / place.file}: {plain(name, 200)} at byte {place.start}"

    # ---------------------------------------------------------------- files
    def _open(self, file: str) -> int:
        if file not in self._files:
            path = own_file(self.path, file)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError as error:
                raise CheckpointError(f"cannot open {path}: {error.strerror}; {_REMEDY}") from None
            self._files[file] = fd
            if not stat.S_ISREG(os.fstat(fd).st_mode):  # a pipe would wait for its writer
                raise CheckpointError(f"{path} is no regular file; {_REMEDY}")
        return self._files[file]

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def __enter__(self) -> DcpFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


class _Window(io.RawIOBase):
    """A range of an open file, read as if it were a file."""

    def __init__(self, fd: int, place: Place) -> None:
        self._fd, self._place = fd, place
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._place.nbytes}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")[: max(0, self._place.nbytes - self._at)]
        count = os.preadv(self._fd, [into], self._place.start + self._at) if into.nbytes else 0
        self._at += count
        return count


class _Unpickler(pickle._Unpickler):
    """Unpickles torch's metadata, and refuses every other class and function. It is Python's
    implementation: the one in C takes as much memory as a number in the pickle says."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no metadata of torch")
        return super().find_class(module, name)


class _Metadata:
    """The contents of torch's metadata, checked. ValueError for what torch does not write: a pickle
    can give an object any attributes, or none."""

    def __init__(self, found: Any) -> None:
        found = _checked(found, torchs.Metadata)
        places = dict(self._places(_checked(found.storage_data, dict)))
        self.tensors: dict[str, SavedTensor] = {}
        self.objects: dict[str, Place] = {}
        for name, entry in _checked(found.state_dict_metadata, dict).items():
            if isinstance(entry, torchs.BytesStorageMetadata):
                self.objects[_checked(name, str)] = _at(places, name, None)
            else:
                self.tensors[_checked(name, str)] = self._tensor(name, entry, places)
        self.paths = dict(self._paths(found.planner_data))

    def _places(self, found: dict[Any, Any]) -> Iterator[tuple[tuple[str, Any], Place]]:
        for index, info in found.items():
            where, kept = _checked(index, torchs.MetadataIndex), _checked(info, _StorageInfo)
            if getattr(kept, "transform_descriptors", None):
                raise ValueError("its files are compressed or encrypted by an extension")
            file, start, nbytes = _checked(kept.relative_path, str), kept.offset, kept.length
            if file in ("", ".", "..") or "/" in file or "\0" in file:
                raise ValueError(f"it names {file!r:.80}, which is no file beside it")
            if any(type(n) is not int or not 0 <= n < 1 << 60 for n in (start, nbytes)):
                raise ValueError("it has a place that is no number")
            at = None if where.offset is None else _sizes(where.offset)
            yield (_checked(where.fqn, str), at), Place(file, start, nbytes)

    def _tensor(self, name: str, entry: Any, places: Mapping[Any, Place]) -> SavedTensor:
        entry = _checked(entry, torchs.TensorStorageMetadata)
        shape = _sizes(entry.size)
        dtype = _checked(_checked(entry.properties, torchs.TensorProperties).dtype, torch.dtype)
        parts = []
        for chunk in _checked(entry.chunks, list):
            box = _checked(chunk, torchs.ChunkStorageMetadata)
            offsets, sizes = _sizes(box.offsets), _sizes(box.sizes)
            if not len(offsets) == len(sizes) == len(shape) or any(
                o + n > whole for o, n, whole in zip(offsets, sizes, shape, strict=True)
            ):
                raise ValueError(f"{name!r:.80} has a part that does not lie in it")
            place = _at(places, name, offsets)
            if math.prod(sizes) * dtype.itemsize > place.nbytes:
                raise ValueError(f"{name!r:.80} has a part with more values than bytes")
            parts.append(Part(offsets, sizes, place))
        if sum(math.prod(part.sizes) for part in parts) != math.prod(shape):
            raise ValueError(f"{name!r:.80} has parts that do not make a whole")
        return SavedTensor(dtype, shape, tuple(parts))

    def _paths(self, found: Any) -> Iterator[tuple[str, Path_]]:
        """The paths of the names from a planner that flattens; the names themselves from others."""
        for name in (*self.tensors, *self.objects):
            path = found.get(name) if isinstance(found, dict) else None
            path = (name,) if path is None else path
            if not isinstance(path, tuple) or not 0 < len(path) < 64 or not all(map(_is_key, path)):
                raise ValueError(f"{name!r:.80} has a path that is none")
            yield name, path


def _is_key(key: Any) -> bool:
    return isinstance(key, str) or (type(key) is int and 0 <= key < _MOST_INDEX)


def _checked(value: Any, kind: type) -> Any:
    """The value. ValueError for one of another class."""
    if not isinstance(value, kind):
        raise ValueError(f"it has a {type(value).__name__} where a {kind.__name__} should be")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    """The sizes of a `torch.Size`. ValueError for anything else."""
    sizes = tuple(_checked(value, torch.Size))
    if any(type(n) is not int or not 0 <= n < 1 << 60 for n in sizes):
        raise ValueError("it has sizes that are no numbers")
    return sizes


def _at(places: Mapping[Any, Place], name: str, offsets: tuple[int, ...] | None) -> Place:
    if (name, offsets) not in places:
        raise ValueError(f"{name!r:.80} is nowhere")
    return places[name, offsets]
