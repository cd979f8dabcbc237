"""Steps: gradients accumulated, then one decision for all groups, then pending updates.

A step knows the norm of all gradients before any weight changes (partial sums were fused into the
copies), so clipping and skipping are exact; the update queue then updates the weights, behind the
next forward:

    backward k        step k       forward k+1
    ├──────────────────┤│├──────────────────────┤
                          ├ update 0 ┤├ 1 ┤├ 2 ┤     group 0 first, it is needed first

Where nothing has to be known of all gradients together, a group's update may begin as soon as its
last gradient is there, behind the rest of the backward (`StepRules.in_backward`):

    backward k        step k       forward k+1
    ├──────────────────┤│├──────────────────────┤
         ├ 2 ┤├ 1 ┤├ 0 ┤
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from offload.swap.states.trace import Trace
from offload.swap.threads.shield import defer_signals
from offload.swap.threads.transfer import Transfer
from offload.tiers.errors import StateError
from offload.tiers.ledger import OldBytes
from offload.zero.experts.packed import ExpertTable
from offload.zero.gradients.loss_scale import LossScale, NonfiniteSteps
from offload.zero.gradients.norms import GradientNorms, clip_coefficient
from offload.zero.groups.group import ParamGroup
from offload.zero.ranks.reduction import Reductions
from offload.zero.ranks.tensor_parallel import TensorParallel
from offload.zero.step.chunks import GroupUpdate, Terms, segments_of
from offload.zero.step.lazy_updates import LazyUpdates, ZeroUpdates
from offload.zero.step.optimizer_state import Hyper, HyperOf, OptimizerState
from offload.zero.step.save_gate import SaveGate
from offload.zero.step.speculative_updates import SpeculativeUpdates
from offload.zero.step.update import UpdateQueue


@dataclass(frozen=True, slots=True)
class StepRules:
    """Settings for a step's gradients: clipping, skipping, scaling, early updates."""

    clip_grad_norm: float | None = None
    skip_nonfinite: bool = False
    max_skipped_steps: int = 50  # in a row
    # Update each group as soon as it got `passes` gradients of every parameter. The loop must then
    # run exactly that many backward passes per step, and take every step it has begun.
    in_backward: bool = False
    passes: int = 1
    # for the old versions of groups that are updated on trial
    trial_nbytes: OldBytes = field(default_factory=OldBytes)
    free_nbytes: Callable[[], int] = lambda: 0  # on the disks, now


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The outcome of one step. The norm is of the unscaled gradients, before clipping."""

    gradient_norm: float
    skipped: bool


class PassCounts:
    """The backward passes since the last step, by group and parameter."""

    def __init__(self, states: Sequence[OptimizerState], per_step: int) -> None:
        """`per_step` passes are to come before each step."""
        self._all = [np.zeros_like(state.steps) for state in states]
        self.readable = [np.zeros_like(state.steps) for state in states]  # by an update, now
        self._per_step = per_step
        self.are_checked = True  # False: the caller of the step counts them
        self._was_short = False  # the last step had fewer than `per_step`
        self.unstepped = False  # gradients arrived since the last step or zero_grad

    def add(self, group: int, index: int, *, readable: bool) -> None:
        """Note that a parameter got its gradient of one pass."""
        self.unstepped = True
        self._all[group][index] += 1
        self.readable[group][index] += readable

    def since_step(self, *, readable: bool = False) -> int:
        """Return the passes whose gradients wait for a step: the most that any parameter has."""
        passes = self.readable if readable else self._all
        return max((int(each.max()) for each in passes if each.size), default=0)

    def forget(self) -> None:
        """Begin to count from 0."""
        for passes in (*self._all, *self.readable):
            passes[:] = 0

    def check(self, *, first: bool) -> None:
        """Compare the passes before a step, or the `first` one, with `gradient_accumulation_steps`.
        That key skips no step, so a loop that counts on it for that (as with DeepSpeed) would step
        too often."""
        if not self.are_checked:
            return
        passes = self.since_step()
        is_short = 0 < passes < self._per_step
        if is_short and (first or self._was_short):
            raise StateError(
                f"gradient_accumulation_steps: {self._per_step} says that so many backward "
                f"passes come before each optimizer.step(), and this step came after {passes}; it "
                "neither skips steps nor divides the loss. Call optimizer.step() and zero_grad() "
                f"after every {self._per_step} passes and divide the loss by "
                f"{self._per_step}, or set gradient_accumulation_steps: {passes}"
            )
        self._was_short = is_short


class Stepper:
    """Decides steps over `states`. For the thread of the model."""

    def __init__(
        self, states: Sequence[OptimizerState], updates: UpdateQueue, rules: StepRules,
        trace: Trace, loss_scale: LossScale | None,
        reductions: Reductions | None = None,
        tensor_parallel: TensorParallel | None = None, tables: Sequence[ExpertTable] = (),
    ) -> None:  # fmt: skip
        """`reductions` are with the ranks that have gradients of the same parameters,
        `tensor_parallel` with those that have other parts of them. `tables` are the model's
        experts: a packed one without a gradient makes its step when it is next needed."""
        self._states = states
        self._updates = updates
        self._rules = rules
        self._trace = trace
        self._loss_scale = loss_scale
        self.taken = self.skipped = 0
        self._lock = threading.RLock()
        # groups whose gradients an update reads, and whether they are cleared after that
        self._read_by_update: dict[int, bool] = {}
        self.nonfinite = NonfiniteSteps(rules.max_skipped_steps)
        # returns the hyperparameters for updates ahead of a step
        self.hyper_source: Callable[[], HyperOf] | None = None
        # told which groups' gradients have no values any more, and why
        self.on_used_up: Callable[[Sequence[int], str], None] = lambda groups, why: None
        self.loss_scale_of_gradients = 1.0  # accumulated gradients have to be divided by it
        self._hyper_ahead: HyperOf | None = None  # what the first update ahead of the step used
        self._ahead: set[int] = set()  # groups whose update has begun ahead of the step
        self._reductions = Reductions() if reductions is None else reductions
        self.norms = GradientNorms(states, self._reductions, tensor_parallel)
        self.passes = PassCounts(states, rules.passes)
        alone = not self._reductions.has_others
        self._missed = LazyUpdates(states, tables, alone=alone)
        self.speculative = SpeculativeUpdates(
            states, rules.trial_nbytes, updates.withdraw, rules.free_nbytes
        )

    @property
    def has_unstepped_gradients(self) -> bool:
        """Whether there are gradients that arrived since the last step, and were not dropped."""
        return self.passes.unstepped and any(state.gradients.has_any for state in self._states)

    @contextmanager
    def beside_save(self) -> Iterator[tuple[SaveGate, int]]:
        """Yield the gate through which updates go on beside a save in the background, and how many
        bytes of files the save may take for old versions. Both are given back after the block."""
        lent = self.speculative.lend()
        try:
            yield self._updates.gate, lent
        finally:
            self._updates.gate.open()
            self.speculative.give_back(lent)

    @property
    def updates_in_backward(self) -> bool:
        return self._rules.in_backward

    def check_arrival(self, state: OptimizerState) -> None:
        """Raise StateError if the group's update has begun and would miss another gradient."""
        if self._loss_scale is not None:
            self._follow_loss_scale()
        if state.group.index in self._ahead:
            raise StateError(
                f"{state.gradients.name} got another gradient after the update that used its last "
                f"one: optimizer.in_backward counts on {self._rules.passes} backward pass(es) per "
                "step; set gradient_accumulation_steps to their number, or in_backward: false"
            )
        self.speculative.take_back([state.group.index])

    def arrived(self, state: OptimizerState, index: int, *, readable: bool = True) -> None:
        """Note that parameter `index` got its gradient of one backward pass. `readable`: an update
        may read it before the step; otherwise it is reduced with other ranks' in the step."""
        self.norms.invalidate()
        self.passes.add(state.group.index, index, readable=readable)
        if not readable:
            return
        arrived = self.passes.readable[state.group.index]
        if self._rules.in_backward:
            if (arrived >= self._rules.passes).all():
                begin = partial(self._update_ahead, state)
                self._reductions.when_issued(state.group.index, begin)
        elif self.speculative.on and (arrived == self.speculative.passes).all():
            self._reductions.when_issued(state.group.index, partial(self._update_on_trial, state))

    def _follow_loss_scale(self) -> None:
        """Rescale gradients that were multiplied with the scale of an earlier pass."""
        assert self._loss_scale is not None, "asked by the caller"
        scale = self._loss_scale.scale
        before, self.loss_scale_of_gradients = self.loss_scale_of_gradients, scale
        if scale == before:
            return
        for state in self._states:
            for index in np.flatnonzero(state.gradients.passes):
                state.gradients.scale(int(index), scale / before)

    def _update_ahead(self, state: OptimizerState) -> None:
        """Begin the update of one group before its step."""
        if self._hyper_ahead is None:
            assert self.hyper_source is not None, "set with the optimizer, before any backward"
            self._hyper_ahead = self.hyper_source()
        state.gradients.close()
        with self._lock:
            self._ahead.add(state.group.index)
        self._submit([state], self._hyper_ahead, 1.0, first=True)
        if state.group.state.in_place:
            state.group.unmap()  # half an update must not be read

    def _update_on_trial(self, state: OptimizerState) -> None:
        """Begin the update of one group before its step, if it can be undone."""
        with self.speculative.lock:  # a thread that takes it back finds it submitted
            if not state.parts or not self.speculative.takes(state) or self._missed.lacks(state):
                return
            assert self.hyper_source is not None, "set with the optimizer, before any backward"
            if self._hyper_ahead is None:
                self._hyper_ahead = self.hyper_source()
            terms = Terms.of(state, self._hyper_ahead, 1.0 / self.loss_scale_of_gradients)
            if len(terms.indices) < len(state.steps):
                return
            state.gradients.close()
            if not self.speculative.begin(state, terms):
                return
            update = self._made(state, terms, {})
            with self._lock:
                self._read_by_update.setdefault(state.group.index, False)
            self._updates.submit([update], first=True)

    def step(self, hyper_of: HyperOf) -> StepOutcome:
        """Make the update of every group with gradients pending, or skip it.

        Returns as soon as that is decided; parameters are read only after their own update. Raises
        StateError, with nothing changed, if `hyper_of` differs from what updates ahead were made
        with.
        """
        self._check_hypers_ahead(hyper_of)
        self.passes.check(first=self.taken + self.skipped == 0)
        self.passes.unstepped = False
        self.agree("a step")
        for state in self._states:
            state.gradients.close()
        scale = self.loss_scale_of_gradients
        total = self.norms.total(scale)
        norm = float(total)
        finite = math.isfinite(norm)
        skip = not finite and self._rules.skip_nonfinite
        if self._loss_scale is not None:
            self._loss_scale.update(overflow=not finite)
        passes = self.passes.since_step(readable=True)
        clip = 1.0
        redone = self.speculative.counts.redone
        if skip:
            self.skipped += 1
            self.speculative.redo_all()
        else:
            self.taken += 1
            clip = clip_coefficient(total, self._rules.clip_grad_norm)
            self._submit_rest(hyper_of, clip / scale)
        changed = skip or clip != 1.0
        hypers_changed = not changed and self.speculative.counts.redone > redone
        self.speculative.decide_next(passes, changed=changed, hypers_changed=hypers_changed)
        self._note_nonfinite(finite, skip)
        self._trace.end_cycle()
        self._end_ahead()
        return StepOutcome(norm, skip)

    def _check_hypers_ahead(self, hyper_of: HyperOf) -> None:
        for index in sorted(self._ahead):
            assert self._hyper_ahead is not None, "set with the first update ahead"
            group = self._states[index].group
            for param, spec in zip(group.params, group.layout.params, strict=True):
                used, now = self._hyper_ahead(param), hyper_of(param)
                if spec.trainable and used != now:
                    raise StateError(
                        f"the update of {spec.name} began during backward, and since then "
                        f"{_changed(used, now)}: optimizer.in_backward uses param groups as they "
                        "are in backward; change them before backward or after step(), where "
                        "schedulers are stepped, or set in_backward: false. That update cannot be "
                        "undone: to go on, put the param groups back as they were and call step() "
                        "again, or load a checkpoint"
                    )

    def _end_ahead(self) -> None:
        """Finish the groups updated ahead of this step: their gradients are used up."""
        with self._lock:
            ahead = sorted(self._ahead)
            self._ahead.clear()
            reading = self._read_by_update.keys() & ahead
            self._read_by_update |= dict.fromkeys(reading, True)
        self._forget_passes()
        self.on_used_up(ahead, "the update in backward has used it up")
        for index in ahead:
            if index not in reading:
                self._states[index].gradients.clear()

    def zero_grad(self) -> None:
        """Forget all gradients, each as soon as a pending update has read it.

        Raises StateError if updates have begun ahead of a step that was never taken.
        """
        self._refuse_to_drop(self._ahead)
        self.speculative.take_back_all()
        self.passes.unstepped = False
        self.norms.invalidate()
        self._reductions.discard()
        for state in self._states:
            self._clear(state)
        self._forget_passes()

    def _forget_passes(self) -> None:
        self._hyper_ahead = None
        self.passes.forget()

    def drop(self, state: OptimizerState, indices: Sequence[int]) -> None:
        """Forget the gradients of some parameters of a group, as `zero_grad` does."""
        self._refuse_to_drop(self._ahead & {state.group.index})
        self.speculative.take_back([state.group.index])
        self.norms.invalidate()
        self._reductions.finish()
        self._reductions.clear(state.group.index, indices)
        state.gradients.drop(indices)
        if not state.gradients.holds_any:  # ... of other ranks, too
            self._clear(state)

    def _refuse_to_drop(self, ahead: set[int]) -> None:
        if ahead:
            raise StateError(
                "zero_grad before step: optimizer.in_backward has used these gradients already; "
                "call optimizer.step() after every backward, or set in_backward: false"
            )

    def _clear(self, state: OptimizerState) -> None:
        with self._lock:
            if state.group.index in self._read_by_update:
                self._read_by_update[state.group.index] = True
                return
        if state.gradients.holds_any:
            state.gradients.clear()

    def forget(self, why: str = "a checkpoint was loaded since") -> None:
        """Forget all gradients and the updates begun ahead of a step: a load is about to replace
        the weights that they changed. For settled states."""
        self.speculative.take_back_all()
        self.passes.unstepped = False
        self.nonfinite.end_row()
        self._reductions.discard()
        self.norms.invalidate()
        having = [state for state in self._states if state.gradients.holds_any]
        self._end_ahead()
        self.on_used_up(range(len(self._states)), why)
        for state in having:
            if state.gradients.holds_any:
                state.gradients.clear()
            if state.group.state.in_place:
                state.group.gather()  # an update ahead withheld it

    def agree(self, use: str, name: str = "") -> None:
        """Clear what any rank has cleared, and reduce what is not reduced yet, even if no gradient
        has come since the norms were computed. `use` says in errors what this is for."""
        self._wait_for_reading_updates()
        self._reductions.agree(use, name)
        self.norms.invalidate()

    def changed(self) -> None:
        """Note that a gradient was written or scaled."""
        self.passes.unstepped = True
        self.norms.invalidate()

    def _wait_for_reading_updates(self) -> None:
        """Wait for updates that read gradients: a group has one update at a time, and what
        zero_grad cleared must not be seen by the next."""
        with self._lock:
            reading = sorted(self._read_by_update.keys() - self._ahead)
        reading = [index for index in reading if index not in self.speculative]
        for index in reading:
            self._states[index].group.pending_update.wait()

    def _note_nonfinite(self, finite: bool, skip: bool) -> None:
        if finite:
            self.nonfinite.end_row()
            return
        names = self.norms.nonfinite(self.loss_scale_of_gradients)
        scale = None if self._loss_scale is None else self._loss_scale.scale
        step = self.taken + self.skipped
        self.nonfinite.note(step, names, self.norms.numel, skipped=skip, scale=scale)

    def _submit_rest(self, hyper_of: HyperOf, grad_scale: float) -> None:
        """Submit every group with gradients that is not being updated yet."""
        first = self._reductions.forward_order or self._trace.first_uses()
        order = {index: rank for rank, index in enumerate(first)}
        having = [state for state in self._states if state.gradients.has_any]
        done = self._ahead | set(self._keep_trials(hyper_of, grad_scale))
        rest = [state for state in having if state.group.index not in done]
        rest.sort(key=lambda state: order.get(state.group.index, len(order)))
        with_gradients = {state.group.index for state in having}
        self._missed.begin_step(hyper_of)
        self._submit(rest, hyper_of, grad_scale)
        for state in having:
            state.group.await_or_unmap()
        for group in self._missed.end_step(with_gradients):
            group.fall_behind(partial(self.catch_up, [group]))
        self.catch_up(self._missed.overdue())

    def _keep_trials(self, hyper_of: HyperOf, grad_scale: float) -> Iterator[int]:
        """Yield the groups whose update on trial is that of this step."""
        for index in self.speculative:
            state = self._states[index]
            terms = Terms.of(state, hyper_of, grad_scale)
            if self.speculative.keeps(index, terms):
                state.steps[list(terms.indices)] += 1
                state.group.invalidate()
                yield index

    def _submit(
        self, states: Sequence[OptimizerState], hyper_of: HyperOf, grad_scale: float, *,
        first: bool = False,
    ) -> None:  # fmt: skip
        updates = []
        for state in states:
            terms = Terms.of(state, hyper_of, grad_scale)
            missed = self._missed.take(state, terms.indices)
            state.group.pending_update.catch_up = None
            updates.append(self._made(state, terms, missed))
            state.steps[list(terms.indices)] += 1
            state.group.invalidate()
        with self._lock:
            for state in states:
                self._read_by_update.setdefault(state.group.index, False)
        here = [update for update in updates if update.state.parts]
        self._updates.submit(here, first=first)
        for update in updates:
            if not update.state.parts:  # this rank updates no part of the group
                update.state.gradients.landed.then(partial(_end, update))

    def _made(self, state: OptimizerState, terms: Terms, missed: ZeroUpdates) -> GroupUpdate:
        """Return the next update of a group. Changes nothing."""
        name, index = state.group.name, state.group.index
        ready: Transfer[None] = Transfer(f"the optimizer update of {name}")
        segments = segments_of(state, terms, missed)
        return GroupUpdate(state, segments, ready, lambda: self._update_done(index))

    # ---------------------------------------------------------------- missed steps
    @defer_signals
    def catch_up(self, groups: Sequence[ParamGroup]) -> None:
        """Begin an update of each of the groups that missed steps. No gradient is read."""
        updates = []
        for group in groups:
            state = self._states[group.index]
            missed = self._missed.take(state)
            group.pending_update.catch_up = None
            segments = segments_of(state, Terms(), missed)
            ready: Transfer[None] = Transfer(f"the steps that {group.name} missed")
            if segments:
                made = GroupUpdate(state, segments, ready, lambda: None, has_gradients=False)
                updates.append(made)
        if updates:
            self._updates.submit(updates)

    def catch_up_all(self) -> None:
        """Catch up, as `catch_up` does, with the steps that any group has missed."""
        self.catch_up(self._missed.behind())

    def _update_done(self, index: int) -> None:
        """Note, on the update thread, that the group's gradients are not read any more."""
        with self._lock:
            ahead = index in self._ahead
        if ahead:
            self._states[index].gradients.spend()
        with self._lock:
            clear = self._read_by_update.get(index, False)
            if not clear:
                self._read_by_update.pop(index, None)
        if clear:
            # A step that comes meanwhile waits for this update: it must not see what is cleared.
            self._states[index].gradients.clear()
            with self._lock:
                self._read_by_update.pop(index, None)


def _end(update: GroupUpdate, _: Transfer[None]) -> None:
    update.done()


def _changed(used: Hyper | None, now: Hyper | None) -> str:
    """Return the change of one parameter's hyperparameters, as half a sentence."""
    if used is None or now is None:
        return f"it was {'added to' if used is None else 'taken out of'} the param groups"
    pairs = zip(used.numbers, now.numbers, strict=True)
    changes = [f"{name} was set from {a} to {b}" for (name, a), (_, b) in pairs if a != b]
    return ", ".join(changes)
