"""`offload plan`: the resolved placement, the reasons for it, its bytes and its time."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from offload.config import OffloadConfig
from offload.display.console import PlainConsole
from offload.gpt import build_meta_model
from offload.memory.tier_manager import compute_device, nvme_paths
from offload.planning.choice.plan_text import Planned, describe
from offload.planning.choice.planner import check_plan
from offload.planning.machine.preflight import preflight
from offload.runs.forecast import forecast, workload_of
from offload.tiers.accelerator import KINDS
from offload.tiers.errors import ConfigError
from offload.zero.ranks.sharding import Sharding


def print_plan(file: Path, overrides: Sequence[str], ranks: int = 1, nodes: int = 1) -> None:
    """Describe the run of `file` without starting it: one rank of `ranks` on each of `nodes`. Raise
    ConfigError if the file was written for a model of one's own."""
    config = OffloadConfig.load(file, overrides)
    if config.written_for is not None:
        config.written_for.refuse()
    _check_device(config, file, overrides)
    PlainConsole().print(describe(plan_of(config, ranks, nodes)))


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


def plan_of(config: OffloadConfig, ranks: int, nodes: int) -> Planned:
    """Plan the built-in model as its training loop does, which takes every step it begins. Raise
    what that would raise before anything is allocated."""
    config = config.owning_the_loop()
    sharding = Sharding.of(config.zero.stage, config.zero.shard_group, ranks * nodes, 0)
    workload = workload_of(config)
    found = forecast(config, build_meta_model(config), workload, sharding, ranks)
    assert found is not None, "the built-in model's passes can be traced"
    best = found.solution.best
    check_plan(best.plan, found.planned.hardware)
    paths = nvme_paths(config.nvme)
    notes = preflight(best.plan, paths, passing_nbytes=best.passing_nbytes)
    stated = "train" in config.model_fields_set
    whose = "of train.model" if stated else "at its default size, as the file names no model"
    return Planned(
        f"built-in model {whose}", config, workload, found.solution, compute_device(config).type,
        found.timed, ranks, notes,
    )  # fmt: skip
