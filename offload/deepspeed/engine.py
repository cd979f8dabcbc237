"""The engine that `deepspeed.initialize` returns: DeepSpeed's methods over an offload engine."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from offload.config import OffloadConfig
from offload.config.paths import StrPath, path_of
from offload.deepspeed.migration import Batches, Migration, migrate, read_ds_config
from offload.deepspeed.saved import LoopState, load_saved, save_all
from offload.engine import Engine
from offload.optimizers.client import CLASSES, ClientOptimizer
from offload.tiered_model import OnUse
from offload.tiers.errors import ConfigError, StateError, UnsupportedError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_log = logging.getLogger("offload")
# Keys of the optimizer section on how states are kept, which no client's optimizer has.
_OF_STATES = ("master", "states", "chunk", "in_backward")
# Those of this process: DeepSpeed's functions take a parameter alone.
_ENGINES: weakref.WeakSet[EngineModule] = weakref.WeakSet()


@dataclass(frozen=True)
class Settings:
    """The settings of one engine."""

    given: dict[str, Any]  # the configuration as it came
    made: Migration
    batches: Batches
    client: ClientOptimizer | None
    config: OffloadConfig

    @classmethod
    def of(
        cls, source: StrPath | Mapping[str, Any], ranks: int,
        optimizer: torch.optim.Optimizer | None,
    ) -> Settings:  # fmt: skip
        """Read a configuration. Raise ConfigError for keys that are unknown, refused or left to the
        Trainer; log those that are dropped."""
        given = read_ds_config(source)
        made = migrate(given, ranks)
        unfilled = made.unfilled
        if unfilled:
            raise ConfigError(
                f"{', '.join(unfilled)}: auto is filled in by transformers' Trainer only; "
                "write the number"
            )
        if made.batches is None:
            raise ConfigError("train_batch_size: missing; set it or train_micro_batch_size_per_gpu")
        for warning in made.warnings:
            _log.warning("%s", warning)
        client = None if optimizer is None else ClientOptimizer.of(optimizer, CLASSES)
        if client is not None:
            kept = {
                key: value for key, value in made.values.get("optimizer", {}).items()
                if key in _OF_STATES
            }  # fmt: skip
            for key in made.get("offload", {}).get("optimizer", {}):
                if key not in _OF_STATES:
                    raise ConfigError(
                        f"offload.optimizer.{key}: the program has an optimizer of its own, which "
                        "says that; remove one of them"
                    )
            made.values["optimizer"] = {**client.section, **kept}
        config = made.config
        if config.optimizer.in_backward is True:
            raise UnsupportedError(
                "optimizer.in_backward: updates begin in the first backward, and step() decides "
                "here when a step is due; use offload.initialize for it"
            )
        return cls(given, made, made.batches, client, config)

    @property
    def has_optimizer(self) -> bool:
        return self.client is not None or self.made.has_optimizer


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
        self.global_rank = 0 if engine.ranks is None else engine.ranks.rank
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.global_steps = self.global_samples = self.skipped_steps = self.micro_steps = 0
        self._settings = settings
        self._boundary: bool | None = None  # as the loop has set it
        self._step_applied = False
        self._passes_divided = 0  # since the last call of step
        self._passes_counted = 0  # of the model since the last step, at the last call of step
        self._grad_norm: float | None = None
        self.offload.steps.passes.are_checked = False
        _ENGINES.add(self)

    # ---------------------------------------------------------------- forward and backward
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the model's outputs."""
        return self.module(*inputs, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Run backward of `loss`, divided by the passes of a step (and scaled under fp16). Return
        the divided loss. Raise StateError without an optimizer."""
        self._need_optimizer("backward")
        divided = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        with self.offload.scaled_backward(divided) as scaled:
            scaled.backward(retain_graph=retain_graph)
        for engine in _ENGINES:  # several may share a loss
            engine._passes_divided += 1
        self.offload.note_pass(divided)
        return divided

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep the gradients of passes inside on this rank until the first pass outside, or the
        step."""
        return self.offload.no_sync()

    # ---------------------------------------------------------------- steps
    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` steps."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next `step` steps; from then on the loop decides."""
        self._boundary = is_boundary

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Step the optimizer and the scheduler if a step is due. Call it after each pass. Raise
        StateError after a loss.backward() that nothing has divided."""
        self._need_optimizer("step")
        self._check_divided()
        self._step_applied = False
        if self.is_gradient_accumulation_boundary():
            self._take_step(lr_kwargs or {})
        self.micro_steps += 1

    def _check_divided(self) -> None:
        """Raise StateError after a backward of the loop's own."""
        passes = self.offload.steps.passes.since_step()
        divided, self._passes_divided = self._passes_divided, 0
        arrived, self._passes_counted = passes > self._passes_counted, passes
        steps = self.gradient_accumulation_steps()
        if arrived and not divided and steps > 1:
            raise StateError(
                "gradients came from loss.backward(), which does not divide the loss by "
                f"gradient_accumulation_steps: {steps}; call engine.backward(loss)"
            )

    def _take_step(self, lr_kwargs: dict[str, Any]) -> None:
        optimizer = self.offload.optimizer
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
        self.global_samples += self.train_batch_size()

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
        return self._settings.batches.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples per pass of one rank."""
        return self._settings.batches.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the passes per step."""
        return self._settings.batches.steps

    def get_lr(self) -> list[Any]:
        """Return each param group's learning rate."""
        return [] if self.optimizer is None else [g["lr"] for g in self.optimizer.param_groups]

    def loss_scale(self) -> float:
        """The current scale of fp16; 1 in other precisions."""
        scale = self.offload.loss_scale
        return 1.0 if scale is None else scale.scale

    # ---------------------------------------------------------------- states
    def save_checkpoint(
        self, save_dir: StrPath, tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None, save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Write the folder SAVE_DIR/TAG (a checkpoint of offload, with the loop's state), and the
        file `latest`; with `exclude_frozen_parameters` for the same frozen parameters alone. All
        ranks call it together. Raise UnsupportedError for a client state that needs pickling,
        ValueError without a folder."""
        if not save_dir:
            raise ValueError(f"save_checkpoint: save_dir is {save_dir!r}; name a folder")
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        state = LoopState(
            self.global_steps, self.global_samples, self.skipped_steps,
            getattr(self.lr_scheduler, "state_dict", dict)(), dict(client_state or {}),
        )  # fmt: skip
        if self.lr_scheduler is None and not client_state:
            self.offload.tell_of_scheduler()
        folder = path_of(save_dir, "save_dir")
        frozen = not exclude_frozen_parameters
        save_all(self.offload, folder, name, state, save_latest=save_latest, frozen=frozen)
        return True

    def load_checkpoint(
        self, load_dir: StrPath, tag: str | int | None = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True,
        load_module_only: bool = False, custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:  # fmt: skip
        """Load what `save_checkpoint` wrote. Return the folder and the client state; (None, None),
        with a warning, without a tag and a `latest`. Names of parameters have to be those of
        the checkpoint, also with `load_module_strict=False`: others are a CheckpointError. Raise
        UnsupportedError for the weights alone, and for a function that loads."""
        if load_module_only or not load_optimizer_states or custom_load_fn is not None:
            raise UnsupportedError(
                "load_checkpoint loads weights and optimizer states together. For the weights "
                "alone call `offload checkpoint export FOLDER/TAG OUT.safetensors`, and load that "
                "file into the model before initialize; other values are written inside "
                "zero.GatheredParameters"
            )
        folder = path_of(load_dir, "load_dir")
        saved = load_saved(self.offload, folder, None if tag is None else str(tag))
        if saved is None:
            return None, None
        path, state = saved
        self.zero_grad()
        self.micro_steps = 0
        if load_lr_scheduler_states and self.lr_scheduler is not None and state.lr_scheduler:
            self.lr_scheduler.load_state_dict(state.lr_scheduler)
        self.global_steps, self.global_samples = state.global_steps, state.global_samples
        self.skipped_steps = state.skipped_steps
        return str(path), state.client_state

    def offload_states(
        self, include: Container[Any] | None = None, device: Any = "cpu", pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:  # fmt: skip
        """Release the device as `Engine.release_device` does, which moves all states whatever
        `include` names; then a pass calls `reload_states` by itself if it does not name
        `lp_params`. `device`: "cpu", or "nvme" for what is in host memory, too. It waits, and host
        memory is pinned as the tiers' is."""
        where = getattr(device, "value", device)
        if where not in ("cpu", "nvme"):
            raise ConfigError(f"offload_states(device={where!r}): expected one of cpu, nvme")
        names = [getattr(each, "value", each) for each in cast(Any, include or ["lp_params"])]
        on_use: OnUse = "raise" if "lp_params" in names else "wake"
        self.offload.release_device(host=where == "nvme", on_use=on_use)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Call `Engine.restore_device`, and wait for it."""
        self.offload.restore_device()

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
            module = self.__dict__.get("_modules", {}).get("module")
            if name != "module" and hasattr(module, name):
                return getattr(module, name)
            return super().__getattr__(name)


def engine_of(param: nn.Parameter) -> EngineModule | None:
    """Return the open engine that a parameter trains through; None if there is none."""
    opened = (each for each in list(_ENGINES) if not each.offload.is_closed)
    return next((each for each in opened if each.offload.store.spec_of(param) is not None), None)
