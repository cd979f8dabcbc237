"""The sharded training state of one model on one rank: groups, gradients, updates.

Down once, back once: a unit's pre-forward hook comes to `use`, a gradient to `_take_gradient`, the
optimizer's step to `step`. Everything that moves does so behind `State`.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import nn

from offload.kernels.adam import AdamScalars
from offload.kernels.convert import encode, split_master
from offload.kernels.floats import Array, Float, Runner
from offload.swap.state import State
from offload.swap.trace import Trace
from offload.swap.transfer import Transfer
from offload.tiers.errors import StateError, UnsupportedError
from offload.zero.bits import FLOAT_OF, array_of, flat_array
from offload.zero.discovery import Discovery
from offload.zero.gradients import GradientAccumulator, total_norm
from offload.zero.group import ParamGroup
from offload.zero.handles import HandleTable
from offload.zero.hooks import UnitHooks
from offload.zero.layout import Layout, ParamSpec, lay_out
from offload.zero.loss_scale import LossScale
from offload.zero.records import RecordFormat
from offload.zero.update import GroupUpdate, OptimizerState, Segment, UpdateQueue, merge

_log = logging.getLogger("offload")
AUTO_PREFETCH = 4


class Homes(Protocol):
    """Makes the states of a group, each with the home that the placement gives it."""

    def parameters(self, index: int, name: str, layout: Layout, next_use: NextUse) -> State: ...

    def gradients(
        self, index: int, name: str, layout: Layout, itemsize: int, next_use: NextUse
    ) -> State: ...

    def record(
        self, index: int, name: str, chunk: int, nbytes: int, next_use: NextUse
    ) -> State: ...


NextUse = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Hyper:
    """One parameter's numbers of one step (from its param group)."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool = True
    maximize: bool = False


HyperOf = Callable[[nn.Parameter], Hyper | None]


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """What a runtime has to know besides the model."""

    dtype: torch.dtype
    device: torch.device
    record_format: RecordFormat
    chunk_numel: int
    accumulate_fp32: bool = False  # expect several backward passes per step
    prefetch: int = AUTO_PREFETCH  # groups fetched ahead
    clip_grad_norm: float | None = None
    skip_nonfinite: bool = False


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What became of one step. The norm is of the unscaled gradients, before clipping."""

    gradient_norm: float
    skipped: bool


class Runtime:
    """Owns the groups of `discovery`. Its public methods are for the thread of the model."""

    def __init__(
        self, discovery: Discovery, options: RuntimeOptions, homes: Homes, run: Runner,
        run_blocks: Runner, staging: Sequence[torch.Tensor], loss_scale: LossScale | None,
    ) -> None:  # fmt: skip
        """`run` shares elements between threads, `run_blocks` blocks of a norm's partial sums."""
        self.options = options
        self.own = FLOAT_OF[options.dtype]
        self.loss_scale = loss_scale
        self.trace = Trace()
        self._run_blocks = run_blocks
        self._homes = homes
        self.steps_taken = self.steps_skipped = 0
        self.unusable: str | None = None  # why nothing may be read or trained (a torn load)
        self.has_unstepped_gradients = False  # ... that arrived since the last step or zero_grad
        self._lock = threading.RLock()
        self._read_by_update: set[int] = set()
        self._clear_after_update: set[int] = set()
        self._scaled_backward = False
        self._warned: set[str] = set()
        self.groups: list[ParamGroup] = []
        self.optimizer_states: list[OptimizerState] = []
        self.steps: list[Array] = []  # per group: how often each trainable parameter was updated
        for plan in discovery.groups:
            self._add_group(plan.name, plan.params)
        self._where = {
            id(param): (group, index)
            for group in self.groups
            for index, param in enumerate(group.params)
        }
        self.updates = UpdateQueue(
            options.record_format, self.own, run, staging, self._update_next_use
        )
        self._handles = HandleTable(self.use)
        self._units = discovery.units
        self._hooks: UnitHooks | None = None
        self._gradient_hooks: list[torch.utils.hooks.RemovableHandle] = []

    # ---------------------------------------------------------------- building
    def _add_group(self, name: str, params: Sequence[tuple[tuple[str, ...], nn.Parameter]]) -> None:
        options = self.options
        index = len(self.groups)
        layout = lay_out(params)
        by_names = dict(params)
        ordered = [by_names[spec.names] for spec in layout.params]

        def next_use() -> float:
            return self.trace.next_use(index)

        def next_update() -> float:
            return self.trace.next_cycle_use(index) + 0.5

        state = self._homes.parameters(index, name, layout, next_use)
        group = ParamGroup(
            index, name, layout, ordered, options.dtype, state, options.device
        )  # fmt: skip
        accumulate = Float.FP32 if options.accumulate_fp32 else self.own
        gradients = GradientAccumulator(
            name, layout, self.own, accumulate,
            lambda itemsize: self._homes.gradients(index, name, layout, itemsize, next_update),
            self._run_blocks,
        )  # fmt: skip
        chunks = layout.chunks(options.chunk_numel)
        records = [
            self._homes.record(
                index, name, chunk, options.record_format.nbytes(len(elements)), next_update
            )
            for chunk, elements in enumerate(chunks)
        ]
        trainable = sum(spec.trainable for spec in layout.params)
        self.groups.append(group)
        kept = OptimizerState(group, gradients, chunks, records)
        group.permanent = kept.in_place
        self.optimizer_states.append(kept)
        self.steps.append(np.zeros(trainable, dtype=np.int64))

    def start(self, model: nn.Module, written: Callable[[ParamGroup, list[int]], None]) -> None:
        """Install the hooks: from here on `model` trains through this runtime."""
        self._hooks = UnitHooks(
            model, self._units, self.groups, self._handles, self.use, written
        )  # fmt: skip
        for group in self.groups:
            for param, spec in zip(group.params, group.layout.params, strict=True):
                if spec.trainable:
                    hook = param.register_post_accumulate_grad_hook(self._take_gradient)
                    self._gradient_hooks.append(hook)

    # ---------------------------------------------------------------- forward and backward
    def use(self, group: ParamGroup) -> None:
        """`group` is needed now: note it, hurry its update, fetch what comes next."""
        self.check_usable()
        self.trace.use(group.index)
        if self.updates.is_pending(group):
            self.updates.promote(group)
        if self.options.prefetch and self.trace.learnt:
            self._fetch_ahead()

    def _fetch_ahead(self) -> None:
        for distance, index in enumerate(self.trace.upcoming()):
            if distance >= self.options.prefetch:
                return
            group = self.groups[index]
            if self.updates.is_pending(group):
                continue  # its update brings it
            if not group.state.bring(next_use=self.trace.next_use(index)):
                return

    def _update_next_use(self, group: ParamGroup) -> float:
        return self.trace.next_use(group.index)

    def _take_gradient(self, param: torch.Tensor) -> None:
        gradient, param.grad = param.grad, None
        if gradient is None:
            return
        if self.loss_scale is not None and not self._scaled_backward:
            raise StateError(
                "precision fp16 scales the loss: call engine.backward(loss) instead of "
                "loss.backward()"
            )
        group, index = self._where[id(param)]
        group.wait_for_update()  # of a graph older than the last step: that step still reads
        self.has_unstepped_gradients = True
        self.optimizer_states[group.index].gradients.add(index, gradient)

    @contextmanager
    def scaled_backward(self) -> Iterator[float]:
        """The scale that the loss has to be multiplied with (1 without loss scaling)."""
        self._scaled_backward = True
        try:
            yield self.loss_scale.scale if self.loss_scale is not None else 1.0
        finally:
            self._scaled_backward = False

    # ---------------------------------------------------------------- step
    def step(self, hyper_of: HyperOf) -> StepOutcome:
        """Make the update of every group with gradients pending, or skip it.

        Returns as soon as that is decided; parameters are read only after their own update.
        """
        self.check_usable()
        self._check_frozen()
        self._wait_for_reading_updates()
        self.has_unstepped_gradients = False
        for state in self.optimizer_states:
            state.gradients.close()
        scale = self.loss_scale.scale if self.loss_scale is not None else 1.0
        norm = self.gradient_norm() / scale
        finite = math.isfinite(norm)
        skip = not finite and self.options.skip_nonfinite
        if self.loss_scale is not None:
            self.loss_scale.update(overflow=not finite)
        if skip:
            self.steps_skipped += 1
        else:
            self.steps_taken += 1
            self._submit(hyper_of, self._clip(norm) / scale)
        self._say_nonfinite(finite, skip)
        self.trace.end_cycle()
        return StepOutcome(norm, skip)

    def _wait_for_reading_updates(self) -> None:
        """A group has one update at a time, and zero_grad counts from when it was called."""
        with self._lock:
            reading = sorted(self._read_by_update)
        for index in reading:
            self.groups[index].wait_for_update()

    def _say_nonfinite(self, finite: bool, skip: bool) -> None:
        if finite or "nonfinite" in self._warned:
            return
        self._warned.add("nonfinite")
        what = "skipped" if skip else "applied as it is (set skip_nonfinite: true to skip)"
        if self.loss_scale is not None:
            what += f" and the loss scale lowered to {self.loss_scale.scale:g}"
        _log.warning(
            "the gradient norm is not finite; the step is %s; said once, report() counts them", what
        )

    def gradient_norm(self) -> float:
        """2-norm of all gradients as accumulated (scaled under loss scaling)."""
        states = self.optimizer_states
        return total_norm([part for state in states for part in state.gradients.squared_norm()])

    def _clip(self, norm: float) -> float:
        limit = self.options.clip_grad_norm
        if limit is None or not math.isfinite(norm):
            return 1.0
        return min(1.0, limit / (norm + 1e-6))

    def _submit(self, hyper_of: HyperOf, grad_scale: float) -> None:
        order = {index: rank for rank, index in enumerate(self._update_order())}
        states = [state for state in self.optimizer_states if state.gradients.has_any]
        states.sort(key=lambda state: order[state.group.index])
        scalars: dict[tuple[Hyper, int], AdamScalars] = {}
        updates = [self._group_update(s, hyper_of, grad_scale, scalars) for s in states]
        with self._lock:
            self._read_by_update.update(state.group.index for state in states)
        self.updates.submit(updates)
        for state in states:
            state.group.await_or_withhold()

    def _update_order(self) -> list[int]:
        first = self.trace.first_uses()
        rest = [group.index for group in self.groups if group.index not in set(first)]
        return [*first, *rest]

    def _group_update(
        self, state: OptimizerState, hyper_of: HyperOf, grad_scale: float,
        scalars: dict[tuple[Hyper, int], AdamScalars],
    ) -> GroupUpdate:  # fmt: skip
        group = state.group
        steps = self.steps[group.index]
        segments = []
        for index, passes in enumerate(state.gradients.passes):
            hyper = hyper_of(group.params[index])
            if not passes or hyper is None:  # without a gradient, or in no param group
                continue
            steps[index] += 1
            key = (hyper, int(steps[index]))
            if key not in scalars:
                scalars[key] = _scalars(*key, grad_scale)
            spec = group.layout.params[index]
            segments.append(Segment(spec.offset, spec.stop, scalars[key]))
        group.version += 1
        ready: Transfer[None] = Transfer(f"the optimizer update of {group.name}")
        return GroupUpdate(state, merge(segments), ready, lambda: self._update_done(group.index))

    def _update_done(self, index: int) -> None:
        """On the update thread: the group's gradients are not read any more."""
        with self._lock:
            clear = index in self._clear_after_update
            if not clear:
                self._read_by_update.discard(index)
        if clear:
            # A step that comes meanwhile waits for this update: it must not see what is cleared.
            self.optimizer_states[index].gradients.clear()
            with self._lock:
                self._clear_after_update.discard(index)
                self._read_by_update.discard(index)

    def zero_grad(self) -> None:
        """Forget all gradients, each as soon as a pending update has read it."""
        self.check_usable()
        self.has_unstepped_gradients = False
        for index, state in enumerate(self.optimizer_states):
            with self._lock:
                if index in self._read_by_update:
                    self._clear_after_update.add(index)
                    continue
            if state.gradients.has_any:
                state.gradients.clear()

    def _check_frozen(self) -> None:
        for group in self.groups:
            for param, spec in zip(group.params, group.layout.params, strict=True):
                if param.requires_grad and not spec.trainable:
                    raise UnsupportedError(
                        f"{spec.name} was frozen when the engine was made and requires a gradient "
                        "now; set requires_grad before offload.initialize"
                    )

    # ---------------------------------------------------------------- values
    def load_group(self, group: ParamGroup, values: Callable[[ParamSpec], torch.Tensor]) -> None:
        """Set a group's parameters (any float dtype), with fresh optimizer states."""
        state = self.optimizer_states[group.index]
        weights = array_of(group.state.host_blank(), self.own)
        cached = {spec: values(spec) for spec in group.layout.params}
        for elements, record in zip(state.chunks, state.records, strict=True):
            full = _assemble(elements, cached)
            arrays = self.options.record_format.arrays(record.blank(), len(elements))
            _clear(arrays)
            _store(full, weights[elements.start : elements.stop], self.own, arrays)
            del arrays
            record.wrote()
        frozen = range(group.layout.numel_trainable, group.layout.numel)
        encode(_assemble(frozen, cached), weights[frozen.start : frozen.stop], self.own)
        del weights
        group.state.host_wrote()

    def check_usable(self) -> None:
        """StateError if the states are a mixture (a load that failed half-way)."""
        if self.unusable is not None:
            raise StateError(self.unusable)

    def group_of(self, param: nn.Parameter) -> tuple[ParamGroup, int] | None:
        """A parameter's group and its index there; None if it is not managed."""
        return self._where.get(id(param))

    def settle(self) -> None:
        """Wait for every pending update and every byte on its way; raises what went wrong."""
        self.updates.settle()
        for state in self.optimizer_states:
            for each in (state.group.state, state.gradients.state, *state.records):
                each.settle()

    def close(self) -> None:
        """Stop the update thread, replace the hooks by refusals, let go of all parameters."""
        self.unusable = "the engine is closed; make a new one with offload.initialize"
        self.updates.close()
        if self._hooks is not None:
            self._hooks.remove()
        UnitHooks.forbid(self._units)
        for group in self.groups:
            group.withhold()
        for hook in self._gradient_hooks:
            hook.remove()


def _scalars(hyper: Hyper, step: int, grad_scale: float) -> AdamScalars:
    return AdamScalars(
        lr=hyper.lr, beta1=hyper.betas[0], beta2=hyper.betas[1], eps=hyper.eps,
        weight_decay=hyper.weight_decay, step=step, grad_scale=grad_scale,
        decoupled=hyper.decoupled, maximize=hyper.maximize,
    )  # fmt: skip


def _clear(arrays: dict[str, Array]) -> None:
    for array in arrays.values():
        array[:] = 0


def _assemble(elements: range, values: dict[ParamSpec, torch.Tensor]) -> Array:
    """fp32 values of a range of the flat buffer; zero where no parameter lies."""
    full = np.zeros(len(elements), dtype=np.float32)
    for spec, value in values.items():
        lo, hi = max(spec.offset, elements.start), min(spec.stop, elements.stop)
        if lo < hi:
            piece = value.detach().reshape(-1)[lo - spec.offset : hi - spec.offset]
            full[lo - elements.start : hi - elements.start] = flat_array(piece.float().cpu())
    return full


def _store(full: Array, weights: Array, own: Float, arrays: dict[str, Array]) -> None:
    """Full-precision values into the weights and, if it has one, the record's master."""
    if "low" in arrays:
        split_master(full, weights, arrays["low"])
        return
    encode(full, weights, own)
    if "master" in arrays:
        arrays["master"][:] = full
