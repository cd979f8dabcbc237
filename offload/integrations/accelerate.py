"""Runs accelerate's loops through an engine: its states are never whole in RAM.

engine = offload.initialize(model, "offload.yaml")
accelerator = OffloadAccelerator(gradient_accumulation_steps=4)
model, optimizer, loader = accelerator.prepare(model, engine.optimizer, loader)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from offload.config.paths import StrPath, path_of, path_text
from offload.engine import Engine
from offload.optimizers.optimizer import OffloadOptimizer
from offload.tiers.errors import ConfigError, UnsupportedError

_STATES = "offload"  # a checkpoint of the engine in the folder of `save_state`


class OffloadAccelerator(Accelerator):  # type: ignore[misc]
    """accelerate's Accelerator, which accepts the optimizer of an engine as well.

    Its processes have to be those of `torchrun`, where an engine finds the others itself. Raises
    ConfigError for `mixed_precision` beside an engine's 16-bit precision, UnsupportedError for a
    second engine, and for DeepSpeed and FSDP plugins beside an engine.
    """

    _models: list[nn.Module]
    _optimizers: list[Any]
    _engine: Engine | None = None

    @property
    def engine(self) -> Engine | None:
        """The engine whose optimizer was prepared; None without one, or when it is closed."""
        return None if self._engine is None or self._engine.is_closed else self._engine

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects as Accelerator does; a model that trains through an engine comes with its
        optimizer (`engine.optimizer`), and neither is moved, wrapped or copied."""
        for each in args:
            if isinstance(each, OffloadOptimizer):
                assert isinstance(each.engine, Engine)
                self._check(each.engine)
                self._engine = each.engine
        return super().prepare(*args, device_placement=device_placement)

    def _check(self, engine: Engine) -> None:
        if self.engine not in (None, engine):
            raise UnsupportedError(
                "an accelerator has one engine, and this is the second one; make an "
                "OffloadAccelerator for each"
            )
        plugins = {"deepspeed_plugin": "DeepSpeed", "fsdp_plugin": "FSDP"}
        for plugin, name in plugins.items():
            if getattr(self.state, plugin, None) is not None:
                raise UnsupportedError(
                    f"{name} and an offload engine both take the model; remove the plugin (zero: "
                    "in offload's configuration says how an engine shards)"
                )
        precision = engine.config.precision
        if precision != "fp32" and self.mixed_precision != "no":
            raise ConfigError(
                f"precision: {precision} in the offload configuration, and Accelerator has "
                f"mixed_precision={self.mixed_precision!r}; name one of them"
            )

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        if self.engine is not None and self.engine.module is model:
            # neither moved nor wrapped for DDP: the engine does both
            device_placement, evaluation_mode = False, True
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        return prepared

    def prepare_optimizer(
        self, optimizer: Any, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        if isinstance(optimizer, OffloadOptimizer):
            device_placement = False  # its states would be copied, and loaded again
        return super().prepare_optimizer(optimizer, device_placement)

    def free_memory(self, *objects: Any) -> Any:
        """Release what was prepared as Accelerator does, and the engine: another may follow."""
        self._engine = None
        return super().free_memory(*objects)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        if self.engine is None:
            super().backward(loss, **kwargs)
            return
        self.engine.note_pass(loss.detach() / self.gradient_accumulation_steps)
        with self.engine.scaled_backward(loss) as scaled:
            super().backward(scaled, **kwargs)

    # ---------------------------------------------------------------- states
    @contextmanager
    def _without(self, engine: Engine) -> Iterator[None]:
        """Hide the engine's model and optimizer from accelerate's saving and loading."""
        models, optimizers = self._models, self._optimizers
        self._models = [each for each in models if self.unwrap_model(each) is not engine.module]
        self._optimizers = [
            each for each in optimizers
            if not isinstance(getattr(each, "optimizer", each), OffloadOptimizer)
        ]  # fmt: skip
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers

    def save_state(
        self, output_dir: StrPath | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """Save as Accelerator does. The states of an engine are streamed into a folder inside.

        Raise StateError while gradients wait for a step: save where `sync_gradients` is true.
        """
        from offload.checkpoint.engine.model import check_stepped

        if output_dir is not None:
            output_dir = path_text(output_dir, "output_dir")
        engine = self.engine
        if engine is None:
            return super().save_state(output_dir, safe_serialization, **kwargs)
        check_stepped(engine)  # before anything is written
        with self._without(engine):
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        # accelerate saves prepared and registered objects
        saved = self._schedulers or self._custom_objects
        engine.save_checkpoint(Path(folder) / _STATES, state={} if saved else None)
        return folder

    def load_state(
        self, input_dir: StrPath | None = None, load_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Load as Accelerator does; a folder that a plain Accelerator saved is whole in RAM."""
        folders: list[Path] = []

        def note_folder(models: list[nn.Module], folder: str) -> None:
            folders.append(Path(folder))

        engine = self.engine
        given = None if input_dir is None else path_of(input_dir, "input_dir").expanduser()
        if engine is None or (given is not None and not (given / _STATES).is_dir()):
            super().load_state(input_dir, load_kwargs, **kwargs)
            return
        handle = self.register_load_state_pre_hook(note_folder)
        try:
            with self._without(engine):
                super().load_state(input_dir, load_kwargs, **kwargs)
        finally:
            handle.remove()
        engine.load_checkpoint(folders[0] / _STATES)
