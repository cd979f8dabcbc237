"""Lightning's Trainer through an engine.

    trainer = lightning.Trainer(strategy=OffloadStrategy("offload.yaml"))

The engine is made when Trainer sets up the model, from the optimizer that the program makes. It
belongs to the model and stays open afterwards, for what follows (`trainer.test`,
`trainer.save_checkpoint`, another Trainer), until `strategy.engine.close()`, which gives the model
its parameters back. A loop of Fabric needs no strategy: `fabric.setup(model, engine.optimizer)`.
"""

import io
import logging
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from offload.checkpoint.format.folder import adopt, discard
from offload.checkpoint.format.reader import CheckpointReader
from offload.checkpoint.format.user_state import refusals, state_in
from offload.config import OffloadConfig
from offload.config.paths import StrPath, path_of
from offload.engine import Engine
from offload.engine_lookup import engine_for, tiers_of
from offload.integrations.loaded_weights import load_checkpoint_weights
from offload.optimizers.client import ClientOptimizer, named_keys
from offload.tiers.errors import CheckpointError, ConfigError, StateError, UnsupportedError

_log = logging.getLogger("offload")
Source = StrPath | Mapping[str, Any] | OffloadConfig | None
_OWN = {"bf16-true": "bf16", "16-true": "fp16"}
_AUTOCAST = ("bf16-mixed", "16-mixed")
_LIGHTNINGS = "lightning"  # a key of a checkpoint's state: Lightning's part, as torch.save packs it


class OffloadStrategy(ParallelStrategy):  # type: ignore[misc]
    """A strategy for `lightning.Trainer(strategy=OffloadStrategy("offload.yaml"))`.

    `config` is that of `offload.initialize`; `weights`, too, for a model that `configure_model`
    puts on the meta device. Optimizer, precision, device and accumulation that the configuration
    does not name come from the LightningModule's `configure_optimizers` and from Trainer. Clipping
    is set in one of the two.

    Checkpoints are those of the engine, with Lightning's part as their state. Those of other
    strategies are loaded, too, whole in RAM.

    Raises ConfigError if the configuration and Lightning name different values, UnsupportedError
    for features that cannot be combined.
    """

    strategy_name = "offload"
    optimizers: Any
    cluster_environment: Any
    _num_nodes = 1

    def __init__(
        self, config: Source = None, *, weights: StrPath | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._loaded = OffloadConfig.load({} if config is None else config)  # errors come now
        self._named = named_keys({} if config is None else config)
        self._weights = None if weights is None else path_of(weights, "weights")
        self._engine: Engine | None = None
        self._states: Path | None = None  # of the checkpoint that is being loaded

    @property
    def engine(self) -> Engine:
        """The engine that trains the LightningModule, open until `engine.close()`. Raises
        StateError before Trainer has set up the model."""
        if self._engine is None:
            raise StateError("Trainer makes the engine in fit, validate, test or predict; call one")
        return self._engine

    # ---------------------------------------------------------------- processes
    # One per device, as in DDPStrategy, started by Lightning or by `torchrun`. That is no base:
    # Lightning gives it a distributed sampler also in a process alone.
    root_device = DDPStrategy.root_device
    num_nodes = DDPStrategy.num_nodes
    num_processes = DDPStrategy.num_processes
    set_world_ranks = DDPStrategy.set_world_ranks
    determine_ddp_device_ids = DDPStrategy.determine_ddp_device_ids
    barrier = DDPStrategy.barrier
    broadcast = DDPStrategy.broadcast
    reduce = DDPStrategy.reduce

    @property
    def is_distributed(self) -> bool:
        """Whether samplers have to give each process different rows."""
        return bool(self.num_nodes * self.num_processes > 1)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        if self.is_distributed:
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.is_distributed:
            self.set_world_ranks()
            backend = _get_default_process_group_backend_for_device(self.root_device)
            _init_dist_connection(self.cluster_environment, backend)
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']} in the environment, and Lightning was told "
                "of one device; pass devices= and num_nodes= as torchrun was started"
            )

    # ---------------------------------------------------------------- set-up
    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        else:
            self._make(trainer, None)
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise UnsupportedError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers, an engine has "
                "one; use one with several param groups, or offload.initialize for each model in a "
                "loop of your own"
            )
        client = ClientOptimizer.of(self.optimizers[0])
        if client.was_lent:
            raise UnsupportedError(
                "configure_optimizers returned the optimizer of an earlier fit, whose states went "
                "with its engine; make a new one there, and pass ckpt_path= to go on"
            )
        engine = self._make(trainer, client)
        client.lend(engine, [each.scheduler for each in self.lr_scheduler_configs])
        self.optimizers = [engine.optimizer]

    def _make(self, trainer: Any, client: ClientOptimizer | None) -> Engine:
        """Make the engine, with the client's numbers; without a client, for evaluation, keep the
        one that the model has."""
        module = self.lightning_module
        self._refuse(trainer)
        config = self._settled(trainer, client)
        engine = next((e for e in tiers_of(module) if isinstance(e, Engine)), None)
        wanted = module, config.device, config.precision
        own = engine and (engine.module, engine.device.type, engine.config.precision)
        if client is not None or engine is None or own != wanted:
            engine = engine_for(
                module, config, parameters=None if client is None else client.groups,
                weights=self._weights,
            )  # fmt: skip
        self._engine = engine
        _update_properties(module, device=self.root_device)
        own = _plugin_of(engine)
        if own is not None:
            self._precision_plugin = own
        return engine

    def _settled(self, trainer: Any, client: ClientOptimizer | None) -> OffloadConfig:
        """Return the configuration, with what the YAML leaves open taken from Lightning. Raise
        ConfigError if both name a setting."""
        named, device = self._named, self.root_device.type
        kind = named.get("device", "auto")
        if kind not in ("auto", device):
            raise ConfigError(
                f"device: {kind} in the offload configuration, and Lightning computes on "
                f"{device}; pass accelerator={kind!r}, or leave device out"
            )
        precision = _precision(named.get("precision"), _name_of(self.precision_plugin))
        settled = {**self._loaded.to_dict(), "device": device, "precision": precision}
        is_open = named.get("gradient_accumulation_steps") is None and not trainer.fast_dev_run
        if precision != "fp32" and is_open:
            # how sums of 16-bit gradients are planned; in fp32 it changes nothing
            settled["gradient_accumulation_steps"] = trainer.accumulate_grad_batches
        if client is not None:
            settled["optimizer"] = client.merged(dict(named.get("optimizer") or {}))
        return OffloadConfig.load(settled)

    def _refuse(self, trainer: Any) -> None:
        clip = self._named.get("clip_grad_norm")
        if clip is not None and trainer.gradient_clip_val:
            raise ConfigError(
                f"clip_grad_norm: {clip} in the offload configuration, and Trainer has "
                f"gradient_clip_val={trainer.gradient_clip_val}; name one of them"
            )
        if self._layer_sync is not None:
            raise UnsupportedError(
                "sync_batchnorm=True replaces modules for DDP; convert the model before "
                "(torch.nn.SyncBatchNorm.convert_sync_batchnorm)"
            )
        if type(self.checkpoint_io) is not TorchCheckpointIO:
            raise UnsupportedError(
                f"{type(self.checkpoint_io).__name__}: checkpoints are streamed into a folder by "
                "the engine; leave the plugin out"
            )

    def model_to_device(self) -> None:
        """Do nothing: the engine moves the model to the device, piece by piece."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None]:
        """Create models in RAM; with `empty_init` on the meta device, for the engine to fill."""
        with torch.device("meta" if empty_init else "cpu"):
            yield

    def teardown(self) -> None:
        """Leave the model in the engine's tiers."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ---------------------------------------------------------------- checkpoints
    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # streamed in save_checkpoint

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise UnsupportedError("storage_options=: checkpoints are streamed to a local folder")
        if "optimizer_states" not in checkpoint:
            _log.warning(
                "%s: weights alone were asked for, and the engine's folder has the optimizer's "
                "states as well", filepath,
            )  # fmt: skip
        if self.lightning_module.trainer.interrupted and self.engine.has_unstepped_gradients():
            # amid accumulation: the checkpoint is of the last step, as without this strategy, and
            # the exception that interrupted the run stays the one that is seen
            _log.warning(
                "%s: the run was interrupted between a backward and its step; those gradients are "
                "not in the checkpoint", filepath,
            )  # fmt: skip
            self.engine.optimizer.zero_grad()
        file = io.BytesIO()
        torch.save(checkpoint, file)
        state = {_LIGHTNINGS: torch.frombuffer(file.getbuffer(), dtype=torch.uint8)}
        self.engine.save_checkpoint(filepath, state=state)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        folder = path_of(checkpoint_path, "ckpt_path")
        adopt(folder)
        self._states = folder if folder.is_dir() else None
        if self._states is None:
            # Lightning 2.5 does not know the argument
            more = {} if weights_only is None else {"weights_only": weights_only}
            plain: dict[str, Any] = self.checkpoint_io.load_checkpoint(checkpoint_path, **more)
            return plain
        return _lightnings_part(folder, weights_only=weights_only is not False)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._states is None:
            super().load_model_state_dict(checkpoint, strict)
        elif self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self.engine.load_checkpoint(self._states)
        else:
            load_checkpoint_weights(self.engine, self._states)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._states is None:
            self.engine.optimizer.load_state_dict(checkpoint["optimizer_states"][0])

    def remove_checkpoint(self, filepath: Any) -> None:
        folder = path_of(filepath, "filepath")
        if not folder.is_dir():
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            discard(folder)


# --------------------------------------------------------------------------- precision
class _OffloadHalfPrecision(HalfPrecision):  # type: ignore[misc]
    """Half precision for an engine: inputs in its 16-bit format, and a scaled loss. The engine
    converts the module, and keeps a master."""

    engine: Engine

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        with self.engine.scaled_backward(tensor) as scaled:
            super().backward(scaled, model, *args, **kwargs)


def _precision(configured: str | None, lightnings: str) -> str:
    """Return the engine's precision for Lightning's `precision=` and the YAML's, if it has one."""
    theirs = "fp32" if lightnings in _AUTOCAST else _OWN.get(lightnings)
    if lightnings not in ("32-true", *_OWN, *_AUTOCAST):
        raise UnsupportedError(
            f"precision={lightnings!r} of Lightning has no counterpart here; use 32-true, "
            f"{', '.join((*_OWN, *_AUTOCAST))}"
        )
    if None not in (configured, theirs) and configured != theirs:
        raise ConfigError(
            f"precision: {configured} in the offload configuration, and Lightning has "
            f"precision={lightnings!r}, which is precision: {theirs} here; name one of them"
        )
    return configured or theirs or "fp32"


def _name_of(plugin: Any) -> str:
    if type(plugin).__name__ not in (
        "Precision", "MixedPrecision", "HalfPrecision", _OffloadHalfPrecision.__name__,
    ):  # fmt: skip
        raise UnsupportedError(
            f"{type(plugin).__name__} changes the model's modules or its updates, which are the "
            "engine's; use precision= with 32-true, "
            f"{', '.join((*_OWN, *_AUTOCAST))}"
        )
    return str(plugin.precision)


def _plugin_of(engine: Engine) -> Any:
    """Return the plugin for an engine in 16 bits; None for fp32."""
    for name, precision in _OWN.items():
        if engine.config.precision == precision:
            plugin = _OffloadHalfPrecision(name)
            plugin.engine = engine
            return plugin
    return None


# --------------------------------------------------------------------------- files
def _lightnings_part(folder: Path, *, weights_only: bool) -> dict[str, Any]:
    """Read Lightning's part of a checkpoint; without `weights_only`, code that it names runs."""
    with CheckpointReader(folder) as reader:
        raw = state_in(reader).get(_LIGHTNINGS)
    if not isinstance(raw, Tensor):
        raise CheckpointError(f"{folder} was not saved by OffloadStrategy; load another checkpoint")
    remedy = "load another checkpoint"
    if weights_only:
        remedy = (
            "if you trust its author, pass weights_only=False to Trainer's method, which runs code "
            "that the checkpoint names"
        )
    with refusals(f"{folder}: Lightning's part", remedy=remedy):
        file = io.BytesIO(raw.numpy().data)
        part = torch.load(file, map_location="cpu", weights_only=weights_only)
    if not isinstance(part, dict):
        raise CheckpointError(f"{folder}: Lightning's part is no dict; load another checkpoint")
    return part


StrategyRegistry.register("offload", OffloadStrategy, "offload, with its defaults", override=True)
