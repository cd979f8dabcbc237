"""A model's weights as safetensors files in a folder, cut into shards as huggingface_hub does, and
written from the tiers, one piece at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from huggingface_hub import get_torch_storage_size, split_state_dict_into_shards_factory
from torch import Tensor

from offload.checkpoint.engine.weights import stream_weights
from offload.checkpoint.foreign.exporting import pending_output
from offload.checkpoint.foreign.model_files import INDEX, SINGLE
from offload.checkpoint.format.disk import check_room, replace_text
from offload.checkpoint.format.safetensors_file import SafetensorsWriter, TensorInfo, file_nbytes
from offload.tiers.errors import UnsupportedError
from offload.zero.groups.bits import DTYPE_NAMES
from offload.zero.groups.layout import ParamSpec

if TYPE_CHECKING:
    from offload.engine import Engine

Write = Callable[[str, Tensor], None]  # a tensor's name, and its next bytes (1D uint8)
_METADATA = {"format": "pt"}
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


class Tensors(Protocol):
    """The tensors to write: `tensors` has them by name, on the meta device."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    def write(self, write: Write) -> None:
        """Write every tensor's bytes, in any order of tensors."""


class OwnNames:
    """Parameters and persistent buffers of an engine's model, each under its first name."""

    def __init__(self, engine: Engine) -> None:
        """Raise UnsupportedError for an entry that is not a tensor."""
        self._engine = engine
        self._names: dict[str, str] = {}  # of a parameter here, by its first one in the engine
        self._others: dict[str, Tensor] = {}  # that are in no tier
        self.tensors: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, value in engine.module.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                raise UnsupportedError(
                    f"{name} is a {type(value).__name__}, which a safetensors file cannot hold; "
                    "engine.save_checkpoint saves it"
                )
            if id(value) not in seen:
                seen.add(id(value))
                self._add(name, value)

    def _add(self, name: str, value: Tensor) -> None:
        store = self._engine.runtime.store
        spec = store.spec_of(value)
        shape, dtype = value.shape, value.dtype
        if spec is None:
            self._others[name] = value
        else:
            self._names[spec.name] = name
            shape, dtype = torch.Size(spec.shape), store.dtype
        self.tensors[name] = torch.empty(shape, dtype=dtype, device="meta")

    def write(self, write: Write) -> None:
        def take(spec: ParamSpec, elements: range, raw: Tensor) -> None:
            if spec.name in self._names:
                write(self._names[spec.name], raw)

        stream_weights(self._engine, take)
        for name, tensor in self._others.items():
            write(name, tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8))


def write_shards(
    saved: Tensors, folder: Path, max_shard_size: int | str, *, variant: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> list[str]:  # fmt: skip
    """Write the files, and their index if there are several, with `metadata` in it; return the
    files' names. Existing files in `folder` are replaced when the new files are complete."""
    pattern = named(SINGLE, variant).replace(".safetensors", "{suffix}.safetensors")
    split = split_state_dict_into_shards_factory(
        dict(saved.tensors), filename_pattern=pattern, max_shard_size=max_shard_size,
        get_storage_size=get_torch_storage_size,
        get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,  # its own knows no meta
    )  # fmt: skip
    with _files(folder, split.filename_to_tensors, saved.tensors) as write:
        saved.write(write)
    if split.is_sharded:
        index = {
            "metadata": {**(metadata or {}), **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        replace_text(
            folder / named(INDEX, variant), json.dumps(index, indent=2, sort_keys=True) + "\n"
        )
    return list(split.filename_to_tensors)


def remove_other_shards(folder: Path, kept: Container[str]) -> None:
    """Remove shards of an earlier save, and its single file, which would be loaded instead."""
    for path in folder.iterdir():
        is_ours = path.name == SINGLE or _SHARD.fullmatch(path.name)
        if is_ours and path.name not in kept:
            path.unlink()


def named(name: str, variant: str | None) -> str:
    stem, _, ending = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{ending}"


@contextmanager
def _files(
    folder: Path, names: Mapping[str, Sequence[str]], tensors: Mapping[str, Tensor]
) -> Iterator[Write]:
    """A function that appends bytes to a tensor. The files, which are filled in parallel, get their
    names when all are complete."""
    sections = {file: _sections(held, tensors) for file, held in names.items()}
    check_room(folder, sum(file_nbytes(each, _METADATA) for each in sections.values()))
    file_of: dict[str, SafetensorsWriter] = {}
    with ExitStack() as stack:
        for file, each in sections.items():
            pending = stack.enter_context(pending_output(folder / file, replaces=True))
            writer = stack.enter_context(SafetensorsWriter(pending, each, _METADATA))
            file_of.update(dict.fromkeys(names[file], writer))
        yield lambda name, raw: file_of[name].append(f"={name}", raw.numpy().data)
        for writer in dict.fromkeys(file_of.values()):
            writer.finish()


def _sections(names: Sequence[str], tensors: Mapping[str, Tensor]) -> dict[str, list[TensorInfo]]:
    """Return one section per tensor. Wide dtypes come first, so that each is aligned."""
    ordered = sorted(names, key=lambda name: (-tensors[name].itemsize, name))
    return {
        f"={name}": [TensorInfo(name, DTYPE_NAMES[tensors[name].dtype], tuple(tensors[name].shape))]
        for name in ordered
    }
