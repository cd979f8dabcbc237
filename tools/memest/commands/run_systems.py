"""`memest compare` and `memest max`: other systems, as tables or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from offload.planning.plan.workload import Generation, Workload
from offload.tiers.errors import ConfigError
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes
from offload.tools.memest.commands.options import EstimateOptions, MachineOptions
from offload.tools.memest.commands.output import show_answer
from offload.tools.memest.commands.run_estimate import (
    DOES_NOT_FIT,
    answered,
    profile_of,
    read_question,
    refuse_inference,
    speeds_of,
)
from offload.tools.memest.estimate.estimator import Estimator
from offload.tools.memest.hardware.profiles import HardwareProfile
from offload.tools.memest.show import view
from offload.tools.memest.show.compare import (
    Comparison,
    comparison_table,
    to_values,
)
from offload.tools.memest.show.render_json import places
from offload.tools.memest.show.tables import bullets, ruled, show, show_json
from offload.tools.memest.systems.compare import ROUGH, compare
from offload.tools.memest.systems.largest import (
    SERVING,
    Largest,
    largest_generating,
    largest_of_all,
)
from offload.tools.memest.systems.memory import (
    FRAMEWORK,
    Framework,
    System,
)
from offload.tools.memest.systems.shapes import Shape

_BOUNDS = {Tier.DEVICE: "GPU", Tier.HOST: "RAM", Tier.NVME: "disk"}


# ---------------------------------------------------------------- compare
def run_compare(asked: EstimateOptions) -> int:
    """Compare one model under every system, offload last. Return 0 if offload fits, 1 if not."""
    output = asked.output
    if output.write is not None or output.advise:
        raise ConfigError("compare: writes no configuration; leave --write and --advise out")
    refuse_inference(asked.work, "compare")
    estimator = Estimator()
    question, ours = answered(read_question(asked), estimator, by_node=True)
    case = question.case
    facts = estimator.facts(case, ours.config)
    speeds = case.speeds if case.source.has_graph else None  # no work is known, so no times
    model = case.shape if case.ep_size > 1 else case.source.shape
    found = Comparison(ours, compare(model, facts, ours, case.profile, speeds))
    show_answer(output, table=lambda: comparison_table(found), values=lambda: to_values(found))
    return 0 if ours.fits else DOES_NOT_FIT


# ---------------------------------------------------------------- max
def run_max(
    family: str, machine: MachineOptions, batch: int, sequence: int, *, as_json: bool,
    measure: bool,
) -> None:  # fmt: skip
    """Find the largest model of a family that trains on the hardware, under every system."""
    from offload.config import OffloadConfig

    if batch < 1 or sequence < 1 or batch * sequence > 1 << 32:
        raise ConfigError(f"--batch {batch} --sequence {sequence}: at least 1 token, at most 2^32")
    config = OffloadConfig()
    profile = profile_of(machine, config)
    speeds = speeds_of(profile, config, measure=measure)
    found = largest_of_all(family, profile, Workload(batch, sequence), speeds)
    if as_json:
        show_json({"schema": "memest-max/1", "systems": [_largest_values(each) for each in found]})
    else:
        title = f"{family} models on {profile.name}, {batch} x {sequence:,} tokens, bf16, Adam\n"
        own = (each.note for each in found if each.note)
        notes = [*_taken_aside(profile), *_how_to_read(found, profile), *own]
        show(Text(title), max_table(found), "", *bullets(notes))


def run_max_inference(
    family: str, machine: MachineOptions, asked: tuple[int, int | None, int | None], *,
    as_json: bool, measure: bool,
) -> None:  # fmt: skip
    """Find the largest model of a family that generates on the hardware, with weights as they are
    and in fewer bits. `asked`: sequences, tokens of a prompt, new tokens."""
    from offload.config import OffloadConfig

    generation, assumed = Generation.asked(*asked)
    config = OffloadConfig()
    profile = profile_of(machine, config)
    found = largest_generating(
        family, profile, generation, speeds_of(profile, config, measure=measure)
    )
    if as_json:
        show_json({"schema": "memest-max/1", "systems": [_largest_values(each) for each in found]})
        return
    title = (
        f"{family} models on {profile.name}, {generation.new_tokens:,} tokens for "
        f"{generation.batch:,} x {generation.prompt:,}\n"
    )
    notes = [*assumed, *_taken_aside(profile, SERVING), *_how_to_read(found, profile)]
    notes.append("the seconds are of a decoding pass; the head of a model stays in bf16")
    show(Text(title), max_table(found, "pass"), "", *bullets(notes))


def _taken_aside(
    profile: HardwareProfile, framework: Framework = FRAMEWORK
) -> Iterator[str]:  # fmt: skip
    """Yield notes on the memory that neither model nor activations may fill, in any system."""
    ram = f"{format_bytes(framework.host_nbytes)} of RAM per rank"
    gpu = f" and {format_bytes(framework.gpu_nbytes)} of each GPU" if profile.gpu_nbytes else ""
    yield (
        f"interpreter and libraries are taken to need {ram}{gpu}, of every system alike; "
        "`memest MODEL` counts what is known of ours"
    )
    if profile.reserve_note:
        yield profile.reserve_note


def _how_to_read(found: Sequence[Largest], profile: HardwareProfile) -> Iterator[str]:
    yield "shape: layers x width (x experts); bound: what the next larger model does not fit into"
    if not any(each.step_s for each in found):
        yield "no steps: the speed of this hardware, or of its network, is not known"
    elif profile.ranks > 1:
        yield "steps over several GPUs are known of offload alone; tokens are of all ranks"
    elif any(each.step_s for each in found if each.system is not System.OURS):
        yield ROUGH


def max_table(found: Sequence[Largest], step: str = "step") -> Table:
    """Return a table with one line per system: its largest model, a step of it, and the places into
    which the next larger one does not fit."""
    columns = ("system", "largest", "shape", step, "tokens/s", "bound")
    table = ruled(*columns, left=["bound"])
    for each in found:
        bound = ", ".join(_BOUNDS[tier] for tier in each.bound)
        size = view.counted(each.numel) if each.shape else "none"
        label = _short_label(each.shape) if each.shape else "-"
        seconds, rate = view.step_cells(each.step_s, each.tokens_per_s)
        table.add_row(each.name, size, label, seconds, rate, bound or "-")
    return table


def _short_label(shape: Shape) -> str:
    experts = f"x{shape.experts}" if shape.experts else ""
    return f"{shape.layers}x{shape.hidden}{experts}"


def _largest_values(each: Largest) -> dict[str, Any]:
    return {
        "system": each.name,
        "parameters": each.numel,
        "shape": each.shape.label if each.shape else None,
        "step_s": each.step_s,
        "tokens_per_s": each.tokens_per_s,
        "bound": [str(tier) for tier in each.bound],
        "places": places(each.places),
        "note": each.note,
    }
