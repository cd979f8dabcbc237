"""`offload plan`: the resolved placement, the reasons for it, its bytes and its time."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from offload.cli.errors import located
from offload.config import OffloadConfig
from offload.display.console import PlainConsole
from offload.planning.plan.workload import Generation
from offload.process.machine import OtherPrograms
from offload.tiers.errors import ConfigError

if TYPE_CHECKING:
    from offload.cli.planned_model import GeneratingModel, PlannedModel
    from offload.planning.choice.plan_text import Planned
    from offload.planning.plan.workload import Workload
    from offload.runs.forecast import Forecast
    from offload.zero.groups.model_shape import ModelShape
    from offload.zero.ranks.sharding import Sharding


_MOST = 1 << 16  # ranks on a machine, or machines


def print_plan(
    file: Path, overrides: Sequence[str], ranks: int = 1, nodes: int = 1, model: str | None = None,
    generation: Mapping[str, int | None] | None = None,
) -> None:  # fmt: skip
    """Describe the run of `file` without starting it: one rank of `ranks` on each of `nodes`, for
    `model` (by default the one that the file was written for, or the built-in one)."""
    for option, given in (generation or {}).items():
        if given is not None:
            raise ConfigError(f"{option} {given}: is of inference alone; add --inference")
    for option, number in (("--ranks", ranks), ("--nodes", nodes)):
        if not 1 <= number <= _MOST:
            raise ConfigError(f"{option} {number}: write 1 to {_MOST}")
    config, others = OffloadConfig.load(file, overrides), OtherPrograms()
    from offload.cli.planned_model import built_in, named
    from offload.planning.choice.plan_text import describe

    with located(file, overrides):
        _check_device(config, file, overrides, model)
        other = model is not None or config.written_for is not None
        found = named(config, model) if other else built_in(config)
        planned = _plan(found, ranks, nodes)
    if planned.timed and others.note:
        planned = replace(planned, assumed=(*planned.assumed, others.note))
    PlainConsole().print(describe(planned))


def print_inference_plan(
    file: Path, overrides: Sequence[str], model: str | None, generation: Mapping[str, int | None],
    ranks: int = 1,
) -> None:  # fmt: skip
    """Describe how `offload generate` would run `model` under `file`: `generation` has the options
    --batch, --prompt and --new-tokens."""
    if ranks > 1:
        raise ConfigError("--inference: is of one process; leave --ranks and --nodes out")
    config = OffloadConfig.load(file, overrides)
    source = model or (config.written_for.source if config.written_for is not None else None)
    if source is None:
        raise ConfigError("--inference: of which model? add --model FOLDER")
    asked, notes = Generation.asked(*generation.values())
    from offload.cli.planned_model import generating
    from offload.planning.choice.plan_text import describe

    with located(file, overrides):
        _check_device(config, file, overrides, model, "--inference")
        planned = _plan_generation(generating(config, source, asked), asked, notes)
    PlainConsole().print(describe(planned))


def _check_device(
    config: OffloadConfig, file: Path, overrides: Sequence[str], model: str | None, *options: str
) -> None:
    """Raise ConfigError if the file is for a machine with another device: memest plans for it."""
    from offload.tiers.accelerator import KINDS

    kind = KINDS.get(config.device)
    if kind is None or kind.is_available():
        return
    words = [str(file)] if model is None else [model, "--config", str(file)]
    words += [word for text in overrides for word in ("-o", text)]
    command = shlex.join(["memest", *words, *options, "--gpu", "24GiB", "--ram", "64GiB"])
    raise ConfigError(
        f"device: {config.device}, but this PyTorch sees no {kind.title} device, and `offload "
        f"plan` plans for this machine; for another one give memest its sizes: {command}"
    )


def _plan_generation(
    model: GeneratingModel, generation: Generation, notes: tuple[str, ...]
) -> Planned:
    """Plan as `offload generate` does. Raise what it would raise before anything is allocated."""
    from offload.runs.forecast import forecast_generation

    found = None
    if model.facts is not None:
        found = forecast_generation(model.config, model.shape, model.facts, generation)
    planned = _planned(model, model.shape, generation.usual, found)
    inference = None if found is None else found.inference
    return replace(planned, inference=inference, assumed=notes)


def _plan(model: PlannedModel, ranks: int, nodes: int) -> Planned:
    """Plan as the training loop does. Raise what it would raise before anything is allocated."""
    from offload.runs.forecast import forecast_of
    from offload.zero.ranks.sharding import Sharding

    config, shape = model.config, model.shape
    zero = config.zero
    sharding = Sharding.of(zero.stage, zero.shard_group, ranks * nodes, 0)
    if not config.splits_experts(sharding.world_size):
        shape = shape.joined
    shape = shape.stored(config.stored)
    found = None
    if model.facts is not None:
        found = forecast_of(config, shape, model.facts, model.workload, sharding, ranks)
    return _planned(model, shape, model.workload, found, sharding, ranks)


def _planned(
    model: PlannedModel | GeneratingModel, shape: ModelShape, workload: Workload,
    found: Forecast | None, sharding: Sharding | None = None, ranks: int = 1,
) -> Planned:  # fmt: skip
    """Return the plan of a forecast, or one by bytes alone where the passes are not known. Raise
    what the machine lacks for it."""
    from offload.memory.tier_manager import compute_device, nvme_paths, this_machine
    from offload.planning.choice.plan_text import Planned
    from offload.planning.choice.planner import check_plan
    from offload.planning.choice.solver import solve
    from offload.planning.machine.preflight import preflight
    from offload.planning.plan.experts import estimate_experts
    from offload.zero.ranks.sharding import ALONE

    config = model.config
    device = compute_device(config)
    hardware = this_machine(config.nvme, device, sharding or ALONE, ranks)
    solution = solve(config, shape, hardware) if found is None else found.solution
    best = solution.best
    check_plan(best.plan, hardware)
    paths = nvme_paths(config.nvme)
    looked = preflight(best.plan, config.nvme, paths, passing_nbytes=best.passing_nbytes)
    looked.refuse()
    experts = estimate_experts(best.plan, shape, workload)
    timed = found is not None and found.timed
    return Planned(
        model.name, config, workload, solution, device.type, looked, timed, ranks, experts
    )
