"""The `state=` of a checkpoint without an engine: read from one, or put into one that is composed.

The state that an engine saves and loads itself is in `run_state`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from offload.checkpoint.format.manifest import BufferRecord, RunRecord
from offload.checkpoint.format.plain_values import packed, unpacked
from offload.checkpoint.format.reader import CheckpointReader
from offload.checkpoint.format.safetensors_file import StoredTensor
from offload.tiers.errors import CheckpointError, UnsupportedError
from offload.zero.groups.bits import DTYPE_NAMES, DTYPES


class Packer:
    """One rank's values as JSON, and their tensors separately."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.tensors: dict[str, torch.Tensor] = {}

    def packed(self, section: str, value: Any, name: str) -> Any:
        """A value of a section of the run's record. UnsupportedError, with the name, for one that
        is not plain."""

        def aside(tensor: torch.Tensor, what: str) -> dict[str, Any]:
            if tensor.dtype not in DTYPE_NAMES:
                raise UnsupportedError(
                    f"{what} is a tensor of {tensor.dtype}, which cannot be in a safetensors file"
                )
            key = f"{section}/{self._rank}/{len(self.tensors)}"
            # a copy: it may be changed while it is written
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.tensors[key] = whole.copy_(tensor.detach())
            return {"name": key}

        return packed(value, name, aside)


def tensor_records(tensors: Mapping[str, torch.Tensor]) -> list[BufferRecord]:
    """The records of tensors, as a manifest lists them."""
    return [
        BufferRecord(name=name, dtype=DTYPE_NAMES[tensor.dtype], shape=list(tensor.shape))
        for name, tensor in tensors.items()
    ]


def run_of(state: Mapping[str, Any]) -> tuple[RunRecord, list[torch.Tensor]]:
    """A run that has nothing but this state, and the tensors of its record, in order.
    UnsupportedError for a value that is not plain."""
    packer = Packer(0)
    sections = {
        "objects": {}, "extra": {}, "entries": {}, "versions": None, "random": [],
        "state": packer.packed("state", state, "state"),
    }  # fmt: skip
    record = RunRecord(sections=sections, tensors=tensor_records(packer.tensors))
    return record, [*packer.tensors.values()]


def tensors_of(
    run: RunRecord, reader: CheckpointReader
) -> Callable[[dict[str, Any]], torch.Tensor]:
    """A function that reads a tensor that the sections of a run refer to."""
    records = {each.name: each for each in run.tensors}

    def read(value: dict[str, Any]) -> torch.Tensor:
        record = records[value["name"]]
        return _read(reader, record, reader.run_tensor(record))

    return read


def buffers_of(reader: CheckpointReader) -> dict[str, torch.Tensor]:
    """All buffers of a checkpoint, by name."""
    return {each.name: _read(reader, each, reader.buffer(each)) for each in reader.manifest.buffers}


def _read(reader: CheckpointReader, record: BufferRecord, stored: StoredTensor) -> torch.Tensor:
    tensor = torch.empty(record.shape, dtype=DTYPES[record.dtype])
    if tensor.numel():
        reader.read_into(stored, 0, tensor.reshape(-1).view(torch.uint8).numpy().data)
    return tensor


def state_in(reader: CheckpointReader) -> dict[str, Any]:
    """The state that a checkpoint was saved with, or an empty one. CheckpointError if malformed."""
    run = reader.manifest.run
    saved = None if run is None else run.sections.get("state")
    if run is None or saved is None:
        return {}
    try:
        found = unpacked(saved, tensors_of(run, reader))
    except CheckpointError as error:
        raise CheckpointError(f"{reader.path}: {error}; load another checkpoint") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{reader.path}: its state is no dict; load another checkpoint")
    return found
