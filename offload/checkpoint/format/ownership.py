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
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import xxhash

from offload.checkpoint.format.disk import entries, is_folder, is_there
from offload.checkpoint.format.locks import OpenFolder
from offload.checkpoint.format.manifest import FORMAT, MANIFEST, OPTIMIZER, PARAMETERS, is_data_file
from offload.checkpoint.format.reader import CheckpointReader
from offload.swap.io.hands import patiently
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
    """The leftover folders in `parent`, newest first; `tmp` before `old`, which it replaces.
    Folders of other users are left out."""
    found, home = [], _status(parent)
    for entry in entries(parent):
        match = _MARKED.fullmatch(entry.name) or _UNMARKED.fullmatch(entry.name)
        if match is None or not entry.is_dir(follow_symlinks=False):
            continue
        with suppress(FileNotFoundError):  # just removed by the process that replaced it
            path, target = parent / entry.name, parent / match["name"]
            status = patiently("stat", path, os.lstat, path)
            if _is_of_others(status, home):
                _tell_once(logging.INFO, path, status.st_uid, "")
                continue
            ours = is_marked(entry.name)
            found.append(Leftover(path, target, match["kind"], ours, status.st_mtime_ns))
    return sorted(found, key=lambda each: (each.kind == "tmp", each.mtime_ns), reverse=True)


# --------------------------------------------------------------------------- users
def _is_of_others(status: os.stat_result, folder: os.stat_result) -> bool:
    """Whether an entry of a folder belongs neither to this user nor to the folder's owner, who can
    exchange anything in it (and owns every file on some network file systems)."""
    return status.st_uid not in (os.geteuid(), folder.st_uid)


def is_planted(entry: os.DirEntry[str], folder: Path) -> bool:
    """Whether another user may have put it there to be taken for ours, as is possible in /tmp; a
    warning is then logged, once."""
    with suppress(FileNotFoundError):
        path = folder / entry.name
        status, home = patiently("stat", path, os.lstat, path), _status(folder)
        if home.st_mode & stat.S_IWOTH and _is_of_others(status, home):
            _tell_once(
                logging.WARNING, path, status.st_uid,
                ", and any user can make such a folder here; load it by its name if you trust them",
            )  # fmt: skip
            return True
    return False


def _status(path: Path) -> os.stat_result:
    return patiently("stat", path, os.stat, path)


@lru_cache(maxsize=4096)
def _tell_once(level: int, path: Path, uid: int, more: str) -> None:
    _log.log(level, "%s stays as it is: it belongs to another user (uid %d)%s", path, uid, more)


# --------------------------------------------------------------------------- contents
@contextmanager
def _opened(path: Path, inside: OpenFolder | None = None) -> Iterator[dict[str, OpenFolder]]:
    """A folder, as "", and those of a checkpoint's two subfolders that are folders, no links: what
    is examined and removed there stays in them, whatever happens to the names meanwhile."""
    with ExitStack() as stack:
        folder = OpenFolder(path, inside)
        stack.callback(folder.close)
        found = {"": folder}
        for name in (PARAMETERS, OPTIMIZER):
            with suppress(FileNotFoundError, NotADirectoryError):
                found[name] = OpenFolder(path / name, folder)
                stack.callback(found[name].close)
        yield found


def _entries(folders: Mapping[str, OpenFolder]) -> Iterator[tuple[str, bool]]:
    """The names in the folder and in the two subfolders, and whether the entries can be part of a
    checkpoint: no link, pipe or the like."""
    for inner, folder in folders.items():
        for entry in folder.entries():
            plain = entry.is_file(follow_symlinks=False)
            if inner:
                yield f"{inner}/{entry.name}", plain
            elif entry.name in (PARAMETERS, OPTIMIZER):
                yield entry.name, entry.name in folders
            else:
                yield entry.name, plain


def _sorted_out(
    folders: Mapping[str, OpenFolder], is_ours: Callable[[str], bool]
) -> tuple[list[str], list[str]]:
    """A folder's contents: our files, and others."""
    ours: list[str] = []
    foreign: list[str] = []
    for name, plain in _entries(folders):
        known = name in (MANIFEST, PARAMETERS, OPTIMIZER) or is_ours(name)
        (ours if plain and known else foreign).append(name)
    return sorted(ours), sorted(foreign)


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
    if patiently("stat", target, os.path.ismount, target):
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


def _foreign(target: Path, is_ours: Callable[[str], bool]) -> list[str]:
    with _opened(target) as folders:
        return _sorted_out(folders, is_ours)[1]


def _refuse(target: Path, found: list[str], why: str) -> None:
    listing = ", ".join(found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
    raise PathError(
        f"{target} holds {listing}, which is not part of a checkpoint ({why}) and would be lost; "
        "move it, or name another path"
    )


def remove(path: Path) -> None:
    """Remove a folder with a marked name, unless it holds foreign files. Nothing is removed through
    a link, also if one takes a name meanwhile."""
    try:
        with closing(OpenFolder(path.parent)) as parent:
            with _opened(path, parent) as folders:
                ours, foreign = _sorted_out(folders, is_data_file)
                if foreign:
                    _log.warning("%s stays: it holds %s", path, ", ".join(foreign[:_SHOWN]))
                    return
                # the manifest first: what is left of a removal that is killed must not look
                # complete
                for name in sorted(ours, key=lambda each: (each != MANIFEST, "/" not in each)):
                    _remove_from(folders, name)
            parent.remove_folder(path.name)
    except FileNotFoundError:
        return  # another process has removed it
    except OSError as error:
        _log.warning("%s stays, removing it failed: %s", path, error.strerror)


def _remove_from(folders: Mapping[str, OpenFolder], name: str) -> None:
    inner, _, last = name.rpartition("/")
    with suppress(FileNotFoundError):
        if name in (PARAMETERS, OPTIMIZER):
            folders[inner].remove_folder(last)
        else:
            folders[inner].remove_file(last)
