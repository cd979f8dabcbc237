"""`offload plan`: the resolved placement, the reasons for it, its bytes and its time."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.cli.errors import located
from offload.config import OffloadConfig
from offload.display.console import PlainConsole
from offload.gpt import build_meta_model
from offload.memory.tier_manager import compute_device, nvme_paths, this_machine
from offload.planning.activations.facts import ActivationFacts
from offload.planning.choice.plan_text import Planned, describe
from offload.planning.choice.planner import check_plan
from offload.planning.choice.solver import solve
from offload.planning.machine.preflight import preflight
from offload.planning.plan.experts import estimate_experts
from offload.planning.plan.workload import Workload
from offload.runs.forecast import Facts, FactsOf, forecast_of, workload_of
from offload.tiers.accelerator import KINDS
from offload.tiers.errors import ConfigError
from offload.zero.groups.discovery import discover
from offload.zero.groups.model_shape import ModelShape
from offload.zero.ranks.sharding import Sharding

# Nothing below the tools may import them, so this module is found by its name.
_READER = "offload.tools.memest.source.read_model"


def print_plan(
    file: Path, overrides: Sequence[str], ranks: int = 1, nodes: int = 1, model: str | None = None
) -> None:  # fmt: skip
    """Describe the run of `file` without starting it: one rank of `ranks` on each of `nodes`, for
    `model` (by default the one that the file was written for, or the built-in one)."""
    config = OffloadConfig.load(file, overrides)
    with located(file, overrides):
        _check_device(config, file, overrides, model)
        other = model is not None or config.written_for is not None
        found = named(config, model) if other else built_in(config)
        planned = _plan(found, ranks, nodes)
    PlainConsole().print(describe(planned))


def _check_device(
    config: OffloadConfig, file: Path, overrides: Sequence[str], model: str | None
) -> None:
    """Raise ConfigError if the file is for a machine with another device: memest plans for it."""
    kind = KINDS.get(config.device)
    if kind is None or kind.is_available():
        return
    words = [str(file)] if model is None else [model, "--config", str(file)]
    words += [word for text in overrides for word in ("-o", text)]
    command = shlex.join(["memest", *words, "--gpu", "24GiB", "--ram", "64GiB"])
    raise ConfigError(
        f"device: {config.device}, but this PyTorch sees no {kind.title} device, and `offload "
        f"plan` plans for this machine; for another one give memest its sizes: {command}"
    )


def _plan(model: PlannedModel, ranks: int, nodes: int) -> Planned:
    """Plan as the training loop does, or by bytes alone where the passes are not known. Raise what
    it would raise before anything is allocated."""
    config, shape, workload = model.config, model.shape, model.workload
    sharding = Sharding.of(config.zero.stage, config.zero.shard_group, ranks * nodes, 0)
    if not config.splits_experts(sharding.world_size):
        shape = shape.joined
    shape = shape.stored(config.stored)
    found = None
    if model.facts is not None:
        found = forecast_of(config, shape, model.facts, workload, sharding, ranks)
    device = compute_device(config)
    hardware = this_machine(config.nvme, device, sharding, ranks)
    solution = solve(config, shape, hardware) if found is None else found.solution
    best = solution.best
    check_plan(best.plan, hardware)
    paths = nvme_paths(config.nvme)
    notes = preflight(best.plan, paths, passing_nbytes=best.passing_nbytes)
    experts = estimate_experts(best.plan, shape, workload)
    timed = found is not None and found.timed
    return Planned(
        model.name, config, workload, solution, device.type, timed, ranks, experts, notes
    )


# ---------------------------------------------------------------- which model
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
    name = f"built-in model {whose}"
    return PlannedModel(name, config, shape, workload, facts)


def named(config: OffloadConfig, source: str | None) -> PlannedModel:
    """Return the model at `source`, else the one that the configuration was written for.

    Raise ConfigError if the configuration was written for another model, or its model is gone.
    """
    found, size = _read(config, source), config.written_for or config.train
    workload = Workload(size.batch, size.sequence, config.gradient_accumulation_steps)
    device = compute_device(config).type

    def facts(config: OffloadConfig) -> ActivationFacts:
        traced: ActivationFacts = found.activations(config, workload, device, trains=True)
        return traced

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
