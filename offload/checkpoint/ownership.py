"""Which files and folders are ours. No others are ever renamed, replaced or removed.

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
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from offload.checkpoint.disk import entries, is_folder, is_there, remove_file, remove_folder
from offload.checkpoint.hands import patiently
from offload.checkpoint.manifest import FORMAT, MANIFEST, OPTIMIZER, PARAMETERS, is_data_file
from offload.checkpoint.reader import CheckpointReader
from offload.tiers.errors import CheckpointError, PathError

_MARKED = re.compile(r"(?P<name>.+)\.(?P<kind>tmp|old|del)-(?P<random>[0-9a-f]{12})[0-9a-f]{16}")
_UNMARKED = re.compile(r"(?P<name>.+)\.(?P<kind>tmp|old)-[0-9a-f]{12}")  # of older versions
_SHOWN = 4
_log = logging.getLogger("offload")


@dataclass(frozen=True, slots=True)
class Leftover:
    """A folder that a writer made beside `target`."""

    path: Path
    target: Path
    kind: str
    removable: bool  # its name is our mark
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
    """Those in `parent`, newest first; `tmp` before `old`, which it replaces."""
    found = []
    for entry in entries(parent):
        match = _MARKED.fullmatch(entry.name) or _UNMARKED.fullmatch(entry.name)
        if match is None or not entry.is_dir(follow_symlinks=False):
            continue
        with suppress(FileNotFoundError):  # just removed by the process that replaced it
            path = parent / entry.name
            mtime_ns = patiently("stat", path, os.lstat, path).st_mtime_ns
            target = parent / match["name"]
            ours = is_marked(entry.name)
            found.append(Leftover(path, target, match["kind"], ours, mtime_ns))
    return sorted(found, key=lambda each: (each.kind == "tmp", each.mtime_ns), reverse=True)


# --------------------------------------------------------------------------- contents
def _entries(folder: Path) -> Iterator[tuple[str, bool]]:
    """Names in the folder and in the two that a checkpoint has, and whether what they name can be
    part of a checkpoint: no link, pipe or the like."""
    for entry in entries(folder):
        inner = entry.name in (PARAMETERS, OPTIMIZER)
        if inner and entry.is_dir(follow_symlinks=False):
            yield entry.name, True
            for below in entries(folder / entry.name):
                yield f"{entry.name}/{below.name}", below.is_file(follow_symlinks=False)
        else:
            yield entry.name, not inner and entry.is_file(follow_symlinks=False)


def _sorted_out(folder: Path, is_ours: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """A folder's contents: our files, and others."""
    ours: list[str] = []
    foreign: list[str] = []
    for name, plain in _entries(folder):
        known = name in (MANIFEST, PARAMETERS, OPTIMIZER) or is_ours(name)
        (ours if plain and known else foreign).append(name)
    return sorted(ours), sorted(foreign)


def check_replaceable(target: Path) -> None:
    """PathError, saying what is there, unless `target` is a checkpoint, an empty folder or nothing.

    To be called inside `alone_in` of its parent, so that no other process replaces or removes it.
    """
    if is_marked(target.name):
        raise PathError(f"{target} is a name for what is not complete yet; name another path")
    if not is_there(target):
        return
    if not is_folder(target):
        raise PathError(f"{target} is a file, a checkpoint is a folder; name another path")
    if patiently("stat", target, os.path.ismount, target):
        raise PathError(f"{target} is where a disk is mounted; name a folder in it")
    names = [entry.name for entry in entries(target)]
    if not names:
        return
    if MANIFEST not in names:
        _, foreign = _sorted_out(target, lambda name: False)
        _refuse(target, foreign or names, f"there is no {MANIFEST} that says so")
    try:
        with CheckpointReader(target, shared=False) as reader:
            files = reader.manifest.files
    except CheckpointError as error:
        raise PathError(
            f"{target} holds a {MANIFEST} that is not one of offload's, and would be lost: "
            f"{error}. Move or remove {target}, or name another path"
        ) from None
    _, foreign = _sorted_out(target, files.__contains__)
    if foreign:
        _refuse(target, foreign, f"its {MANIFEST} does not name it")


def _refuse(target: Path, found: list[str], why: str) -> None:
    listing = ", ".join(found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
    raise PathError(
        f"{target} holds {listing}, which is not part of a checkpoint ({why}) and would be lost; "
        "move it, or name another path"
    )


def remove(folder: Path) -> None:
    """Remove a folder with a marked name, unless it holds what is not ours."""
    try:
        ours, foreign = _sorted_out(folder, is_data_file)
        if foreign:
            _log.warning("%s stays: it holds %s", folder, ", ".join(foreign[:_SHOWN]))
            return
        for name in sorted(ours, key=lambda each: (each != MANIFEST, "/" not in each)):
            # the manifest first: what is left of a removal that is killed must not look complete
            with suppress(FileNotFoundError):
                (remove_folder if name in (PARAMETERS, OPTIMIZER) else remove_file)(folder / name)
        remove_folder(folder)
    except FileNotFoundError:
        return  # another process has removed it
    except OSError as error:
        _log.warning("%s stays, removing it failed: %s", folder, error.strerror)
