"""`memest scale`: a model on one to thousands of GPUs of a named machine, in three formats."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from offload.tiers.errors import ConfigError
from offload.tiers.ledger import StateClass
from offload.tiers.units import format_bytes
from offload.tools.memest import wording
from offload.tools.memest.options import EstimateOptions, Format
from offload.tools.memest.output import write_file
from offload.tools.memest.run_estimate import DOES_NOT_FIT, Question, read_question
from offload.tools.memest.scaling import MOST_RANKS, Point, Series, in_order, scaling, totals

if TYPE_CHECKING:
    from rich.table import Table

STATES = (StateClass.PARAMETERS, StateClass.GRADIENTS, StateClass.OPTIMIZER)


def run_scale(asked: EstimateOptions) -> int:
    """Print or write what a run of every size takes. 0 if the largest fits, 1 if not."""
    if asked.output.write is not None or asked.output.advise or asked.output.chosen is Format.PNG:
        raise ConfigError("scale: gives a table, --format json or html; leave the others out")
    # one machine that is not here: there is nothing to be measured
    one = replace(asked.machine, nodes=None)
    output = replace(asked.output, measure=False)
    question = read_question(replace(asked, machine=one, output=output))
    case = question.case
    machine = case.profile.ranks_per_node
    most = MOST_RANKS if asked.machine.nodes is None else asked.machine.nodes * machine
    if not 1 <= most <= MOST_RANKS:
        raise ConfigError(
            f"--nodes {asked.machine.nodes}: 1 to {MOST_RANKS // machine} machines of {machine} "
            "GPUs are gone through"
        )
    found = scaling(case, most)
    _show(question, found, asked)
    return 0 if all(series.points[-1].fits for series in found) else DOES_NOT_FIT


def _show(question: Question, found: Sequence[Series], asked: EstimateOptions) -> None:
    output = asked.output
    if output.chosen is Format.HTML:
        from offload.tools.memest.render_scale import to_html

        text = to_html(question, found)
    elif output.chosen is Format.JSON:
        text = json.dumps(values(question, found), indent=1) + "\n"
    elif output.out is None:
        _print_tables(question, found)
        return
    else:
        raise ConfigError(f"--out {output.out}: a page or JSON; name a .html or a .json file")
    if output.out is None:
        sys.stdout.write(text)
    else:
        write_file(output.out, text.encode(errors="replace"), "--out")


# ---------------------------------------------------------------- what is said in all formats
def statements(question: Question, found: Sequence[Series]) -> Iterator[str]:
    """What of the numbers is computed, what is from data sheets, and what is assumed."""
    from offload.tools.memest.parts import NCCL
    from offload.tools.memest.profiles import LINK_SHARE, MATMUL_SHARE, NETWORK_SHARE

    profile = question.case.profile
    inside = profile.inside or profile.link
    yield (
        "Simulated: nothing was run or measured on such a cluster. The layouts, the plan and the "
        "order of collectives are those of the code that trains; times are a model"
    )
    parts = sum(point.shards.parts for series in found for point in series.points)
    yield (
        "Computed: bytes of every class, from the layouts; every shard of every rank follows the "
        f"one before it, and together they are the whole ({parts:,} parts of parameters checked)"
    )
    yield f"From data sheets: {'; '.join(profile.notes)}"
    if inside is not None:
        yield f"From data sheets: {inside.name}, {inside.source}"
    yield (
        f"Assumed: products at {MATMUL_SHARE:.0%} of their peak, links between ranks at "
        f"{NETWORK_SHARE:.0%} of theirs, those to the host at {LINK_SHARE:.0%}; a network that "
        "carries what all machines send; no rank is slower than another"
    )
    yield f"Latencies: {NCCL.source}"
    yield (
        "All-gathers are rings. A reduce-scatter is an all-to-all and a sum in the order of the "
        "ranks, as the runtime makes it: the same bits for any number of ranks, and more bytes "
        "between machines than a ring, which sums within a machine first"
    )
    yield "The batch is per rank: with more ranks a step has more tokens (weak scaling)"
    yield from question.assumed


def cells(point: Point) -> list[str]:
    """One row, as `HEADER` names it."""
    sharding = point.sharding
    held = [wording_of(point.held_nbytes(state)) for state in STATES]
    return [
        f"{point.ranks:,}", f"{sharding.ranks:,} x {sharding.replicas:,}", *held,
        wording_of(point.shared_nbytes), f"{point.shards.padding:.1%}",
        f"{point.collectives:,}", f"{point.times_model:.2f}", wording.duration(point.step.seconds),
        wording.duration(point.network_s) if point.network_s else "-",
        f"{point.step.tokens_per_s:,.0f}", f"{point.efficiency:.0%}",
        "yes" if point.fits else "no",
    ]  # fmt: skip


HEADER = (
    "ranks", "shards", "parameters", "gradients", "optimizer", "exchange", "padding",
    "collectives", "moved / model", "step", "network", "tokens/s", "computing", "fits",
)  # fmt: skip
NARROW = (  # tables that a terminal of 80 columns has room for: what they have of `HEADER`
    (
        "bytes of one rank",
        ("ranks", "shards", "parameters", "gradients", "optimizer", "exchange", "fits"),
    ),
    ("one step", ("ranks", "collectives", "step", "network", "tokens/s", "computing")),
)
_BYTES = (
    "Shards: of one copy of the states, x copies. Bytes are of one rank, at home in all tiers; "
    "exchange: buffers for working with other ranks."
)
_COMPUTING = "Computing: the share of a step in which the model computes."
LEGEND = (
    f"{_BYTES} Moved: buffers of all collectives of a step, in sizes of the model. {_COMPUTING}"
)
NARROW_LEGEND = (
    f"{_BYTES} {_COMPUTING} Padding, what is moved, homes of the states and the collectives in "
    "order are in --format json and --out scale.html."
)


def wording_of(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


# ---------------------------------------------------------------- tables
def _print_tables(question: Question, found: Sequence[Series]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    case = question.case
    console.print(Text(f"{case.source.name} on machines like {case.profile.name}, simulated\n"))
    for series in found:
        for what, columns in NARROW:
            console.print(_table(series, what, columns))
            console.print()
    console.print(Text(f"{NARROW_LEGEND}\n"))
    for line in statements(question, found):
        console.print(Text(f"  · {line}", style="dim"))


def _table(series: Series, what: str, columns: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title_justify="left",
                  title=Text(f"{series.name}: {what}", style="bold"), title_style="")  # fmt: skip
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for point in series.points:
        row = dict(zip(HEADER, cells(point), strict=True))
        table.add_row(*(row[name] for name in columns))
    return table


# ---------------------------------------------------------------- JSON
def values(question: Question, found: Sequence[Series]) -> dict[str, Any]:
    return {
        "schema": "memest-scale/1",
        "model": question.case.source.name,
        "machine": question.case.profile.name,
        "series": [
            {"name": series.name, "points": [_point_values(point) for point in series.points]}
            for series in found
        ],
        "notes": list(statements(question, found)),
    }


def _point_values(point: Point) -> dict[str, Any]:
    sharding = point.sharding
    return {
        "ranks": point.ranks,
        "shards": sharding.ranks,
        "replicas": sharding.replicas,
        "fits": point.fits,
        "by_class": {str(state): point.held_nbytes(state) for state in STATES},
        "exchange_nbytes": point.shared_nbytes,
        "padding": point.shards.padding,
        "step_s": point.step.seconds,
        "network_s": point.network_s,
        "computing": point.efficiency,
        "tokens_per_s": point.step.tokens_per_s,
        "placements": point.homes,
        "collectives": [
            {"name": each.name, "count": each.count, "nbytes": each.nbytes, "seconds": each.seconds}
            for each in totals(point)
        ],
        "sequence": [
            {"name": name, "group": each.group, "nbytes": each.nbytes}
            for name, each in in_order(point.sequence)
        ],
    }
