"""Finds the placement that makes a step fastest within the budgets, for all that is left open.

    1  every class whole in one tier, and the largest shares that fit into the faster ones
       (`placement_search`), laid out by the planner, checked to the byte and ranked by how long
       the slowest link is busy (`link_time`)
    2  where it is known what a step works on, the first of them are predicted (`step_time`), and
       the fastest is taken; elsewhere the rank decides

Where activations.checkpoint or micro_batches are `auto` and the batch is known, every choice goes
through 1, and all take part in 2. What the configuration names stays as it is. The result
depends on the arguments alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.config.fields import AUTO_MICRO_BATCHES
from offload.planning.choice.evaluator import Candidate as Candidate
from offload.planning.choice.evaluator import PlacementEvaluator
from offload.planning.choice.evaluator import RunFacts as RunFacts
from offload.planning.plan.plan import Hardware
from offload.zero.groups.model_shape import ModelShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig

_AS_FAST = 0.01  # of a step's time: no prediction tells less
_MICRO_BATCHES = (1, 2, 4, 8)
_CHECKPOINTS = (False, "selective", True)


@dataclass(frozen=True)
class Solution:
    """The best candidate, and the other ones after it."""

    best: Candidate
    others: tuple[Candidate, ...]
    open_keys: tuple[str, ...]  # that were left to the solver


def solve(
    config: OffloadConfig, model: ModelShape, hardware: Hardware, run: RunFacts | None = None
) -> Solution:
    """Find the best placement of `model`; if none fits, the one with the least missing bytes.

    Without `run`, `auto` values of activations.checkpoint and micro_batches are settled, and only
    parameters may be placed in device memory, which activations will need.
    """
    evaluator, candidates = None, []
    for settled in _choices(config, run, model):
        evaluator = PlacementEvaluator(settled, model, hardware, run, evaluator)
        candidates += evaluator.candidates()
    fastest = min((c.seconds for c in candidates if c.fits), default=0.0)
    best, *others = sorted(candidates, key=lambda candidate: _rank(candidate, fastest))
    return Solution(best, tuple(others), tuple(_open_keys(config)))


def _rank(candidate: Candidate, fastest: float) -> tuple[int, int, int, int, float]:
    """The sort key of candidates: those that fit, then those that fit into free memory, then by
    time; among equally fast ones the fewest parts, then the least busy links. `sorted` keeps the
    search's order among equals."""
    slower = candidate.seconds / fastest - 1 if fastest else 0.0
    parts = sum(len(placement.tiers) for placement in candidate.plan.placements.values())
    busy = candidate.seconds
    if candidate.step is not None:
        busy = sum(link.seconds for link in candidate.step.links)
    return (
        candidate.short, candidate.beyond_free_nbytes, math.floor(max(0.0, slower) / _AS_FAST),
        parts, float(f"{busy:.4g}"),
    )  # fmt: skip


def _open_keys(config: OffloadConfig) -> Iterator[str]:
    yield from (f"placement.{name}" for name, home in config.placement.homes().items() if not home)
    if config.placement.activations.checkpoint == "auto":
        yield "placement.activations.checkpoint"
    if config.micro_batches == AUTO_MICRO_BATCHES:
        yield "micro_batches"


def _choices(
    config: OffloadConfig, run: RunFacts | None, model: ModelShape
) -> Iterator[OffloadConfig]:
    """Settled configurations to compare, the plainest first. If experts are to move one by one,
    only those that allow it."""
    if run is None:
        yield config.settled()
        return
    given = config.placement.activations.checkpoint
    checkpoints = _CHECKPOINTS if given == "auto" else (given,)
    pieces: tuple[int, ...] = (config.micro_batches,)
    if config.micro_batches == AUTO_MICRO_BATCHES:
        pieces = tuple(n for n in _MICRO_BATCHES if not run.workload.batch % n)
    for checkpoint, number in itertools.product(checkpoints, pieces):
        activations = config.placement.activations.model_copy(update={"checkpoint": checkpoint})
        placement = config.placement.model_copy(update={"activations": activations})
        settled = config.model_copy(update={"placement": placement, "micro_batches": number})
        if settled.splits_experts(1) or not model.tables:
            yield settled
