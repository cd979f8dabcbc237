"""The gate of a save in the background: groups wait before they overwrite unsaved values.

    group on nvme, and room for another version      at once: the old version stays
    else                                             once the save has passed the group

An update that may not begin yet stays in its queue while others go on. The save takes the groups
next that are waited for, so its order is that of the updates.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping


class SaveGate:
    """Thread-safe. Open to all groups while no save is under way."""

    def __init__(self) -> None:
        self.on_passed: Callable[[], None] = lambda: None  # a waiting group may be admitted now
        self._lock = threading.Condition(threading.Lock())
        # by group: bytes of its versions on nvme; None where it cannot be overwritten meanwhile
        self._held: dict[int, int | None] = {}
        self._admitted: dict[int, int] = {}  # bytes that they take until the save passes
        self._room = 0
        self._wanted: OrderedDict[int, None] = OrderedDict()  # the next one first

    def close(self, held: Mapping[int, int | None], room_nbytes: int) -> None:
        """Note that a save begins to read these groups, and the room for versions of them."""
        with self._lock:
            self._held, self._admitted = dict(held), {}
            self._room = room_nbytes
            self._wanted.clear()

    def admits(self, index: int) -> bool:
        """Return whether a group may be overwritten from now on. If not, the save takes it next."""
        if not self._held:  # without the lock: no less true than just after it
            return True
        with self._lock:
            if index not in self._held or index in self._admitted:
                return True
            nbytes = self._held[index]
            if nbytes is not None and nbytes <= self._room:
                self._room -= nbytes
                self._admitted[index] = nbytes
                return True
            self._wanted[index] = None
            return False

    def holds_back(self, index: int) -> bool:
        with self._lock:
            return index in self._held and index not in self._admitted

    def want(self, index: int) -> None:
        """Note that a group is needed now: the save takes it next, if it holds it back."""
        if not self._held:
            return
        with self._lock:
            if index in self._wanted:
                self._wanted.move_to_end(index, last=False)

    def await_admission(self, index: int) -> None:
        while not self.admits(index):
            self.want(index)
            with self._lock:
                self._lock.wait_for(lambda: index not in self._held)

    def next_wanted(self) -> int | None:
        """Return a group that is waited for."""
        with self._lock:
            return next((index for index in self._wanted if index in self._held), None)

    def passed(self, index: int) -> None:
        """Note that all of a group was read."""
        with self._lock:
            self._held.pop(index, None)
            self._room += self._admitted.pop(index, 0)
            self._wanted.pop(index, None)
            self._lock.notify_all()
        self.on_passed()

    def open(self) -> None:
        """Note that the save reads nothing any more."""
        with self._lock:
            self._held.clear()
            self._admitted.clear()
            self._wanted.clear()
            self._lock.notify_all()
        self.on_passed()
