"""transformers' Trainer, and every trainer derived from it, through an engine.

    trainer = OffloadTrainer(model, args, train_dataset=rows, offload="offload.yaml")
    trainer.train()

    class Mine(OffloadMixin, SFTTrainer): ...

The engine is made when the model is first needed: to train, evaluate or predict, or to load a
checkpoint. It belongs to the model and stays open after training, for `evaluate`, `save_model` and
`model.generate`, until `trainer.engine.close()`, which gives the model its parameters back. Another
trainer of the same model goes on with it, or takes the weights over.
"""

import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.trainer_utils import has_length

from offload.checkpoint.engine.model import restore_numbers
from offload.checkpoint.format.reader import CheckpointReader
from offload.config import OffloadConfig
from offload.engine import Engine
from offload.engine_lookup import engine_for, tiers_of
from offload.integrations.adapters import AdapterSave, is_adapted
from offload.integrations.transformers.hub_format import stream_weights
from offload.integrations.transformers.pretrained import load_weights
from offload.integrations.transformers.pretrained_save import StreamedSave
from offload.integrations.transformers.trainer_watch import WatchCallback as WatchCallback
from offload.integrations.transformers.training_arguments import (
    GroupsOnly,
    Source,
    arguments_for,
    changed_arguments,
    client_of,
    groups_only,
    settle,
)
from offload.models.foreign_wrappers import CHECKPOINTS_ON_CPU
from offload.optimizers.client import named_keys
from offload.optimizers.optimizer import OffloadOptimizer
from offload.tiers.errors import ConfigError, StateError, UnsupportedError
from offload.zero.gradients.loss_scale import LossScale

_log = logging.getLogger("offload")
STATES = "offload"  # the folder of the engine's states in a checkpoint of Trainer's
_SCHEDULER = "scheduler.pt"
_MAKES_ITS_OWN = (
    "{}, and this trainer makes an engine itself: give it the configuration; plain transformers."
    "Trainer trains with optimizers=(engine.optimizer, None)"
)
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


class OffloadMixin(transformers.Trainer):  # type: ignore[misc]
    """A mixin that precedes a trainer in the bases: `class Mine(OffloadMixin, SFTTrainer)`.

    `offload`: the engine's configuration (the path of a YAML file, a mapping or an OffloadConfig).
    Optimizer, precision, seed, device, clipping and accumulation that a configuration does not name
    come from TrainingArguments, with Trainer's own param groups for weight decay.

    Raises ConfigError if both name different values, UnsupportedError for features that cannot be
    combined.
    """

    optimizer: Any

    def __init__(self, *args: Any, offload: Source | None = None, **kwargs: Any) -> None:
        if isinstance(offload, Engine):
            raise ConfigError(_MAKES_ITS_OWN.format("offload= is an engine"))
        self._offload: Source = {} if offload is None else offload
        self._engine: Engine | None = None
        self._own: OffloadOptimizer | None = None  # the optimizer that this trainer trains with
        self._is_fresh = False  # `_own` was made for a training that has not begun
        self._holder: nn.ModuleList | None = None  # of the model and losses that train with it
        self._max_norm = math.inf
        super().__init__(*args, **kwargs)
        if isinstance(self.optimizer, OffloadOptimizer):
            raise ConfigError(_MAKES_ITS_OWN.format("optimizers= has the optimizer of an engine"))
        self._brought = self.optimizer
        self._refuse()
        self._settled(self.model)  # errors now rather than when training begins

    @property
    def engine(self) -> Engine:
        """The engine that the model is in: that of another trainer, if it trains there, else one
        that is created here, which raises what `offload.initialize` raises. It stays open until
        `engine.close()`, which gives the model its parameters back."""
        model, engine = self.model, self._engine
        trained = None if model is None else self._trained(model)
        if engine is not None and engine.module is trained and not engine.is_closed:
            return engine
        if model is None:
            raise StateError(
                "the trainer has no model: hyperparameter_search has released the last one, and "
                "train() makes the next"
            )
        here = [each for each in tiers_of(model) if isinstance(each, Engine)]
        if len(here) == 1 and here[0].module is trained:
            return self._adopted(here[0])
        if isinstance(self.optimizer, OffloadOptimizer):
            self.optimizer = self._brought
        self._ask(model)
        self._is_fresh = True
        return self._made(model)

    def _training_engine(self) -> Engine:
        """Return the engine with the optimizer that `create_optimizer` sets up, which is called
        once for each training, as in plain Trainer. It may keep the one of the last training."""
        model = self.model
        if model is None:
            return self.engine  # raises
        own, trained = self._own, self._trained(model)
        is_served = own is not None and not own.engine.is_closed and own.engine.module is trained
        if not is_served and isinstance(self.optimizer, OffloadOptimizer):
            self.optimizer = self._brought
            if own is not None and own.engine.module is trained:
                _log.warning(
                    "the optimizer begins anew, with the model's weights: its states went when "
                    "the engine was closed, or another trainer took the model"
                )
        if not (is_served and self._is_fresh):
            self._ask(model)
        self._is_fresh = False
        if is_served and self.optimizer is own:
            return self.engine
        return self._made(model)

    def _trained(self, model: nn.Module) -> nn.Module:
        """Return the module that trains: the model, or what contains it and the parameters that
        sentence-transformers' losses have (`SoftmaxLoss`), a loss or a dict of losses."""
        given = getattr(self, "loss", None)
        losses = list(given.values()) if isinstance(given, dict) else [given]
        parts = [model, *(each for each in losses if isinstance(each, nn.Module))]
        theirs = {p for each in parts for p in each.parameters() if p.requires_grad}
        if theirs <= set(model.parameters()):
            return model
        if self._holder is None or list(self._holder) != parts:
            self._holder = nn.ModuleList(parts)
        return self._holder

    def _ask(self, model: nn.Module) -> None:
        """Call `create_optimizer`, in which the arguments have the configuration's numbers."""
        with changed_arguments(self.args, **arguments_for(self._settled(model))):
            self.create_optimizer()

    def _made(self, model: nn.Module) -> Engine:
        engine = self._make_engine(model)
        self.optimizer = self._own = engine.optimizer
        return self._adopted(engine)

    def _adopted(self, engine: Engine) -> Engine:
        self._engine = engine
        self._prepare(engine)
        return engine

    # ---------------------------------------------------------------- making the engine
    def _make_engine(self, model: nn.Module) -> Engine:
        """Make the engine from the trainer's optimizer, which has made no step."""
        config = self._settled(model)
        client = client_of(self)
        if not isinstance(client.given, GroupsOnly):  # whose numbers the configuration has
            named = dict(named_keys(self._offload).get("optimizer") or {})
            config = OffloadConfig.load({**config.to_dict(), "optimizer": client.merged(named)})
        if self.accelerator.native_amp:  # around the model's forward, as in plain Trainer
            self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        update = {
            "clip_grad_norm": None,  # by Trainer, which logs the norm
            "gradient_accumulation_steps": self._passes(config),
        }
        trained = self._trained(model)
        engine = engine_for(trained, config.model_copy(update=update), parameters=client.groups)
        is_made_here = self.lr_scheduler is None or self._created_lr_scheduler
        client.lend(engine, [] if is_made_here else [self.lr_scheduler])
        return engine

    def _passes(self, config: OffloadConfig) -> int:
        """Return the backward passes of a step: fewer than configured if data are too few."""
        rows = self.train_dataset
        if rows is None or not has_length(rows):
            return config.gradient_accumulation_steps
        of_all = int(self._train_batch_size * self.args.world_size)
        batches = math.ceil(len(rows) / of_all)
        return max(1, min(batches, config.gradient_accumulation_steps))

    def _prepare(self, engine: Engine) -> None:
        """Mark model and optimizer as prepared: accelerate neither moves nor wraps the model, and
        copies no states."""
        model: Any = self.model
        for prepared in model, engine.optimizer:
            prepared._is_accelerate_prepared = True  # type: ignore[union-attr]
        engine.before_close(lambda: vars(model).pop("_is_accelerate_prepared", None))
        scale = engine.loss_scale
        if scale is not None:
            self.accelerator.scaler = _LossScaler(engine, scale)
        if self.args.torch_compile:
            model.compile(**self.accelerator.state.dynamo_plugin.to_kwargs())
        StreamedSave.install(model, engine)
        AdapterSave.install(engine)
        if self.args.save_strategy != "no":
            self._check_saving(engine)

    @staticmethod
    def _check_saving(engine: Engine) -> None:
        streams = isinstance(vars(engine.module).get("save_pretrained"), StreamedSave)
        if engine.ranks is not None and not streams:
            raise UnsupportedError(
                f"saving a {type(engine.module).__name__} on several ranks: only models with "
                "transformers' own save_pretrained are; set save_strategy='no', and save with "
                "engine.save_checkpoint"
            )

    def _settled(self, model: nn.Module | None) -> OffloadConfig:
        return settle(self._offload, self.args, model)

    def _refuse(self) -> None:
        args = self.args
        for name in "deepspeed", "fsdp", "parallelism_config":
            if getattr(args, name, None):
                raise UnsupportedError(
                    f"TrainingArguments({name}=...) shards the model in another way, and offload's "
                    f"engine does that here (zero: in its configuration); remove {name} (`offload "
                    "migrate ds_config.json -o offload.yaml` converts a file of DeepSpeed)"
                )
        if args.n_gpu > 1:
            raise UnsupportedError(
                f"{args.n_gpu} GPUs in one process (DataParallel): an engine trains on one; set "
                "CUDA_VISIBLE_DEVICES=0, or start the script by torchrun, with a process per GPU"
            )
        checkpoints = args.gradient_checkpointing_kwargs or {}
        if args.gradient_checkpointing and checkpoints.get("offload"):
            raise UnsupportedError(CHECKPOINTS_ON_CPU)
        if getattr(self.model, "hf_quantizer", None) is not None:
            raise UnsupportedError(
                "the model's weights are quantized: an engine keeps floating point weights; load "
                "it without quantization_config= (bf16 with LoRA takes 2 bytes per weight, and "
                "they may be on nvme)"
            )
        if args.save_on_each_node and args.world_size > 1:
            raise UnsupportedError(
                "TrainingArguments(save_on_each_node=True): the first rank writes what all ranks "
                "have, once; leave it out, and let all machines read output_dir"
            )
        if self._brought is not None and self.model is not None:
            client_of(self)
        saving = super()._save_optimizer_and_scheduler
        if not _is_trainers(saving):
            raise UnsupportedError(
                f"{saving.__qualname__} saves the optimizer's states, and the engine streams them "
                "into a folder; write what else belongs to a checkpoint in _save_checkpoint, or in "
                "a callback's on_save"
            )

    # ---------------------------------------------------------------- Trainer's methods
    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        if self._settled(self.model).precision != "fp32":
            arguments["mixed_precision"] = "no"  # the engine's weights have 16 bits
        return arguments

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: the engine moves the model to the device, piece by piece."""

    def call_model_init(self, trial: Any = None) -> nn.Module:
        if self._engine is not None:
            # before the next model needs its memory; a loss keeps the parameters of its own
            self._engine.close("drop" if self._holder is None else "host")
        model: nn.Module = super().call_model_init(trial)
        return model

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._training_engine()  # before what a subclass may do with the model
        clip = self._settled(engine.module).clip_grad_norm
        self._max_norm = math.inf if clip is None else clip
        callbacks = self.callback_handler.callbacks
        watches = [each for each in callbacks if isinstance(each, WatchCallback)]
        if watches:  # a terminal has one bar
            self.remove_callback(transformers.ProgressCallback)
        with ExitStack() as last:
            for each in watches:
                last.callback(each.end)
            return super()._inner_training_loop(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        if self.engine.loss_scale is None:  # else `engine.backward` has noted it
            self.engine.note_pass(loss)
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        _ = self.engine
        return super().evaluation_loop(*args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the param groups, and no states: the engine takes them over when training begins."""
        with changed_arguments(self.args, **arguments_for(self._settled(self.model))):
            made: torch.optim.Optimizer = super().create_optimizer(model)
        return made

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> tuple[Any, Any]:
        theirs = super().get_optimizer_cls_and_kwargs
        if theirs is not transformers.Trainer.get_optimizer_cls_and_kwargs:
            chosen: tuple[Any, Any] = theirs(args, model)
            return chosen
        optimizer = self._settled(self.model).optimizer
        numbers = {k: v for k, v in optimizer.numbers.items() if k != "weight_decay"}
        return groups_only(optimizer.type), numbers  # Trainer's param groups have the decay

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["create_optimizer"] = lambda *_: self.optimizer  # it has been called
        try:
            return super()._prepare_for_training(*args, **kwargs)
        finally:
            del self.__dict__["create_optimizer"]

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        with changed_arguments(self.args, max_grad_norm=self._max_norm):
            norm: Tensor = super()._clip_grad_norm(model)
        if self.engine.watching is not None:
            self.engine.watching.log(gradient_norm=norm)
        return norm

    # ---------------------------------------------------------------- files
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        engine = self.engine
        self._check_saving(engine)
        super().save_model(output_dir, _internal_call)
        if engine.ranks is not None and not self.args.should_save:
            stream_weights(engine, lambda *_: None)  # this rank's part of the first one's files

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if is_adapted(self.engine.module):  # the states of adapters alone
            super()._save_optimizer_and_scheduler(output_dir)
            return
        self.engine.save_checkpoint(Path(output_dir) / STATES, state={})  # the scheduler: below
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        given = (resume_from_checkpoint,) if model is None else (resume_from_checkpoint, model)
        self._load(Path(resume_from_checkpoint), super()._load_from_checkpoint, *given)

    def _load_best_model(self) -> None:
        self._load(Path(self.state.best_model_checkpoint), super()._load_best_model)

    def _load(self, folder: Path, theirs: Any, *args: Any) -> None:
        """Load by the engine, or as Trainer does. A method of a trainer between the two is called
        before the engine's states are loaded."""
        is_trainers = _is_trainers(theirs)
        if is_trainers and self._load_states(folder):
            return
        theirs(*args)
        if not is_trainers and (folder / STATES).is_dir():
            self.engine.load_checkpoint(folder / STATES)

    def _load_states(self, folder: Path) -> bool:
        """Load the engine's states, or the weights of a checkpoint without them; return False if
        Trainer has to load it."""
        engine = self.engine
        if (folder / STATES).is_dir():
            engine.load_checkpoint(folder / STATES)
            return True
        if is_adapted(engine.module) or not any((folder / name).is_file() for name in _WEIGHTS):
            return False
        load_weights(engine, folder)
        return True

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # of a plain Trainer, or none
        folder = None if checkpoint is None else Path(checkpoint)
        if folder is None or not (folder / STATES).is_dir():
            return
        # the states came with the weights; making the scheduler has changed the learning rates
        with CheckpointReader(folder / STATES) as reader:
            saved = reader.manifest.optimizer.param_groups
        for group, record in zip(self.engine.optimizer.param_groups, saved, strict=True):
            restore_numbers(group, record.numbers)
        states = torch.load(folder / _SCHEDULER, weights_only=True)
        self.lr_scheduler.load_state_dict(states)


def _is_trainers(method: Any) -> bool:
    """Whether a bound method is transformers.Trainer's own, and not that of a trainer between it
    and the mixin."""
    return getattr(transformers.Trainer, method.__name__, None) is method.__func__


class OffloadTrainer(OffloadMixin):
    """transformers' Trainer through an engine; see `OffloadMixin`."""


class _LossScaler:
    """Takes the place of a GradScaler in `accelerator.backward`: the engine scales the loss, and
    its step unscales gradients and skips."""

    def __init__(self, engine: Engine, scale: LossScale) -> None:
        self._engine = engine
        self._scale = scale

    def scale(self, loss: Tensor) -> SimpleNamespace:
        return SimpleNamespace(backward=partial(self._engine.backward, loss))

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scale.scale, "good_steps": self._scale.good_steps}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        self._scale.scale, self._scale.good_steps = states["scale"], states["good_steps"]
