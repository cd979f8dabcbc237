"""The model that `offload plan` plans: the built-in one, or one that memest can read."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial
from typing import Any

from offload.config import OffloadConfig
from offload.gpt import build_meta_model
from offload.memory.tier_manager import compute_device
from offload.planning.activations.facts import ActivationFacts
from offload.planning.activations.generation_facts import GenerationFactsOf
from offload.planning.plan.kv_plan import kv_in_tiers
from offload.planning.plan.workload import Generation, Workload
from offload.runs.forecast import Facts, FactsOf, workload_of
from offload.tiers.errors import ConfigError
from offload.zero.groups.discovery import discover
from offload.zero.groups.model_shape import ModelShape

# Nothing below the tools may import them, so this module is found by its name.
_READER = "offload.tools.memest.source.read_model"


@dataclass(frozen=True)
class PlannedModel:
    """A model, and the configuration as its training loop will have it."""

    name: str
    config: OffloadConfig
    shape: ModelShape
    workload: Workload
    facts: FactsOf | None  # of a pass; None: the model's code is not known


def built_in(config: OffloadConfig) -> PlannedModel:
    """Return the model of `offload train`, in a loop that takes every step it begins."""
    config = config.owning_the_loop()
    model = build_meta_model(config)
    workload = workload_of(config)
    shape = discover(model, config.groups.blocks, experts=config.splits_experts(1)).shape()
    facts = Facts(model, workload, compute_device(config).type)
    stated = "train" in config.model_fields_set
    whose = "of train.model" if stated else "at its default size, as the file names no model"
    name = f"built-in {config.train.model.shape} {whose}"
    return PlannedModel(name, config, shape, workload, facts)


def named(config: OffloadConfig, source: str | None) -> PlannedModel:
    """Return the model at `source`, else the one that the configuration was written for.

    Raise ConfigError if the configuration was written for another model, or its model is gone.
    """
    found, size = _read(config, source), config.written_for or config.train
    workload = Workload(size.batch, size.sequence, config.gradient_accumulation_steps)
    device = compute_device(config).type

    def facts(config: OffloadConfig) -> ActivationFacts:
        return _activations(found, device, config, workload)

    has_graph: bool = found.has_graph
    return PlannedModel(found.name, config, found.shape, workload, facts if has_graph else None)


def _read(config: OffloadConfig, source: str | None) -> Any:
    """Return memest's model at `source`, or the one that the configuration was written for."""
    reader: Any = importlib.import_module(_READER)
    if config.written_for is not None:
        return reader.read_written_for(config, config.written_for, source)
    found = reader.read_model(source, blocks=config.groups.blocks)
    if found.config is not None:
        raise ConfigError(f"--model {source}: is a configuration, too; name the model itself")
    return found


def _activations(
    model: Any, device: str, config: OffloadConfig, workload: Workload, *, trains: bool = True
) -> ActivationFacts:
    found: ActivationFacts = model.activations(config, workload, device, trains=trains)
    return found


@dataclass(frozen=True)
class GeneratingModel:
    """A model that generates, and the configuration as `offload.dispatch` will have it."""

    name: str
    config: OffloadConfig
    shape: ModelShape
    facts: GenerationFactsOf | None  # of its passes; None: the model's code is not known


def generating(config: OffloadConfig, source: str, asked: Generation) -> GeneratingModel:
    """Return the model at `source` that generates under `config`. Raise ConfigError like
    `named`."""
    found = _read(config, source)
    config = config.in_precision_of(found.precision).for_inference()
    device = compute_device(config).type
    facts = None
    if found.has_graph:
        forward = partial(_activations, found, device, trains=False)
        facts = GenerationFactsOf(forward, found.cache, gpu=device != "cpu")
    shape = found.shape.frozen
    if not config.splits_experts(1):
        shape = shape.joined
    shape = shape.stored(config.stored)
    config, shape = kv_in_tiers(config, shape, found.cache, asked.batch, asked.context)
    return GeneratingModel(found.name, config, shape, facts)
