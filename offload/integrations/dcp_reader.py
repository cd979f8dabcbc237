"""A reader for `torch.distributed.checkpoint.load` that runs no code of the folder it reads.

    dcp.load({"app": EngineState(engine)}, storage_reader=SafeReader("checkpoint"))

Torch's `FileSystemReader`, which `dcp.load(..., checkpoint_id=)` takes, unpickles `.metadata`; its
planner unpickles objects that are not tensors. Either runs code of the folder's author.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from offload.checkpoint.foreign.dcp_folder import DcpFolder, Part, SavedTensor
from offload.config.paths import StrPath, path_of, path_text


class SafeReader(StorageReader):
    """Reads tensors and plain values from folders that `dcp.save` wrote with torch's
    `FileSystemWriter`.

    Raises CheckpointError on creation for a folder that is damaged or forged; during a load, inside
    torch's `CheckpointException`, for a damaged file, or one that holds another object. One tensor
    of a file is in memory at a time.
    """

    def __init__(self, path: StrPath) -> None:
        self._folder = DcpFolder(path_of(path, "path"))
        self._parts: dict[tuple[str, tuple[int, ...]], Part] = {}

    @property
    def checkpoint_id(self) -> str:
        return str(self._folder.path)

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Read the folder anew; `dcp.load` calls this, since the folder may have been replaced."""
        given = self._folder.path if checkpoint_id is None else checkpoint_id
        self._folder = DcpFolder(path_of(given, "checkpoint_id"))

    def read_metadata(self) -> Metadata:  # without a rank: its own is not read
        entries: dict[str, Any] = {
            name: _metadata_of(tensor) for name, tensor in self._folder.tensors.items()
        }
        entries |= {name: BytesStorageMetadata() for name in self._folder.objects}
        return Metadata(entries, planner_data=dict(self._folder.paths))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._parts = {
            (name, part.offsets): part
            for name, tensor in self._folder.tensors.items() for part in tensor.parts
        }  # fmt: skip

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with self._folder:
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, self._object(item.storage_index.fqn))
                else:
                    self._read(item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _object(self, name: str) -> io.BytesIO:
        """Return a pickle of plain values, written here: the planner unpickles it."""
        buffer = io.BytesIO()
        torch.save(self._folder.read_object(name), buffer)
        buffer.seek(0)
        return buffer

    def _read(self, item: ReadItem, planner: LoadPlanner) -> None:
        index = item.storage_index
        found = self._folder.read_part(index.fqn, self._parts[index.fqn, tuple(index.offset or ())])
        for dimension, (start, length) in enumerate(
            zip(item.storage_offsets, item.lengths, strict=True)
        ):
            found = found.narrow(dimension, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(found)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        return "://" not in path_text(checkpoint_id, "checkpoint_id")


def _metadata_of(tensor: SavedTensor) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
        for part in tensor.parts
    ]
    return TensorStorageMetadata(
        TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks
    )
