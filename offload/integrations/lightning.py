"""Lightning's Trainer through an engine.

    trainer = lightning.Trainer(strategy=OffloadStrategy("offload.yaml"))

The engine is made when Trainer sets up the model, from the optimizer that the program makes. It
belongs to the model and stays open afterwards, for what follows (`trainer.test`,
`trainer.save_checkpoint`, another Trainer), until `strategy.engine.close()`, which gives the model
its parameters back. A loop of Fabric needs no strategy: `fabric.setup(model, engine.optimizer)`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from offload.checkpoint.foreign.model_files import pending_output
from offload.config import OffloadConfig
from offload.config.paths import StrPath, path_of
from offload.config.source import load_source
from offload.engine import Engine
from offload.integrations import streamed_folder
from offload.memory.leftovers import STATE
from offload.optimizers.client import ClientOptimizer
from offload.taking_over import engine_for, tiers_of
from offload.tiers.errors import CheckpointError, ConfigError, StateError, UnsupportedError

_LEAST = (2, 5)
if tuple(map(int, lightning.__version__.split(".")[:2])) < _LEAST:
    raise UnsupportedError(
        f"offload.integrations.lightning needs lightning {'.'.join(map(str, _LEAST))} or newer, "
        f"and {lightning.__version__} is installed; pip install -U lightning"
    )
_log = logging.getLogger("offload")
Source = StrPath | Mapping[str, Any] | OffloadConfig | None
_OWN = {"bf16-true": "bf16", "16-true": "fp16"}
_AUTOCAST = ("bf16-mixed", "16-mixed")


class _EngineMaker:
    """The configuration, and the engine that is created from it once."""

    def __init__(self, config: Source, weights: StrPath | None) -> None:
        self._loaded = OffloadConfig.load({} if config is None else config)  # errors come now
        if isinstance(config, OffloadConfig):
            self.named = config.model_dump(mode="json", exclude_defaults=True)
        else:
            self.named = load_source({} if config is None else config).value
        self._weights = None if weights is None else path_of(weights, "weights")
        self.engine: Engine | None = None

    def settled(
        self, device: torch.device, precision: str, others: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the configuration, with what the YAML leaves open taken from Lightning. Raise
        ConfigError if both name a setting."""
        named = self.named
        kind = named.get("device", "auto")
        if kind not in ("auto", device.type):
            raise ConfigError(
                f"device: {kind} in the offload configuration, and Lightning computes on "
                f"{device.type}; pass accelerator={kind!r}, or leave device out"
            )
        merged = {**self._loaded.to_dict(), "device": device.type}
        merged["precision"] = self.precision(precision)
        merged |= {key: value for key, value in others.items() if named.get(key) is None}
        return merged

    def precision(self, lightnings: str) -> str:
        """Return the engine's precision for one of Lightning's `precision=`."""
        ours = self.named.get("precision")
        theirs = "fp32" if lightnings in _AUTOCAST else _OWN.get(lightnings)
        if lightnings not in ("32-true", *_OWN, *_AUTOCAST):
            raise UnsupportedError(
                f"precision={lightnings!r} of Lightning has no counterpart here; use 32-true, "
                f"{', '.join((*_OWN, *_AUTOCAST))}"
            )
        if None not in (ours, theirs) and ours != theirs:
            raise ConfigError(
                f"precision: {ours} in the offload configuration, and Lightning has "
                f"precision={lightnings!r}, which is precision: {theirs} here; name one of them"
            )
        return ours or theirs or "fp32"

    def make(self, module: nn.Module, client: ClientOptimizer | None, config: Any) -> Engine:
        """Return the engine of `module`, with the client's numbers; without a client, for
        evaluation, the engine that the model has."""
        if client is not None:
            named = dict(self.named.get("optimizer") or {})
            config = {**config, "optimizer": client.merged(named)}
        loaded = OffloadConfig.load(config)
        current = next((e for e in tiers_of(module) if isinstance(e, Engine)), None)
        mine = current is not None and current.module is module
        if current is not None and mine and client is None and _computes_alike(current, loaded):
            self.engine = current  # for evaluation, whichever trainer trains
            return current
        self.engine = engine_for(
            module, loaded, parameters=None if client is None else client.groups,
            weights=self._weights,
        )  # fmt: skip
        return self.engine


def _computes_alike(engine: Engine, config: OffloadConfig) -> bool:
    kind = config.device if config.device != "auto" else engine.device.type
    return engine.config.precision == config.precision and engine.device.type == kind


class OffloadStrategy(ParallelStrategy):  # type: ignore[misc]
    """A strategy for `lightning.Trainer(strategy=OffloadStrategy("offload.yaml"))`.

    `config` is that of `offload.initialize`; `weights`, too, for a model that `configure_model`
    puts on the meta device. Optimizer, precision, device and accumulation that the configuration
    does not name come from the LightningModule's `configure_optimizers` and from Trainer. Clipping
    is set in one of the two.

    Checkpoints are folders (see `streamed_folder`); `consolidate` makes a file of one. Those of
    other strategies are loaded, too, whole in RAM.

    Raises ConfigError if the configuration and Lightning name different values, UnsupportedError
    for features that cannot be combined.
    """

    strategy_name = "offload"
    optimizers: Any
    cluster_environment: Any
    parallel_devices: Any
    _num_nodes = 1

    def __init__(
        self, config: Source = None, *, weights: StrPath | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._maker = _EngineMaker(config, weights)
        self._states: Path | None = None  # of the checkpoint that is being loaded

    @property
    def engine(self) -> Engine:
        """The engine that trains the LightningModule, open until `engine.close()`. Raises
        StateError before Trainer has set up the model."""
        if self._maker.engine is None:
            raise StateError("Trainer makes the engine in fit, validate, test or predict; call one")
        return self._maker.engine

    # ---------------------------------------------------------------- processes
    # One per device, as in Lightning's DDP strategies, started by Lightning or by `torchrun`; the
    # engine averages gradients itself.
    @property
    def root_device(self) -> torch.device:
        device: torch.device = self.parallel_devices[self.local_rank]
        return device

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        self._num_nodes = number

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or ())

    @property
    def is_distributed(self) -> bool:
        """Whether samplers have to give each process different rows."""
        return self.num_nodes * self.num_processes > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        if not self.is_distributed:
            return None  # a process alone samples as without a strategy
        rank = self.global_rank
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": rank}

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        if self.is_distributed:
            self._launcher = _SubprocessScriptLauncher(
                environment, self.num_processes, self.num_nodes
            )

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            local = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(local)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)

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

    def barrier(self, *_: Any, **__: Any) -> None:
        if _distributed_is_initialized():
            torch.distributed.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not _distributed_is_initialized():
            return obj
        listed = [obj]
        torch.distributed.broadcast_object_list(listed, src)
        return listed[0]

    # ---------------------------------------------------------------- set-up
    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        else:
            self._make(trainer, None)
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)  # configure_optimizers
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
        module, plugin = self.lightning_module, self.precision_plugin
        self._refuse(trainer)
        others = {}
        if self._maker.precision(_name_of(plugin)) != "fp32" and not trainer.fast_dev_run:
            # how sums of 16-bit gradients are planned; in fp32 it changes nothing
            others["gradient_accumulation_steps"] = trainer.accumulate_grad_batches
        config = self._maker.settled(self.root_device, _name_of(plugin), others)
        engine = self._maker.make(module, client, config)
        _update_properties(module, device=self.root_device)
        own = _plugin_of(engine)
        if own is not None:
            self._precision_plugin = own
        return engine

    def _refuse(self, trainer: Any) -> None:
        clip = self._maker.named.get("clip_grad_norm")
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

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if isinstance(tensor, Tensor):
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor

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
        if self.lightning_module.trainer.interrupted:
            self._drop_gradients_of_half_a_step(filepath)
        streamed_folder.save(
            self.engine, filepath, checkpoint, self.broadcast, writes=self.is_global_zero
        )

    def _drop_gradients_of_half_a_step(self, filepath: Any) -> None:
        """After an exception amid accumulation: the checkpoint is of the last step, as without this
        strategy, and the exception stays the one that is seen."""
        if self.engine.runtime.stepper.has_unstepped_gradients:
            _log.warning(
                "%s: the run was interrupted between a backward and its step; those gradients are "
                "not in the checkpoint", filepath,
            )  # fmt: skip
            self.engine.optimizer.zero_grad()

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        def load(path: Any) -> dict[str, Any]:
            found: dict[str, Any] = self.checkpoint_io.load_checkpoint(
                path, weights_only=weights_only
            )
            return found

        if streamed_folder.is_streamed(checkpoint_path):
            checkpoint, self._states = streamed_folder.read(checkpoint_path, load)
            return checkpoint
        self._states = None
        if Path(checkpoint_path).is_dir():
            raise CheckpointError(
                f"{checkpoint_path} has no {STATE}: it is no checkpoint of this "
                "strategy, or one that was not saved to its end"
            )
        return load(checkpoint_path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._states is None:
            super().load_model_state_dict(checkpoint, strict)
        elif self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self.engine.load_checkpoint(self._states)
        else:
            streamed_folder.load_weights(self.engine, self._states)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._states is None:
            self.engine.optimizer.load_state_dict(checkpoint["optimizer_states"][0])

    def remove_checkpoint(self, filepath: Any) -> None:
        if not streamed_folder.is_streamed(filepath):
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            streamed_folder.remove(filepath)


# --------------------------------------------------------------------------- precision
class _OffloadHalfPrecision(HalfPrecision):  # type: ignore[misc]
    """Half precision for an engine: inputs in its 16-bit format, and a scaled loss. The engine
    converts the module, and keeps a master."""

    engine: Engine

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        with self.engine.runtime.scaled_backward() as scale:
            scaled = tensor if scale == 1.0 else tensor * scale
            super().backward(scaled, model, *args, **kwargs)


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
    for name, ours in _OWN.items():
        if engine.config.precision == ours:
            plugin = _OffloadHalfPrecision(name)
            plugin.engine = engine
            return plugin
    return None


# --------------------------------------------------------------------------- files
def consolidate(folder: StrPath, file: StrPath, *, trust: bool = False) -> None:
    """Write a checkpoint file, as Trainer writes it without a strategy, from a folder that
    `OffloadStrategy` wrote: for `LightningModule.load_from_checkpoint`. It contains everything but
    the optimizer's states.

    The weights are those that the model computed with, all names of tied ones, each compared with
    its hash; they are all in RAM meanwhile. Raise CheckpointError if a part of it
    is missing or damaged, or if Lightning's part has objects beside tensors and plain values
    (hyperparameters of a class, a callback's) and `trust` is not set: reading them runs code that
    the file names, so set it for a trusted author only.
    """
    file = path_of(file, "file")
    state, states = streamed_folder.read(
        path_of(folder, "folder"), partial(streamed_folder.load_state, trust=trust)
    )
    state.pop("optimizer_states", None)
    with pending_output(file, replaces=True) as pending:
        weights = streamed_folder.weights_of(states)
        torch.save({**state, "state_dict": weights}, pending)


StrategyRegistry.register("offload", OffloadStrategy, "offload, with its defaults", override=True)
