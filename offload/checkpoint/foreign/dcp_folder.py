"""A folder of torch.distributed.checkpoint, read as data: nothing of it is run.

    .metadata       a pickle: tensors, their parts, and where each part lies
    __0_0.distcp    archives of `torch.save`, one after the other

Torch's own reader unpickles `.metadata`, and what is no tensor: both can be made to run anything.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from offload.checkpoint.foreign.inert_pickle import MOST_NBYTES, Made, load
from offload.checkpoint.foreign.model_files import own_file
from offload.checkpoint.foreign.torch_archive import (
    ArchivedTensor,
    Window,
    dtype_of,
    read_archive,
    sizes_of,
)
from offload.display.plain_text import plain
from offload.tiers.errors import CheckpointError, NoCheckpointError

METADATA = ".metadata"
_CLASSES = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
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
        raw = self._metadata()
        try:
            found = _Metadata(load(raw))
            self.tensors, self.objects = found.tensors, found.objects
            self.paths = found.paths
            self._check_places()
        except ValueError as error:
            said = plain(str(error), 300)
            raise CheckpointError(f"{path / METADATA} is damaged: {said}; {_REMEDY}") from None
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
        try:
            window = self._window(METADATA, 0, None)
        except BaseException:
            self.close()
            raise
        if window.nbytes > MOST_NBYTES:
            raise CheckpointError(
                f"{self.path / METADATA} has {window.nbytes:,} bytes, more than the "
                f"{MOST_NBYTES:,} that are read; {_REMEDY}"
            )
        return window.read(0, window.nbytes)

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
            if end > self._window(file, 0, None).nbytes:
                raise ValueError(f"{file!r:.80} has fewer than {end} bytes")

    # ---------------------------------------------------------------- values
    def read_part(self, name: str, part: Part) -> torch.Tensor:
        """A copy of a part. CheckpointError unless it is what the metadata says."""
        tensor, found = self.tensors[name], self._archive(name, part.place)
        if not isinstance(found, ArchivedTensor) or found.shape != part.sizes:
            raise CheckpointError(f"{self._where(name, part.place)} is no such tensor; {_REMEDY}")
        if found.dtype != tensor.dtype:
            raise CheckpointError(
                f"{self._where(name, part.place)} is {found.dtype}, and should be {tensor.dtype}; "
                f"{_REMEDY}"
            )
        return found.read()

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
        """A value that is no tensor: plain values and containers of them, with tensors in them
        read. CheckpointError for anything else."""
        return _with_values(self._archive(name, self.objects[name]))

    def _archive(self, name: str, place: Place) -> Any:
        try:
            return read_archive(self._window(place.file, place.start, place.nbytes))
        except ValueError as error:
            raise CheckpointError(
                f"{self._where(name, place)} cannot be read as data: "
                f"{plain(str(error), 300)}; {_REMEDY}"
            ) from None

    def _where(self, name: str, place: Place) -> str:
        return f"{self.path / place.file}: {plain(name, 200)} at byte {place.start}"

    # ---------------------------------------------------------------- files
    def _window(self, file: str, start: int, nbytes: int | None) -> Window:
        if file not in self._files:
            path = own_file(self.path, file)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError as error:
                raise CheckpointError(f"cannot open {path}: {error.strerror}; {_REMEDY}") from None
            self._files[file] = fd
            if not stat.S_ISREG(os.fstat(fd).st_mode):  # a pipe would wait for its writer
                raise CheckpointError(f"{path} is no regular file; {_REMEDY}")
        fd = self._files[file]
        size = os.fstat(fd).st_size - start
        return Window(fd, start, size if nbytes is None else nbytes, self.path / file)

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


def _with_values(value: Any) -> Any:
    """The value with its tensors read. `read_archive` has made sure that it is a tree."""
    if isinstance(value, ArchivedTensor):
        return value.read()
    if isinstance(value, dict):
        return {key: _with_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_with_values, value))
    return value


class _Metadata:
    """The contents of the metadata's pickle. ValueError for what torch does not write."""

    def __init__(self, value: Any) -> None:
        fields = _fields(value, "Metadata")
        places = dict(self._places(_dict(fields.get("storage_data"))))
        self.tensors: dict[str, SavedTensor] = {}
        self.objects: dict[str, Place] = {}
        for name, entry in _dict(fields.get("state_dict_metadata")).items():
            if not isinstance(name, str):
                raise ValueError("it has a name that is no text")
            if isinstance(entry, Made) and entry.is_of((_CLASSES, "BytesStorageMetadata")):
                self.objects[name] = _at(places, name, None)
            else:
                self.tensors[name] = self._tensor(name, entry, places)
        self.paths = dict(self._paths(fields.get("planner_data")))

    def _places(self, found: dict[Any, Any]) -> Iterator[tuple[tuple[str, Any], Place]]:
        for index, info in found.items():
            where = _fields(index, "MetadataIndex")
            offsets = where.get("offset")
            if not isinstance(info, Made) or not info.is_of(_STORAGE_INFO):
                raise ValueError("it has a place of an unknown kind")
            kept = _dict(info.state)
            if kept.get("transform_descriptors"):
                raise ValueError("its files are compressed or encrypted by an extension")
            name, file = where.get("fqn"), kept.get("relative_path")
            start, nbytes = kept.get("offset"), kept.get("length")
            if not isinstance(name, str) or not isinstance(file, str) or "\0" in file:
                raise ValueError("it has a place without a name")
            if file in ("", ".", "..") or "/" in file:
                raise ValueError(f"it names {file!r:.80}, which is no file beside it")
            if any(type(n) is not int or not 0 <= n < 1 << 60 for n in (start, nbytes)):
                raise ValueError("it has a place that is no number")
            at = None if offsets is None else sizes_of(offsets)
            yield (name, at), Place(file, start, nbytes)  # type: ignore[arg-type]

    def _tensor(self, name: str, entry: Any, places: Mapping[Any, Place]) -> SavedTensor:
        fields = _fields(entry, "TensorStorageMetadata")
        shape, chunks = sizes_of(fields.get("size")), fields.get("chunks")
        dtype = _dtype(fields.get("properties"))
        if not isinstance(chunks, list):
            raise ValueError(f"{name!r:.80} has no list of parts")
        parts = []
        for chunk in chunks:
            box = _fields(chunk, "ChunkStorageMetadata")
            offsets, sizes = sizes_of(box.get("offsets")), sizes_of(box.get("sizes"))
            if not len(offsets) == len(sizes) == len(shape) or any(
                o + n > whole for o, n, whole in zip(offsets, sizes, shape, strict=True)
            ):
                raise ValueError(f"{name!r:.80} has a part that does not lie in it")
            parts.append(Part(offsets, sizes, _at(places, name, offsets)))
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


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError("it has something else where keys and values should be")
    return value


def _fields(value: Any, kind: str) -> dict[Any, Any]:
    """The fields of an object. ValueError for one of another class."""
    if not isinstance(value, Made) or not value.is_of((_CLASSES, kind)):
        raise ValueError(f"it has something else where a {kind} should be")
    return _dict(value.state)


def _at(places: Mapping[Any, Place], name: str, offsets: tuple[int, ...] | None) -> Place:
    if (name, offsets) not in places:
        raise ValueError(f"{name!r:.80} is nowhere")
    return places[name, offsets]


def _dtype(properties: Any) -> torch.dtype:
    state = properties.state if isinstance(properties, Made) else None
    first = state[0] if isinstance(state, tuple) and state else None
    found = dtype_of(first)
    if found is None:
        raise ValueError("it has a tensor without a dtype")
    return found
