"""What a pass of a model takes, traced once per kind of pass and kept on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

from offload.config import OffloadConfig
from offload.planning.activations.facts import ActivationFacts, HeapFacts, PassCost
from offload.planning.machine.disk_cache import load, text, whole
from offload.planning.plan.workload import Workload
from offload.tiers.errors import OffloadError, UnsupportedError
from offload.tools.memest.answer_cache import keep, key_of

if TYPE_CHECKING:
    from torch import nn

_KIND = "activations"


class UntraceableError(UnsupportedError):
    """A model whose code cannot be followed without values: its states are known all the same."""


def cached_facts(
    fingerprint: str, build: Callable[[], nn.Module], config: OffloadConfig, workload: Workload,
    device: str | None = None,
) -> ActivationFacts:  # fmt: skip
    """What one pass takes; without torch where that is known already.

    `fingerprint` names all that the model depends on; empty: nothing is kept. `device` (cpu, cuda)
    says whose kernels are meant; by default those of `config`, or of this machine. UntraceableError
    where the model's code cannot be followed, UnsupportedError where it fails for this input.
    """
    key = ""
    if fingerprint:
        key = key_of(_parts(fingerprint, config, workload, device))
        found = load(_KIND, key, _decoded)
        if isinstance(found, str):
            raise UntraceableError(found)
        if found is not None:
            return found
    try:
        facts = _traced(build(), config, workload, device)
    except UntraceableError as error:
        if key:
            keep(_KIND, key, {"untraceable": str(error)})
        raise
    if key:
        keep(_KIND, key, asdict(facts))
    return facts


def _traced(
    model: nn.Module, config: OffloadConfig, workload: Workload, device: str | None
) -> ActivationFacts:
    from offload.planning.activations.trace import trace_activations

    try:
        return trace_activations(model, config, workload, device=device)
    except UnsupportedError as error:
        raise UntraceableError(str(error)) from error
    except OffloadError:
        raise
    except Exception as error:  # the model's own code: sizes that only it finds out about
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedError(
            f"{type(model).__name__}: its forward fails for {workload.batch} x {workload.sequence} "
            f"tokens: {type(error).__name__}: {reason}"
        ) from error


def _parts(
    fingerprint: str, config: OffloadConfig, workload: Workload, device: str | None
) -> dict[str, Any]:
    """All that a trace depends on."""
    chosen = device or config.device
    # torch would say which it is on this machine: without it, what decides that is named
    here = ("/dev/nvidiactl", os.environ.get("CUDA_VISIBLE_DEVICES"))
    gpu = [os.path.exists(here[0]), here[1]] if chosen == "auto" else None
    return {
        "model": fingerprint,
        "torch": metadata.version("torch"),
        "device": [chosen, gpu],
        "precision": config.precision,
        "blocks": config.groups.blocks,
        "recompute": config.placement.activations.checkpoint,
        "micro_batches": config.micro_batches,
        "batch": workload.batch,
        "sequence": workload.sequence,
    }


def _decoded(values: Any) -> ActivationFacts | str:
    """Facts, or why there are none."""
    if "untraceable" in values:
        return text(values["untraceable"])
    return ActivationFacts(
        saved_nbytes=whole(values["saved_nbytes"]),
        peak_nbytes=whole(values["peak_nbytes"]),
        peak_elsewhere_nbytes=whole(values["peak_elsewhere_nbytes"]),
        peak_at=text(values["peak_at"]),
        forward=_cost(values["forward"]),
        backward=_cost(values["backward"]),
        heap=_heap(values["heap"]),
    )


def _heap(values: Any) -> HeapFacts:
    names = ("saved_nbytes", "peak_nbytes", "peak_elsewhere_nbytes")
    return HeapFacts(*(whole(values[name]) for name in names))


def _cost(values: Any) -> PassCost:
    names = ("flops", "touched_nbytes", "operations")
    return PassCost(*(whole(values[name]) for name in names))
