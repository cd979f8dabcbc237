"""Steps: gradients accumulated, then one decision for all groups, then pending updates.

A step knows the norm of all gradients before any weight changes (partial sums were fused into the
copies), so clipping and skipping are exact; the update queue then updates the weights, behind the
next forward:

    backward k        step k       forward k+1
    ├──────────────────┤│├──────────────────────┤
                          ├ update 0 ┤├ 1 ┤├ 2 ┤     group 0 first, it is needed first

When updates begin is up to a policy, which may let some begin already in backward
(deferred_updates.py).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from offload.swap.states.trace import Trace
from offload.tiers.errors import StateError
from offload.tiers.ledger import OldBytes
from offload.zero.experts.packed import ExpertTable
from offload.zero.gradients.loss_scale import LossScale, NonfiniteSteps
from offload.zero.gradients.norms import GradientNorms, clip_coefficient
from offload.zero.ranks.reduction import Reductions
from offload.zero.ranks.tensor_parallel import TensorParallel
from offload.zero.step.deferred_updates import DeferredUpdates
from offload.zero.step.in_backward_updates import InBackwardUpdates
from offload.zero.step.lazy_updates import LazyUpdates
from offload.zero.step.optimizer_state import HyperOf, OptimizerState
from offload.zero.step.speculative_updates import SpeculativeUpdates, old_nbytes
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
    # for the old versions of groups that are updated speculatively
    speculation_nbytes: OldBytes = field(default_factory=OldBytes)
    speculates_on_host: bool = False  # with records in host memory, too
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
        self._rules = rules
        self._trace = trace
        self._loss_scale = loss_scale
        self.loss_scale_of_gradients = 1.0  # accumulated gradients have to be divided by it
        self.taken = self.skipped = 0
        self.nonfinite = NonfiniteSteps(rules.max_skipped_steps)
        # told which groups' gradients have no values any more, and why
        self.on_used_up: Callable[[Sequence[int], str], None] = lambda groups, why: None
        self._reductions = Reductions() if reductions is None else reductions
        self.norms = GradientNorms(states, self._reductions, tensor_parallel)
        self.passes = PassCounts(states, rules.passes)
        missed = LazyUpdates(states, tables, alone=not self._reductions.has_others)
        base = states, updates, missed, rules.speculation_nbytes
        codes = rules.speculates_on_host
        nbytes = old_nbytes(states, rules.speculation_nbytes, codes=codes)
        self.policy = DeferredUpdates(*base)
        if rules.in_backward:
            self.policy = InBackwardUpdates(*base, passes=rules.passes)
        elif nbytes:
            free = rules.free_nbytes
            self.policy = SpeculativeUpdates(*base, nbytes=nbytes, free_nbytes=free)

    @property
    def has_unstepped_gradients(self) -> bool:
        """Whether there are gradients that arrived since the last step, and were not dropped."""
        return self.passes.unstepped and any(state.gradients.has_any for state in self._states)

    def check_arrival(self, state: OptimizerState) -> None:
        """Raise StateError if the group's update has begun and would miss another gradient."""
        if self._loss_scale is not None:
            self._follow_loss_scale(self._loss_scale.scale)
        self.policy.check_arrival(state)

    def _follow_loss_scale(self, scale: float) -> None:
        """Rescale gradients that were multiplied with the scale of an earlier pass."""
        before, self.loss_scale_of_gradients = self.loss_scale_of_gradients, scale
        if scale == before:
            return
        for state in self._states:
            for index in np.flatnonzero(state.gradients.passes):
                state.gradients.scale(int(index), scale / before)

    def arrived(self, state: OptimizerState, index: int, *, readable: bool = True) -> None:
        """Note that parameter `index` got its gradient of one backward pass. `readable`: an update
        may read it before the step; otherwise it is reduced with other ranks' in the step."""
        group = state.group.index
        self.norms.invalidate()
        self.passes.add(group, index, readable=readable)
        if readable and self.policy.is_due(self.passes.readable[group]):
            self._reductions.when_issued(
                group, lambda: self.policy.begin(state, 1.0 / self.loss_scale_of_gradients)
            )

    def changed(self) -> None:
        """Note that a gradient was written or scaled."""
        self.passes.unstepped = True
        self.norms.invalidate()

    def agree(self, use: str, name: str = "") -> None:
        """Clear what any rank has cleared, and reduce what is not reduced yet, even if no gradient
        has come since the norms were computed. `use` says in errors what this is for."""
        self.policy.wait_for_reads()
        self._reductions.agree(use, name)
        self.norms.invalidate()

    def step(self, hyper_of: HyperOf) -> StepOutcome:
        """Make the update of every group with gradients pending, or skip it.

        Returns as soon as that is decided; parameters are read only after their own update. Raises
        StateError, with nothing changed, if `hyper_of` differs from what updates ahead were made
        with.
        """
        self.policy.check_step(hyper_of)
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
        clip = 1.0
        if skip:
            self.skipped += 1
        else:
            self.taken += 1
            clip = clip_coefficient(total, self._rules.clip_grad_norm)
            order = self._reductions.forward_order or self._trace.first_uses()
            self.policy.submit_step(hyper_of, clip / scale, order)
        passes = self.passes.since_step(readable=True)
        self.policy.decide_next(passes, changed=skip or clip != 1.0)
        self._note_nonfinite(finite, skip)
        self._trace.end_cycle()
        self._end_cycle()
        return StepOutcome(norm, skip)

    def _note_nonfinite(self, finite: bool, skip: bool) -> None:
        if finite:
            self.nonfinite.end_row()
            return
        names = self.norms.nonfinite(self.loss_scale_of_gradients)
        scale = None if self._loss_scale is None else self._loss_scale.scale
        step = self.taken + self.skipped
        self.nonfinite.note(step, names, self.norms.numel, skipped=skip, scale=scale)

    def _end_cycle(self) -> None:
        """Forget the passes of this step, and gradients that were used up ahead of it."""
        used_up = self.policy.end_cycle()
        self.passes.forget()
        self.on_used_up(used_up, "the update in backward has used it up")
        for index in used_up:
            self.policy.clear(self._states[index])

    def zero_grad(self) -> None:
        """Forget all gradients, each as soon as a pending update has read it.

        Raises StateError if updates have begun ahead of a step that was never taken.
        """
        self.policy.check_drop(range(len(self._states)))
        self.passes.unstepped = False
        self.norms.invalidate()
        self._reductions.discard()
        for state in self._states:
            self.policy.clear(state)
        self.policy.end_cycle()
        self.passes.forget()

    def drop(self, state: OptimizerState, indices: Sequence[int]) -> None:
        """Forget the gradients of some parameters of a group, as `zero_grad` does."""
        self.policy.check_drop([state.group.index])
        self.norms.invalidate()
        self._reductions.finish()
        self._reductions.clear(state.group.index, indices)
        state.gradients.drop(indices)
        if not state.gradients.holds_any:  # ... of other ranks, too
            self.policy.clear(state)

    def forget(self, why: str = "a checkpoint was loaded since") -> None:
        """Forget all gradients and the updates begun ahead of a step: a load is about to replace
        the weights that they changed. For settled states."""
        self.policy.take_back(range(len(self._states)))
        self.passes.unstepped = False
        self.nonfinite.end_row()
        self._reductions.discard()
        self.norms.invalidate()
        having = [state for state in self._states if state.gradients.holds_any]
        self._end_cycle()
        self.on_used_up(range(len(self._states)), why)
        for state in having:
            if state.gradients.holds_any:
                state.gradients.clear()
            if state.group.state.in_place:
                state.group.gather()  # an update ahead withheld it
