"""Loads weights that transformers wrote into an engine's model, one piece at a time."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from offload.checkpoint.foreign.model_files import INDEX, SINGLE, weight_files
from offload.integrations.loaded_weights import missing_in, overwrite
from offload.integrations.transformers.pretrained import built
from offload.tiers.errors import CheckpointError
from offload.weights.lazy_tensors import LazyTensor, lazy_tensors

if TYPE_CHECKING:
    from offload.engine import Engine


def load_weights(engine: Engine, folder: Path) -> None:
    """Overwrite the model's parameters and persistent buffers with those of `folder`.

    Raise CheckpointError, with nothing changed, unless it has them all, under the model's own
    names or those of transformers' files.
    """
    model = engine.module
    files = weight_files(folder)
    if not files:
        raise CheckpointError(f"{folder} has no {SINGLE} and no {INDEX}; name another checkpoint")
    found = lazy_tensors(files)
    if missing_in(found, model) and isinstance(model, PreTrainedModel):
        found = _converted(model, folder, found)
    overwrite(engine, folder, found)


def _converted(
    model: PreTrainedModel, folder: Path, found: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    """Return the weights under the model's own names: transformers builds a second such model from
    them. Weights that are missing take no RAM, as they are not written, and are left out."""
    with no_init_weights():
        made = built(
            type(model), copy.deepcopy(model.config), found, folder, dtype="auto",
            generation_config=getattr(model, "generation_config", None),
        )  # fmt: skip
    return {
        name: tensor for name, tensor in made.state_dict(keep_vars=True).items()
        if isinstance(tensor, LazyTensor)
    }  # fmt: skip
