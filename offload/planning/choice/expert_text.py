"""Experts in words: what `offload plan` and memest say of them."""

from __future__ import annotations

from collections.abc import Iterator

from offload.planning.choice.durations import counted, three_digits
from offload.planning.plan.experts import ExpertEstimate
from offload.tiers.units import format_bytes

EXPERT_HEADS = ("moved in a step", "expected", "if all were touched")


def expert_facts(found: ExpertEstimate) -> tuple[str, ...]:
    """How many there are, and how many of them take part."""
    there = f"{found.experts:,} experts in {found.tables:,} tables"
    if found.chosen is None:
        return (
            f"{there} with {counted(found.numel)} parameters; how many are chosen for a token is "
            "not known: all are counted as touched",
        )
    return (
        f"{there} with {counted(found.numel)} parameters; a token is sent to {found.chosen} of "
        f"each table, and computed with {counted(found.active_numel)} parameters of the model",
        f"expected to be touched, if routers prefer none: {_share(found.touched_pass)} in a pass "
        f"of {found.tokens:,} tokens, {_share(found.touched_step)} in a step",
        "bytes as if no copy of an expert were kept anywhere",
    )


def expert_rows(found: ExpertEstimate) -> Iterator[tuple[str, str, str]]:
    """What moves, in bytes, and what would if all were touched; nothing being kept anywhere."""
    for each in found.moved:
        yield each.name, format_bytes(each.touched_nbytes), format_bytes(each.all_nbytes)
    yield "together", format_bytes(found.touched_nbytes), format_bytes(found.all_nbytes)


def _share(fraction: float) -> str:
    percent = 100 * fraction
    return ">99.9 %" if 99.95 <= percent < 100 else f"{three_digits(percent)} %"
