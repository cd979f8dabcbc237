"""`offload plan`: the resolved placement, why it is so, its bytes and its time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from offload.cli.located import located
from offload.config import OffloadConfig
from offload.tiers.errors import ConfigError

if TYPE_CHECKING:
    from offload.planning.plan_text import Planned


_MOST = 1 << 16  # ranks on a machine, or machines


def print_plan(file: Path, overrides: Sequence[str], ranks: int = 1, nodes: int = 1) -> None:
    """Describe the run of `file` without starting it: that of one of `ranks` on each of `nodes`."""
    for option, number in (("--ranks", ranks), ("--nodes", nodes)):
        if not 1 <= number <= _MOST:
            raise ConfigError(f"{option} {number}: write 1 to {_MOST}")
    config = OffloadConfig.load(file, overrides)
    with located(file, overrides):
        planned = _plan(config.owning_the_loop(), ranks, nodes)
    from offload.planning.plan_text import describe

    Console().print(describe(planned))


def _plan(config: OffloadConfig, ranks: int, nodes: int) -> Planned:
    """As the loop plans. Raises what it would raise before anything is allocated."""
    from offload.homes import compute_device, nvme_paths, this_machine
    from offload.planning.plan_text import Planned
    from offload.planning.planner import check_plan
    from offload.planning.preflight import preflight
    from offload.planning.solver import solve
    from offload.train.forecast import forecast, workload_of
    from offload.train.model import build_meta_model
    from offload.zero.discovery import discover
    from offload.zero.sharding import Sharding

    model = build_meta_model(config)
    device = compute_device(config)
    zero = config.zero
    sharding = Sharding.of(zero.stage, zero.shard_group, ranks * nodes, 0)
    hardware = this_machine(config.nvme, device, sharding, ranks)
    shape = discover(model, config.groups.blocks).shape()
    found = forecast(config, model, workload_of(config), sharding, ranks)
    solution = solve(config, shape, hardware) if found is None else found.solution
    check_plan(solution.best.plan, hardware)
    looked = preflight(
        solution.best.plan, config.nvme, nvme_paths(config.nvme),
        passing_nbytes=solution.best.passing_nbytes, disk_nbytes=hardware.nvme_free_nbytes,
    )  # fmt: skip
    looked.refuse()
    timed = found is not None and found.timed
    return Planned(config, solution, device.type, looked, timed, ranks)
