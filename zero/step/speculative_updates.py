"""Speculative updates: begun during backward as if the step would change no gradient.

Clipping and skipping need the norm of all gradients, which is known when backward is over. Mostly
it changes nothing: the coefficient is 1. So a group whose gradients are complete is updated at
once, its old versions are kept, and the step decides:

    backward k        step k                         forward k+1
    ├──────────────────┤│├─────────────────────────────┤
         ├ 2 ┤├ 1 ┤├ 0 ┤ as on trial: old versions are dropped
                       │ else: back to them ├ 0 ┤├ 1 ┤├ 2 ┤

The bits are those of the deferred update in any case. A group that is read before the step, or
gets another gradient, is as it was: `PendingUpdate.wait` goes back first.
(Speculation with validation behind it is described for updates in CPU memory in SuperOffload,
arXiv:2509.21271.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from offload.swap.states.state import Undoable
from offload.swap.threads.shield import defer_signals
from offload.tiers.ledger import OldBytes
from offload.zero.step.chunks import Terms
from offload.zero.step.optimizer_state import OptimizerState

_LONGEST_PAUSE = 64  # steps


@dataclass(slots=True)
class SpeculationCounts:
    """The counts of groups that were updated on trial, by outcome."""

    kept: int = 0
    redone: int = 0  # the step clipped, skipped, or had other numbers
    taken_back: int = 0  # the group was needed as it was before

    def __str__(self) -> str:
        """Return one line; empty if there were none."""
        if not (self.kept or self.redone or self.taken_back):
            return ""
        return (
            f"{self.kept:,} updates made in backward counted, {self.redone:,} were redone, "
            f"{self.taken_back:,} taken back"
        )


class SpeculativeUpdates:
    """The groups on trial, and whether there are to be any. For the thread of the model; any thread
    that reads a group takes it back."""

    def __init__(
        self, states: Sequence[OptimizerState], spare: OldBytes,
        withdraw: Callable[[int], None], free_nbytes: Callable[[], int],
    ) -> None:  # fmt: skip
        """`spare` is free for old versions, as far as `free_nbytes` of the disks are. `withdraw`
        ends a group's update, or lets it not begin."""
        self._states = states
        self._spare = spare
        self._withdraw = withdraw
        self._free = free_nbytes
        self._terms: dict[int, Terms] = {}
        # held while a trial begins, until its update is submitted, and while it ends
        self.lock = threading.RLock()
        self._nbytes = [_old_nbytes(state) for state in states]
        self.counts = SpeculationCounts()
        self._is_possible = any(n is not None and spare.holds(n) for n in self._nbytes)
        self.passes = 1  # backward passes that the last step had
        self.on = False  # in this step
        self._pause = self._last_pause = 0
        self._disturbed = False

    def lend(self) -> int:
        """Lend a save in the background all room for versions in files, and return its bytes: until
        `give_back` no group whose old version needs some is on trial."""
        with self.lock:
            lent = self._spare.files
            self._spare = self._spare - OldBytes(files=lent)
            return lent

    def give_back(self, nbytes: int) -> None:
        """The reverse of `lend`."""
        with self.lock:
            self._spare = self._spare + OldBytes(files=nbytes)

    def __contains__(self, index: int) -> bool:
        return index in self._terms

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._terms))

    def takes(self, state: OptimizerState) -> bool:
        """Return whether the group can be updated now and then restored, if memory suffices."""
        group, nbytes = state.group, self._nbytes[state.group.index]
        return (
            self.on and nbytes is not None and self._spare.holds(nbytes) and not group.is_entered
            and (not group.is_gathered or group.state.in_place)
            and not group.copies.is_arriving  # it may be read on another thread from here on
            # a view kept by the user, or read by another thread, must not show a trial
            and not group.has_kept_views()
            and not any(each.has_views() for each in _undoable(state)[1:])
            and nbytes.files <= self._free()  # checkpoints, and others, write there, too
        )  # fmt: skip

    def begin(self, state: OptimizerState, terms: Terms) -> bool:
        """Begin a trial: the group's update with these terms is about to be submitted (lock held).
        Returns False if there is no memory for its old version."""
        index = state.group.index
        nbytes = self._nbytes[index]
        assert nbytes is not None, "taken"
        with ExitStack() as kept:
            for each in _undoable(state):
                if not each.keep_old():
                    return False
                kept.callback(each.drop_old)
            kept.pop_all()
        self._spare = self._spare - nbytes
        self._terms[index] = terms
        state.group.pending_update.on_trial = lambda: self.take_back([index])
        return True

    def keeps(self, index: int, terms: Terms) -> bool:
        """Return whether the step is made with the terms of the trial, whose outcome counts then.
        Else the group is as it was before."""
        with self.lock:
            if index not in self._terms:  # another thread has just taken it back
                return False
            if self._terms[index] != terms:
                self._end(index, keep=False)
                self.counts.redone += 1
                return False
            self._end(index, keep=True)
            self.counts.kept += 1
            return True

    def redo_all(self) -> None:
        """Take all trials back: the step is skipped."""
        with self.lock:
            for index in list(self._terms):
                self._end(index, keep=False)
                self.counts.redone += 1

    def take_back(self, indices: Iterable[int]) -> None:
        """Let groups be as they were, which is needed before the step."""
        with self.lock:
            for index in indices:
                if index in self._terms:
                    self._end(index, keep=False)
                    self.counts.taken_back += 1
                    self._disturbed = True

    def take_back_all(self) -> None:
        self.take_back(range(len(self._states)))

    @defer_signals  # half of it would leave an update that is made twice
    def _end(self, index: int, *, keep: bool) -> None:
        state = self._states[index]
        with ExitStack() as ended:  # all of it, also where something fails
            ended.callback(self._forget, index)  # last: until then others wait for the lock
            for each in _undoable(state):
                ended.callback(each.drop_old if keep else each.go_back)
            if not keep:
                self._withdraw(index)
                state.group.pending_update.ready = None

    def _forget(self, index: int) -> None:
        nbytes = self._nbytes[index]
        assert nbytes is not None, "it was on trial"
        del self._terms[index]
        self._spare = self._spare + nbytes
        self._states[index].group.pending_update.on_trial = None

    def decide_next(self, passes: int, *, changed: bool, hypers_changed: bool) -> None:
        """Decide whether the next step has trials, after a step of so many passes; `changed`: it
        clipped or skipped. The next one has trials if this one changed nothing, but for some steps
        after one in which groups were needed as they were, or got other numbers."""
        if not self._is_possible:
            return
        if self._disturbed or hypers_changed:
            self._last_pause = min(2 * self._last_pause + 1, _LONGEST_PAUSE)
            self._pause = self._last_pause + 1
        elif self.on and not changed:
            self._last_pause = 0
        self._disturbed = False
        self._pause = max(0, self._pause - 1)
        self.passes = passes
        self.on = not changed and not self._pause and passes > 0


def _undoable(state: OptimizerState) -> list[Undoable]:
    """Return the states that an update writes, as far as it can be undone."""
    written = (each.undoable() for each in (state.group.state, *state.records))
    return [each for each in written if each is not None]


def _old_nbytes(state: OptimizerState) -> OldBytes | None:
    """Return the bytes of all its old versions; None if some cannot be kept. Nor are they if a
    record is in memory: its old version would take the place of copies that save reads."""
    weights, records = state.group.state.undoable(), [r.undoable() for r in state.records]
    if weights is None or any(each is None or each.old_nbytes.memory for each in records):
        return None
    if not records and weights.old_nbytes.memory:
        return None  # nothing moves
    return sum((each.old_nbytes for each in _undoable(state)), OldBytes())
