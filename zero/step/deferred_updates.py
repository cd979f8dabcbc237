"""Deferred updates: all groups' updates begin once the step has decided.

Under two other policies some begin with their group's last gradient:

    in backward   where a step has nothing to decide (in_backward_updates.py)
    speculative   and are undone if the step decides otherwise (speculative_updates.py)
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from offload.kernels.floats import Array
from offload.swap.threads.save_gate import SaveGate
from offload.swap.threads.shield import defer_signals
from offload.swap.threads.transfer import Transfer
from offload.tiers.ledger import OldBytes
from offload.zero.groups.group import ParamGroup
from offload.zero.step.chunks import GroupUpdate, Terms, segments_of
from offload.zero.step.lazy_updates import LazyUpdates
from offload.zero.step.optimizer_state import HyperOf, OptimizerState
from offload.zero.step.update import UpdateQueue


@dataclass(slots=True)
class SpeculationCounts:
    """The counts of groups that were updated speculatively, by outcome."""

    kept: int = 0
    redone: int = 0  # the step clipped, skipped, or had other numbers; or some had no room
    taken_back: int = 0  # the group was needed as it was before
    paused_steps: int = 0  # that clipped or were skipped, behind which no group is speculative

    def __str__(self) -> str:
        """Return one line; empty if there were none."""
        paused = self.paused_steps and (
            f"{self.paused_steps:,} steps clipped or were skipped, so the updates of the next one "
            "waited for it"
        )
        if not (self.kept or self.redone or self.taken_back):
            return f"no update was made in backward: {paused}" if paused else ""
        return (
            f"{self.kept:,} updates made in backward counted, {self.redone:,} were redone, "
            f"{self.taken_back:,} taken back{f'; {paused}' if paused else ''}"
        )


@dataclass(eq=False, repr=False)
class DeferredUpdates:
    """Makes the updates of groups and submits them to the queue. For the thread of the model, and
    the one that runs backward. The other policies override methods that do nothing here."""

    states: Sequence[OptimizerState]
    queue: UpdateQueue
    missed: LazyUpdates
    room: OldBytes  # free for old versions: of speculative updates, or of a save in the background
    # returns the hyperparameters as they are now; set with the optimizer, before any backward
    hyper_source: Callable[[], HyperOf] | None = None
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    lock: threading.RLock = field(default_factory=threading.RLock)  # held while `room` changes
    _hyper_ahead: HyperOf | None = None  # what the first update ahead of the step used
    # groups whose gradients an update reads, and whether they are cleared after that
    _reading: dict[int, bool] = field(default_factory=dict)
    _reading_lock: threading.RLock = field(default_factory=threading.RLock)

    in_backward = False  # whether gradients are used up before the step, and cannot be changed

    @contextmanager
    def beside_save(self) -> Iterator[tuple[SaveGate, int]]:
        """Yield the gate through which updates go on beside a save in the background, and how many
        bytes of files the save may take for old versions: all that are free, so until the end no
        group whose old version needs some is updated speculatively."""
        with self.lock:
            lent = OldBytes(files=self.room.files)
            self.room = self.room - lent
        try:
            yield self.queue.gate, lent.files
        finally:
            self.queue.gate.open()
            with self.lock:
                self.room = self.room + lent

    def __contains__(self, index: int) -> bool:
        """Return whether a group's update has begun ahead of its step."""
        return False

    def check_arrival(self, state: OptimizerState) -> None:
        """Let another gradient of a group come. Raises StateError if its update has missed it."""
        self.take_back([state.group.index])

    def is_due(self, passes: Array) -> bool:
        """Return whether to begin a group's update after so many passes of its parameters."""
        return False

    def begin(self, state: OptimizerState, grad_scale: float) -> None:
        """Begin the update of a group that is due, as if the step would not clip."""

    def take_back(self, groups: Iterable[int]) -> None:
        """Let these groups be as they were before updates that can be undone."""

    def check_drop(self, groups: Iterable[int]) -> None:
        """Let these groups' gradients be dropped. Raises StateError if an update used them up."""
        self.take_back(groups)

    def _hyper_now(self) -> HyperOf:
        """Return the hyperparameters for all updates ahead of the same step."""
        if self._hyper_ahead is None:
            assert self.hyper_source is not None, "set with the optimizer, before any backward"
            self._hyper_ahead = self.hyper_source()
        return self._hyper_ahead

    def check_step(self, hyper_of: HyperOf) -> None:
        """Raise StateError if updates that cannot be undone were made with other numbers."""

    def submit_step(self, hyper_of: HyperOf, grad_scale: float, order: Sequence[int]) -> None:
        """Submit the update of every group with gradients that is not being updated yet, those in
        `order` first. Groups without gradients miss the step."""
        ranks = {index: rank for rank, index in enumerate(order)}
        having = [state for state in self.states if state.gradients.has_any]
        begun = set(self._begun(hyper_of, grad_scale))
        rest = [state for state in having if state.group.index not in begun]
        rest.sort(key=lambda state: ranks.get(state.group.index, len(ranks)))
        self.missed.begin_step(hyper_of)
        self._submit(rest, hyper_of, grad_scale)
        for state in having:
            state.group.await_or_unmap()
        for group in self.missed.end_step({state.group.index for state in having}):
            group.fall_behind(partial(self.catch_up, [group]))
        self.catch_up(self.missed.overdue())

    def _begun(self, hyper_of: HyperOf, grad_scale: float) -> Iterable[int]:
        """Return the groups whose update has begun and is that of a step with these numbers."""
        return ()

    def decide_next(self, passes: int, *, changed: bool) -> None:
        """Decide how updates of the next step begin, after one of so many passes. `changed`: it
        clipped or skipped."""

    def end_cycle(self) -> Sequence[int]:
        """End what concerns one step, and return the groups whose gradients were used up for it."""
        self._hyper_ahead = None
        return ()

    def _submit(
        self, states: Sequence[OptimizerState], hyper_of: HyperOf, grad_scale: float, *,
        first: bool = False,
    ) -> None:  # fmt: skip
        updates = []
        for state in states:
            terms = Terms.of(state, hyper_of, grad_scale)
            updates.append(self._made(state, terms))
            state.count_update(terms.indices, updates[-1])
        self._put(updates, first=first)

    def _made(self, state: OptimizerState, terms: Terms) -> GroupUpdate:
        missed = self.missed.take(state, terms.indices)
        state.group.pending_update.catch_up = None
        segments = segments_of(state, terms, missed)
        ready: Transfer[None] = Transfer(f"the optimizer update of {state.group.name}")
        return GroupUpdate(state, segments, ready, partial(self._done, state))

    def _put(self, updates: Sequence[GroupUpdate], *, first: bool) -> None:
        with self._reading_lock:
            for update in updates:
                self._reading.setdefault(update.group.index, False)
        self.queue.submit([update for update in updates if update.state.parts], first=first)
        for update in updates:
            if not update.state.parts:  # this rank updates no part of the group
                update.state.gradients.landed.then(partial(_end, update))

    @defer_signals
    def catch_up(self, groups: Sequence[ParamGroup]) -> None:
        """Begin an update of each of the groups that missed steps. No gradient is read."""
        updates = []
        for group in groups:
            state = self.states[group.index]
            missed = self.missed.take(state)
            group.pending_update.catch_up = None
            segments = segments_of(state, Terms(), missed)
            ready: Transfer[None] = Transfer(f"the steps that {group.name} missed")
            if segments:
                made = GroupUpdate(state, segments, ready, lambda: None, has_gradients=False)
                updates.append(made)
        if updates:
            self.queue.submit(updates)

    def complete_steps(self) -> None:
        """Undo updates that no step has made, and begin those by steps that groups have missed."""
        self.take_back(range(len(self.states)))
        self.catch_up(self.missed.behind())

    def wait_for_reads(self) -> None:
        """Wait for updates that read gradients of earlier steps: a group has one update at a time,
        and what zero_grad cleared must not be seen by the next."""
        with self._reading_lock:
            reading = sorted(self._reading)
        for index in [index for index in reading if index not in self]:
            self.states[index].group.pending_update.wait()

    def clear(self, state: OptimizerState) -> None:
        """Clear a group's gradients, as soon as no update reads them."""
        with self._reading_lock:
            if state.group.index in self._reading:
                self._reading[state.group.index] = True
                return
        if state.gradients.holds_any:
            state.gradients.clear()

    def _done(self, state: OptimizerState) -> None:
        """Note, on the update thread, that the group's gradients are not read any more."""
        index = state.group.index
        with self._reading_lock:
            clear = self._reading.get(index, False)
            if not clear:
                self._reading.pop(index, None)
        if clear:
            # A step that comes meanwhile waits for this update: it must not see what is cleared.
            state.gradients.clear()
            with self._reading_lock:
                self._reading.pop(index, None)


def _end(update: GroupUpdate, _: Transfer[None]) -> None:
    update.done()
    update.ready.complete(None)
