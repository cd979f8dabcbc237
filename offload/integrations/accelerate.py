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

_STATES = "offload"  # a checkpoint of the engine in the folder of `save_state`; offload_1, ...


class OffloadAccelerator(Accelerator):  # type: ignore[misc]
    """accelerate's Accelerator, which accepts the optimizers of engines as well.

    Its processes have to be those of `torchrun`, where each engine finds the others itself. Raises
    ConfigError for `mixed_precision` beside an engine's 16-bit precision, UnsupportedError for
    DeepSpeed and FSDP plugins beside an engine.
    """

    _models: list[nn.Module]
    _optimizers: list[Any]

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects as Accelerator does; a model that trains through an engine comes with its
        optimizer (`engine.optimizer`), and neither is moved, wrapped or copied."""
        for each in args:
            if isinstance(each, OffloadOptimizer):
                assert isinstance(each.engine, Engine)
                self._check(each.engine)
        self._preparing = [each for each in args if isinstance(each, OffloadOptimizer)]
        return super().prepare(*args, device_placement=device_placement)

    def _check(self, engine: Engine) -> None:
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
        if any(engine.module is model for engine in self.engines):
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

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        scaling = [e for e in self.engines if e.runtime.loss_scale is not None]
        if len(self.engines) == 1:
            self.engines[0].note_pass(loss.detach() / self.gradient_accumulation_steps)
        if not scaling:
            super().backward(loss, **kwargs)
            return
        if len(self.engines) > 1:
            raise UnsupportedError(
                "precision: fp16 and several engines: whose loss it is cannot be told; call "
                "engine.backward(loss / accelerator.gradient_accumulation_steps)"
            )
        with scaling[0].runtime.scaled_backward() as scale:
            super().backward(loss * scale, **kwargs)

    # ---------------------------------------------------------------- states
    @property
    def engines(self) -> list[Engine]:
        """The open engines of the optimizers that were prepared, in their order."""
        found = [each.engine for each in self._optimizers_of_engines()]
        return [engine for engine in dict.fromkeys(found) if not engine.is_closed]

    def _optimizers_of_engines(self) -> list[OffloadOptimizer]:
        prepared = [getattr(each, "optimizer", each) for each in self._optimizers]
        found = [each for each in prepared if isinstance(each, OffloadOptimizer)]
        more = [each for each in getattr(self, "_preparing", ()) if each not in found]
        return [*found, *more]

    @contextmanager
    def _without_engines(self) -> Iterator[None]:
        """Hide the models and optimizers of engines from accelerate's saving and loading."""
        models, optimizers = self._models, self._optimizers
        ours = {id(engine.module) for engine in self.engines}
        self._models = [each for each in models if id(self.unwrap_model(each)) not in ours]
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
        """Save as Accelerator does. States of engines are streamed into folders inside.

        Raise StateError while gradients wait for a step: save where `sync_gradients` is true.
        """
        from offload.checkpoint.engine.model import check_stepped

        if output_dir is not None:
            output_dir = path_text(output_dir, "output_dir")
        for engine in self.engines:  # before anything is written
            check_stepped(engine)
        with self._without_engines():
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        for number, engine in enumerate(self.engines):
            # accelerate saves prepared and registered objects
            saved = self._schedulers or self._custom_objects
            engine.save_checkpoint(Path(folder) / _name(number), state={} if saved else None)
        return folder

    def load_state(
        self, input_dir: StrPath | None = None, load_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Load as Accelerator does; a folder that a plain Accelerator saved is whole in RAM."""
        folders: list[Path] = []

        def found(models: list[nn.Module], folder: str) -> None:
            folders.append(Path(folder))

        engines = self.engines
        given = None if input_dir is None else path_of(input_dir, "input_dir").expanduser()
        if not engines or (given is not None and not (given / _name(0)).is_dir()):
            super().load_state(input_dir, load_kwargs, **kwargs)
            return
        handle = self.register_load_state_pre_hook(found)
        try:
            with self._without_engines():
                super().load_state(input_dir, load_kwargs, **kwargs)
        finally:
            handle.remove()
        for number, engine in enumerate(engines):
            engine.load_checkpoint(folders[0] / _name(number))


def _name(number: int) -> str:
    return _STATES if number == 0 else f"{_STATES}_{number}"
