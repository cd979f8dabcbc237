"""An existing checkpoint folder: its manifest, its tensors by range, and whether it is complete."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

import xxhash

from offload.checkpoint.format.checked_files import REMEDY, CheckedFiles
from offload.checkpoint.format.disk import OpenFile, storage_error
from offload.checkpoint.format.manifest import (
    MANIFEST,
    RUN,
    BufferRecord,
    FileRecord,
    Manifest,
    ParameterRecord,
)
from offload.checkpoint.format.safetensors_file import (
    StoredTensor,
    TensorInfo,
    field_info,
    info_of,
    parse_header,
)
from offload.display.byte_progress import progress
from offload.display.plain_text import plain
from offload.process.bounded_json import MAX_NBYTES
from offload.tiers.errors import CheckpointError, NoCheckpointError
from offload.tiers.units import format_bytes

_NOT_THERE = (  # for this user
    errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG,
)  # fmt: skip
_NOT_INSIDE = (
    "is a link or no regular file, and of a checkpoint nothing outside of its folder is opened; "
    "`cp -rL` makes a copy without links"
)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY


class CheckpointReader:
    """Reads one checkpoint folder. A context manager.

    Keeps reading the same folder when another one takes its name: what is removed meanwhile is
    missing, and nothing of two checkpoints is mixed.
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError for a missing checkpoint or an unusable manifest."""
        self.path = path
        self._folder = _open_folder(path)
        self._headers: dict[str, dict[str, StoredTensor]] = {}
        self.digest = 0  # of the manifest, and so of all that it has hashes of
        try:
            self.manifest = self._read_manifest()
        except BaseException:
            self._folder.close()
            raise
        self._files = CheckedFiles(self.manifest, self._open_data)

    def _read_manifest(self) -> Manifest:
        path = self.path / MANIFEST
        try:
            file = self._open(MANIFEST)
        except FileNotFoundError:
            raise NoCheckpointError(
                f"{self.path} is no checkpoint: no {MANIFEST} in it; name a folder that "
                "engine.save_checkpoint wrote (offload.initialize(model, config, weights=PATH) "
                "starts from a folder of weights)"
            ) from None
        with file:
            nbytes = file.status().st_size
            if nbytes > MAX_NBYTES:
                raise CheckpointError(
                    f"{path} has {format_bytes(nbytes)}, no manifest has more than "
                    f"{format_bytes(MAX_NBYTES)}; {REMEDY}"
                )
            raw = bytearray(nbytes)
            file.read_all(memoryview(raw), 0)
        manifest = Manifest.from_json(raw, str(path))
        self.digest = xxhash.xxh3_64_intdigest(raw)
        return manifest

    def _open(self, name: str) -> OpenFile:
        """Open a file. CheckpointError unless it is a regular file in this very folder;
        FileNotFoundError, StorageError."""
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW  # a pipe would wait for its writer
        path, folder = self.path / name, self._folder
        try:
            if path.parent != self.path:
                folder = OpenFile(path.parent, _FOLDER | os.O_NOFOLLOW, inside=folder.fd)
            file = OpenFile(path, flags, inside=folder.fd)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):  # ENXIO: a socket
                raise CheckpointError(f"{path} {_NOT_INSIDE}") from None
            raise storage_error(error, "opening", path) from None
        if not stat.S_ISREG(file.status().st_mode):
            raise CheckpointError(f"{path} {_NOT_INSIDE}")
        return file

    def _open_data(self, name: str) -> OpenFile:
        try:
            return self._open(name)
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.path / name} is missing; load {self.path} again if another process has "
                f"just replaced it, else {REMEDY}"
            ) from None

    # ---------------------------------------------------------------- tensors
    def parameter(self, record: ParameterRecord) -> StoredTensor:
        """The location of a parameter. CheckpointError, also in the next methods, unless its file
        has it with that dtype and shape."""
        base = self.manifest.base
        if base is not None and not record.trainable:
            raise CheckpointError(
                f"{self.path} does not have {plain(record.names[0], 99)}: it was saved with "
                f"frozen=False, and is complete with its base (XXH3 {base.name}) alone; load it "
                "with engine.load_checkpoint into an engine whose frozen parameters are that base"
            )
        return self._tensor(self.manifest.groups[record.group].parameters or "", info_of(record))

    def field(self, record: ParameterRecord, field: str) -> StoredTensor:
        """The location of an optimizer's array of a parameter."""
        file = self.manifest.groups[record.group].optimizer or ""
        return self._tensor(file, field_info(record, field, self.manifest.fields_of(record)[field]))

    def buffer(self, record: BufferRecord) -> StoredTensor:
        """The location of a buffer."""
        return self._tensor(self.manifest.buffers_file, info_of(record))

    def run_tensor(self, record: BufferRecord) -> StoredTensor:
        """The location of a tensor of the manifest's `run`."""
        return self._tensor(RUN, info_of(record))

    def weights(self) -> Iterator[tuple[list[str], StoredTensor]]:
        """Every parameter and buffer, with its names, the file's own first. CheckpointError unless
        its file exists in full length."""
        groups, buffers_file = self.manifest.groups, self.manifest.buffers_file
        files = [*(group.parameters or "" for group in groups), buffers_file]
        self.check(contents=False, files=files)
        for record in self.manifest.parameters:
            yield record.names, self.parameter(record)
        for buffer in self.manifest.buffers:
            yield [buffer.name], self.buffer(buffer)

    def check_tensors(self) -> None:
        """Raise CheckpointError unless every file has a valid header, and all the tensors that the
        manifest says; StorageError."""
        manifest = self.manifest
        for file in manifest.files:
            self._header(file)
        for record in manifest.stored:
            self.parameter(record)
            if record.trainable and 0 not in record.shape:
                for field in manifest.fields_of(record):
                    self.field(record, field)
        for buffer in manifest.buffers:
            self.buffer(buffer)
        for tensor in manifest.run.tensors if manifest.run is not None else []:
            self.run_tensor(tensor)

    def _tensor(self, file: str, expected: TensorInfo) -> StoredTensor:
        stored = self._header(file).get(expected.name)
        if stored is None or stored.info != expected:
            has = "no such tensor" if stored is None else f"{stored.info.dtype} {stored.info.shape}"
            raise CheckpointError(
                f"{self.path / file}: {expected.name} should be {expected.dtype} {expected.shape}, "
                f"the file has {has}; {REMEDY}"
            )
        return stored

    def _header(self, file: str) -> dict[str, StoredTensor]:
        if file not in self.manifest.files:
            raise CheckpointError(f"{self.path / MANIFEST} has no file {plain(file, 99)!r}")
        if file not in self._headers:
            nbytes = self.manifest.files[file].nbytes
            self._headers[file] = parse_header(
                partial(self._files.read_into, file), nbytes, file, str(self.path / file)
            )
        return self._headers[file]

    def read_into(self, tensor: StoredTensor, start_bytes: int, buffer: memoryview) -> None:
        """Fill `buffer` with the tensor's bytes from `start_bytes` on, compared with their hashes.

        CheckpointError if they are not what was written; StorageError. Either leaves anything in
        `buffer`.
        """
        self._files.read_into(tensor.file, tensor.offset_bytes + start_bytes, buffer)

    # ---------------------------------------------------------------- checks
    def check(self, *, contents: bool, files: Collection[str] | None = None) -> None:
        """Raise CheckpointError for the first problem, or StorageError."""
        for problem in self.problems(contents=contents, files=files):
            raise CheckpointError(problem if "; " in problem else f"{problem}; {REMEDY}")

    def problems(self, *, contents: bool, files: Collection[str] | None = None) -> Iterator[str]:
        """The files' problems: missing, of another size or, with `contents`, changed, or without a
        tensor that the manifest has. All bytes are read for that. StorageError. `files`: only these
        are checked."""
        sound = []
        for name, record in self.manifest.files.items():
            if files is not None and name not in files:
                continue
            problem = self._size_problem(name, record)
            if problem is None:
                sound.append(name)
            else:
                yield problem
        if not contents:
            return
        whole = len(sound) == len(self.manifest.files)
        with progress(f"checking {self.path.name}", self.manifest.nbytes) as on_bytes:
            for name in sound:
                for problem in self._files.problems(name, on_bytes):
                    whole = False
                    yield problem
        if whole:
            try:
                self.check_tensors()
            except CheckpointError as error:
                yield str(error)

    def _size_problem(self, name: str, record: FileRecord) -> str | None:
        path = self.path / name
        try:
            with self._open(name) as file:
                nbytes = file.status().st_size
        except FileNotFoundError:
            return f"{path} is missing ({format_bytes(record.nbytes)})"
        except CheckpointError as error:
            return str(error)
        if nbytes != record.nbytes:
            return f"{path} has {nbytes} bytes instead of {record.nbytes}"
        return None

    def close(self) -> None:
        self._files.close()
        self._folder.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_folder(path: Path) -> OpenFile:
    try:
        return OpenFile(path, _FOLDER)
    except (OSError, ValueError) as error:  # ValueError: a NUL
        if isinstance(error, OSError) and error.errno not in _NOT_THERE:
            raise storage_error(error, "opening", path) from None
        raise NoCheckpointError(
            f"no checkpoint at {str(path)!r}: {error}; name a folder that engine.save_checkpoint "
            "wrote"
        ) from None
