"""The bytes of activations that leave during forward and return during backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from offload.planning.plan.plan import Plan
from offload.planning.step.program import Bytes, Move, Verb
from offload.tiers.tier import Tier
from offload.zero.groups.model_shape import ModelShape

if TYPE_CHECKING:
    from offload.planning.activations.facts import ActivationFacts

_REQUEST_NBYTES = 2 << 20  # of one request: storages differ, pieces are at least that long


def add_activations(
    plan: Plan, model: ModelShape, facts: ActivationFacts, moves: Sequence[Move]
) -> None:
    """Add the moves of saved activations, which leave during forward and return during backward.

    On nvme half of the window is never written, and what is still in the window is not read.
    """
    activations = plan.activations
    if activations is None:
        return
    parked = facts.saved_nbytes
    window = activations.window_nbytes
    written = read = 0
    if activations.tier is Tier.NVME:
        written = min(max(0, parked - window // 2), activations.disk_nbytes)
        read = max(0, min(written, parked - window))
    elif plan.gpu:
        parked = min(parked, window)
    for verb in (Verb.FORWARD, Verb.BACKWARD):
        chosen = [move for move in moves if move.action.verb is verb]
        blocks = {group for unit in model.units if unit.repeated for group in unit.groups}
        inside = [move for move in chosen if move.action.group in blocks] or chosen
        passes = max(move.action.number for move in inside) + 1 if inside else 1
        share = max(1, len(inside)) // passes or 1
        for index, move in enumerate(inside):
            part = index % share
            across = _part(parked, part, share) if plan.gpu else 0
            if verb is Verb.FORWARD:
                leaving = Bytes(written=_part(written, part, share), to_host=across)
            else:
                leaving = Bytes(read=_part(read, part, share), to_device=across)
            leaving.requests = -(-(leaving.read + leaving.written) // _REQUEST_NBYTES)
            move.nbytes.add(leaving)


def _part(nbytes: int, index: int, count: int) -> int:
    """Return part `index` of `nbytes` in `count` whole parts that add up."""
    return nbytes * (index + 1) // count - nbytes * index // count
