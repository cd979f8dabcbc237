"""Loads weights that transformers wrote into an engine's model, one piece at a time."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from offload.checkpoint.foreign.model_files import INDEX, SINGLE, weight_files
from offload.display.progress import progress
from offload.integrations.transformers.pretrained import built
from offload.tiers.errors import CheckpointError
from offload.weights.lazy_tensors import LazyTensor, lazy_tensors

if TYPE_CHECKING:
    from offload.engine import Engine

_PIECE_NUMEL = 1 << 22
_SHOWN = 5


def load_weights(engine: Engine, folder: Path) -> None:
    """Overwrite the model's parameters and persistent buffers with those of `folder`.

    Raise CheckpointError, with nothing changed, unless it has them all, under the model's own
    names or those of transformers' files.
    """
    model = engine.module
    state = model.state_dict(keep_vars=True)
    wanted = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    needed = {name: tensor for name, tensor in wanted.items() if name not in ignored}
    found = _tensors(folder)
    if _missing(needed, found) and isinstance(model, PreTrainedModel):
        found = _converted(model, folder, found)
    _check(folder, needed, found)
    read = {name: tensor for name, tensor in found.items() if name in wanted}
    with progress("loading weights", sum(wanted[name].nbytes for name in read)) as came:
        for name, tensor in read.items():
            target = wanted[name]
            rows = engine.runtime.store.rows_of(target)  # type: ignore[arg-type]
            for number, row in enumerate(rows):
                with engine.gathered(row):
                    _fill(row, tensor if row is target else tensor.row(number))
            came(target.nbytes)


def _tensors(folder: Path) -> dict[str, LazyTensor]:
    files = weight_files(folder)
    if not files:
        raise CheckpointError(f"{folder} has no {SINGLE} and no {INDEX}; name another checkpoint")
    return lazy_tensors(files)


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


def _missing(wanted: Mapping[str, Tensor], found: Mapping[str, LazyTensor]) -> list[str]:
    there = {id(wanted[name]) for name in wanted.keys() & found.keys()}  # tied: one name is enough
    return [name for name, tensor in wanted.items() if id(tensor) not in there]


def _check(folder: Path, wanted: Mapping[str, Tensor], found: Mapping[str, LazyTensor]) -> None:
    missing = _missing(wanted, found)
    if missing:
        others = sorted(found.keys() - wanted.keys())
        has = f" (it has {_listing(others)})" if others else ""
        raise CheckpointError(
            f"{folder} has no {_listing(missing)}{has}; it is of another model: resume from one of "
            "this model, or from a checkpoint that has the engine's states"
        )
    for name in wanted.keys() & found.keys():
        shapes = tuple(found[name].shape), tuple(wanted[name].shape)
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"{folder}: {name} has shape {shapes[0]}, the model's has shape {shapes[1]}; it is "
                "of another model"
            )


@torch.no_grad()
def _fill(target: Tensor, source: LazyTensor) -> None:
    if not target.is_contiguous():
        target.copy_(source.value())
        return
    start = 0
    for piece in source.pieces(_PIECE_NUMEL):
        target.view(-1)[start : start + piece.numel()].copy_(piece)
        start += piece.numel()


def _listing(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
