"""Speculative updates: begun during backward as if the step would change no gradient.

Clipping and skipping need the norm of all gradients, which is known when backward is over. Mostly
it changes nothing: the coefficient is 1. So a group whose gradients are complete is updated at
once, its old versions are kept, and the step decides:

    backward k        step k                         forward k+1
    ├──────────────────┤│├─────────────────────────────┤
         ├ 2 ┤├ 1 ┤├ 0 ┤ as speculated: old versions are dropped
                       │ else: back to them ├ 0 ┤├ 1 ┤├ 2 ┤

The bits are those of the deferred update in any case. A group that is read before the step, or
gets another gradient, is as it was: `PendingUpdate.wait` goes back first.
(Speculation with validation behind it is described for updates in CPU memory in SuperOffload,
arXiv:2509.21271.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from offload.kernels.floats import Array
from offload.swap.states.state import Undoable
from offload.swap.threads.shield import defer_signals
from offload.tiers.ledger import OldBytes
from offload.zero.step.chunks import Terms
from offload.zero.step.deferred_updates import DeferredUpdates
from offload.zero.step.optimizer_state import HyperOf, OptimizerState

_LONGEST_PAUSE = 64  # steps


@dataclass(eq=False, repr=False, kw_only=True)
class SpeculativeUpdates(DeferredUpdates):
    """The groups that are updated speculatively, and whether there are to be any. Any thread that
    reads a group takes it back. `lock` is also held while such an update begins, until it is
    submitted, and while it ends."""

    nbytes: Mapping[int, OldBytes]  # of old versions, by group that can be updated so
    free_nbytes: Callable[[], int]  # on the disks, now
    passes: int = 1  # backward passes that the last step had
    on: bool = False  # in this step
    _terms: dict[int, Terms] = field(default_factory=dict)  # by group that is updated speculatively
    _pause: int = 0  # steps
    _last_pause: int = 0
    _disturbed: bool = False  # in this step: a group was needed as it was,
    _had_other_terms: bool = False  # or was updated with other numbers

    def __contains__(self, index: int) -> bool:
        return index in self._terms

    def is_due(self, passes: Array) -> bool:
        return self.on and bool((passes == self.passes).all())

    def begin(self, state: OptimizerState, grad_scale: float) -> None:
        index = state.group.index
        with self.lock:  # a thread that takes it back finds it submitted
            if not state.parts or not self._takes(state) or self.missed.lacks(state):
                return
            terms = Terms.of(state, self._hyper_now(), grad_scale)
            if len(terms.indices) < len(state.steps):
                return
            state.gradients.close()
            with ExitStack() as kept:
                for each in _undoable(state):
                    if not each.keep_old():
                        return
                    kept.callback(each.drop_old)
                kept.pop_all()
            self.room = self.room - self.nbytes[index]
            self._terms[index] = terms
            state.group.pending_update.undo = lambda: self.take_back([index])
            self._put([self._made(state, terms)], first=True)

    def _takes(self, state: OptimizerState) -> bool:
        """Return whether the group can be updated now and then restored, if memory suffices."""
        group, nbytes = state.group, self.nbytes.get(state.group.index)
        return (
            self.on and nbytes is not None and self.room.holds(nbytes) and not group.is_entered
            and (not group.is_gathered or group.state.in_place)
            and not group.copies.is_arriving  # it may be read on another thread from here on
            # a view kept by the user, or read by another thread, must not show such an update
            and not group.has_kept_views()
            and not any(each.has_views() for each in _undoable(state)[1:])
            and nbytes.files <= self.free_nbytes()  # checkpoints, and others, write there, too
        )  # fmt: skip

    def take_back(self, groups: Iterable[int]) -> None:
        with self.lock:
            for index in groups:
                if index in self._terms:
                    self._end(index, keep=False)
                    self.counts.taken_back += 1
                    self._disturbed = True

    def _begun(self, hyper_of: HyperOf, grad_scale: float) -> Iterator[int]:
        """Yield the groups whose update had the terms of the step, and counts then. The others
        are as they were before."""
        for index in list(self._terms):
            state = self.states[index]
            terms = Terms.of(state, hyper_of, grad_scale)
            with self.lock:
                if index not in self._terms:  # another thread has just taken it back
                    continue
                keep = self._terms[index] == terms
                self._end(index, keep=keep)
            if keep:
                self.counts.kept += 1
                state.count_update(terms.indices)
                yield index
            else:
                self.counts.redone += 1
                self._had_other_terms = True

    @defer_signals  # half of it would leave an update that is made twice
    def _end(self, index: int, *, keep: bool) -> None:
        state = self.states[index]
        with ExitStack() as ended:  # all of it, also where something fails
            ended.callback(self._forget, index)  # last: until then others wait for the lock
            for each in _undoable(state):
                ended.callback(each.drop_old if keep else each.go_back)
            if not keep:
                self.queue.withdraw(index)
                state.group.pending_update.ready = None

    def _forget(self, index: int) -> None:
        del self._terms[index]
        self.room = self.room + self.nbytes[index]
        self.states[index].group.pending_update.undo = None

    def decide_next(self, passes: int, *, changed: bool) -> None:
        """The next step speculates if this one changed nothing, but for some steps after one in
        which groups were needed as they were, or got other numbers."""
        with self.lock:
            for index in list(self._terms):  # the step was skipped
                self._end(index, keep=False)
                self.counts.redone += 1
        if self._disturbed or (self._had_other_terms and not changed):
            self._last_pause = min(2 * self._last_pause + 1, _LONGEST_PAUSE)
            self._pause = self._last_pause + 1
        elif self.on and not changed:
            self._last_pause = 0
        self._disturbed = self._had_other_terms = False
        self._pause = max(0, self._pause - 1)
        self.passes = passes
        self.on = not changed and not self._pause and passes > 0


def old_nbytes(states: Sequence[OptimizerState], room: OldBytes) -> dict[int, OldBytes]:
    """Return the bytes of old versions by group, for those that `room` suffices for."""
    needed = {state.group.index: _old_nbytes(state) for state in states}
    return {index: n for index, n in needed.items() if n is not None and room.holds(n)}


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
