"""`offload plan`: the resolved placement, the reasons for it, its bytes and its time."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.config import OffloadConfig
from offload.display.console import PlainConsole
from offload.gpt import build_meta_model
from offload.memory.tier_manager import compute_device, nvme_paths, this_machine
from offload.planning.choice.plan_text import Planned, describe
from offload.planning.choice.planner import check_plan
from offload.planning.machine.preflight import preflight
from offload.planning.plan.workload import Workload
from offload.runs.forecast import Facts, forecast_of, workload_of
from offload.tiers.accelerator import KINDS
from offload.tiers.errors import ConfigError
from offload.zero.groups.discovery import discover
from offload.zero.groups.model_shape import ModelShape
from offload.zero.ranks.sharding import Sharding


def print_plan(file: Path, overrides: Sequence[str], ranks: int = 1, nodes: int = 1) -> None:
    """Describe the run of `file` without starting it: one rank of `ranks` on each of `nodes`. Raise
    ConfigError if the file was written for a model of one's own."""
    config = OffloadConfig.load(file, overrides)
    if config.written_for is not None:
        config.written_for.refuse()
    _check_device(config, file, overrides)
    planned = _plan(built_in(config), ranks, nodes)
    PlainConsole().print(describe(planned))


def _check_device(config: OffloadConfig, file: Path, overrides: Sequence[str]) -> None:
    """Raise ConfigError if the file is for a machine with another device: memest plans for it."""
    kind = KINDS.get(config.device)
    if kind is None or kind.is_available():
        return
    words = [str(file), *(word for text in overrides for word in ("-o", text))]
    command = shlex.join(["memest", *words, "--gpu", "24GiB", "--ram", "64GiB"])
    raise ConfigError(
        f"device: {config.device}, but this PyTorch sees no {kind.title} device, and `offload "
        f"plan` plans for this machine; for another one give memest its sizes: {command}"
    )


def _plan(model: PlannedModel, ranks: int, nodes: int) -> Planned:
    """Plan as the training loop does. Raise what it would raise before anything is allocated."""
    config, shape, workload = model.config, model.shape, model.workload
    sharding = Sharding.of(config.zero.stage, config.zero.shard_group, ranks * nodes, 0)
    if not config.splits_experts(sharding.world_size):
        shape = shape.joined
    shape = shape.stored(config.stored)
    found = forecast_of(config, shape, model.facts, workload, sharding, ranks)
    assert found is not None, "the built-in model's passes can be traced"
    device = compute_device(config)
    hardware = this_machine(config.nvme, device, sharding, ranks)
    best = found.solution.best
    check_plan(best.plan, hardware)
    paths = nvme_paths(config.nvme)
    notes = preflight(best.plan, paths, passing_nbytes=best.passing_nbytes)
    return Planned(
        model.name, config, workload, found.solution, device.type, found.timed, ranks, notes
    )


# ---------------------------------------------------------------- which model
@dataclass(frozen=True)
class PlannedModel:
    """A model, and the configuration as its training loop will have it."""

    name: str
    config: OffloadConfig
    shape: ModelShape
    workload: Workload
    facts: Facts  # of a pass


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
