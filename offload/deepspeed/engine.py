"""The engine that `deepspeed.initialize` returns: DeepSpeed's methods over an offload engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from offload.config.paths import StrPath, path_of
from offload.deepspeed.batches import Batches
from offload.deepspeed.fp16_loss import ScalingLoss, plain
from offload.deepspeed.hints import missing_method
from offload.deepspeed.outputs import with_tensors
from offload.deepspeed.registry import ENGINES
from offload.deepspeed.saved import load_saved, save_all, save_weights
from offload.deepspeed.settings import Settings
from offload.engine import Engine
from offload.tiers.errors import StateError, UnsupportedError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from offload.report import Report

_log = logging.getLogger("offload")


class EngineModule(nn.Module):
    """A model that trains as under DeepSpeed's engine.

    `backward` divides the loss by the passes of a step, `step` steps after so many passes, clears
    the gradients and steps the scheduler; a step that is skipped for an overflow does not.
    `offload` is the engine underneath, with all that DeepSpeed has not.
    """

    module: nn.Module

    def __init__(
        self, model: nn.Module, settings: Settings, engine: Engine, ranks: int,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.module = model
        self.offload = engine
        self.optimizer = optimizer
        self.config = settings.given
        self.lr_scheduler: Any = None
        self.training_dataloader: DataLoader[Any] | None = None
        self.device = engine.device
        self.world_size = self.dp_world_size = ranks
        self.global_rank = _rank()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.global_steps = self.global_samples = self.skipped_steps = self.micro_steps = 0
        self._settings = settings
        self._batches = settings.batches
        self._boundary: bool | None = None  # as the loop has set it
        self._in_no_sync = self._in_backward = self._step_applied = False
        self._returned = ""  # the class of the last outputs
        self._passes_seen = 0  # since the last step: backward passes that were divided
        self._passes_counted = 0  # ... of the model, at the last call of step
        self._grad_norm: float | None = None
        self.offload.runtime.stepper.checks_passes = False
        self.offload.runtime.multiply_gradients(ranks if settings.sums_over_ranks else 1)
        if optimizer is not None and self.fp16_enabled():
            engine.before_close(model.register_forward_hook(_with_scaling_losses).remove)
        ENGINES.add(self)

    # ---------------------------------------------------------------- forward and backward
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the model's outputs."""
        if self._settings.casts_inputs:
            inputs, kwargs = pytree.tree_map(_half, (inputs, kwargs))
        watches = torch.is_grad_enabled() and self._batches.steps > 1
        again = watches and _comes_from_outputs((inputs, kwargs))
        with self._autocast():
            outputs = self.module(*inputs, **kwargs)
        if not watches:
            return outputs
        self._returned = type(outputs).__name__
        return with_tensors(outputs, partial(self._watched, again=again))

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self._settings.autocast_dtype
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def _watched(self, output: torch.Tensor, *, again: bool) -> Any:
        """Return `output` with the same values; its gradient in a backward that the user starts is
        divided as `backward` divides the loss. `again`: it is computed from such outputs."""
        if not output.requires_grad:
            return output
        watched = _Watched.apply(plain(output), self, again)
        return watched.as_subclass(type(output)) if type(output) is ScalingLoss else watched

    def _divided(self, value: torch.Tensor) -> torch.Tensor:
        """Return a loss, or its gradient, divided by the passes of a step."""
        return value / self._batches.steps if self._batches.steps > 1 else value

    def gradient_of(self, gradient: torch.Tensor, *, again: bool) -> torch.Tensor:
        """Return the gradient of an output as the model takes it: unchanged if an engine's
        `backward` has divided the loss, and in torch.autograd.grad, which sets no gradients. Raise
        StateError if it will be divided `again`."""
        if not self._reaches_parameters():
            return gradient
        self._passes_seen += 1
        if any(engine._in_backward for engine in ENGINES):
            return gradient
        if again:
            raise StateError(
                "loss.backward() goes through outputs of an engine that engine(...) was given, and "
                "would divide the gradient by gradient_accumulation_steps once more at each; call "
                "engine.backward(loss), which divides the loss"
            )
        return self._divided(gradient)

    def _reaches_parameters(self) -> bool:
        """Whether the running backward accumulates gradients of this model."""
        will = torch._C._will_engine_execute_node
        trained = (param for param in self.module.parameters() if param.requires_grad)
        with torch._C.DisableTorchFunctionSubclass():
            try:
                return any(
                    will(torch.autograd.graph.get_gradient_edge(param).node) for param in trained
                )
            except RuntimeError:  # torch.autograd.grad is asked for that parameter's gradient
                return False

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Run backward of `loss`, divided by the passes of a step (and scaled under fp16). Return
        the divided loss. Raise StateError without an optimizer, UnsupportedError if `loss` is not a
        scalar."""
        self._need_optimizer("backward")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UnsupportedError(
                "engine.backward takes a loss with one element; call output.backward(gradient) for "
                "other tensors"
            )
        loss = plain(loss)
        divided = self._divided(loss) if scale_wrt_gas else loss
        self._in_backward = True
        try:
            with self.offload.runtime.scaled_backward() as scale:
                (divided if scale == 1.0 else divided * scale).backward(retain_graph=retain_graph)
        finally:
            self._in_backward = False
        self._passes_seen += 1
        self.offload.note_pass(divided)
        return divided

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` scaled for fp16, for `engine.scale(loss).backward()`."""
        self._need_optimizer("scale")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise UnsupportedError(
                "engine.scale takes a scalar loss with a graph; for other tensors, call "
                "output.backward(gradient)"
            )
        return self.offload.scale(plain(loss))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of passes inside on this rank until the first pass outside. Raise
        StateError inside another `no_sync`, and for a step inside."""
        if self._in_no_sync:
            raise StateError("no_sync inside no_sync; leave the first one before")
        self._in_no_sync = True
        try:
            with self.offload.no_sync():
                yield
        finally:
            self._in_no_sync = False

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Reduce the gradients of all passes inside once, in the step after it, like `no_sync`."""
        return self.no_sync()

    # ---------------------------------------------------------------- steps
    def managed_gradient_accumulation(self) -> bool:
        """Whether `step` counts passes; False: each one steps."""
        return self._settings.counts_passes

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` steps."""
        if self._boundary is not None:
            return self._boundary
        if not self._settings.counts_passes:
            return True
        return (self.micro_steps + 1) % self._batches.steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next `step` steps; from then on the loop decides."""
        if not self._settings.counts_passes:
            raise StateError(
                "set_gradient_accumulation_boundary contradicts managed_gradient_accumulation: "
                "false, where every step() steps"
            )
        self._boundary = is_boundary

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Step the optimizer and the scheduler if a step is due. Call it after each pass."""
        self._need_optimizer("step")
        if self._in_no_sync:
            raise StateError("engine.step() inside no_sync; leave the block before")
        self._check_divided()
        self._step_applied = False
        if self.is_gradient_accumulation_boundary():
            self._take_step(lr_kwargs or {})
        self.micro_steps += 1

    def _check_divided(self) -> None:
        """Raise StateError after a backward of a tensor that is not an output of this engine."""
        passes = self.offload.runtime.stepper.passes_since_step
        seen, self._passes_seen = self._passes_seen, 0
        came, self._passes_counted = passes > self._passes_counted, passes
        if came and not seen and self._batches.steps > 1:
            raise StateError(
                "gradients came from a backward that began at no output of engine(...), so the "
                f"loss was not divided by gradient_accumulation_steps: {self._batches.steps}; call "
                f"engine.backward(loss). If the loss comes from the {self._returned} that "
                "engine(...) returned, its tensors are in an object that cannot be looked into"
            )

    def _take_step(self, lr_kwargs: dict[str, Any]) -> None:
        optimizer = self.offload.optimizer
        passes = self.offload.runtime.stepper.passes_since_step
        optimizer.step()
        optimizer.zero_grad()
        self._passes_counted = 0
        outcome = optimizer.last_step
        skipped = outcome is not None and outcome.skipped
        if outcome is not None and not skipped:
            self._grad_norm = outcome.gradient_norm
        self._step_applied = not skipped
        if skipped:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            if self._settings.client is not None:  # schedulers made of it look there for a step
                self._settings.client.given._opt_called = True  # type: ignore[attr-defined]
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        self.global_samples += (
            self._batches.train if self._settings.counts_passes
            else passes * self._batches.micro * self.world_size
        )  # fmt: skip
        every = self._settings.made.get("steps_per_print")
        if every and self.global_rank == 0 and self.global_steps % int(every) == 0:
            _log.info(
                "step=%d, skipped=%d, lr=%s, mom=%s",
                self.global_steps, self.skipped_steps, self.get_lr(), self.get_mom(),
            )  # fmt: skip

    def _need_optimizer(self, what: str) -> None:
        if self.optimizer is None:
            raise StateError(
                f"engine.{what}: there is no optimizer; give initialize one, or the configuration "
                "an optimizer section"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        self.offload.optimizer.zero_grad(set_to_none)
        self._passes_counted = 0

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed the weights."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """Return the gradient norm of the last step taken, before clipping; None before the
        first."""
        return self._grad_norm

    # ---------------------------------------------------------------- numbers
    def train_batch_size(self) -> int:
        """Return the samples per step of all ranks."""
        return self._batches.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples per pass of one rank."""
        return self._batches.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the passes per step."""
        return self._batches.steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return the three numbers above."""
        return self._batches.train, self._batches.micro, self._batches.steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the passes per step. Raise ValueError unless the samples per pass divide the
        size."""
        if train_batch_size < 1 or train_batch_size % (self._batches.micro * self.world_size):
            raise ValueError(
                f"train_batch_size: {train_batch_size} is no multiple of {self._batches.micro} x "
                f"{self.world_size} ranks"
            )
        steps = train_batch_size // (self._batches.micro * self.world_size)
        self._batches = replace(self._batches, train=train_batch_size, steps=steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples per pass; the passes per step stay."""
        steps = self._batches.steps
        self._batches = Batches(micro_batch_size * steps * self.world_size, micro_batch_size, steps)

    def get_lr(self) -> list[Any]:
        """Return each param group's learning rate."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """Return each param group's betas, or momentum."""
        has_momentum = self.offload.config.optimizer.type == "sgd"
        return self._of_groups("momentum" if has_momentum else "betas")

    def get_type(self) -> list[Any]:
        """Return each param group's entry `type`."""
        return self._of_groups("type")

    def _of_groups(self, key: str) -> list[Any]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get(key, 0.0) for group in groups]

    def loss_scale(self) -> float:
        """The current scale of fp16; 1 in other precisions."""
        scale = self.offload.runtime.loss_scale
        return 1.0 if scale is None else scale.scale

    @property
    def scales_losses(self) -> bool:
        """Whether the engine is open and trains in fp16."""
        return not self.offload.is_closed and self.optimizer is not None and self.fp16_enabled()

    def gradient_clipping(self) -> float:
        """Return the maximum gradient norm; 0: no clipping."""
        return self.offload.config.clip_grad_norm or 0.0

    def zero_optimization_stage(self) -> int:
        return self.offload.config.zero.stage

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_weights(self) -> bool:
        return self.zero_optimization_stage() == 3

    def zero_optimization_partition_gradients(self) -> bool:
        return self.zero_optimization_stage() >= 2

    def fp16_enabled(self) -> bool:
        return self.offload.config.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self.offload.config.precision == "bf16"

    def optimizer_name(self) -> str | None:
        """Return the name of the update rule; None without an optimizer."""
        return None if self.optimizer is None else self.offload.config.optimizer.type

    def scheduler_name(self) -> str | None:
        """Return the type of the schedule in the configuration; None if there is none."""
        schedule = self._settings.made.schedule
        return None if schedule is None else schedule.type

    def steps_per_print(self) -> int | None:
        return self._settings.made.get("steps_per_print")  # type: ignore[no-any-return]

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Return the modules with gradients sent as sparse tensors: none, all are reduced dense."""
        return set()

    def report(self) -> Report:
        """Return bytes per tier, bytes moved, and steps."""
        return self.offload.report()

    # ---------------------------------------------------------------- states
    def manages(self, param: nn.Parameter) -> bool:
        """Whether a parameter trains through this engine, while it is open."""
        if self.offload.is_closed:
            return False
        return self.offload.runtime.store.spec_of(param) is not None

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:  # fmt: skip
        """Raise UnsupportedError: states are where `placement` and `budget` put them."""
        raise UnsupportedError(
            "offload_states: states are not moved by hand here. Those that are at home in host "
            "memory or on nvme leave the device by themselves after each use; put more of them "
            'there: {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, ...}}'
        )

    def reload_states(self, non_blocking: bool = False) -> None:
        """Do nothing: states are fetched where they are used."""

    def empty_partition_cache(self) -> None:
        """Do nothing: copies are dropped when their memory is needed."""

    def save_checkpoint(
        self, save_dir: StrPath, tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None, save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Write the folder SAVE_DIR/TAG (a checkpoint of offload, with the loop's state), and the
        file `latest`. All ranks call it together. Raise UnsupportedError for a client state that
        would have to be pickled, ValueError without a folder."""
        if not save_dir:
            raise ValueError(f"save_checkpoint: save_dir is {save_dir!r}; name a folder")
        folder, tag = path_of(save_dir, "save_dir"), _tag(tag, self.global_steps)
        save_all(self, folder, tag, dict(client_state or {}), save_latest=save_latest)
        return True

    def load_checkpoint(
        self, load_dir: StrPath, tag: str | int | None = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True,
        load_module_only: bool = False, custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:  # fmt: skip
        """Load what `save_checkpoint` wrote. Return the folder and the client state; (None, None),
        with a warning, if no tag is given and there is no `latest`."""
        if custom_load_fn is not None:
            raise UnsupportedError(
                "load_checkpoint(custom_load_fn=...): write the weights into the model inside "
                "zero.GatheredParameters"
            )
        return load_saved(
            self, path_of(load_dir, "load_dir"), None if tag is None else str(tag),
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            counters=not load_module_only,
        )  # fmt: skip

    def save_16bit_model(
        self, save_dir: StrPath, save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Write the weights, in the format that the model computes with, to a safetensors file."""
        save_weights(self, path_of(save_dir, "save_dir"), save_filename)
        return True

    save_fp16_model = save_16bit_model

    def compile(
        self, backend: Any = "inductor", compile_kwargs: dict[str, Any] | None = None, **_: Any
    ) -> None:  # fmt: skip
        """Compile the model by `module.compile(backend=...)`."""
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    def destroy(self) -> None:
        """Close the engine: its threads end, its files and memory are released."""
        self.offload.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of the model, as DeepSpeed's engine does."""
            if name in self.__dict__.get("_modules", {}):
                return super().__getattr__(name)
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            raise AttributeError(missing_method(name))


class _Watched(torch.autograd.Function):
    """The identity over the same memory; see `EngineModule._watched`."""

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, engine: EngineModule, again: bool
    ) -> torch.Tensor:  # fmt: skip
        ctx.engine, ctx.again = engine, again
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.engine.gradient_of(gradient, again=ctx.again), None, None


def _comes_from_outputs(inputs: Any) -> bool:
    """Whether the graph of a tensor in `inputs` goes through a watched output of some engine."""
    nodes: list[Any] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        nodes.append(tensor.grad_fn)
        return tensor

    with_tensors(inputs, note)
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, _Watched._backward_cls):
            return True
        if node is not None and node not in seen:
            seen.add(node)
            nodes.extend(before for before, _ in node.next_functions)
    return False


def _with_scaling_losses(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
    """A forward hook of an fp16 model: the losses that it returns scale themselves."""

    def scaling(output: torch.Tensor) -> torch.Tensor:
        is_loss = output.requires_grad and output.numel() == 1 and output.is_floating_point()
        return output.as_subclass(ScalingLoss) if is_loss else output

    return with_tensors(outputs, scaling)


def _half(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.half() if is_float else value


def _tag(tag: str | int | None, steps: int) -> str:
    return f"global_step{steps}" if tag is None else str(tag)


def _rank() -> int:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if there else 0
