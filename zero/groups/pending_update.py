"""The update of a group that readers of its weights and optimizer states have to wait for.

pending     a step has submitted it, and its thread completes `ready` once it can be read
on trial    it was submitted before its step and can be undone: a reader undoes it first
            (zero/step/speculative_updates.py)
missed      steps were noted without an update: a reader begins one that makes them up
            (zero/step/lazy_updates.py)
"""

from __future__ import annotations

from collections.abc import Callable

from offload.swap.threads.transfer import Transfer


class PendingUpdate:
    """What a group's readers wait for, if anything."""

    __slots__ = ("_catch_up", "on_trial", "ready", "step_waits")

    def __init__(self) -> None:
        self.ready: Transfer[None] | None = None  # of the update that is pending
        # undoes a pending update that no step has made yet
        self.on_trial: Callable[[], None] | None = None
        # begins the update by the steps that were missed, if there are any
        self._catch_up: Callable[[], None] | None = None
        # True: the step itself waits, for every state is at home in the memory where it is used
        self.step_waits = False

    def fall_behind(self, catch_up: Callable[[], None]) -> None:
        """Note that a step was missed: before anything is read, `catch_up` begins its update."""
        self._catch_up = catch_up

    def caught_up(self) -> None:
        """Note that an update by all steps that were missed is about to be submitted."""
        self._catch_up = None

    def begin_missed(self) -> None:
        """Begin the update by the steps that were missed, if there are any."""
        if self._catch_up is not None:
            if self.ready is not None:  # where an interrupt can end the wait
                self.ready.wait()
            self._catch_up()

    def decided(self) -> Transfer[None] | None:
        """Return the `ready` that readers wait for, after undoing an update that no step has
        made."""
        if self.on_trial is not None:
            self.on_trial()
        return self.ready

    def wait(self) -> None:
        """Block until the pending update is visible, and the update by the steps that were missed.
        Every reader of weights or optimizer states comes here."""
        self.decided()
        self.begin_missed()
        ready = self.ready
        if ready is not None:
            ready.wait()
            if self.ready is ready:  # else another thread has made a step meanwhile
                self.ready = None
