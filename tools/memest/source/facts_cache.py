"""What a pass of a model takes, traced once per kind of pass and kept on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import metadata
from typing import TYPE_CHECKING, Any

from offload.config import OffloadConfig
from offload.planning.activation_facts import ActivationFacts
from offload.planning.workload import Workload
from offload.tiers.errors import OffloadError, UnsupportedError
from offload.tools.memest.source.answer_cache import key_of, remembered
from offload.tools.memest.source.error_text import one_line

if TYPE_CHECKING:
    from torch import nn


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

    def find() -> ActivationFacts | str:
        return _traced(build(), config, workload, device)

    if fingerprint:
        key = key_of(_parts(fingerprint, config, workload, device))
        facts = remembered("activations", key, ActivationFacts | str, find)
    else:
        facts = find()
    if isinstance(facts, str):
        raise UntraceableError(facts)
    return facts


def _traced(
    model: nn.Module, config: OffloadConfig, workload: Workload, device: str | None
) -> ActivationFacts | str:
    """The facts, or why the model's code cannot be followed."""
    from offload.planning.activation_trace import trace_activations

    try:
        return trace_activations(model, config, workload, device=device)
    except UnsupportedError as error:
        return str(error)
    except OffloadError:
        raise
    except Exception as error:  # the model's own code: sizes that only it finds out about
        raise UnsupportedError(
            f"{type(model).__name__}: its forward fails for {workload.batch} x {workload.sequence} "
            f"tokens: {one_line(error)}"
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
