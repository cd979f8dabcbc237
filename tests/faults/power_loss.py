"""The states that a power loss may leave of a folder, at every moment of the calls on it.

A file system promises little of what was not synced. Here it promises this, and no more:

    a file       has the contents of its last fsync (none before the first), or its present ones
    a folder     has, under each name, what it had at its last fsync, or what it has at present
    a rename     is of one name at once, and no order among names is kept

`Disk` records calls of fsync and of what changes names, and after each collects all trees that may
be left. What is being written has a name that says so, and is left out.
"""

import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest

from offload.checkpoint.format import disk

Tree = bytes | tuple[tuple[str, "Tree"], ...]  # a file's contents, or a folder's names in order

_CHANGING = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir")
_PENDING = re.compile(r"\.(tmp|old|del)-[0-9a-f]{8}")
_MAX_STATES = 32  # of one file or folder: what is left unsynced has many more, one tells of it


class Disk:
    """What is below `root`, all of which is durable at first. A context manager."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.RLock()
        self._open: dict[int, int] = {}  # no inode's number is used again while it is open
        self._contents: dict[int, bytes] = {}  # durable, by inode
        self._names: dict[int, dict[str, int]] = {}
        self._top = self._inode(root)
        self.seen: dict[Tree, str] = {}  # every tree that may be left, and since which call
        for folder, _, files in os.walk(root):
            for path in (Path(folder), *(Path(folder) / name for name in files)):
                self._made_durable(self._inode(path))
        self._look("at first")

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Calls inside are recorded, from any module and thread."""
        fsync = os.fsync

        def synced(fd: int) -> None:
            fsync(fd)
            with self._lock:
                number = os.fstat(fd).st_ino
                if number in self._open or self._find(fd) is not None:
                    self._made_durable(number)
                    self._look(f"fsync of {os.readlink(f'/proc/self/fd/{fd}')}")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", synced)
            patch.setattr(disk, "_exchange", self._told("exchange", disk._exchange))
            for name in _CHANGING:
                patch.setattr(os, name, self._told(name, getattr(os, name)))
            yield

    def _told(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any, **keys: Any) -> Any:
            with self._lock:
                self._look(f"before {name} {args}")  # what was created or written meanwhile
                try:
                    return function(*args, **keys)
                finally:
                    self._look(f"{name} {args}")

        return told

    # ---------------------------------------------------------------- inodes
    def _find(self, fd: int) -> int | None:
        """The inode of an open file or folder below the root."""
        path = os.readlink(f"/proc/self/fd/{fd}")
        if not Path(path).is_relative_to(self._root) or not os.path.lexists(path):
            return None
        return self._inode(Path(path))

    def _inode(self, path: Path) -> int:
        status = os.lstat(path)
        if status.st_ino not in self._open:
            assert not stat.S_ISLNK(status.st_mode), path
            self._open[status.st_ino] = os.open(path, os.O_RDONLY)
        return status.st_ino

    def _is_folder(self, number: int) -> bool:
        return stat.S_ISDIR(os.fstat(self._open[number]).st_mode)

    def _names_now(self, number: int) -> dict[str, int]:
        inodes = {}
        fd = self._open[number]
        for name in os.listdir(fd):
            try:
                inodes[name] = self._inode(Path(f"/proc/self/fd/{fd}/{name}"))
            except FileNotFoundError:  # another thread removes it
                continue
        return inodes

    def _contents_now(self, number: int) -> bytes:
        fd = self._open[number]
        return os.pread(fd, os.fstat(fd).st_size, 0)

    def _made_durable(self, number: int) -> None:
        if self._is_folder(number):
            self._names[number] = self._names_now(number)
        else:
            self._contents[number] = self._contents_now(number)

    # ---------------------------------------------------------------- after a crash
    def _look(self, what: str) -> None:
        for tree in self._states(self._top):
            self.seen.setdefault(tree, what)

    def _states(self, number: int) -> Iterator[Tree]:
        """The states that may be left, the durable one first."""
        if not self._is_folder(number):
            yield from {self._contents.get(number, b""): 0, self._contents_now(number): 0}
            return
        durable, now = self._names.get(number, {}), self._names_now(number)
        names = [name for name in sorted({*durable, *now}) if not _PENDING.search(name)]
        each = [
            [(name, state) for one in {durable.get(name): 0, now.get(name): 0}
             for state in ([None] if one is None else islice(self._states(one), _MAX_STATES))]
            for name in names
        ]  # fmt: skip
        for chosen in product(*each):
            yield tuple((name, state) for name, state in chosen if state is not None)

    def durable(self) -> Tree:
        """The state with nothing but durable contents and names."""

        def tree(number: int) -> Tree:
            if not self._is_folder(number):
                return self._contents.get(number, b"")
            names = sorted(self._names.get(number, {}).items())
            return tuple((n, tree(each)) for n, each in names if not _PENDING.search(n))

        return tree(self._top)


def write_tree(tree: Tree, path: Path) -> None:
    if isinstance(tree, bytes):
        path.write_bytes(tree)
        return
    path.mkdir()
    for name, inner in tree:
        write_tree(inner, path / name)
