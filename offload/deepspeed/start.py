"""`deepspeed.initialize`, and what is called before it."""

import argparse
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from offload.config.paths import StrPath
from offload.deepspeed.engine import EngineModule, Settings
from offload.engine import Engine
from offload.engine_lookup import engine_for, tiers_of
from offload.tiers import accelerator
from offload.tiers.errors import ConfigError, StateError, UnsupportedError

_log = logging.getLogger("offload")
Config = StrPath | Mapping[str, Any]


def initialize(
    args: Any = None, model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | nn.Module | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | Callable[[Any], Any] | None = None,
    distributed_port: int = 29500, mpu: Any = None, dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None, config: Config | None = None,
    mesh_param: Any = None, config_params: Config | None = None,
) -> tuple[EngineModule, torch.optim.Optimizer | None, DataLoader[Any] | None, Any]:  # fmt: skip
    """Return an engine with DeepSpeed's methods, its optimizer, a loader of `training_data` and a
    scheduler; None for what was not asked for.

    `config`: a dict or file of DeepSpeed's, with one section more: {"offload": {...}} has keys of
    offload, such as budgets, which override the converted other keys. `optimizer`: one of torch's
    classes with a rule here, a function of the parameters that makes one, or none: that of the
    configuration. `model_parameters`: parameters or param groups; trainable parameters that are in
    none are frozen, since no step changes them.

    Raise ConfigError naming every key that is unknown or refused, UnsupportedError for an
    optimizer without a rule, StateError inside `zero.Init`, and what `offload.initialize` raises.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"initialize(model=...): expected a module, found {model!r}")
    if torch.get_default_device().type == "meta":
        raise StateError("initialize inside zero.Init: the model is complete behind that block")
    if mpu is not None or mesh_param is not None:
        raise UnsupportedError(
            "mpu and mesh_param: use offload.initialize(model, config, mesh=...) with "
            "parallelize_module or torch.distributed.pipelining (docs/ranks.md)"
        )
    if "WORLD_SIZE" in os.environ:
        init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    if torch.distributed.is_initialized():
        ranks = torch.distributed.get_world_size()
    else:  # with dist_init_required=False the engine makes the group
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
    given = _parameters(model_parameters)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(list(model.parameters()) if given is None else given)
    settings = Settings.of(_config(args, config, config_params), ranks, optimizer)
    groups = given if settings.client is None else settings.client.groups
    engine = _engine(model, settings, groups)
    try:
        stepped = engine.optimizer if settings.has_optimizer else None
        made = EngineModule(model, settings, engine, ranks, stepped)
        if settings.client is not None:
            settings.client.lend(engine)
        if stepped is not None:
            scheduler: Any = lr_scheduler
            if scheduler is None and settings.made.schedule is not None:
                scheduler = settings.made.schedule.on
            is_made = isinstance(scheduler, LRScheduler) or not callable(scheduler)
            made.lr_scheduler = scheduler if is_made else scheduler(stepped)
        if training_data is not None:
            made.training_dataloader = _loader(made, settings, training_data, collate_fn)
    except BaseException:
        engine.close()
        raise
    return made, stepped, made.training_dataloader, made.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config FILE` to a parser, for `initialize(args=...)`."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="Has no effect.")
    group.add_argument("--deepspeed_config", help="The configuration of DeepSpeed, JSON.")
    return parser


def init_distributed(
    dist_backend: str | None = None, auto_mpi_discovery: bool = True,
    distributed_port: int = 29500, verbose: bool = True, timeout: timedelta | None = None,
    init_method: str | None = None, dist_init_required: bool | None = None, config: Any = None,
    rank: int = -1, world_size: int = -1,
) -> None:  # fmt: skip
    """Initialise torch's process group as `torchrun` asks for it, or one of this process alone. Do
    nothing if there is a process group, or with `dist_init_required=False`."""
    if dist_init_required is False or torch.distributed.is_initialized():
        return
    kind = accelerator.default_type()
    backend = dist_backend or (
        "gloo" if kind == "cpu"
        else f"cpu:gloo,{kind}:{torch.distributed.get_default_backend_for_device(kind)}"
    )  # fmt: skip
    more: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if "WORLD_SIZE" in os.environ or init_method is not None or world_size > 0:
        torch.distributed.init_process_group(
            backend, init_method=init_method, rank=rank, world_size=world_size, **more
        )
        return
    store = torch._C._distributed_c10d.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1, **more)


def _config(args: Any, config: Config | None, config_params: Config | None) -> Config:
    named = getattr(args, "deepspeed_config", None)
    configs = [each for each in (config, config_params, named) if each is not None]
    if len(configs) != 1:
        raise ConfigError(
            "initialize takes one configuration: config=, or --deepspeed_config of args; "
            f"{len(configs)} are given"
        )
    return configs[0]


def _parameters(given: Iterable[Any] | nn.Module | None) -> list[Any] | None:
    """Read the parameters once: they may come from a generator."""
    if given is None:
        return None
    listed = list(given.parameters() if isinstance(given, nn.Module) else given)
    groups = [
        {**each, "params": _plain_list(each["params"])} if isinstance(each, Mapping) else each
        for each in _plain_list(listed)
    ]
    return [each for each in groups if not isinstance(each, Mapping) or each["params"]]


def _plain_list(given: Any) -> list[Any]:
    """Return a list of parameters, given as torch.optim takes them: one, several, or named."""
    if isinstance(given, torch.Tensor):
        return [given]
    return [each[1] if isinstance(each, tuple) else each for each in given]


def _engine(model: nn.Module, settings: Settings, groups: list[Any] | None) -> Engine:
    for before in tiers_of(model):
        before.close("host")  # which thaws what it had frozen
    if settings.has_optimizer:
        frozen = []
        if groups is not None:
            every = [each["params"] if isinstance(each, dict) else [each] for each in groups]
            inside = {id(param) for params in every for param in params}
            frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in inside]
    else:  # nothing trains: no gradients or states are kept
        frozen, groups = [p for p in model.parameters() if p.requires_grad], None
    for param in frozen:
        param.requires_grad_(False)
    try:
        engine = engine_for(model, settings.config, parameters=groups)
    except BaseException:
        _thaw(frozen)
        raise
    engine.before_close(partial(_thaw, frozen))
    if frozen and settings.has_optimizer:
        _log.warning(
            "%d trainable parameters are in no param group, so no step changes them: they are "
            "frozen", len(frozen),
        )  # fmt: skip
    return engine


def _thaw(frozen: list[nn.Parameter]) -> None:
    for param in frozen:
        param.requires_grad_(True)


def _loader(
    engine: EngineModule, settings: Settings, data: Dataset[Any],
    collate_fn: Callable[[Any], Any] | None,
) -> DataLoader[Any]:  # fmt: skip
    """Return the batches of one rank, drawn as torch's DistributedSampler draws them."""
    sampler: DistributedSampler[Any] | None = None
    if not isinstance(data, IterableDataset):
        sampler = DistributedSampler(data, engine.world_size, engine.global_rank)
    return DataLoader(
        data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler,
        collate_fn=collate_fn, pin_memory=engine.device.type != "cpu",
        drop_last=bool(settings.made.get("dataloader_drop_last", False)),
    )  # fmt: skip
