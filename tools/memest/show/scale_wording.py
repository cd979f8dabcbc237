"""What `memest scale` says in all its formats: cells, their names, and what stands behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from offload.tiers.ledger import StateClass
from offload.tiers.units import format_bytes
from offload.tools.memest.estimate.case import Question
from offload.tools.memest.estimate.scaling import Point, Series
from offload.tools.memest.show import wording

STATES = (StateClass.PARAMETERS, StateClass.GRADIENTS, StateClass.OPTIMIZER)


def statements(question: Question, found: Sequence[Series]) -> Iterator[str]:
    """What of the numbers is computed, what is from data sheets, and what is assumed."""
    from offload.tools.memest.hardware.parts import NCCL
    from offload.tools.memest.hardware.profiles import LINK_SHARE, MATMUL_SHARE, NETWORK_SHARE

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


def cells(point: Point) -> dict[str, str]:
    """One row by its columns."""
    sharding = point.sharding
    held = {str(state): _bytes(point.held_nbytes(state)) for state in STATES}
    return {
        "ranks": f"{point.ranks:,}",
        "shards": f"{sharding.ranks:,} x {sharding.replicas:,}",
        **held,
        "exchange": _bytes(point.shared_nbytes),
        "padding": f"{point.shards.padding:.1%}",
        "collectives": f"{len(point.calls):,}",
        "moved / model": f"{point.times_model:.2f}",
        "step": wording.duration(point.step.seconds),
        "network": wording.duration(point.network_s) if point.network_s else "-",
        "tokens/s": f"{point.step.tokens_per_s:,.0f}",
        "computing": f"{point.efficiency:.0%}",
        "fits": "yes" if point.found.fits else "no",
    }


NARROW = (  # tables that a terminal of 80 columns has room for: their columns
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


def _bytes(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"
