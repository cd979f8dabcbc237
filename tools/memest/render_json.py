"""An estimate as JSON, for programs. docs/memest.md documents the fields.

`SCHEMA` changes its number when a field changes its meaning or goes; new fields may come at any
time. Bytes are whole numbers, seconds are floats, absent figures are null.
"""

from __future__ import annotations

import json
from typing import Any

from offload.planning.plan.estimate import Change, Estimate, PlaceEstimate, Shortfall, StepEstimate
from offload.planning.plan.plan import Plan, needed_nbytes
from offload.tiers.extent import TierName

SCHEMA = "memest/1"


def to_json(estimate: Estimate) -> str:
    """The text of `to_dict`, one screen wide, with a newline at its end."""
    return json.dumps(to_dict(estimate), indent=2, allow_nan=False) + "\n"


def to_dict(estimate: Estimate) -> dict[str, Any]:
    """Plain values."""
    memory = estimate.memory
    workload = estimate.workload
    return {
        "schema": SCHEMA,
        "fits": estimate.fits,
        "model": {
            "name": estimate.model,
            "parameters": estimate.numel,
            "trainable": estimate.numel_trainable,
        },
        "hardware": estimate.hardware,
        "workload": {
            "batch": workload.batch,
            "sequence": workload.sequence,
            "passes": workload.passes,
            "tokens_per_step": workload.tokens,
        },
        "memory": {str(tier): _place(place) for tier, place in memory.places.items()},
        "ledger_peaks": {str(tier): nbytes for tier, nbytes in memory.ledger_peaks.items()},
        "checkpoint_nbytes": memory.checkpoint_nbytes,
        "step": None if estimate.step is None else _step(estimate.step),
        "ssd": {
            "endurance_nbytes": estimate.endurance_nbytes or None,
            "life_steps": estimate.ssd_life_steps,
        },
        "plan": _plan(estimate.plan),
        "shortfalls": [_shortfall(shortfall) for shortfall in estimate.shortfalls],
        "changes": [_change(change) for change in estimate.changes],
        "notes": list(estimate.notes),
        "config": estimate.config.to_dict(),
    }


def _place(place: PlaceEstimate) -> dict[str, Any]:
    return {
        "capacity_nbytes": place.capacity_nbytes,
        "peak_nbytes": place.peak_nbytes,
        "by_class": {str(name): nbytes for name, nbytes in place.by_class.items()},
    }


def _step(step: StepEstimate) -> dict[str, Any]:
    return {
        "seconds": step.seconds,
        "tokens_per_s": step.tokens_per_s,
        "bottleneck": step.bottleneck,
        "written_nbytes": step.written_nbytes,
        "links": [
            {"name": link.name, "seconds": link.seconds, "nbytes": link.nbytes}
            for link in step.links
        ],
        "spans": [
            {"link": s.link, "label": s.label, "start_s": s.start_s, "stop_s": s.stop_s}
            for s in step.spans
        ],
    }


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "budgets": {str(tier): nbytes for tier, nbytes in plan.budgets.items()},
        "needed_nbytes": {str(tier): needed_nbytes(plan, tier) for tier in TierName},
        "placements": {
            str(state_class): {str(tier): share for tier, share in placement.shares if share}
            for state_class, placement in plan.placements.items()
        },
        "groups": len(plan.groups),
        "chunk_numel": plan.chunk_numel,
        "prefetch": plan.prefetch,
    }


def _shortfall(shortfall: Shortfall) -> dict[str, Any]:
    return {
        "tier": str(shortfall.tier),
        "needed_nbytes": shortfall.needed_nbytes,
        "capacity_nbytes": shortfall.capacity_nbytes,
        "key": shortfall.key,
        "message": shortfall.message,
    }


def _change(change: Change) -> dict[str, Any]:
    return {
        "settings": dict(change.settings),
        "text": change.text,
        "step_factor": change.step_factor,
    }
