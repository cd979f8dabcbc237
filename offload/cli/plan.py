"""`offload plan`: the resolved placement, why it is so, its bytes and its time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from offload.cli.located import located
from offload.config import OffloadConfig

if TYPE_CHECKING:
    from offload.planning.plan_text import Planned


def print_plan(file: Path, overrides: Sequence[str]) -> None:
    """Describe the run of `file` without starting it."""
    config = OffloadConfig.load(file, overrides)
    with located(file, overrides):
        planned = _plan(config.owning_the_loop())
    from offload.planning.plan_text import describe

    Console().print(describe(planned))


def _plan(config: OffloadConfig) -> Planned:
    """As the loop plans. Raises what it would raise before anything is allocated."""
    from offload.homes import compute_device, nvme_paths, this_machine
    from offload.planning.plan_text import Planned
    from offload.planning.planner import check_plan
    from offload.planning.preflight import preflight
    from offload.planning.solver import solve
    from offload.train.forecast import forecast, workload_of
    from offload.train.model import build_meta_model
    from offload.zero.discovery import discover

    model = build_meta_model(config)
    device = compute_device(config)
    hardware = this_machine(config.nvme, device)
    shape = discover(model, config.groups.blocks).shape()
    found = forecast(config, model, workload_of(config))
    solution = solve(config, shape, hardware) if found is None else found.solution
    check_plan(solution.best.plan, hardware)
    looked = preflight(
        solution.best.plan, config.nvme, nvme_paths(config.nvme),
        passing_nbytes=solution.best.passing_nbytes, disk_nbytes=hardware.nvme_free_nbytes,
    )  # fmt: skip
    looked.refuse()
    timed = found is not None and found.speeds is not None
    return Planned(config, solution, device.type, looked, timed)
