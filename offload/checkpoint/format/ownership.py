"""The files and folders that are ours. No others are ever renamed, replaced or removed.

A checkpoint is known by its manifest, which ends in a hash of itself, and all it holds are the
files that the manifest names. A folder that is no checkpoint yet, or no more, is known by its name,
which ends in a hash of itself:

    NAME.tmp-RANDOM HASH     being written, by the holder of its lock; complete once its manifest is
                             in. Or replaced just now
    NAME.old-RANDOM HASH     replaced, where two names cannot be exchanged in one step
    NAME.del-RANDOM HASH     about to be removed
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from offload.checkpoint.format.disk import entries, is_folder, is_there, make_call
from offload.checkpoint.format.manifest import FORMAT, MANIFEST, OPTIMIZER, PARAMETERS, is_data_file
from offload.checkpoint.format.reader import CheckpointReader
from offload.tiers.errors import CheckpointError, PathError

_MARKED = re.compile(r"(?P<name>.+)\.(?P<kind>tmp|old|del)-(?P<random>[0-9a-f]{12})[0-9a-f]{16}")
_SHOWN = 4
_log = logging.getLogger("offload")


@dataclass(frozen=True, slots=True)
class Leftover:
    """A folder that a writer made beside `target`."""

    path: Path
    target: Path
    kind: str
    mtime_ns: int


def marked(path: Path, kind: str) -> Path:
    """A new name of a kind beside `path`."""
    start = f"{path.name}.{kind}-{secrets.token_hex(6)}"
    return path.with_name(start + _mark(start))


def _mark(start: str) -> str:
    return xxhash.xxh3_64_hexdigest(os.fsencode(f"{FORMAT}: {start}"))


def is_marked(name: str) -> bool:
    return _MARKED.fullmatch(name) is not None and name.endswith(_mark(name[:-16]))


def leftovers(parent: Path) -> list[Leftover]:
    """The leftover folders in `parent`, newest first; `tmp` before `old`, which it replaces."""
    found = []
    for entry in entries(parent):
        match = _MARKED.fullmatch(entry.name) if is_marked(entry.name) else None
        if match is None or not entry.is_dir(follow_symlinks=False):
            continue
        with suppress(FileNotFoundError):  # just removed by the process that replaced it
            path, target = parent / entry.name, parent / match["name"]
            status = make_call("stat", path, os.lstat, path)
            found.append(Leftover(path, target, match["kind"], status.st_mtime_ns))
    return sorted(found, key=lambda each: (each.kind == "tmp", each.mtime_ns), reverse=True)


# --------------------------------------------------------------------------- contents
def _foreign(folder: Path, is_ours: Callable[[str], bool]) -> list[str]:
    """The names in a folder, and in a checkpoint's two subfolders, that are not part of a
    checkpoint: other files, links, pipes and the like."""
    found = []
    for entry in entries(folder):
        plain = entry.is_file(follow_symlinks=False)
        if entry.name in (PARAMETERS, OPTIMIZER) and entry.is_dir(follow_symlinks=False):
            found += [
                f"{entry.name}/{inner.name}"
                for inner in entries(folder / entry.name)
                if not inner.is_file(follow_symlinks=False)
                or not is_ours(f"{entry.name}/{inner.name}")
            ]
        elif not plain or not (entry.name == MANIFEST or is_ours(entry.name)):
            found.append(entry.name)
    return sorted(found)


def check_replaceable(target: Path) -> None:
    """Raise PathError, naming the contents, unless `target` is a checkpoint, empty or absent.

    Must be called inside `alone_in` of its parent, so that no other process replaces or removes it.
    """
    if is_marked(target.name):
        raise PathError(f"{target} is a name for what is not complete yet; name another path")
    if not is_there(target):
        return
    if not is_folder(target):
        raise PathError(f"{target} is a file, a checkpoint is a folder; name another path")
    if make_call("stat", target, os.path.ismount, target):
        raise PathError(f"{target} is where a disk is mounted; name a folder in it")
    names = [entry.name for entry in entries(target)]
    if not names:
        return
    if MANIFEST not in names:
        foreign = _foreign(target, lambda name: False)
        _refuse(target, foreign or names, f"there is no {MANIFEST} that says so")
    try:
        with CheckpointReader(target, shared=False) as reader:
            files = reader.manifest.files
    except CheckpointError as error:
        raise PathError(
            f"{target} holds a {MANIFEST} that is not one of offload's, and would be lost: "
            f"{error}. Move or remove {target}, or name another path"
        ) from None
    foreign = _foreign(target, files.__contains__)
    if foreign:
        _refuse(target, foreign, f"its {MANIFEST} does not name it")


def _refuse(target: Path, found: list[str], why: str) -> None:
    listing = ", ".join(found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
    raise PathError(
        f"{target} holds {listing}, which is not part of a checkpoint ({why}) and would be lost; "
        "move it, or name another path"
    )


def remove(path: Path) -> None:
    """Remove a folder with a marked name, unless it holds foreign files. No link is followed, also
    if one takes a name meanwhile."""
    try:
        foreign = _foreign(path, is_data_file)
        if foreign:
            _log.warning("%s stays: it holds %s", path, ", ".join(foreign[:_SHOWN]))
        else:
            make_call("rmtree", path, shutil.rmtree, path)
    except FileNotFoundError:
        return  # another process has removed it
    except OSError as error:
        _log.warning("%s stays, removing it failed: %s", path, error.strerror or error)
