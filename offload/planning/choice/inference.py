"""The estimate of text generation under a plan: its two kinds of pass, and its cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from offload.planning.plan.estimate import InferenceEstimate
from offload.planning.plan.sizes import ITEMSIZE
from offload.planning.step.step_time import estimate_step

if TYPE_CHECKING:
    from offload.planning.activations.generation_facts import GenerationFactsOf
    from offload.planning.choice.run_plan import RunPlan
    from offload.planning.machine.speeds import Speeds
    from offload.planning.plan.workload import Generation


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
    found = InferenceEstimate(generation, None, held, token)
    if facts_of is None or speeds is None or best.step is None:
        return found
    facts = facts_of(best.config, generation)
    prefill = estimate_step(
        best.plan, best.config, planned.model, facts.prefill, generation.prefill, speeds
    )
    return replace(found, prefill=prefill)
