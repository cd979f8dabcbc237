"""Names that identify the process that made a file or folder which must vanish with it.

    STEM.tmp-BOOT-SPACE-PID-START-RANDOM

BOOT is the machine's since it was started, SPACE the namespace that PID counts in (containers have
their own), START when the process began, since a pid is used again. So files of a killed process
differ from those of a living one.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_MARKED = re.compile(
    r".+\.tmp-(?P<boot>[0-9a-f]{8})-(?P<space>\d+)-(?P<pid>\d+)-(?P<ticks>\d+)-[0-9a-f]{12}"
)
_NO_BOOT = "0" * 8  # /proc does not say it
_UNKNOWN = 0  # a namespace or a start that /proc does not say
_PROC = Path("/proc")


class Life(Enum):
    """Whether a process lives; UNKNOWN where that cannot be told from here."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Maker:
    """A process, wherever and whenever it runs."""

    boot: str
    space: int
    pid: int
    ticks: int  # between the machine's start and its own

    @classmethod
    def here(cls, proc: Path = _PROC) -> Maker:
        """The maker that represents this process."""
        pid = os.getpid()
        return cls(_boot(proc), _space(proc), pid, _ticks(pid, proc) or _UNKNOWN)

    def life(self, *, is_local: bool, proc: Path = _PROC) -> Life:
        """Whether the process lives. `is_local`: no other machine can have made the mark, so that
        another BOOT is a past boot of this machine."""
        here = _boot(proc)
        if _NO_BOOT in (self.boot, here):
            return Life.UNKNOWN
        if self.boot != here:
            return Life.DEAD if is_local else Life.UNKNOWN
        ticks = _ticks(self.pid, proc)
        if self.space != _space(proc) or _UNKNOWN in (self.space, self.ticks, ticks):
            return Life.UNKNOWN
        if ticks is None and _is_hidden(self.pid):
            return Life.UNKNOWN
        return Life.ALIVE if ticks == self.ticks else Life.DEAD


def marked(stem: str) -> str:
    """A new name with this process's mark."""
    here = Maker.here()
    mark = f"{here.boot}-{here.space}-{here.pid}-{here.ticks}"
    return f"{stem}.tmp-{mark}-{secrets.token_hex(6)}"


def maker_of(name: str) -> Maker | None:
    """The process that made what has this name; None unless it looks like one of `marked`."""
    found = _MARKED.fullmatch(name)
    if found is None:
        return None
    return Maker(found["boot"], int(found["space"]), int(found["pid"]), int(found["ticks"]))


def _boot(proc: Path) -> str:
    try:
        text = (proc / "sys/kernel/random/boot_id").read_text()
    except OSError:
        return _NO_BOOT
    return text[:8]


def _space(proc: Path) -> int:
    try:
        return int(re.sub(r"\D", "", os.readlink(proc / "self/ns/pid")) or _UNKNOWN)
    except OSError:
        return _UNKNOWN


def _is_hidden(pid: int) -> bool:
    """Whether a process lives that /proc does not show (mounted with hidepid)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's process, or no valid pid
        return True
    return True


def _ticks(pid: int, proc: Path) -> int | None:
    """The start time of a process, in ticks; None if there is no such process."""
    try:
        text = (proc / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:
        return _UNKNOWN
    # the program's name, in brackets, may hold anything
    return int(text.rpartition(")")[2].split()[19])
