"""The weights of a folder that transformers wrote into an engine's model, one piece at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offload.checkpoint.disk import read_all, storage_errors
from offload.checkpoint.model import DTYPE_NAMES
from offload.checkpoint.safetensors_file import StoredTensor, parse_header
from offload.tiers.errors import CheckpointError

if TYPE_CHECKING:
    from offload.engine import Engine

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_PIECE_NUMEL = 1 << 22
_SHOWN = 5


def load_weights(engine: Engine, folder: Path) -> None:
    """Overwrite the model's parameters and persistent buffers with those of `folder`.

    CheckpointError, and nothing is changed, unless it has them all under the model's own names.
    """
    state = engine.module.state_dict(keep_vars=True)
    wanted = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    files = {file: _tensors(file) for file in _files(folder)}
    found = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    ignored = getattr(engine.module, "_keys_to_ignore_on_save", None) or ()
    _check(folder, {n: t for n, t in wanted.items() if n not in ignored}, found)
    for file, tensors in files.items():
        with _opened(file) as fd:
            for name, stored in tensors.items():
                if name in wanted:
                    with engine.gathered(wanted[name]):
                        _fill(wanted[name], fd, stored, file)


def _check(folder: Path, wanted: Mapping[str, Tensor], found: Mapping[str, StoredTensor]) -> None:
    there = {id(wanted[name]) for name in wanted.keys() & found.keys()}  # tied: one name is enough
    missing = [name for name, tensor in wanted.items() if id(tensor) not in there]
    if missing:
        others = sorted(found.keys() - wanted.keys())
        has = f" (it has {_listing(others)})" if others else ""
        raise CheckpointError(
            f"{folder} has no {_listing(missing)}{has}; it is of another model, or in the format "
            "of the hub: build the model from it with from_pretrained, or resume from a "
            "checkpoint that has the engine's states"
        )
    for name in wanted.keys() & found.keys():
        shapes = found[name].info.shape, tuple(wanted[name].shape)
        if shapes[0] != shapes[1] or found[name].info.dtype not in _DTYPES:
            raise CheckpointError(
                f"{folder}: {name} is {found[name].info.dtype} of shape {shapes[0]}, the model's "
                f"has shape {shapes[1]}; it is of another model"
            )


@torch.no_grad()
def _fill(target: Tensor, fd: int, stored: StoredTensor, file: Path) -> None:
    dtype = _DTYPES[stored.info.dtype]
    flat = target.view(-1) if target.is_contiguous() else torch.empty(target.numel(), dtype=dtype)
    for start in range(0, flat.numel(), _PIECE_NUMEL):
        part = flat[start : start + _PIECE_NUMEL]
        piece = torch.empty(part.numel(), dtype=dtype)
        raw = piece.view(torch.uint8).numpy().data
        read_all(fd, raw, stored.offset_bytes + start * dtype.itemsize, file)
        part.copy_(piece)
    if not target.is_contiguous():
        target.copy_(flat.view(target.shape))


def _files(folder: Path) -> list[Path]:
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    index = json.loads((folder / _INDEX).read_text())
    return [folder / name for name in sorted(set(index["weight_map"].values()))]


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    with storage_errors("opening", file):
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _tensors(file: Path) -> dict[str, StoredTensor]:
    with _opened(file) as fd:

        def read(offset: int, nbytes: int) -> bytes:
            buffer = bytearray(nbytes)
            read_all(fd, memoryview(buffer), offset, file)
            return bytes(buffer)

        return parse_header(read, os.fstat(fd).st_size, file.name, str(file))


def _listing(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
