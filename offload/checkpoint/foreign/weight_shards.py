"""A model's weights as safetensors files in a folder, cut into shards as huggingface_hub does, and
written one piece at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from offload.checkpoint.foreign.model_files import INDEX, SINGLE
from offload.checkpoint.format.disk import check_room, pending_output, replace_text
from offload.checkpoint.format.safetensors_file import SafetensorsWriter, TensorInfo
from offload.tiers.units import parse_bytes
from offload.zero.groups.bits import DTYPE_NAMES

SHARD = "5GB"
Write = Callable[[str, Tensor], None]  # a tensor's name, and its next bytes (1D uint8)
_METADATA = {"format": "pt"}


class Tensors(Protocol):
    """The tensors to write: `tensors` has them by name, on the meta device."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    def write(self, write: Write) -> None:
        """Write every tensor's bytes, in any order of tensors."""


def write_shards(
    saved: Tensors, folder: Path, max_shard_size: int | str, *, variant: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> list[str]:  # fmt: skip
    """Write files of at most `max_shard_size`, and their index if there are several, with
    `metadata` in it; return their names. Existing files in `folder` are replaced when the new ones
    are complete."""
    groups = _by_storage(saved.tensors)
    sizes = {first: saved.tensors[first].untyped_storage().nbytes() for first in groups}
    cuts = cut(sizes, parse_bytes(max_shard_size), named(SINGLE, variant))
    files = {
        file: [each for first in held for each in groups[first]] for file, held in cuts.items()
    }
    with new_files(folder, files, saved.tensors) as write:
        saved.write(write)
    if len(files) > 1:
        index = {
            "metadata": {**(metadata or {}), "total_size": sum(sizes.values())},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        replace_text(
            folder / named(INDEX, variant), json.dumps(index, indent=2, sort_keys=True) + "\n"
        )
        return [*files, named(INDEX, variant)]
    return list(files)


def _by_storage(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """The tensors of each storage by the first of them: huggingface_hub keeps them in one file."""
    found: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        found.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    return {names[0]: names for names in found.values()}


def cut(sizes: Mapping[str, int], most_nbytes: int, name: str = SINGLE) -> dict[str, list[str]]:
    """File name -> tensors, of `sizes` (name -> bytes): in their order, and cut like
    huggingface_hub does. A tensor that is larger than a shard has a shard of its own. `name`: that
    of a file without others."""
    shards: list[list[str]] = []
    held: list[str] = []
    held_nbytes = 0
    for tensor, nbytes in sizes.items():
        if nbytes > most_nbytes:
            shards.append([tensor])
            continue
        if held_nbytes + nbytes > most_nbytes:
            shards.append(held)
            held, held_nbytes = [], 0
        held.append(tensor)
        held_nbytes += nbytes
    if held:
        shards.append(held)
    if len(shards) <= 1:
        return dict(zip([name], shards, strict=False))
    stem, count = name.removesuffix(".safetensors"), len(shards)
    return {
        f"{stem}-{number:05d}-of-{count:05d}.safetensors": names
        for number, names in enumerate(shards, 1)
    }


def named(name: str, variant: str | None) -> str:
    stem, _, ending = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{ending}"


@contextmanager
def new_files(
    folder: Path, names: Mapping[str, Sequence[str]], tensors: Mapping[str, Tensor]
) -> Iterator[Write]:
    """A function that appends bytes to a tensor. The files, which are filled in parallel, get their
    names when all are complete."""
    sections = {file: _tensors(held, tensors) for file, held in names.items()}
    check_room(folder, sum(tensor.nbytes for tensor in tensors.values()))
    file_of: dict[str, SafetensorsWriter] = {}
    with ExitStack() as stack:
        pending = {
            file: stack.enter_context(pending_output(folder / file, replaces=True))
            for file in sections
        }
        for file, each in sections.items():
            writer = SafetensorsWriter(pending[file], each, _METADATA)
            file_of.update(dict.fromkeys(names[file], writer))
        yield lambda name, raw: file_of[name].append(name, raw.numpy().data)
        for writer in dict.fromkeys(file_of.values()):
            writer.finish()


def _tensors(names: Sequence[str], tensors: Mapping[str, Tensor]) -> list[list[TensorInfo]]:
    """Return one section per tensor. Wide dtypes come first, so that each is aligned."""
    ordered = sorted(names, key=lambda name: (-tensors[name].itemsize, name))
    return [
        [TensorInfo(name, DTYPE_NAMES[tensors[name].dtype], tuple(tensors[name].shape))]
        for name in ordered
    ]
