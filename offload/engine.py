"""`offload.initialize` and the engine: one model, its tiers, its optimizer."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from offload import machine
from offload.activations import Activations
from offload.config import OffloadConfig
from offload.homes import TieredHomes, compute_device, nvme_paths, ranks_here, this_machine
from offload.materialise import MetaInitialiser, SafetensorsWeights, make_real
from offload.model_state import StateDictHooks
from offload.optimizer import OffloadOptimizer
from offload.planning.plan import Plan, spare_host_nbytes
from offload.planning.planner import make_plan, resolved_config
from offload.planning.preflight import preflight
from offload.report import Report, tier_reports
from offload.swap.worker import ParallelRunner
from offload.tiers.errors import OffloadError, StateError, UnsupportedError
from offload.zero.collectives import Wire
from offload.zero.discovery import Discovery, discover, managed
from offload.zero.group import ParamGroup
from offload.zero.hooks import UnitHooks
from offload.zero.layout import ParamSpec
from offload.zero.loading import load_group
from offload.zero.local_tensors import local_of
from offload.zero.loss_scale import LossScale
from offload.zero.ranks import Ranks, data_ranks
from offload.zero.runtime import Runtime, RuntimeOptions
from offload.zero.sharding import ALONE
from offload.zero.stepper import StepRules
from offload.zero.tensor_parallel import TensorParallel
from offload.zero.values import ParameterValues

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger("offload")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ParamGroups = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


def initialize(
    model: nn.Module,
    config: str | Path | Mapping[str, Any] | OffloadConfig | None = None,
    *,
    parameters: ParamGroups | None = None,
    weights: str | Path | None = None,
    mesh: DeviceMesh | None = None,
) -> Engine:
    """Spread the model's states over tiers and make it train from there.

    `model` may be on the meta device: it is then initialised group by group (from `weights`, a
    safetensors file or folder, or by its own `reset_parameters`) and is never whole in RAM.
    `parameters` are the optimizer's param groups as torch.optim takes them; by default all
    trainable parameters. The module object stays the same and is used as before.

    `mesh` (1D) holds the ranks that train this model together, each with other data: by default all
    of the world. A model that is parallel in other ways as well needs it: one that
    `parallelize_module` made (`mesh=mesh["dp"]`), or a stage of a pipeline.

    Raises ConfigError, PathError or BudgetError before anything is allocated.
    """
    loaded = OffloadConfig.load({} if config is None else config)
    return Engine(model, loaded, parameters=parameters, weights=weights, mesh=mesh)


class Engine:
    """Owns the tiers of one model. A context manager; `close` gives everything back."""

    def __init__(
        self, model: nn.Module, config: OffloadConfig, *, parameters: ParamGroups | None = None,
        weights: str | Path | None = None, mesh: DeviceMesh | None = None,
    ) -> None:  # fmt: skip
        config = config.settled()
        self.module = model
        self.device = compute_device(config)
        self._closed = False
        self._run: ParallelRunner
        self._homes: TieredHomes
        self._runtime: Runtime | None = None
        self._activations: Activations | None = None
        _check_model(model)
        discovery = discover(model, config.groups.blocks)
        zero = config.zero
        self._tensor_parallel = TensorParallel.find(
            model.named_parameters(), data_ranks(mesh), self.device, zero.timeout_s
        )
        _check_tensor_parallel(self._tensor_parallel, weights)
        self._ranks = Ranks.join(
            zero.stage, zero.shard_group, self.device, zero.timeout_s, mesh,
            _alike(config, discovery),
        )  # fmt: skip
        try:
            self._build(model, config, discovery, parameters, weights)
        except BaseException:
            self.close()
            raise
        self.optimizer.engine = self  # whoever keeps the optimizer keeps what it works with
        self._finalizer = weakref.finalize(self, _close_all, self._runtime, self._run, self._homes)

    # ---------------------------------------------------------------- building
    def _build(
        self, model: nn.Module, config: OffloadConfig, discovery: Discovery,
        parameters: ParamGroups | None, weights: str | Path | None,
    ) -> None:  # fmt: skip
        dtype = _DTYPES[config.precision]
        sharding = ALONE if self._ranks is None else self._ranks.sharding
        hardware = this_machine(config.nvme, self.device, sharding)
        self.plan: Plan = make_plan(config, discovery.shape(), hardware)
        self.config = resolved_config(
            config, self.plan, self.device.type, ranks_here()
        )  # fmt: skip
        _look_ahead(self.plan, config, model)
        _say_slow(config.precision, self.device)
        optimized: Any = parameters
        if parameters is not None and not isinstance(parameters, torch.Tensor):
            optimized = list(parameters)

        initialiser = _initialiser(model, config.seed)
        translate = make_real(model, dtype, self.device) if initialiser is not None else {}
        originals = [dict(group.params) for group in discovery.groups]
        _translate_groups(discovery, translate)

        self._run = ParallelRunner(int(self.config.threads.optimizer))
        if self.config.threads.torch != "auto":
            torch.set_num_threads(self.config.threads.torch)
        self._homes = TieredHomes(self.plan, config.nvme, self.device, dtype.itemsize)
        self._runtime = self._make_runtime(discovery, dtype)
        self._load(originals, initialiser, weights)
        self.values = ParameterValues(self._runtime)
        self.optimizer = self._make_optimizer(optimized, translate)
        self._state_dict_hooks = StateDictHooks(model, self._runtime, self.values)
        self._activations = Activations(model, discovery, config, self._homes.activations)
        self._runtime.start(model, self.values.adopt_written)

    def _make_runtime(self, discovery: Discovery, dtype: torch.dtype) -> Runtime:
        config = self.config
        options = RuntimeOptions(
            dtype=dtype,
            device=self.device,
            chunk_numel=self.plan.chunk_numel,
            seed=config.seed,
            accumulate_fp32=config.gradient_accumulation_steps > 1,
            prefetch=int(config.prefetch),
            keep_records=spare_host_nbytes(self.plan) > 0,
            micro_batches=config.micro_batches,
            step_rules=StepRules(
                config.clip_grad_norm,
                config.skips_nonfinite,
                in_backward=config.optimizer.in_backward is True,
                passes=config.gradient_accumulation_steps,
            ),
            wire=_wire(config),
        )
        staging = self._homes.staging()
        runtime = Runtime(
            discovery,
            options,
            self._homes,
            self._run,
            staging,
            _loss_scale(config),
            self._ranks,
            self._tensor_parallel,
        )
        self._homes.let_wait(runtime.await_progress)
        return runtime

    def _load(
        self, originals: Sequence[Mapping[tuple[str, ...], nn.Parameter]],
        initialiser: MetaInitialiser | None, weights: str | Path | None,
    ) -> None:  # fmt: skip
        """Fill every group's states, one group at a time."""
        assert self._runtime is not None, "made just before"
        files = SafetensorsWeights(weights) if weights is not None else None
        for group, params in zip(self._runtime.groups, originals, strict=True):
            values = _values(
                group, params, initialiser, files, self._ranks, self._tensor_parallel
            )  # fmt: skip
            state = self._runtime.optimizer_states[group.index]
            load_group(state, self._runtime.own, values)
            group.adopt()
            if self._runtime.rank_work is not None:
                self._runtime.rank_work.refresh([group])
            machine.trim_memory()  # the values of one group are freed before the next ones come
        if initialiser is not None:
            initialiser.finish_buffers()
            _load_buffers(self.module, files)
            _check_buffers(self.module)
        if self._ranks is not None:
            for buffer in self.module.buffers():
                own = local_of(buffer)
                own.copy_(self._ranks.from_first(own))

    def _make_optimizer(
        self, given: Any, translate: Mapping[int, nn.Parameter]
    ) -> OffloadOptimizer:
        assert self._runtime is not None, "made just before"
        if given is None:
            # as one param group: that may be empty (a frozen model), a list of parameters may not
            params: Any = [{"params": [p for p in self.module.parameters() if p.requires_grad]}]
        elif isinstance(given, torch.Tensor):
            params = given  # torch says what is wrong with it
        else:
            params = [_translated(item, translate) for item in given]
        return OffloadOptimizer(self._runtime, self.values, params, self.config.optimizer)

    # ---------------------------------------------------------------- training
    def backward(self, loss: torch.Tensor) -> None:
        """`loss.backward()` in every precision; scales the loss under fp16."""
        with self._open().scaled_backward() as scale:
            (loss if scale == 1.0 else loss * scale).backward()

    def idle(self) -> None:
        """Take part in one forward and backward pass of the other ranks, without data on this one:
        its gradients count as zeros in the average. Of no effect on one rank.

        It repeats what the last pass did here. StateError if there was none.
        """
        self._open().idle()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of the backward passes inside add up on this rank; the first pass outside, or
        the step, reduces their sum with the other ranks'. Of no effect on one rank.

        Meanwhile a rank holds gradients whole, where `placement.gradients` puts them.
        """
        with self._open().no_sync():
            yield

    @contextmanager
    def gathered(self, *what: nn.Parameter | nn.Module | Iterable[nn.Parameter]) -> Iterator[None]:
        """Full parameters inside the block, for reading or writing.

        `what` are parameters, modules or iterables of parameters; nothing given means all. Written
        parameters keep exactly what was written.
        """
        runtime = self._open()
        params = _params_of(what) if what else list(self.module.parameters())
        with self.values.gathered([p for p in params if runtime.group_of(p) is not None]):
            yield

    def gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        """A copy of what was accumulated for `param` (`param.grad` is always None)."""
        self._open()
        return self.values.gradient(param)

    # ---------------------------------------------------------------- looking
    def report(self) -> Report:
        """Bytes per tier, bytes moved and steps so far."""
        runtime = self._open()
        last = self.optimizer.last_step
        with self._homes.lock:
            tiers = tier_reports(self._homes.ledger.accounts)
        return Report(
            tiers=tiers,
            bytes_moved={**self._homes.bytes_moved(), **runtime.exchanged_nbytes()},
            bytes_saved=self._homes.bytes_saved(),
            steps=runtime.stepper.taken,
            skipped_steps=runtime.stepper.skipped,
            gradient_norm=None if last is None else last.gradient_norm,
            loss_scale=None if runtime.loss_scale is None else runtime.loss_scale.scale,
            prefetch_hits=runtime.trace.hits,
            prefetch_misses=runtime.trace.misses,
            evictions=self._homes.pool.evictions,
            placements={str(c): p.describe() for c, p in self.plan.placements.items()},
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every tier's books balance."""
        with self._homes.lock:
            self._homes.ledger.check_integrity()

    def settle(self) -> None:
        """Wait for every pending update and every byte on its way."""
        self._open().settle()
        if self._homes.activations is not None:
            self._homes.activations.settle()

    # ---------------------------------------------------------------- checkpoints
    def save_checkpoint(self, path: str | Path) -> None:
        """Write parameters, optimizer states and param groups into the folder `path`.

        UnsupportedError where parameters are DTensors; their `state_dict()` is complete.
        """
        from offload.checkpoint import save

        _refuse_parts("save_checkpoint", self._open())
        save(self, Path(path))

    def load_checkpoint(self, path: str | Path) -> None:
        """Take over what `save_checkpoint` wrote. CheckpointError if it does not fit the model."""
        from offload.checkpoint import load

        _refuse_parts("load_checkpoint", self._open())
        load(self, Path(path))

    @property
    def runtime(self) -> Runtime:
        """The sharded training state (for checkpoints and tests)."""
        return self._open()

    # ---------------------------------------------------------------- ending
    def _open(self) -> Runtime:
        if self._closed or self._runtime is None:
            raise StateError("the engine is closed; make a new one with offload.initialize")
        return self._runtime

    def close(self) -> None:
        """Stop threads, close swap files, give back memory. Parameters are not readable after.

        Calling it again does nothing.
        """
        if self._closed:
            return
        self._closed = True
        if self._ranks is not None:
            self._ranks.watch.leave_after_error()  # before anything waits for the others
        if hasattr(self, "_finalizer"):
            self._finalizer.detach()
        if self._activations is not None:
            self._activations.remove()
        try:
            made = getattr(self, "_run", None), getattr(self, "_homes", None)
            _close_all(self._runtime, *made)
        finally:
            if self._ranks is not None:
                self._ranks.watch.close()
                self._ranks.leave()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        try:
            self.close()
        except OffloadError as closing:
            if error is None:
                raise
            _log.warning("while closing after an error: %s", closing)


def _close_all(
    runtime: Runtime | None, runner: ParallelRunner | None, homes: TieredHomes | None
) -> None:
    """Threads, files and memory, in this order; also of an engine that was never closed."""
    try:
        if runtime is not None:
            runtime.close()
    finally:
        if runner is not None:
            runner.close()
        if homes is not None:
            homes.close()


def _alike(config: OffloadConfig, discovery: Discovery) -> dict[str, str]:
    """What ranks that train together have to agree on; budgets, placements and folders are each
    rank's own."""
    keys: dict[str, Any] = {
        "precision": config.precision,
        "clip_grad_norm": config.clip_grad_norm,
        "skip_nonfinite": config.skip_nonfinite,
        "loss_scale": config.loss_scale and config.loss_scale.model_dump(),
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "micro_batches": config.micro_batches,
        "placement.activations.checkpoint": config.placement.activations.checkpoint,
    }
    for name in ("zero", "optimizer"):
        section = getattr(config, name).model_dump(exclude={"timeout_s", "chunk"})
        keys |= {f"{name}.{key}": value for key, value in section.items()}
    shape = discovery.shape()
    keys["the model (names, shapes, what is trained, groups)"] = shape.groups, shape.units
    return {key: str(value) for key, value in keys.items()}


def _look_ahead(plan: Plan, config: OffloadConfig, model: nn.Module) -> None:
    """Refuse what this machine cannot do now, and say what will be slow, before allocating."""
    here = [p for p in model.parameters() if p.device.type == "cpu"]
    freed = sum(local_of(p).nbytes for p in here)
    found = preflight(plan, config.nvme, nvme_paths(config.nvme), freed_nbytes=freed)
    found.refuse()
    for warning in found.warnings:
        _log.warning("%s", warning)


def _say_slow(precision: str, device: torch.device) -> None:
    if device.type == "cpu" and precision in machine.slow_matmul_precisions():
        _log.warning(
            "precision: %s is computed on this CPU without a fast kernel: matrix products can take "
            "100 times as long as in fp32; use precision: fp32 here", precision,
        )  # fmt: skip


def _wire(config: OffloadConfig) -> Wire:
    zero = config.zero
    rounded = None if zero.reduce_dtype == "fp32" else _DTYPES[zero.reduce_dtype]
    return Wire(rounded, zero.quantized_weights, zero.quantized_gradients)


def _loss_scale(config: OffloadConfig) -> LossScale | None:
    scaling = config.scaling
    if scaling is None:
        return None
    return LossScale(
        scaling.initial, scaling.growth_interval, scaling.growth_factor,
        scaling.backoff_factor, scaling.min,
    )  # fmt: skip


def _check_model(model: nn.Module) -> None:
    if UnitHooks.had_an_engine(model):
        raise StateError(
            "this model was given to an engine before, which has its parameters (or had, until it "
            "was closed); build the model anew"
        )
    for name, param in model.named_parameters():
        if param.requires_grad and not managed(param):
            raise UnsupportedError(
                f"{name} ({param.dtype}, {param.layout}) is trainable but no dense real floating "
                "point tensor; freeze it, or train this model without offload"
            )
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise UnsupportedError(
                f"{name} has no shape yet (a lazy module); run one forward before initialize"
            )


def _check_tensor_parallel(found: TensorParallel | None, weights: str | Path | None) -> None:
    if found is not None and weights is not None:
        raise UnsupportedError(
            "weights= cannot fill a model whose parameters are DTensors; load them before "
            "parallelize_module, or with torch.distributed.checkpoint after offload.initialize"
        )


def _refuse_parts(what: str, runtime: Runtime) -> None:
    """A checkpoint's files have no place for parts of a parameter: each rank would write its own
    over the others'."""
    if runtime.tensor_parallel is not None:
        raise UnsupportedError(
            f"{what}: the model's parameters are DTensors, parts on several ranks; use "
            "model.state_dict() and engine.optimizer.state_dict() with "
            "torch.distributed.checkpoint, which knows them"
        )


def _initialiser(model: nn.Module, seed: int) -> MetaInitialiser | None:
    anything = [*model.parameters(), *model.buffers()]
    return MetaInitialiser(model, seed) if any(t.is_meta for t in anything) else None


def _translate_groups(discovery: Discovery, new: Mapping[int, nn.Parameter]) -> None:
    for group in discovery.groups:
        group.params = [(names, new.get(id(p), p)) for names, p in group.params]


def _values(
    group: ParamGroup, originals: Mapping[tuple[str, ...], nn.Parameter],
    initialiser: MetaInitialiser | None, files: SafetensorsWeights | None, ranks: Ranks | None,
    tensor_parallel: TensorParallel | None,
) -> Any:  # fmt: skip
    """Where a group's initial values come from: of several ranks, the first one's model."""
    if files is not None:
        return files.get
    meta = {names[0]: param for names, param in originals.items() if param.is_meta}
    fresh = initialiser.values(meta) if initialiser is not None and meta else {}

    def value(spec: ParamSpec) -> torch.Tensor:
        found = fresh.get(spec.name)
        if found is not None:
            return found
        param = originals[spec.names]
        given = local_of(param).detach()
        if tensor_parallel is not None:
            given = tensor_parallel.agree_on(param, given)
        return given if ranks is None else ranks.from_first(given)

    return value


def _load_buffers(model: nn.Module, files: SafetensorsWeights | None) -> None:
    if files is None:
        return
    for name, buffer in model.named_buffers():
        saved = files.find((name,))
        if saved is not None and not buffer.is_meta:
            buffer.copy_(saved)


def _check_buffers(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise UnsupportedError(
                f"buffer {name} is on the meta device and nothing gives it a value; let its "
                "module's reset_parameters() fill it, or keep buffers real when building the model"
            )


def _translated(item: Any, new: Mapping[int, nn.Parameter]) -> Any:
    """A parameter, `(name, parameter)` or param group with meta parameters replaced."""
    if isinstance(item, dict):
        return {**item, "params": [_translated(p, new) for p in _as_list(item["params"])]}
    if isinstance(item, tuple):  # of named_parameters()
        return (*item[:-1], new.get(id(item[-1]), item[-1]))
    return new.get(id(item), item)


def _as_list(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _params_of(what: Iterable[Any]) -> list[nn.Parameter]:
    params: list[nn.Parameter] = []
    for item in what:
        if isinstance(item, nn.Module):
            params.extend(item.parameters())
        elif isinstance(item, torch.Tensor):
            params.append(cast(nn.Parameter, item))
        else:
            params.extend(item)
    return list({id(param): param for param in params}.values())
