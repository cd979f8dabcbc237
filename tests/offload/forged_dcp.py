"""Folders of torch.distributed.checkpoint, whole and forged."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

DATA = "__0_0.distcp"


def saved(folder: Path) -> Path:
    """A model of two tensors, the states of one, and numbers."""
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}]
    groups[0]["params"] = ["a.weight"]
    states = {
        "step": torch.tensor(3.0), "exp_avg": torch.ones(4, 3), "exp_avg_sq": torch.ones(4, 3)
    }  # fmt: skip
    state = {
        "model": {"a.weight": torch.arange(12.0).view(4, 3), "count": torch.tensor(5)},
        "optim": {"state": {"a.weight": states}, "param_groups": groups},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no process group: DCP says that it assumes one process
        dcp.save(state, checkpoint_id=folder)
    return folder


def metadata_of(folder: Path) -> Metadata:
    """Of a folder of ours: unpickled."""
    found: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return found


def edited(folder: Path, change: Callable[[Metadata], Any]) -> None:
    """Other metadata, or what `change` returns in its place."""
    found = metadata_of(folder)
    changed = change(found)
    raw = changed if isinstance(changed, bytes) else pickle.dumps(found)
    (folder / ".metadata").write_bytes(raw)


def first_index(metadata: Metadata, name: str) -> MetadataIndex:
    return next(index for index in metadata.storage_data if index.fqn == name)


def replaced(folder: Path, name: str, archive: bytes) -> None:
    """Another archive for a tensor or an object, in a file of its own."""
    (folder / "other.distcp").write_bytes(archive)

    def change(metadata: Metadata) -> None:
        index = first_index(metadata, name)
        metadata.storage_data[index] = _StorageInfo("other.distcp", 0, len(archive))

    edited(folder, change)


def archive(data_pkl: bytes, files: dict[str, bytes] | None = None, **how: Any) -> bytes:
    """As `torch.save` writes one, of any pickle."""
    all_files = {"data.pkl": data_pkl, "byteorder": b"little", "version": b"3", **(files or {})}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **how) as file:
        for name, content in all_files.items():
            file.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def tensor_pickle(
    *, offset: Any = 0, shape: Any = (4, 3), strides: Any = (3, 1), kind: Any = torch.FloatStorage,
    key: Any = "0", call: str = "_rebuild_tensor_v2",
) -> bytes:  # fmt: skip
    """`data.pkl` of a tensor that says what it likes."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", kind, key, "cpu", 12) if isinstance(obj, Stored) else None

    buffer = io.BytesIO()
    function = getattr(torch._utils, call)
    Pickler(buffer, protocol=2).dump(
        Call(function, (Stored(), offset, shape, strides, False, None))
    )
    return buffer.getvalue()


class Stored:
    """Stands for a storage."""


class Call:
    """Is pickled as a call."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


__all__ = [
    "DATA", "BytesStorageMetadata", "Call", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
    "TensorProperties", "TensorStorageMetadata", "archive", "edited", "first_index",
    "metadata_of", "replaced", "saved", "tensor_pickle",
]  # fmt: skip
