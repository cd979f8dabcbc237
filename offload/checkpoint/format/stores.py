"""The stores of checkpoints besides the local file system: copied there and back, whole.

    folder   ──copy──▶  s3://bucket/run/step-000100     data files first, the manifest last
    folder  ◀──copy──   gs://, hf://, sftp://, ...      compared with its hashes before it counts

A store has a checkpoint once its manifest is there: `commit` puts it in one piece, behind all that
it names. fsspec determines which stores there are, and how to log in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offload.checkpoint.format.disk import (
    check_room,
    make_call,
    make_folder,
    new_file,
    storage_errors,
    write_text,
)
from offload.checkpoint.format.folder import PendingFolder
from offload.checkpoint.format.manifest import MANIFEST, OPTIMIZER, PARAMETERS, Manifest
from offload.checkpoint.format.reader import CheckpointReader
from offload.config.paths import StrPath, path_text
from offload.display.progress import progress
from offload.process.bounded_json import MOST_NBYTES
from offload.tiers.errors import CheckpointError, PathError, StorageError

_BLOCK_NBYTES = 8 << 20


class ObjectStore:
    """A prefix of a file system of fsspec: the place of one checkpoint. StorageError if a call
    fails."""

    def __init__(self, url: str) -> None:
        """Raises PathError for a URL of a kind that is not installed, or cannot be reached."""
        import fsspec  # type: ignore[import-untyped]

        self.url = url.rstrip("/")
        try:
            found: tuple[Any, str] = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError, OSError) as error:
            raise PathError(f"{url}: {error}") from None
        self._files, self._root = found

    def manifest(self) -> bytes | None:
        """The manifest's bytes; None if no checkpoint is complete."""
        with self._errors("reading", MANIFEST):
            path = self._path(MANIFEST)
            if not self._files.exists(path):
                return None
            if self._files.size(path) > MOST_NBYTES:
                raise CheckpointError(f"{self.url}/{MANIFEST} is larger than any manifest")
            raw: bytes = self._files.cat_file(path)
            return raw

    def get(self, name: str, into: Path, nbytes: int) -> None:
        """Write one of its files, of `nbytes`, to a new local file, durably."""
        with (
            self._errors("reading", name),
            self._files.open(self._path(name), "rb") as file,
            new_file(into) as local,
        ):
            done = 0
            while block := file.read(min(_BLOCK_NBYTES, nbytes + 1)):
                nbytes -= len(block)
                if nbytes < 0:
                    raise CheckpointError(f"{self.url}/{name} is larger than its manifest says")
                local.write_all(memoryview(block), done)
                done += len(block)
            local.sync()

    def put(self, name: str, source: Path) -> None:
        """Write a local file there, replacing what an unfinished copy has left."""
        with self._errors("writing", name):
            self._files.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(source), self._path(name))

    def commit(self, manifest: bytes) -> None:
        """Write the manifest, which makes the checkpoint count, after all files are there."""
        with self._errors("writing", MANIFEST):
            # where a file grows as it is written, its name has to come last
            self._files.pipe_file(self._path(f"{MANIFEST}.part"), manifest)
            self._files.mv(self._path(f"{MANIFEST}.part"), self._path(MANIFEST))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _errors(self, doing: str, name: str) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, StorageError):
            raise
        except Exception as error:  # each file system of fsspec has errors of its own
            raise StorageError(
                f"{doing} {self.url}/{name} failed: {type(error).__name__}: {error!s:.200}",
                path=f"{self.url}/{name}",
            ) from error


def is_url(path: StrPath) -> bool:
    """Whether it is a URL, also as a Path that was made of one, which has one slash less."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)) is not None


def refuse_url(path: StrPath, doing: str) -> None:
    """Raise PathError for a place that is no folder of this machine."""
    if is_url(path):
        raise PathError(
            f"{doing} {path}: a checkpoint is saved to and loaded from a folder of this machine; "
            "`offload checkpoint copy FROM TO`, or offload.checkpoint.copy, takes it there and back"
        )


def copy_checkpoint(source: StrPath, destination: StrPath) -> int:
    """Copy a checkpoint; see `offload.checkpoint.copy`."""
    source = path_text(source, "source")
    destination = path_text(destination, "destination")
    if is_url(source) == is_url(destination):
        raise PathError(
            f"{source} and {destination}: one of both has to be a folder here, the other a URL"
        )
    if is_url(destination):
        return _upload(Path(source), ObjectStore(destination))
    return _download(ObjectStore(source), Path(destination))


def _upload(source: Path, store: ObjectStore) -> int:
    with CheckpointReader(source) as reader:
        if store.manifest() is not None:
            raise PathError(
                f"{store.url} has a checkpoint, which is not replaced; remove it, or name another"
            )
        reader.check(contents=True)
        with progress(f"copying to {store.url}", reader.manifest.nbytes) as came:
            for name, record in reader.manifest.files.items():
                store.put(name, source / name)
                came(record.nbytes)
        manifest = source / MANIFEST
        with storage_errors("reading", manifest):
            raw = make_call("read", manifest, manifest.read_bytes)
        if Manifest.from_json(raw, str(source)).generation != reader.manifest.generation:
            raise CheckpointError(f"{source} was saved again while it was copied; copy it again")
        store.commit(raw)
        return reader.manifest.nbytes


def _download(store: ObjectStore, destination: Path) -> int:
    raw = store.manifest()
    if raw is None:
        raise CheckpointError(f"{store.url} is no complete checkpoint: no {MANIFEST} is there")
    manifest = Manifest.from_json(raw, f"{store.url}/{MANIFEST}")
    with PendingFolder(destination) as folder:
        check_room(folder.path, manifest.nbytes)
        with storage_errors("creating", folder.path):
            make_folder(folder.path / PARAMETERS)
            make_folder(folder.path / OPTIMIZER)
        with progress(f"copying {store.url}", manifest.nbytes) as came:
            for name, record in manifest.files.items():
                store.get(name, folder.path / name, record.nbytes)
                came(record.nbytes)
        write_text(folder.path / MANIFEST, raw.decode())
        with CheckpointReader(folder.path, shared=False) as reader:
            reader.check(contents=True)
        folder.commit()
    return manifest.nbytes
