"""`offload.initialize` and the engine: one model, its tiers, its optimizer."""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from offload.checkpoint.engine.background import BackgroundSaves
from offload.checkpoint.engine.loading import load_engine
from offload.checkpoint.engine.saving import save_engine
from offload.config import OffloadConfig
from offload.config.fields import shared_settings
from offload.config.paths import StrPath, local_path_of
from offload.display.byte_progress import say
from offload.losses.causal_lm import ChunkedLoss
from offload.losses.tiled_mlp import tile_mlps
from offload.memory.kv_homes import cached_layers
from offload.memory.tier_manager import TierManager, ranks_here
from offload.models.activations import handle_activations
from offload.models.closing import Keep
from offload.models.foreign_wrappers import refuse_checkpoints_on_cpu, refuse_foreign_wrappers
from offload.models.frozen_base import FrozenBase
from offload.optimizers.matrices import Matrices
from offload.optimizers.optimizer import (
    OffloadOptimizer,
    optimizer_class,
    refuse_foreign_optimizers,
)
from offload.planning.plan.plan import spare_host_nbytes
from offload.process import machine
from offload.process.interrupts import noted_interrupts
from offload.report import Report
from offload.swap.states.fetching import Fetcher
from offload.swap.threads.lanes import waits_s
from offload.swap.threads.worker import ParallelRunner, available_cores
from offload.tiered_model import DTYPES, Closed, TieredModel, refuse_shared
from offload.tiers.errors import OffloadError, StateError, UnsupportedError
from offload.weights.initialisation import WeightInitialisation
from offload.weights.lazy_tensors import LazyWeights
from offload.weights.safetensors_weights import first_weights
from offload.weights.spread_experts import SpreadExperts
from offload.zero.gradients.loss_scale import LossScale
from offload.zero.groups.group import ParamGroup
from offload.zero.groups.layout import ParamSpec
from offload.zero.groups.loading import load_group
from offload.zero.groups.model_shape import GroupShape
from offload.zero.groups.parameter_grouping import ParameterGrouping, managed
from offload.zero.groups.store import WeightStore
from offload.zero.groups.values import ParameterValues
from offload.zero.ranks.ranks import Ranks, data_ranks
from offload.zero.step.optimizer_state import OptimizerState
from offload.zero.step.runtime import Runtime, RuntimeOptions
from offload.zero.step.stepper import StepRules
from offload.zero.tensors.local_tensors import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from offload.checkpoint.engine.run_state import Carried
    from offload.config.optimizer import OptimizerConfig
    from offload.loggers import AnyLogger
    from offload.models.trained import Steps
    from offload.runs.watch import Watch

_log = logging.getLogger("offload")
_PUT_OFF = "this step ends first; again: it stops at once"
ParamGroups = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


@dataclass(frozen=True)
class SavedCheckpoint:
    """The last checkpoint that was saved, and the number of steps before it."""

    path: Path
    step: int


def initialize(
    model: nn.Module,
    config: StrPath | Mapping[str, Any] | OffloadConfig | None = None,
    *,
    parameters: ParamGroups | None = None,
    weights: StrPath | None = None,
    mesh: DeviceMesh | None = None,
) -> Engine:
    """Spread the model's states over tiers and make it train from there.

    `model` is on the CPU or on the meta device; the object stays the same and is used as before.
    On the meta device it is initialised group by group and is never whole in RAM, from `weights` (a
    safetensors file or folder, or an engine's checkpoint), or by what its constructor would call:
    `reset_parameters`, `_init_weights`. A tensor that these do not set, or that the constructor set
    in another way, is an UnsupportedError that names it. A model of `offload.open_pretrained` is
    read from its files in the same way.

    `config`: the path of a YAML file, a mapping with its keys, or an OffloadConfig; by default all
    keys have their defaults.

    `parameters` are the optimizer's param groups as torch.optim takes them; by default all
    trainable parameters.

    `mesh` (1D) holds the ranks that train this model together, each with other data: by default all
    of the world. A model that is parallel in other ways as well needs it: one that
    `parallelize_module` made (`mesh=mesh["dp"]`), or a stage of a pipeline.

    On several ranks all call it, with the same model and configuration; the first one's values
    count.

    Raises ConfigError, PathError or BudgetError before anything is allocated; UnsupportedError for
    a model that cannot train this way, naming the part; StateError if it trains through another
    engine.
    """
    loaded = OffloadConfig.load({} if config is None else config)
    refuse_shared(model)
    with first_weights(model, weights) as lazy:
        return Engine(model, loaded, lazy, parameters=parameters, mesh=mesh)


class Engine(TieredModel):
    """Owns the tiers of one model. A context manager; `close` gives everything back.

    `module` is the model, `optimizer` its `OffloadOptimizer`, `device` where it computes and wants
    its inputs, `config` the configuration with every `auto` resolved, `plan` each state's tier.
    Checkpoints and trainers of other libraries read `ranks` (None for one), `steps`, `loss_scale`
    (None except under fp16) and `optimizer_states`, one for each group of `store`.

    What trains, reads or saves is a StateError on a closed engine. On several ranks, `gathered`,
    `gradient`, `save_checkpoint` and `load_checkpoint` are for all ranks together.
    """

    values: ParameterValues
    _CLOSED = Closed(
        "the engine is closed", "make a new one with offload.initialize",
        "engine.save_checkpoint, or engine.close(keep='host'),",
    )  # fmt: skip

    def __init__(
        self, model: nn.Module, config: OffloadConfig, lazy: LazyWeights, *,
        parameters: ParamGroups | None = None, mesh: DeviceMesh | None = None,
    ) -> None:  # fmt: skip
        config = config.settled()
        self.made_at = time.perf_counter()
        self.watching: Watch | None = None
        self.last_checkpoint: SavedCheckpoint | None = None
        self.carried: dict[str, Carried] = {}
        self._run: ParallelRunner | None = None
        self._runtime: Runtime | None = None
        self._saves = BackgroundSaves()
        self.frozen_base = FrozenBase()
        self._told_of_scheduler = False
        super().__init__(model, config)
        _check_trainable(model)
        self.spread.check(
            machine.rank_here(), machine.world_size(),
            meshed=mesh is not None or any(is_dtensor(param) for param in model.parameters()),
        )  # fmt: skip
        grouping = self._group_parameters(config)
        if parameters is not None and not isinstance(parameters, torch.Tensor):
            parameters = cast(Any, list(parameters))  # read once: they may come from a generator
        self._matrices = Matrices.of(
            model, grouping, parameters, config.optimizer, config.groups.blocks
        )
        grouping = grouping.stored(config.stored, self._matrices.names)
        if self._matrices.names:
            say(str(self._matrices))
        if config.placement.kv is not None:
            grouping.cached = cached_layers(model)
        try:
            self._find_tensor_parallel(config, data_ranks(mesh))
            zero = config.zero
            self.ranks = Ranks.join(
                zero.stage, zero.shard_group, self.device, zero.timeout_s, mesh,
                _alike(config, grouping, model, self.spread),
            )  # fmt: skip
            self._build(config, grouping, parameters, lazy)
        except BaseException:
            self.close("drop")
            raise
        runtime = self._open()
        made = self._saves, self._run, self._tier_manager
        # this keeps no model, which keeps its engine
        self._close_with(self, partial(_close_all, runtime.ending(), *made))

    # ---------------------------------------------------------------- building
    def _build(
        self, config: OffloadConfig, grouping: ParameterGrouping, parameters: ParamGroups | None,
        lazy: LazyWeights,
    ) -> None:  # fmt: skip
        dtype = DTYPES[config.precision]
        if config.loss.chunked:
            self.before_close(ChunkedLoss(self.module).remove)
        self.before_close(tile_mlps(self.module, config.placement.activations.tiled_mlp))
        self._make_plan(config, grouping)
        first = self._initialisation(grouping, dtype, lazy)
        cores = available_cores() // ranks_here()
        # beside a GPU the model's thread and I/O keep a core each: a kernel that is launched late
        # costs more than an optimizer with two threads fewer
        self._run = ParallelRunner(max(1, cores - 2 if self.plan.gpu else cores))
        self._open_tiers(config, dtype)
        runtime = self._runtime = self._make_runtime(grouping, dtype, self._run)
        self._store, self.loss_scale = runtime.store, runtime.loss_scale
        self._store.closed = self._CLOSED.text
        self.steps: Steps = runtime.stepper
        self.optimizer_states: Sequence[OptimizerState] = runtime.optimizer_states
        self._load(first)
        self.values = ParameterValues(runtime)
        self.optimizer = self._make_optimizer(parameters, self.config.optimizer)
        self._give_out_values()
        self._attach_experts()
        module, store = self.module, self.store
        self.optimizer.register_step_pre_hook(lambda *_: _refuse_unseen(module, store))
        self.optimizer.serve(self)
        self.before_close(handle_activations(
            self.module, grouping, config, self._tier_manager.activations, self._store
        ))  # fmt: skip
        runtime.start(self.module, self.values, self)  # which the model keeps
        refuse_foreign_optimizers(store)
        refuse_foreign_wrappers(store)
        # a trace of its own: how long rollouts are on each rank changes nothing in that of steps
        self._keep_caches(Fetcher(int(self.config.prefetch)), trains=True)

    def _make_runtime(
        self, grouping: ParameterGrouping, dtype: torch.dtype, run: ParallelRunner
    ) -> Runtime:
        config = self.config
        rounded, scaling = config.zero.reduce_dtype, config.scaling
        options = RuntimeOptions(
            dtype=dtype,
            device=self.device,
            chunk_numel=self.plan.chunk_numel,
            seed=config.seed,
            prefetch=int(config.prefetch),
            keep_records=spare_host_nbytes(self.plan) > 0,
            step_rules=StepRules(
                config.clip_grad_norm,
                config.skips_nonfinite,
                config.max_skipped_steps,
                in_backward=config.optimizer.in_backward is True,
                passes=config.gradient_accumulation_steps,
                speculation_nbytes=self._tier_manager.spare,
                speculates_on_host=self.plan.gpu,  # a CPU that computes has no time to spare
                free_nbytes=self._tier_manager.free_nvme_nbytes,
            ),
            reduce_dtype=None if rounded == "fp32" else DTYPES[rounded],
        )
        runtime = Runtime(
            grouping,
            options,
            self._tier_manager,
            run,
            self._tier_manager.staging(),
            None
            if scaling is None
            else LossScale(scaling.initial, scaling.growth_interval, scaling.min or 0.0),
            self.ranks,
            self._tensor_parallel,
        )
        trace = runtime.trace
        runtime.on_forward = self._forward_begins
        self._tier_manager.let_wait(
            _while_there(runtime.await_progress), lambda: trace.cursor.uses_left
        )
        return runtime

    def _load_group(self, group: ParamGroup, values: Callable[[ParamSpec], torch.Tensor]) -> None:
        load_group(self.optimizer_states[group.index], self.store.own, values)
        self.store.adopt(group)

    def _values_of(
        self, group: ParamGroup, first: WeightInitialisation
    ) -> Callable[[ParamSpec], torch.Tensor]:
        """Return a group's first values; ranks that share the group get those of the first one."""
        value, ranks = super()._values_of(group, first), self._open().rank_work.of(group.ep_size)
        if not ranks.has_others:
            return value
        params = group.layout.params
        agreed = ranks.as_on_first([value(spec) for spec in params])
        return dict(zip(params, agreed, strict=True)).__getitem__

    def _make_optimizer(self, given: Any, config: OptimizerConfig) -> OffloadOptimizer:
        if given is None:
            # as one param group: that may be empty (a frozen model), a list of parameters may not
            given = [{"params": [p for p in self.module.parameters() if p.requires_grad]}]
        if config.type == "muon":
            given = self._matrices.param_groups(given, config)
        return optimizer_class(config.type)(self._open(), self.values, given, config)

    def check_numbers(self, parameters: list[Any], config: OptimizerConfig) -> None:
        """Raise what `initialize` raises for the numbers of these param groups."""
        groups = [each for each in parameters if isinstance(each, dict)] or [{}]
        self._make_optimizer([{**each, "params": []} for each in groups], config)

    # ---------------------------------------------------------------- training
    def backward(self, loss: torch.Tensor) -> None:
        """Call `loss.backward()` in every precision; scales `loss` (one element) under fp16. It is
        not divided: of N passes for a step, divide it by N."""
        with self.scaled_backward(loss) as scaled:
            # plain: a subclass's `backward` may scale, too (`deepspeed.fp16_loss`)
            scaled.as_subclass(torch.Tensor).backward()
        self.note_pass(loss)

    def scaled_backward(self, loss: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Return a context for a trainer that calls `backward()` by itself: it yields the loss to
        call it with, which is multiplied with the loss scale under fp16."""
        scale = self._open().loss_scale
        return nullcontext(loss) if scale is None else scale.applied(loss)

    def has_unstepped_gradients(self) -> bool:
        """Return whether gradients wait for `optimizer.step()`, and were not cleared."""
        runtime = self._open()
        runtime.drop_cleared_gradients()
        return runtime.stepper.has_unstepped_gradients

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients of the backward passes inside add up on this rank; the first pass outside, or
        the step, reduces their sum with the other ranks'. Has no effect on a single rank.

        Meanwhile a rank holds gradients whole, where `placement.gradients` puts them.
        """
        return self._open().reductions.no_sync()

    def gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return a copy of the gradient accumulated for `param` (`param.grad` is a handle of it),
        in its shape, on its device and in the format it is kept in, without a loss scale; None if
        there is none."""
        self._open()
        return self.values.gradient(param)

    # ---------------------------------------------------------------- looking
    def report(self) -> Report:
        """Return bytes per tier, bytes moved, steps, and seconds waited so far. It waits for
        nothing: numbers of operations in progress may change while they are read."""
        return Report.of(
            self._open(),
            self.optimizer.last_step,
            waits=self.waits(),
            muon=str(self._matrices),
            **self._seen(),
        )

    @property
    def steps_done(self) -> int:
        """The number of steps so far, skipped ones included."""
        stepper = self._open().stepper
        return stepper.taken + stepper.skipped

    def waits(self) -> dict[str, float]:
        """Return the seconds for which the model's thread has waited, as in `Report.waits`."""
        return waits_s([*self._tier_manager.lanes(), *self._open().lanes()])

    def watch(
        self, *, steps: int | None = None, tokens: int | None = None,
        loggers: Iterable[AnyLogger] = (), show: bool = True, every: int | None = None,
    ) -> Watch:  # fmt: skip
        """Show the steps that follow, and give their figures to `loggers` (`offload.loggers`), to
        the end of what is returned, a context manager, or of the engine. An engine has one watch:
        the next one ends it.

        `steps` of the whole run, those before it was resumed included, for the time that is left;
        `tokens` of one step, of all ranks, for tokens per second. What is shown is a line on
        standard error, every `every` steps. Of several ranks the first one shows and logs.
        """
        from offload.runs.watch import Watch

        self._open()
        if self.watching is not None:
            self.watching.close()
        self.watching = Watch(
            self, steps=steps, tokens=tokens, loggers=loggers, show=show, every=every
        )
        return self.watching

    def _forward_begins(self) -> None:
        if self.watching is not None:
            self.watching.forward_begins()
        if self._kv is not None and torch.is_grad_enabled():
            self._kv.expect_none()

    def note_pass(self, loss: torch.Tensor) -> None:
        """Note a backward pass of `loss`, which the watch, if any, adds to the step's."""
        if self.watching is not None:
            self.watching.passed(loss)

    def settle(self) -> None:
        """Wait for every pending update and every byte in transit. Raises their errors."""
        self._open().settle()
        if self._tier_manager.activations is not None:
            self._tier_manager.activations.settle()

    # ---------------------------------------------------------------- checkpoints
    def register_for_checkpointing(self, **objects: Carried) -> None:
        """Let checkpoints keep, by these names, the states of schedulers, of data loaders that
        know their position, of anything with `state_dict()` and `load_state_dict()`, and of
        generators of random numbers (torch's, Python's, NumPy's). The default generators are kept
        anyway. On several ranks each keeps its own.

        Raises UnsupportedError for objects without such a state, StateError for a name in use.
        """
        from offload.checkpoint.engine.run_state import check_carried

        self._check_open()
        check_carried(self.carried, objects)
        self.carried.update(objects)

    @contextmanager
    def stop_signals(self) -> Iterator[Callable[[], bool]]:
        """Inside, the first Ctrl-C or SIGTERM is noted and raises nothing; the yielded function
        returns whether one arrived, so that a loop can save and end between two steps. On several
        ranks all must call it, and learn of each other's signals. A second one, at least a second
        later, raises KeyboardInterrupt, and so does the end of the block if a signal arrived that
        was never returned. A nested block and the one around it both learn of it. A signal that the
        program handles itself is not noted, nor is any in a block of another thread than the main
        one.

            with engine.stop_signals() as stop:
                for batch in loader:
                    ...  # a step
                    if stop():
                        engine.save_checkpoint("checkpoint")
                        break
        """
        ranks = self.store.ranks

        def signaled() -> bool:
            seen = bool(ranks.exchange([interrupts.seen], "whether a signal arrived").any())
            interrupts.told = interrupts.told or seen
            return seen

        with noted_interrupts() as interrupts:
            with interrupts.put_off(_PUT_OFF):
                yield signaled
            if not interrupts.told:
                interrupts.check()

    def save_checkpoint(
        self, path: StrPath, *, state: Mapping[str, Any] | None = None, wait: bool = True,
        frozen: bool = True,
    ) -> None:  # fmt: skip
        """Write parameters, masters, optimizer states and param groups into the folder `path`, one
        group after the other, with all that training needs to go on with the same bits: steps, loss
        scale, random numbers of every kind, what was registered, and `state`, a dict of numbers,
        text, tensors and containers of them. Wait until it is complete. Only then is an existing
        checkpoint in the folder replaced. Any number of ranks can load a checkpoint; they get the
        first rank's `state`.

        A scheduler that is not registered is left out, with a warning unless there is a `state`
        (`{}` says that you save it elsewhere).

        With `wait=False` it returns once the state to be written is fixed, and a thread writes it
        while training goes on, to the same bits: states on nvme keep their old version, as far as
        there is room, updates of others wait until the thread has passed them. The folder appears
        when it is complete. One is under way at a time: the next save, a load, `close` and
        `checkpoint_saved` wait for it, and raise its error (the next save when it is
        complete itself). On several ranks each has such a thread, and an error of one is raised on
        all. Where a state to be saved is quantized it waits all the same, and says so once.

        With `frozen=False` the frozen parameters are left out, and named by a hash of each: the
        checkpoint of adapters has adapters, their masters and optimizer states, and all else, in
        the bytes of these. It loads onto an engine with the same frozen parameters. The first such
        save reads them all to hash them, the next ones those that were written since.

        Raises StateError while gradients wait for a step, inside `gathered`, or with `frozen=False`
        if all parameters are frozen, or if ranks differ in `frozen` or `wait`; PathError for a
        folder that holds anything else or cannot be written; UnsupportedError if parameters are
        DTensors, whose `state_dict()` is complete.
        """
        path = local_path_of(path, "path")
        _refuse_parts("save_checkpoint", self._open())
        if state is None:
            self.tell_of_scheduler()
        earlier: OffloadError | None = None
        try:
            self._saves.wait()
        except OffloadError as error:
            earlier = error
        self.values.adopt_changes()
        saved, engine = SavedCheckpoint(path, self.steps_done), weakref.ref(self)

        def note() -> None:
            if (live_engine := engine()) is not None:
                live_engine.last_checkpoint = saved

        asked = self.store.ranks.exchange([int(frozen), int(wait)], "how a checkpoint is saved")
        if (asked != asked[0]).any():
            raise StateError(
                f"{path} was not saved: save_checkpoint(frozen=, wait=) has to be the same on all "
                f"ranks, and is frozen={frozen}, wait={wait} on this one"
            )
        if wait or not self._saves.begin(self, path, state, note, frozen=frozen):
            save_engine(self, path, state, frozen=frozen)
            note()
        if earlier is not None:  # of the one before; this one is saved all the same
            raise earlier

    def tell_of_scheduler(self) -> None:
        """Warn, once, about a scheduler that a checkpoint lacks: it steps the optimizer, and
        nothing is registered."""
        if self._told_of_scheduler or self.carried or not self.optimizer.has_scheduler:
            return
        self._told_of_scheduler = True
        _log.warning(
            "the checkpoint does not have the learning-rate scheduler of engine.optimizer, which "
            "would begin anew after a load: call engine.register_for_checkpointing(schedule="
            "scheduler) before; if you save it elsewhere, pass save_checkpoint(..., state={})"
        )

    def checkpoint_saved(self, *, wait: bool = True) -> bool:
        """Return whether no save of `save_checkpoint(wait=False)` is in progress any more, on any
        rank: with `wait` it is True on return. Raises the error of the last save, once. All ranks
        call it together."""
        self._check_open()
        if not wait:
            under_way = self._saves.under_way
            goes_on = under_way is not None and not under_way.has_ended
            if self.store.ranks.exchange([int(goes_on)], "whether a save is in progress").any():
                return False
        self._saves.wait()
        return True

    @property
    def swap_folders(self) -> Sequence[str]:
        """The folders that hold swap files; empty if nothing is on nvme."""
        return self._tier_manager.swap_folders

    def load_checkpoint(self, path: StrPath) -> dict[str, Any]:
        """Take over what `save_checkpoint` wrote, under any placement and number of ranks, and
        return its `state` (empty if it had none). All of it is compared with its hashes as it is
        read. Random numbers go on as they were, and registered objects get their states last.

        Raises CheckpointError, and changes nothing, if it is of another model, not all there, or
        saved with `frozen=False` by an engine whose frozen parameters had other values.
        After one that names damage, or a StorageError, the engine does nothing (StateError) until
        another checkpoint is loaded.
        """
        path = local_path_of(path, "path")
        _refuse_parts("load_checkpoint", self._open())
        self.store.one_thread.check_awake()
        self._saves.wait()
        self.values.adopt_changes()
        return load_engine(self, path)

    # ---------------------------------------------------------------- ending
    def _open(self) -> Runtime:
        self._check_open()
        assert self._runtime is not None, "made with the store"
        return self._runtime

    def close(self, keep: Keep | None = None) -> None:
        """Close as `TieredModel.close` does, after a save in the background, which Ctrl-C ends."""
        try:
            self._saves.wait()
        except KeyboardInterrupt:
            self._saves.give_up()
            raise
        finally:
            super().close(keep)

    def _settle(self) -> None:
        self._saves.wait()
        super()._settle()
        self._open().settle()

    def _close(self) -> None:
        self._closed = True
        meshed = None if self._tensor_parallel is None else self._tensor_parallel.ranks
        for ranks in (self.ranks, meshed):
            if ranks is not None and sys.exception() is not None:
                ranks.watch.leave()  # before anything waits for the others
        super()._close()

    def _close_all(self) -> None:
        try:
            runtime, tier_manager = self._runtime, getattr(self, "_tier_manager", None)
            end = None if runtime is None else partial(runtime.close, self._why_without)
            _close_all(end, self._saves, self._run, tier_manager)
        finally:
            if self.ranks is not None:
                self.ranks.watch.close()
                if self.ranks.owns_world and dist.is_initialized():
                    dist.destroy_process_group()


def _close_all(
    end: Callable[[], None] | None, saves: BackgroundSaves, runner: ParallelRunner | None,
    tier_manager: TierManager | None,
) -> None:  # fmt: skip
    """Close a save in progress, threads by `end`, files and memory, in this order."""
    with ExitStack() as last_first:
        if tier_manager is not None:
            last_first.callback(tier_manager.close)
        if runner is not None:
            last_first.callback(runner.close)
        if end is not None:
            last_first.callback(end)
        saves.wait()


def _while_there(wait: Callable[[], bool]) -> Callable[[], bool]:
    """Return a function that calls a method while its object exists: homes keep no model."""
    method = weakref.WeakMethod(wait)

    def call() -> bool:
        bound = method()
        return bound is not None and bound()

    return call


def _check_trainable(model: nn.Module) -> None:
    refuse_checkpoints_on_cpu(model)
    for name, param in model.named_parameters():
        if param.requires_grad and not managed(param):
            raise UnsupportedError(
                f"{name} ({param.dtype}, {param.layout}) is trainable but no dense real floating "
                "point tensor; freeze it, or train this model without offload"
            )


def _refuse_unseen(model: nn.Module, store: WeightStore) -> None:
    """Raise UnsupportedError, before a step, for trainable parameters that no update would see."""
    for name, param in model.named_parameters():
        if not store.places_of(param) and param.requires_grad:
            raise UnsupportedError(
                f"{name}: no update would see what was put into the model after "
                "offload.initialize; add modules, adapters and tokens before offload.initialize, "
                "write values into the parameters that are there (engine.gathered), or freeze what "
                "is new with requires_grad_(False)"
            )


def _alike(
    config: OffloadConfig, grouping: ParameterGrouping, model: nn.Module, spread: SpreadExperts
) -> dict[str, str]:
    """Return what ranks must agree on, beside the settings that each may have for itself."""
    keys: dict[str, Any] = {**shared_settings(config)}
    shape = grouping.shape()
    keys["the model's ep_size"] = spread.ep_size
    keys["the model (names, shapes, what is trained, groups)"] = (
        [_as_on_first(group, spread) for group in shape.groups],
        [replace(unit, name=spread.name_on(0, unit.name)) for unit in shape.units],
    )
    keys["the model's formats (dtypes of parameters, buffers and their shapes)"] = (
        [(spread.name_on(0, name), param.dtype) for name, param in model.named_parameters()],
        [(name, buffer.dtype, tuple(buffer.shape)) for name, buffer in model.named_buffers()],
    )
    return {key: str(value) for key, value in keys.items()}


def _as_on_first(group: GroupShape, spread: SpreadExperts) -> GroupShape:
    """Return the group with the names that experts at the same places have on the first rank."""
    params = (
        replace(param, names=tuple(spread.name_on(0, name) for name in param.names))
        for param in group.params
    )
    return replace(group, name=spread.name_on(0, group.name), params=tuple(params))


def _refuse_parts(what: str, runtime: Runtime) -> None:
    """Raise UnsupportedError for parts of parameters: a checkpoint's files have no place for them,
    so each rank would overwrite the others' files."""
    if runtime.tensor_parallel is not None:
        raise UnsupportedError(
            f"{what}: the model's parameters are DTensors, parts on several ranks; use "
            "model.state_dict() and engine.optimizer.state_dict() with "
            "torch.distributed.checkpoint, which knows them"
        )
