"""Overwrites the weights of an engine's model by those of files, one piece at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from offload.checkpoint.format.reader import CheckpointReader
from offload.display.byte_progress import progress
from offload.display.words import some_of
from offload.tiers.errors import CheckpointError
from offload.weights.lazy_tensors import LazyTensor, checked_tensors

if TYPE_CHECKING:
    from offload.engine import Engine

_PIECE_NUMEL = 1 << 22


def load_checkpoint_weights(engine: Engine, folder: Path) -> None:
    """Load parameters and persistent buffers alone from a checkpoint of any optimizer.

    Raise CheckpointError unless it has them all, in the model's shapes, and no others.
    """
    with CheckpointReader(folder) as reader:
        reader.check(contents=True)
        tensors = checked_tensors(reader)
        absent = sorted(tensors.keys() - saved_tensors(engine.module).keys())
        if absent:
            raise CheckpointError(
                f"{folder} has {some_of(absent)}, which the model does not have; it is of another "
                "model"
            )
        overwrite(engine, folder, tensors)


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and persistent buffers by all their names."""
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def missing_in(tensors: Mapping[str, LazyTensor], model: nn.Module) -> list[str]:
    """Return the names that `tensors` lacks. One name of a tied tensor is enough, and none of those
    that transformers does not save is needed."""
    wanted = saved_tensors(model)
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    there = {id(wanted[name]) for name in wanted.keys() & tensors.keys()}
    return [n for n, tensor in wanted.items() if id(tensor) not in there and n not in ignored]


def overwrite(engine: Engine, folder: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Write the tensors of `folder` into the model. Raise CheckpointError, with nothing changed,
    if some are missing or of other shapes."""
    wanted = saved_tensors(engine.module)
    _check(engine.module, folder, wanted, tensors)
    read = {name: tensor for name, tensor in tensors.items() if name in wanted}
    with progress("loading weights", sum(wanted[name].nbytes for name in read)) as on_bytes:
        for name, tensor in read.items():
            target = wanted[name]
            rows = engine.store.rows_of(target)  # type: ignore[arg-type]
            for number, row in enumerate(rows):
                with engine.gathered(row):
                    _fill(row, tensor if row is target else tensor.row(number))
            on_bytes(target.nbytes)


def _check(
    model: nn.Module, folder: Path, wanted: Mapping[str, Tensor], tensors: Mapping[str, LazyTensor]
) -> None:
    missing = missing_in(tensors, model)
    if missing:
        others = sorted(tensors.keys() - wanted.keys())
        has = f" (it has {some_of(others)})" if others else ""
        raise CheckpointError(
            f"{folder} has no {some_of(missing)}{has}; it is of another model: load one of this "
            "model, or a checkpoint that has the engine's states"
        )
    for name in wanted.keys() & tensors.keys():
        shapes = tuple(tensors[name].shape), tuple(wanted[name].shape)
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
