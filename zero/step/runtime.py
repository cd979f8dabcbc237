"""Trains the weights of a `WeightStore`: gradients, optimizer states, updates.

Autograd's gradients arrive at `_take`; `step` is the optimizer's step. The store fetches weights,
and asks the update queue whether a group has to be updated first. `State` does all moves.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Protocol

import numpy as np
import torch
from torch import nn

from offload.kernels.floats import Float
from offload.kernels.variants import Master
from offload.swap.states.state import State
from offload.swap.threads.lanes import Lane
from offload.swap.threads.shield import defer_signals, interrupted_in_waits
from offload.swap.threads.worker import ParallelRunner
from offload.tiers.errors import StateError, UnsupportedError
from offload.zero.experts.packed_gradients import PackedGradients
from offload.zero.gradients.gradient_handles import GradientHandles
from offload.zero.gradients.gradient_hooks import GradientHooks, refuse_graph
from offload.zero.gradients.gradient_paths import DevicePartials
from offload.zero.gradients.gradients import GradientAccumulator
from offload.zero.gradients.loss_scale import LossScale
from offload.zero.groups.group import ParamGroup
from offload.zero.groups.parameter_grouping import ParameterGrouping
from offload.zero.groups.store import NextUse, WeightHomes, WeightStore
from offload.zero.hooks.handles import Keeper
from offload.zero.ranks.collectives import SharedMemory
from offload.zero.ranks.rank_work import RankWork, SharedWork
from offload.zero.ranks.ranks import Ranks
from offload.zero.ranks.reduction import Gradients
from offload.zero.ranks.sharding import Part
from offload.zero.ranks.tensor_parallel import TensorParallel
from offload.zero.step.device_update import DeviceWork
from offload.zero.step.matrices import MatrixWork
from offload.zero.step.optimizer_state import HyperOf, OptimizerState
from offload.zero.step.records import RecordFormat
from offload.zero.step.stepper import StepOutcome, Stepper, StepRules
from offload.zero.step.update import UpdateQueue, next_update
from offload.zero.tensors.local_tensors import spread_as
from offload.zero.tensors.released import Values

_SCHEDULES = "torch.distributed.pipelining.schedules"
_MIN_NORM_BLOCKS = 4  # partial sums of a norm that are worth another thread


class Homes(WeightHomes, Protocol):
    """Makes all states of a group, each at home in the tier of its placement."""

    @property
    def activations(self) -> Keeper | None:
        """The tier of saved activations; None if they stay on the device."""

    def gradients(
        self, index: int, name: str, numel: int, itemsize: int, next_use: NextUse
    ) -> State: ...

    def record(
        self, index: int, name: str, chunk: int, nbytes: int, next_use: NextUse
    ) -> State: ...

    @property
    def record_format(self) -> RecordFormat: ...

    def matrix_work(self) -> MatrixWork:
        """Return the memory for Muon's products."""

    def device_work(self) -> DeviceWork:
        """Return the device's streams and memory for updates and gradients beside the model."""

    def shared_memory(self) -> SharedMemory:
        """Return memory where the model computes, for buffers that belong to several ranks."""


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    dtype: torch.dtype
    device: torch.device
    chunk_numel: int
    seed: int = 0  # of stochastic rounding
    prefetch: int = 4  # groups fetched ahead
    keep_records: bool = False  # memory is left for optimizer records until their next update
    step_rules: StepRules = field(default_factory=StepRules)
    reduce_dtype: torch.dtype | None = None  # gradients are rounded to it on their way to ranks


def _next_read(runtime: Runtime, index: int) -> float:
    done = index in runtime.stepper.policy and not runtime.updates.is_pending(index)
    return math.inf if done else next_update(runtime.trace, index)


class Runtime:
    """Owns the groups of `grouping`. Its public methods are for the thread of the model."""

    def __init__(
        self, grouping: ParameterGrouping, options: RuntimeOptions, homes: Homes,
        run: ParallelRunner, staging: Sequence[torch.Tensor], loss_scale: LossScale | None,
        ranks: Ranks | None = None, tensor_parallel: TensorParallel | None = None,
    ) -> None:  # fmt: skip
        """`ranks` train together; None for one rank. `tensor_parallel` are the ranks that hold
        other parts of this rank's parameters; None if it holds whole parameters."""
        self.options = options
        self.ranks = ranks
        self.tensor_parallel = tensor_parallel
        self.loss_scale = loss_scale
        self._run_blocks = run.sharing(_MIN_NORM_BLOCKS)
        self._homes = homes
        work = homes.device_work()
        self._partials = DevicePartials(work.partials) if work.partials is not None else None
        self._ring = work.ring
        self._called = False  # for a forward, at least once
        self.on_forward: Callable[[], object] = lambda: None  # before a call of the whole model
        self._backward_thread = 0  # the one that gave the last gradient
        self.rank_work = RankWork()
        with ExitStack() as begun:  # ends the threads started so far if a later line raises
            if ranks is not None:
                memory = homes.shared_memory()
                ep_size = max((group.ep_size for group in grouping.groups), default=1)
                self.rank_work = SharedWork(
                    ranks, memory, options.dtype, options.reduce_dtype, ep_size,
                    wait_for_complete_groups=options.step_rules.in_backward,
                )  # fmt: skip
            begun.callback(self.rank_work.close)
            self.reductions = self.rank_work.reductions
            self.store = WeightStore(
                grouping, homes, options.dtype, options.device, prefetch=options.prefetch,
                ranks=self.rank_work, keeper=homes.activations,
            )  # fmt: skip
            self.groups, self.own, self.trace = self.store.groups, self.store.own, self.store.trace
            self.optimizer_states = [self._optimizer_state(group) for group in self.groups]
            # the update thread must not keep the model alive
            fetcher = weakref.proxy(self.store.fetcher)
            self.updates = UpdateQueue(
                self.own, run, options.seed, staging, fetcher, work, homes.matrix_work(),
                keep_records=options.keep_records,
            )  # fmt: skip
            begun.callback(self.updates.close)
            self.store.fetcher.updates = self.updates
            self.stepper = Stepper(
                self.optimizer_states, self.updates, options.step_rules, self.trace, loss_scale,
                self.reductions, tensor_parallel, self.store.tables,
            )  # fmt: skip
            self.gradients = GradientHandles(
                self.optimizer_states, self.stepper, self.rank_work, self._arrive,
                self.store.check_usable,
            )  # fmt: skip
            self.packed_gradients = PackedGradients(self.store.packed, self.gradients)
            begun.pop_all()
        self._gradient_hooks: GradientHooks | None = None

    def _optimizer_state(self, group: ParamGroup) -> OptimizerState:
        index, layout, part = group.index, group.layout, self.store.part_of(group)

        # homes live as long as their files, and must not keep the model alive
        next_read = partial(_next_read, weakref.proxy(self), index)
        next_use = partial(next_update, self.trace, index)
        gradients = self._gradients(index, group.name, part, next_read, group.ep_size)
        chunks = layout.chunks(self.options.chunk_numel)
        kept_as = self._homes.record_format.of(matrices=group.matrices)
        records = [
            self._homes.record(index, group.name, chunk, kept_as.nbytes(len(elements)), next_use)
            for chunk, elements in enumerate(chunks)
        ]
        steps = np.zeros(sum(spec.trainable for spec in layout.params), dtype=np.int64)
        kept = OptimizerState(group, gradients, chunks, records, kept_as, steps, part)
        group.has_masters = bool(chunks) and kept_as.master is not Master.NONE
        # A state at home on the device is updated on a stream, for which the CPU does not wait: the
        # model has to ask for it at each use, so that its own stream waits.
        states = (group.state, gradients.state, *records)
        table = self.store.table_of(group)
        group.pending_update.step_waits = (
            kept.in_place and not group.has_masters and layout.ranks == 1
            and not (table is not None and table.packed)  # experts may miss steps
            and not any(each.at_home_on_device for each in states)
        )  # fmt: skip
        return kept

    def _gradients(
        self, index: int, name: str, part: Part, next_read: NextUse, ep_size: int
    ) -> Gradients:
        options = self.options
        accumulate = Float.FP32 if options.step_rules.passes > 1 else self.own
        specs = [each.spec for each in part.trained()]
        own = GradientAccumulator(
            name, specs, self.own, accumulate,
            lambda itemsize: self._homes.gradients(
                index, name, len(part.trainable), itemsize, next_read
            ),
            self._run_blocks, self._partials, self._ring,
            # an expert's gradient is the sum over the tokens of `ep_size` ranks: average it
            1.0 / ep_size,
        )  # fmt: skip
        layout = part.layout

        def local() -> GradientAccumulator:
            return GradientAccumulator(
                name, [spec for spec in layout.params if spec.trainable], self.own, accumulate,
                lambda itemsize: self._homes.gradients(
                    index, f"{name}, not reduced,", layout.numel_trainable, itemsize, next_read
                ),
                self._run_blocks,
            )  # fmt: skip

        return self.rank_work.of(ep_size).reductions.add(
            index, part, own, local, lambda: self.groups[index].pending_update.wait()
        )

    def start(self, model: nn.Module, values: Values, owner: object) -> None:
        """Install the hooks: `model` trains through this runtime, and keeps its `owner`."""
        self.store.start(model, values, owner, self._begin_forward)
        all_places = [self.store.places_of(param) for param in model.parameters()]
        self.stepper.norms.add_in(
            [
                [(group.index, index) for group, index in places] for places in all_places
                if any(group.layout.params[index].trainable for group, index in places)
            ]
        )  # fmt: skip
        self.gradients.prepare()
        params = self.gradients.params.values()
        self._gradient_hooks = GradientHooks(self.store, params, self._take)

    def _begin_forward(self, part: int) -> None:
        self.store.check_usable()
        self.on_forward()
        if not self._called:
            self._called = True
            _check_schedule(self.options.step_rules)
        self.gradients.drop_cleared()
        self.gradients.note_set()
        self.store.begin_forward(part)

    def _take(self, group: int, index: int, param: torch.Tensor) -> None:
        """Take a gradient that autograd has given, or has added to the handle that was there."""
        state, key = self.optimizer_states[group], (group, index)
        with torch._C.DisableTorchFunctionSubclass():  # a released parameter has its own
            gradient = param.grad
            if gradient is None or self.gradients.is_current(key, gradient):
                return
            if self.gradients.is_set(key, gradient):
                return
            param.grad = None
        if gradient.requires_grad:
            refuse_graph(state.group.layout.params[index].name)
        self.gradients.take(state, index, gradient)

    def _arrive(self, state: OptimizerState, index: int, gradient: torch.Tensor) -> None:
        """Take one parameter's gradient of a backward pass into its accumulator."""
        if self.loss_scale is not None and not self.loss_scale.is_applied:
            raise StateError(
                "precision fp16 scales the loss: call engine.backward(loss) instead of "
                "loss.backward(); a GradScaler is not needed"
            )
        group = state.group
        if type(gradient) is not torch.Tensor:
            gradient = spread_as(group.params[index], gradient)
        self.stepper.check_arrival(state)
        if group.pending_update.ready is not None:
            # the graph predates the last step, which still reads gradients
            group.pending_update.wait()
        self._backward_thread = threading.get_ident()
        readable = state.gradients.add(index, gradient)
        self.stepper.arrived(state, index, readable=readable)

    def await_progress(self) -> bool:
        """Make room in a pool: write back gradients of groups whose backward is not over (an expert
        without tokens never gets all of them), or wait for the group being updated. Return False if
        there is nothing to wait for."""
        in_backward = threading.get_ident() == self._backward_thread
        if in_backward:
            closed = [state.gradients.close() for state in self.optimizer_states]
            if any(closed):
                return True
        if self.reductions.await_progress(in_backward=in_backward):
            return True
        return self.updates.await_progress()

    @defer_signals
    def step(self, hyper_of: HyperOf) -> StepOutcome:
        """Make the update of every group with gradients pending, or skip it (see `Stepper`)."""
        with self.store.one_thread:
            self.store.check_usable()
            self._check_params()
            self.store.refuse_amid_use("optimizer.step()")
            self.store.adopt_changes()
            self.gradients.collect()
            self.rank_work.finish_pass()
            outcome = self.stepper.step(hyper_of)
            self.gradients.complete()
            self.rank_work.refresh_updated()
            return outcome

    @defer_signals
    def drop_cleared_gradients(self) -> None:
        """Forget gradients that left `param.grad`, each as soon as a pending update has read it."""
        self.store.check_usable()
        with self.store.one_thread:
            self.gradients.drop_cleared()

    def _check_params(self) -> None:
        for packed in self.store.packed:
            packed.follow_requires_grad()
        with torch._C.DisableTorchFunctionSubclass():
            for group in self.groups:
                for param, spec in zip(group.params, group.layout.params, strict=True):
                    if param.requires_grad and not spec.trainable:
                        raise UnsupportedError(
                            f"{spec.name} was frozen when the engine was made and requires a "
                            "gradient now; set requires_grad before offload.initialize (and to "
                            "False again after it, for what is to train later)"
                        )

    def lanes(self) -> list[Lane]:
        """Return the lanes that the model's thread waits for, beside its states."""
        meshed = [] if self.tensor_parallel is None else [self.tensor_parallel.ranks.watch.lane]
        return [self.updates.lane, *self.rank_work.lanes(), *meshed]

    @interrupted_in_waits
    def settle(self) -> None:
        """Make all missed steps, wait for updates and moves, and raise the error of any of them."""
        self.stepper.policy.complete_steps()
        self.updates.settle()
        for state in self.optimizer_states:
            for each in (state.group.state, state.gradients, *state.records):
                each.settle()

    def ending(self) -> Callable[[], None]:
        """Return a function that ends all threads. It keeps no model, unless an update is pending:
        for an engine that is dropped together with its model."""
        ends = [self.updates.close, self.rank_work.ending()]
        if self.tensor_parallel is not None:
            ends.append(self.tensor_parallel.ranks.watch.close)
        return partial(_end, weakref.ref(self.store), ends)

    def close(self, why: str | None = None) -> None:
        """Stop the update thread, and close the store (see `WeightStore.close`)."""
        self.store.refuse_use()
        try:
            self.rank_work.finish()  # gathering may wait for updates
        finally:
            self.updates.close()
        self.store.close(why)
        if self._gradient_hooks is not None:
            self._gradient_hooks.remove()
        self.gradients.clear("the engine is closed")


def _end(store: weakref.ref[WeightStore], ends: Sequence[Callable[[], None]]) -> None:
    alive = store()
    if alive is not None:  # at interpreter exit: later finalisers find it closed
        alive.refuse_use()
    with ExitStack() as last_first:  # each one also where another fails
        for end in reversed(ends):
            last_first.callback(end)


def _check_schedule(rules: StepRules) -> None:
    """Raise UnsupportedError if the caller, however far up, is a schedule that cannot be followed.
    For the first forward of a model.

    A stage of a pipeline (`torch.distributed.pipelining`) trains through an engine of its own,
    whose data-parallel mesh is that of the stage. To it a schedule is a loop that runs some
    forwards before their backwards and takes one step in the end:

        Schedule1F1B, stage 0     F0 F1 B0 F2 B1 F3 B2 B3 | step     gradients: the sum of B0 to B3

    Settings that need all gradients of a model (clipping, skipping) would see one stage's gradients
    and silently train another model."""
    schedule = _calling_schedule()
    if schedule is None:
        return
    name = type(schedule).__name__
    key = "clip_grad_norm" if rules.clip_grad_norm is not None else "skip_nonfinite"
    if rules.clip_grad_norm is not None or rules.skip_nonfinite:
        raise UnsupportedError(
            f"{key} in a stage of a pipeline ({name}): each stage's engine knows the norm of its "
            f"own gradients only, and the stages would decide differently; leave {key} out"
        )


def _calling_schedule() -> object | None:
    if _SCHEDULES not in sys.modules:
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # of the schedules' own frames alone: to look at the names of a frame keeps what they stand
        # for alive as long as the frame, also what the caller deletes
        if frame.f_globals.get("__name__") == _SCHEDULES:
            schedule = frame.f_locals.get("self")
            if hasattr(schedule, "scale_grads"):
                return schedule
        frame = frame.f_back
    return None
