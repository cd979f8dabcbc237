"""`offload plan`: the resolved placement, the reasons for it, its bytes and its time."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offload.config import OffloadConfig
from offload.display.console import PlainConsole
from offload.display.words import duration
from offload.gpt import build_meta_model
from offload.memory.preflight import gpu_line, preflight
from offload.memory.tier_manager import compute_device, nvme_paths
from offload.planning.choice.planner import check_plan
from offload.planning.choice.solver import Solution
from offload.planning.plan.estimate import StepEstimate, Workload
from offload.planning.plan.plan import Plan, needed_nbytes
from offload.runs.forecast import forecast, workload_of
from offload.tiers.accelerator import KINDS
from offload.tiers.errors import ConfigError
from offload.tiers.ledger import StateClass
from offload.tiers.placement import Placement
from offload.tiers.tier import TIERS, Tier
from offload.tiers.units import format_bytes
from offload.zero.ranks.sharding import Sharding

_CLASSES = (
    StateClass.PARAMETERS, StateClass.GRADIENTS, StateClass.OPTIMIZER, StateClass.STAGING,
    StateClass.ACTIVATIONS,
)  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """The data that `offload plan` prints."""

    model: str
    config: OffloadConfig  # as it was given
    workload: Workload
    solution: Solution
    device: str
    timed: bool  # whether the predicted times are of this machine's measured speeds
    ranks_here: int = 1  # on each machine
    notes: tuple[str, ...] = ()  # sentences
    gpu: str = ""  # the sum of its memory

    @property
    def plan(self) -> Plan:
        return self.solution.best.plan


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
    prediction = forecast(config, build_meta_model(config), workload, sharding, ranks)
    assert prediction is not None, "the built-in model's passes can be traced"
    best = prediction.solution.best
    check_plan(best)
    gpu = prediction.planned.memory.places.get(Tier.DEVICE)
    paths = nvme_paths(config.nvme)
    notes = preflight(best.plan, paths, passing_nbytes=best.passing_nbytes)
    stated = "train" in config.model_fields_set
    whose = "of train.model" if stated else "at its default size, as the file names no model"
    return Planned(
        f"built-in model {whose}", config, workload, prediction.solution,
        compute_device(config).type, prediction.timed, ranks, notes, gpu_line(gpu),
    )  # fmt: skip


# ---------------------------------------------------------------- as text
def describe(planned: Planned) -> RenderableType:
    """Describe the placement with its reasons, bytes and time."""
    parts: list[RenderableType] = [_headline(planned), "", _why(planned), "", _bytes(planned), ""]
    best = planned.solution.best
    parts += [planned.gpu, ""] if planned.gpu else []
    if best.step is not None and planned.timed:
        parts.append(_time(best.step))
    elif planned.plan.sharding.world_size > 1:
        parts.append("no step time: nothing is known of the network between the ranks")
    else:
        paths = "".join(f" {shlex.quote(str(path))}" for path in planned.config.nvme.paths)
        parts.append(
            "no step time: this machine's speed has not been measured; "
            f"`memest calibrate{paths}` does that"
        )
    parts += [f"note: {note}" for note in planned.notes]
    return Group(*parts)


def _headline(planned: Planned) -> RenderableType:
    plan, config = planned.plan, planned.solution.best.config.resolved()
    specs = [spec for group in plan.groups for spec in group.layout.params]
    numel = sum(spec.numel for spec in specs)
    trainable = sum(spec.numel for spec in specs if spec.trainable)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("model", Text(planned.model))
    table.add_row("", f"{numel:,} parameters ({trainable:,} trainable)")
    work = planned.workload
    passes = f"{work.passes} passes of " if work.passes > 1 else ""
    table.add_row("a step", f"{passes}{work.batch:,} x {work.sequence:,} tokens")
    largest = "nothing"
    if plan.groups:
        group = max(plan.groups, key=lambda g: g.parameters)
        largest = f"{group.name} with {format_bytes(group.parameters)}"
    table.add_row("groups", f"{len(plan.groups)}, the largest {largest}")
    if plan.sharding.world_size > 1:
        table.add_row("ranks", _ranks(planned))
    table.add_row("computes on", f"{planned.device}, precision {config.precision}")
    if config.storage is not None:
        stored = [group for group in plan.groups if group.dequantized]
        quantized, values = sum(g.parameters for g in stored), sum(g.dequantized for g in stored)
        table.add_row(
            "storage",
            f"{config.storage.weights}, {config.storage.group_size} elements per scale: "
            f"{format_bytes(quantized)} for weights of {format_bytes(values)}",
        )
    table.add_row("master", f"{config.optimizer.master}, moments {config.optimizer.states}")
    table.add_row("chunk", f"{plan.chunk_numel:,} elements; {plan.prefetch} groups fetched ahead")
    checkpoint = str(config.placement.activations.checkpoint).lower()
    table.add_row(
        "activations",
        f"{config.placement.activations.tier}, checkpoint {checkpoint}"
        f"{_auto(planned, 'placement.activations.checkpoint')}",
    )
    return table


def _ranks(planned: Planned) -> str:
    """The ranks: `1 of 16, 8 on each machine; ZeRO stage 3: 2 copies of shards for 8 ranks`."""
    sharding, stage = planned.plan.sharding, planned.config.zero.stage
    groups = f"{sharding.replicas} copies of shards for {sharding.ranks} ranks"
    if sharding.ranks == 1:
        groups = f"{sharding.replicas} whole copies"
    elif sharding.replicas == 1:
        groups = f"shards for {sharding.ranks} ranks"
    machine = f"{planned.ranks_here} on each machine"
    return f"1 of {sharding.world_size}, {machine}; ZeRO stage {stage}: {groups}"


def _auto(planned: Planned, key: str) -> str:
    return " (auto)" if key in planned.solution.open_keys else ""


def _why(planned: Planned) -> RenderableType:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    said = reasons(planned.solution)
    for state_class, placement in planned.plan.placements.items():
        chosen = _auto(planned, f"placement.{state_class}")
        table.add_row(state_class, placement.describe() + chosen, said[state_class])
    return table


def _bytes(planned: Planned) -> Table:
    plan, here = planned.plan, planned.ranks_here
    several = plan.sharding.world_size > 1
    table = Table(title=f"Bytes at home{' of one rank' * several}", title_justify="left")
    table.add_column("")
    for tier in TIERS:
        table.add_column(str(tier), justify="right", no_wrap=True)
    for state_class in _CLASSES:
        held = (plan.expected[tier].get(state_class, 0) for tier in TIERS)
        table.add_row(state_class, *map(_cell, held))
    table.add_section()
    table.add_row("total", *(_cell(plan.total(tier)) for tier in TIERS))
    table.add_row("needed at least", *(_cell(needed_nbytes(plan, tier)) for tier in TIERS))
    table.add_row("budget", *(_cell(plan.budgets[tier]) for tier in TIERS))
    if several:
        table.add_section()
        table.add_row(
            f"all {here} ranks of a machine" if here > 1 else "the rank of a machine",
            *(_cell(here * needed_nbytes(plan, tier)) for tier in TIERS),
        )
    return table


def _cell(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


def _time(step: StepEstimate) -> RenderableType:
    table = Table(title=f"Predicted step: {duration(step.seconds)}", title_justify="left")
    table.add_column("link")
    for name in ("busy", "of the step", "moved"):
        table.add_column(name, justify="right", no_wrap=True)
    for link in step.links:
        if not (link.seconds or link.nbytes):
            continue
        mark = " (bottleneck)" if link.name == step.bottleneck else ""
        share = f"{link.seconds / step.seconds:.0%}"
        table.add_row(link.name + mark, duration(link.seconds), share, _cell(link.nbytes))
    return table


# ---------------------------------------------------------------- why a class is where it is
def reasons(solution: Solution) -> dict[StateClass, str]:
    """Return a sentence for each class, on the faster tier that it does not fit."""
    return {
        state_class: _reason(solution, state_class, placement)
        if f"placement.{state_class}" in solution.open_keys
        else "as the configuration says"
        for state_class, placement in solution.best.plan.placements.items()
    }


def _reason(solution: Solution, state_class: StateClass, placement: Placement) -> str:
    plan = solution.best.plan
    slowest = placement.tiers[-1]
    above = next(reversed(slowest.faster), Tier.DEVICE)
    if slowest.on_device or (above.on_device and not plan.gpu):
        return f"fits into {slowest}: nothing has to move"
    left = plan.room_nbytes(above) - needed_nbytes(plan, above)
    missing = plan.homes[state_class].get(slowest, 0) - left
    if missing > 0:
        return f"{format_bytes(missing)} more of {above} would hold it all"
    return f"{above} has room, but a step would not be faster"
