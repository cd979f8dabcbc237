"""The weights of a folder that transformers wrote into an engine's model, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor

from offload.tiers.errors import CheckpointError

if TYPE_CHECKING:
    from offload.engine import Engine

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHOWN = 5


def load_weights(engine: Engine, folder: Path) -> None:
    """Overwrite the model's parameters and persistent buffers with those of `folder`.

    CheckpointError unless it has them all, under the model's own names.
    """
    model = engine.module
    wanted = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    files = _files(folder)
    shapes = {name: shape for file in files for name, shape in _shapes(file)}
    names = shapes.keys()
    there = {id(wanted[name]) for name in names & wanted.keys()}  # one name of tied ones is enough
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    missing = [n for n, t in wanted.items() if id(t) not in there and n not in ignored]
    if missing:
        unknown = sorted(names - wanted.keys())
        raise CheckpointError(
            f"{folder} has no {_listing(missing)}"
            + (f" (but {_listing(unknown)})" if unknown else "")
            + "; it is of another model, or in the format of the hub: build the model from it "
            "(from_pretrained), or resume from a checkpoint that has the engine's states"
        )
    for name in names & wanted.keys():
        if shapes[name] != tuple(wanted[name].shape):
            raise CheckpointError(
                f"{folder}: {name} has shape {shapes[name]}, the model's has "
                f"{tuple(wanted[name].shape)}; it is of another model"
            )
    for file in files:
        _load_file(engine, file, wanted)


@torch.no_grad()
def _load_file(engine: Engine, file: Path, wanted: dict[str, Tensor]) -> None:
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - no mapping
            if name in wanted:
                with engine.gathered(wanted[name]):
                    wanted[name].copy_(opened.get_tensor(name))


def _files(folder: Path) -> list[Path]:
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    index = json.loads((folder / _INDEX).read_text())
    return [folder / name for name in sorted(set(index["weight_map"].values()))]


def _shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - no mapping
            yield name, tuple(opened.get_slice(name).get_shape())


def _listing(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
