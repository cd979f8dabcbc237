"""The experts of a model as text, for `offload plan` and memest."""

from __future__ import annotations

from collections.abc import Iterator

from offload.planning.choice.durations import counted, three_digits
from offload.planning.plan.experts import ExpertEstimate
from offload.tiers.units import format_bytes

EXPERT_HEADS = ("moved in a step or pass", "expected", "if all were touched")


def expert_facts(found: ExpertEstimate) -> tuple[str, ...]:
    """Sentences on the number of experts and on how many of them take part."""
    there = f"{found.experts:,} experts in {found.tables:,} tables"
    if found.chosen is None:
        return (
            f"{there} with {counted(found.numel)} parameters; how many are chosen for a token is "
            "not known: all are counted as touched",
            *_spread_facts(found),
        )
    in_pass = f"{_share(found.touched_pass)} in a pass of {found.tokens:,} tokens"
    in_step = f", {_share(found.touched_step)} in a step" if len(found.moved) > 1 else ""
    return (
        f"{there} with {counted(found.numel)} parameters; a token is sent to {found.chosen} of "
        f"each table, and computed with {counted(found.active_numel)} parameters of the model",
        f"expected to be touched, if routers prefer none: {in_pass}{in_step}",
        "bytes as if no copy of an expert were kept anywhere",
        *_spread_facts(found),
    )


def _spread_facts(found: ExpertEstimate) -> Iterator[str]:
    if found.ep_size == 1:
        return
    yield (
        f"ep_size {found.ep_size}, of offload.moe.MoE: a rank has {found.experts_per_rank:,} of "
        f"the experts, {counted(found.numel // found.ep_size)} parameters of them; the bytes above "
        f"are its own, the tokens those of {found.ep_size} ranks"
    )
    if found.sent_nbytes is not None:
        yield (
            f"a rank sends {format_bytes(found.sent_nbytes)} to others in a step (all_to_all: "
            "tokens, results and their gradients); blocks that are recomputed, half as much again"
        )


def expert_rows(found: ExpertEstimate) -> Iterator[tuple[str, str, str]]:
    """Rows of the bytes that move, and that would if all experts were touched; without copies."""
    for each in found.moved:
        yield each.name, format_bytes(each.touched_nbytes), format_bytes(each.all_nbytes)
    yield "together", format_bytes(found.touched_nbytes), format_bytes(found.all_nbytes)


def _share(fraction: float) -> str:
    percent = 100 * fraction
    return ">99.9 %" if 99.95 <= percent < 100 else f"{three_digits(percent)} %"
