"""The estimate of text generation under a plan: its two kinds of pass, and the batch size at which
the model's work takes as long as moving the weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from offload.planning.plan.estimate import InferenceEstimate, StepEstimate
from offload.planning.plan.sizes import ITEMSIZE
from offload.planning.step.program import pieces_of
from offload.planning.step.representatives import representatives
from offload.planning.step.step_time import estimate_step, forward_work_s

if TYPE_CHECKING:
    from offload.planning.activations.facts import PassCost
    from offload.planning.activations.generation_facts import GenerationFacts, GenerationFactsOf
    from offload.planning.choice.run_plan import RunPlan
    from offload.planning.machine.speeds import Speeds
    from offload.planning.plan.workload import Generation

_MOST_BATCH = 1 << 20


def estimate_inference(
    planned: RunPlan, generation: Generation, facts_of: GenerationFactsOf | None,
    speeds: Speeds | None,
) -> InferenceEstimate:  # fmt: skip
    """Estimate text generation. `facts_of` is None if the model's code is not known, `speeds` if
    they are not."""
    best = planned.best
    itemsize, cache = ITEMSIZE[best.config.precision], facts_of.cache if facts_of else None
    held = token = None
    if cache is not None:
        held = generation.batch * itemsize * cache.kept_numel(generation.context)
        token = itemsize * cache.token_numel
    found = InferenceEstimate(generation, None, held, token, None)
    if facts_of is None or speeds is None or best.step is None:
        return found
    facts = facts_of(best.config, generation)
    prefill = estimate_step(
        best.plan, best.config, planned.model, facts.prefill, generation.prefill, speeds
    )
    twice = facts_of(best.config, replace(generation, batch=2 * generation.batch))
    balanced = _break_even_batch(planned, best.step, generation, facts, twice, speeds)
    return replace(found, prefill=prefill, break_even_batch=balanced)


def _break_even_batch(
    planned: RunPlan, decode: StepEstimate, generation: Generation, facts: GenerationFacts,
    twice: GenerationFacts, speeds: Speeds,
) -> int | None:  # fmt: skip
    """The least number of sequences per pass whose work takes as long as the slowest link of
    `decode`.

    If only products count, this is bytes per parameter x FLOP/s / (2 x link's bytes/s). The bytes
    that operations touch are a straight line through a batch and `twice` of it. None if nothing has
    to move, or if no batch size is enough.
    """
    link_s = max((link.seconds for link in decode.links if link.nbytes), default=0.0)
    experts = representatives(planned.best.plan, planned.model, generation.usual)
    config, one, two = planned.best.config, facts.decode, twice.decode

    def is_enough(batch: int) -> bool:
        cost = _at(batch / generation.batch, one.forward, two.forward)
        pieces = pieces_of(config, batch)
        return forward_work_s(cost, experts, config, batch // pieces, pieces, speeds) >= link_s

    if not link_s or not is_enough(_MOST_BATCH):
        return None
    low, high = 1, _MOST_BATCH
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return low


def _at(factor: float, one: PassCost, two: PassCost) -> PassCost:
    """The cost of a pass of `factor` times the sequences of `one`; `two` has twice as many."""
    touched = one.touched_nbytes + (factor - 1) * (two.touched_nbytes - one.touched_nbytes)
    return replace(one, flops=int(one.flops * factor), touched_nbytes=int(touched))
