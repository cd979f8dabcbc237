"""Updates in backward: each begins with its group's last gradient, and is final.

For loops that need to know nothing of all gradients together, and promise to take a step after so
many passes (`StepRules.in_backward`):

    backward k        step k       forward k+1
    ├──────────────────┤│├──────────────────────┤
         ├ 2 ┤├ 1 ┤├ 0 ┤
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from offload.kernels.floats import Array
from offload.tiers.errors import StateError
from offload.zero.step.deferred_updates import DeferredUpdates
from offload.zero.step.optimizer_state import Hyper, HyperOf, OptimizerState


@dataclass(eq=False, repr=False, kw_only=True)
class InBackwardUpdates(DeferredUpdates):
    """The groups whose update has begun ahead of its step."""

    passes: int  # of each step
    _ahead: set[int] = field(default_factory=set)

    in_backward = True

    def __contains__(self, index: int) -> bool:
        return index in self._ahead

    def check_arrival(self, state: OptimizerState) -> None:
        if state.group.index in self._ahead:
            raise StateError(
                f"{state.gradients.name} got another gradient after the update that used its last "
                f"one: optimizer.in_backward counts on {self.passes} backward pass(es) per "
                "step; set gradient_accumulation_steps to their number, or in_backward: false"
            )

    def is_due(self, passes: Array) -> bool:
        return bool((passes >= self.passes).all())

    def begin(self, state: OptimizerState, grad_scale: float) -> None:
        hyper_of = self._hyper_now()
        state.gradients.close()
        self._ahead.add(state.group.index)
        self._submit([state], hyper_of, grad_scale, first=True)
        if state.group.state.in_place:
            state.group.unmap()  # half an update must not be read

    def check_drop(self, groups: Iterable[int]) -> None:
        if not self._ahead.isdisjoint(groups):
            raise StateError(
                "zero_grad before step: optimizer.in_backward has used these gradients already; "
                "call optimizer.step() after every backward, or set in_backward: false"
            )

    def check_step(self, hyper_of: HyperOf) -> None:
        for index in sorted(self._ahead):
            used_by, group = self._hyper_now(), self.states[index].group
            for param, spec in zip(group.params, group.layout.params, strict=True):
                used, now = used_by(param), hyper_of(param)
                if spec.trainable and used != now:
                    raise StateError(
                        f"the update of {spec.name} began during backward, and since then "
                        f"{_changed(used, now)}: optimizer.in_backward uses param groups as they "
                        "are in backward; change them before backward or after step(), where "
                        "schedulers are stepped, or set in_backward: false. That update cannot be "
                        "undone: to go on, put the param groups back as they were and call step() "
                        "again, or load a checkpoint"
                    )

    def _begun(self, hyper_of: HyperOf, grad_scale: float) -> Iterable[int]:
        return self._ahead

    def _done(self, state: OptimizerState) -> None:
        if state.group.index in self:  # until the step, no more than their norm is needed
            state.gradients.spend()
        super()._done(state)

    def end_cycle(self) -> Sequence[int]:
        super().end_cycle()
        ahead, self._ahead = sorted(self._ahead), set()
        return ahead


def _changed(used: Hyper | None, now: Hyper | None) -> str:
    """Return the change of one parameter's hyperparameters, as half a sentence."""
    if used is None or now is None:
        return f"it was {'added to' if used is None else 'taken out of'} the param groups"
    pairs = zip(used.numbers, now.numbers, strict=True)
    changes = [f"{name} was set from {a} to {b}" for (name, a), (_, b) in pairs if a != b]
    return ", ".join(changes)
