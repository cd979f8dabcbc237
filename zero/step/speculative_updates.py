"""Speculative updates: begun during backward as if the step would change no gradient.

Clipping and skipping need the norm of all gradients, which is known when backward is over. Mostly
it changes nothing: the coefficient is 1. So a group whose gradients are complete is updated at
once, its old versions are kept, and the step decides:

    backward k        step k                         forward k+1
    ├──────────────────┤│├─────────────────────────────┤
         ├ 2 ┤├ 1 ┤├ 0 ┤ as speculated: old versions are dropped
                       │ else: back to them ├ 0 ┤├ 1 ┤├ 2 ┤

The bits are those of the deferred update in any case. A group that is read before the step, or
gets another gradient, is as it was: `PendingUpdate.wait` goes back first. What the old version is
depends on where the optimizer's record is:

    nvme          the old extents, and a copy of the weights if their home is memory
    host memory   a code, from which it follows with the gradient (undo_codes.py)

(Speculation with validation behind it is described for updates in CPU memory in SuperOffload,
arXiv:2509.21271.)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from offload.kernels.bits import FLOAT_OF
from offload.kernels.cpu.undo_code import codes_nbytes
from offload.kernels.floats import Array
from offload.swap.states.memory_state import MemoryState
from offload.swap.states.state import Undoable
from offload.swap.threads.shield import defer_signals
from offload.swap.threads.transfer import Transfer
from offload.tiers.ledger import OldBytes
from offload.tiers.tier import PAGE_NBYTES
from offload.tiers.units import round_up
from offload.zero.step.chunks import GroupUpdate, Terms
from offload.zero.step.deferred_updates import DeferredUpdates
from offload.zero.step.optimizer_state import HyperOf, OptimizerState
from offload.zero.step.undo_codes import Codes

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
    _updates: dict[int, GroupUpdate] = field(default_factory=dict)  # of the same groups
    _pause: int = 0  # steps
    _last_pause: int = 0
    _disturbed: bool = False  # in this step: a group was needed as it was,
    _had_other_terms: bool = False  # or was updated with other numbers

    def __post_init__(self) -> None:
        # also while none is there: a reader on another thread waits for `lock`, so that an update
        # that begins after it sees the reader
        for index in self.nbytes:
            self.states[index].group.pending_update.undo = partial(self.take_back, [index])

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
            codes = None
            with ExitStack() as kept:
                pool = next((record.spare for record in _coded(state).values()), None)
                if pool is not None:
                    codes = Codes.lease(pool, _code_nbytes(state), state.group.name)
                    if codes is None:
                        return
                    kept.callback(codes.free)
                for each in _kept(state):
                    if not each.keep_old():
                        return
                    kept.callback(each.drop_old)
                kept.pop_all()
            state.gradients.close()
            self.room = self.room - self.nbytes[index]
            self._terms[index] = terms
            update = self._updates[index] = self._made(state, terms)
            update.codes = codes
            self._put([update], first=True)

    def _takes(self, state: OptimizerState) -> bool:
        """Return whether the group can be updated now and then restored, if memory suffices."""
        group, nbytes = state.group, self.nbytes.get(state.group.index)
        return (
            self.on and nbytes is not None and self.room.holds(nbytes) and not group.is_entered
            and (not group.is_gathered or group.state.in_place)
            and not group.copies.is_arriving  # it may be read on another thread from here on
            # a view kept by the user, or read by another thread, must not show such an update
            and not group.has_kept_views()
            and not any(each.has_views() for each in _written(state)[1:])
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
        for index in reversed(self._terms.copy()):  # before those that wait are begun
            state = self.states[index]
            terms = Terms.of(state, hyper_of, grad_scale)
            with self.lock:
                if index not in self._terms:  # another thread has just taken it back
                    continue
                keep, update = self._terms[index] == terms, self._updates[index]
                whole = self._end(index, keep=keep)
            self.counts.kept += keep and whole
            self.counts.redone += not (keep and whole)
            if keep:
                state.count_update(terms.indices, update)
                yield index
            else:
                self._had_other_terms = True

    @defer_signals  # half of it would leave an update that is made twice
    def _end(self, index: int, *, keep: bool) -> bool:
        """End a speculative update: it counts, or it was never made. Returns whether all of it was
        made; of one that counts, the rest is submitted."""
        state, update = self.states[index], self._updates[index]
        codes = update.codes
        rest: Sequence[int] = ()
        with ExitStack() as ended:  # all of it, also where something fails
            ended.callback(self._forget, index)  # last: until then others wait for the lock
            for each in _kept(state):
                ended.callback(each.drop_old if keep else each.go_back)
            if not keep:
                ended.callback(self._undo, update)
                self.queue.withdraw(index)
                state.group.pending_update.ready = None
            elif codes is not None and (rest := codes.accept()):
                update.ready.wait()  # until then it reads gradients
                ready: Transfer[None] = Transfer(f"the rest of the update of {state.group.name}")
                done = partial(self._done, state)
                left = GroupUpdate(state, update.segments, ready, done, some=rest)
                self._put([left], first=False)
        return not rest

    def _undo(self, update: GroupUpdate) -> None:
        """Undo the chunks that have codes, on the update thread, and drop the codes."""
        codes, ready = update.codes, Transfer[None](f"undoing the update of {update.group.name}")
        if codes is None or not codes.made:
            if codes is not None:
                codes.free()
            return
        ready.then(lambda _: codes.free())
        done, some = lambda: None, tuple(codes.made)
        undoing = GroupUpdate(update.state, (), ready, done, undoes=update, some=some)
        self.queue.submit([undoing], first=True)
        ready.wait()

    def _forget(self, index: int) -> None:
        del self._terms[index], self._updates[index]
        self.room = self.room + self.nbytes[index]

    def decide_next(self, passes: int, *, changed: bool) -> None:
        """The next step speculates if this one changed nothing, but for some steps after one in
        which groups were needed as they were, or got other numbers."""
        with self.lock:
            for index in reversed(self._terms.copy()):  # the step was skipped
                self._end(index, keep=False)
                self.counts.redone += 1
        self.counts.paused_steps += changed
        if self._disturbed or (self._had_other_terms and not changed):
            self._last_pause = min(2 * self._last_pause + 1, _LONGEST_PAUSE)
            self._pause = self._last_pause + 1
        elif self.on and not changed:
            self._last_pause = 0
        self._disturbed = self._had_other_terms = False
        self._pause = max(0, self._pause - 1)
        self.passes = passes
        self.on = not changed and not self._pause and passes > 0


def old_nbytes(
    states: Sequence[OptimizerState], room: OldBytes, *, codes: bool
) -> dict[int, OldBytes]:
    """Return the bytes of old versions by group, for those that `room` suffices for. `codes`: also
    of groups with records in host memory."""
    needed = {state.group.index: _old_nbytes(state, codes=codes) for state in states}
    return {index: n for index, n in needed.items() if n is not None and room.holds(n)}


def _written(state: OptimizerState) -> list[Undoable]:
    """Return the states that an update writes, as far as it can be undone."""
    written = (each.undoable() for each in (state.group.state, *state.records))
    return [each for each in written if each is not None]


def _coded(state: OptimizerState) -> dict[int, MemoryState]:
    """Return the records in host memory, by chunk: a code undoes their updates."""
    undoable = {chunk: record.undoable() for chunk, record in enumerate(state.records)}
    return {chunk: each for chunk, each in undoable.items() if isinstance(each, MemoryState)}


def _kept(state: OptimizerState) -> list[Undoable]:
    """Return the states whose old versions are kept: none if codes undo all of the update."""
    coded = list(_coded(state).values())
    if coded and len(coded) == len(state.records):
        return []
    return [each for each in _written(state) if each not in coded]


def _code_nbytes(state: OptimizerState) -> dict[int, int]:
    pieces = len(state.steps)  # of consecutive elements with equal numbers, at most
    return {chunk: codes_nbytes(len(state.chunks[chunk]), pieces) for chunk in _coded(state)}


def _old_nbytes(state: OptimizerState, *, codes: bool) -> OldBytes | None:
    """Return the bytes of all its old versions; None if some cannot be kept."""
    weights, records, coded = state.group.state.undoable(), state.records, _coded(state)
    if weights is None or any(record.undoable() is None for record in records):
        return None
    if coded and not (codes and state.record_format.can_undo(FLOAT_OF[state.group.dtype])):
        return None
    if not records and weights.old_nbytes.memory:
        return None  # nothing moves
    memory = sum(round_up(nbytes, PAGE_NBYTES) for nbytes in _code_nbytes(state).values())
    return sum((each.old_nbytes for each in _kept(state)), OldBytes(memory=memory))
