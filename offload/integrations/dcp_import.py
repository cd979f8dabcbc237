"""The weights in a folder of torch.distributed.checkpoint, as a safetensors file: `offload
checkpoint import-dcp`.

Torch's own reader is asked for one tensor at a time, so no more is in memory. It unpickles the
folder's `.metadata`, which runs what its author wrote there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from offload.checkpoint.foreign.model_files import check_new, pending_output
from offload.checkpoint.format.disk import check_room
from offload.checkpoint.format.safetensors_file import TensorInfo, file_nbytes, new_file
from offload.checkpoint.format.torch_files import refusals
from offload.display.plain_text import plain
from offload.tiers.errors import CheckpointError, NoCheckpointError, PathError
from offload.zero.groups.bits import DTYPE_NAMES

_MODEL = "model"
_METADATA = {"format": "pt"}
_REMEDY = "load another checkpoint"
_OTHERWISE = (
    'with the model at hand: dcp.load({"app": EngineState(engine)}, checkpoint_id=FOLDER), then '
    "engine.save_checkpoint"
)


def import_dcp(source: Path, out: Path) -> Path:
    """Write the model's weights in the folder `source` to the new file OUT.safetensors; return its
    path.

    Only for folders whose author is trusted: their metadata is unpickled. Raises PathError if `out`
    is no such name, or exists; CheckpointError, with nothing written, for a folder that is damaged,
    or has no model or several.
    """
    if out.suffix != ".safetensors":
        raise PathError(
            f"{out}: the weights alone are written, to a file OUT.safetensors; {_OTHERWISE}"
        )
    check_new(out)
    folder = _DcpFolder(source)
    infos = [
        TensorInfo(name, _dtype_name(source, name, found), tuple(found.size))
        for name, (_, found) in folder.weights.items()
    ]
    infos.sort(key=lambda info: -info.nbytes // max(1, torch.Size(info.shape).numel()))  # aligned
    sections = {"tensors": infos}
    check_room(out.parent, file_nbytes(sections, _METADATA))
    with pending_output(out) as pending, new_file(pending, sections, _METADATA) as file:
        for info in infos:
            value = folder.read(info.name)
            if value.numel():
                file.append("tensors", value.reshape(-1).view(torch.uint8).numpy().data)
    return out


def _dtype_name(source: Path, name: str, found: TensorStorageMetadata) -> str:
    dtype = found.properties.dtype
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"{source}: {plain(name, 80)} is {dtype}, which no file of safetensors holds"
        )
    return DTYPE_NAMES[dtype]


class _DcpFolder:
    """`weights`: the model's tensors by name, each with its key in the folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = FileSystemReader(path)
        if not (path / ".metadata").is_file():
            raise NoCheckpointError(
                f"{path} is no folder of torch.distributed.checkpoint (no .metadata in it); name "
                "one that dcp.save wrote"
            )
        with refusals(str(path / ".metadata"), "is damaged", _REMEDY):
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            self.weights = _weights_in(path, self._metadata)

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, put together from the parts that ranks have written."""
        key, found = self.weights[name]
        if sum(chunk.sizes.numel() for chunk in found.chunks) != found.size.numel():
            raise CheckpointError(
                f"{self._path}: {plain(key, 200)}: its parts do not make a whole; {_REMEDY}"
            )
        value = torch.empty(found.size, dtype=found.properties.dtype)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        with refusals(f"{self._path}: {plain(key, 200)}", "cannot be read", _REMEDY):
            planner.set_up_planner({key: value}, self._metadata, is_coordinator=True)
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        return value


def _weights_in(path: Path, metadata: Metadata) -> Mapping[str, tuple[str, TensorStorageMetadata]]:
    """The tensors below the key "model", wherever it is, or all of a folder without one."""
    keys = metadata.planner_data or {}
    paths = {name: keys.get(name, (name,)) for name in metadata.state_dict_metadata}
    homes = {each[: each.index(_MODEL)] for each in paths.values() if _MODEL in each[:-1]}
    homes -= {home for home in homes if any(home[:n] in homes for n in range(len(home)))}
    if len(homes) > 1:
        raise CheckpointError(f"{path} has {len(homes)} models, and one is read; {_OTHERWISE}")
    start = (*next(iter(homes)), _MODEL) if homes else ()
    found = {}
    for key, entry in metadata.state_dict_metadata.items():
        inside = paths[key][: len(start)] == start
        if inside and isinstance(entry, TensorStorageMetadata):
            found[".".join(map(str, paths[key][len(start) :]))] = key, entry
    if not found:
        raise CheckpointError(f"{path} has no tensors of a model; {_OTHERWISE}")
    return found
