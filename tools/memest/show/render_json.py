"""An estimate as JSON, for programs. docs/memest.md documents the fields.

`SCHEMA` changes its number when a field changes its meaning or goes; new fields may come at any
time. Bytes are whole numbers, seconds are floats, absent figures are null.
"""

from dataclasses import asdict
from typing import Any

from offload.planning.plan.estimate import StepEstimate
from offload.planning.plan.plan import Plan, needed_nbytes
from offload.tiers.tier import TIERS
from offload.tools.memest.estimate.result import Estimate, InferenceEstimate
from offload.tools.memest.show import view

SCHEMA = "memest/3"


def to_dict(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate as plain values."""
    memory = estimate.memory
    workload = estimate.workload
    return {
        "schema": SCHEMA,
        "fits": estimate.fits,
        "verdict": view.verdict(estimate),
        "model": {
            "name": estimate.model,
            "parameters": estimate.numel,
            "trainable": estimate.numel_trainable,
            "active": estimate.active_numel,
        },
        "hardware": estimate.hardware,
        "workload": {
            "batch": workload.batch,
            "sequence": workload.sequence,
            "passes": workload.passes,
            "tokens_per_step": workload.tokens,
        },
        "memory": {
            str(tier): {
                "capacity_nbytes": place.capacity_nbytes,
                "peak_nbytes": place.peak_nbytes,
                "by_class": {str(name): nbytes for name, nbytes in place.by_class.items()},
            }
            for tier, place in memory.places.items()
        },
        "ledger_peaks": {str(tier): nbytes for tier, nbytes in memory.ledger_peaks.items()},
        "checkpoint_nbytes": estimate.checkpoint_nbytes,
        "step": None if estimate.step is None else _step(estimate.step),
        "inference": None if estimate.inference is None else _inference(estimate.inference),
        "ssd": {
            "endurance_nbytes": estimate.endurance_nbytes or None,
            "life_steps": estimate.ssd_life_steps,
        },
        "plan": _plan(estimate.plan),
        "shortfalls": [{**asdict(each), "tier": str(each.tier)} for each in estimate.shortfalls],
        "changes": [asdict(change) for change in estimate.changes],
        "notes": list(estimate.notes),
        "config": estimate.config.to_dict(),
    }


def _step(step: StepEstimate) -> dict[str, Any]:
    return {
        "seconds": step.seconds,
        "tokens_per_s": step.tokens_per_s,
        "bottleneck": step.bottleneck,
        "written_nbytes": step.written_nbytes,
        "links": [asdict(link) for link in step.links],
    }


def _inference(inference: InferenceEstimate) -> dict[str, Any]:
    return {
        "batch": inference.generation.batch,
        "prompt": inference.generation.prompt,
        "new_tokens": inference.generation.new_tokens,
        "prefill": None if inference.prefill is None else _step(inference.prefill),
        "cache_nbytes": inference.cache_nbytes,
        "cache_nbytes_per_token": inference.token_nbytes,
    }


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "budgets": {str(tier): nbytes for tier, nbytes in plan.budgets.items()},
        "needed_nbytes": {str(tier): needed_nbytes(plan, tier) for tier in TIERS},
        "placements": {
            str(state_class): {str(tier): share for tier, share in placement.shares if share}
            for state_class, placement in plan.placements.items()
        },
        "groups": len(plan.groups),
        "chunk_numel": plan.chunk_numel,
        "prefetch": plan.prefetch,
    }
