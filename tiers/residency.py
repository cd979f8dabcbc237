"""Residency: where valid copies of a piece of state *are*, as opposed to its placement."""

from __future__ import annotations

import enum


class Residency(enum.Enum):
    """The state of a slot that holds a copy of a piece.

    ABSENT    no memory is held; the home has the only valid copy
    ARRIVING  memory is held and a transfer is filling it; the home is valid
    CLEAN     memory and home are both valid; the memory may be taken away at any time
    DIRTY     only the memory is valid: it was written and has not gone home
    LEAVING   memory is valid and a transfer is taking it home
    """

    ABSENT = "absent"
    ARRIVING = "arriving"
    CLEAN = "clean"
    DIRTY = "dirty"
    LEAVING = "leaving"

    @property
    def readable(self) -> bool:
        """True if the memory holds what the state's reader must see."""
        return self in (Residency.CLEAN, Residency.DIRTY, Residency.LEAVING)
