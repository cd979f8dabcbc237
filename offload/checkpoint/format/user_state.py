"""Values of a run as archives of `torch.save`: the state of a checkpoint, random numbers and the
states of registered objects.

Only what `torch.load(weights_only=True)` reads is written, so nothing that is read runs code:
numbers, text, containers, tensors and NumPy's arrays of numbers.
"""

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals
from torch.utils._pytree import tree_map_only

from offload.checkpoint.format.manifest import BufferRecord
from offload.checkpoint.format.reader import CheckpointReader
from offload.checkpoint.format.safetensors_file import StoredTensor
from offload.display.plain_text import plain
from offload.tiers.errors import CheckpointError, UnsupportedError

# By their names in safetensors files.
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "I64": torch.int64, "U64": torch.uint64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

STATE = "state"  # the name of the user's own state in a run's file
_CODES = "?" + np.typecodes["AllInteger"] + "efdFDSU"
_SAFE: list[Any] = [  # beside what torch takes for safe: with which NumPy's values are made again
    frozenset, np.ndarray, np.dtype, np.zeros(1).__reduce__()[0], np.float64(1).__reduce__()[0],
    *{type(np.dtype(code)) for code in _CODES},
]  # fmt: skip
_REMEDY = "keep numbers, text, tensors and containers of them there, save other objects yourself"


def packed(value: Any, name: str) -> torch.Tensor:
    """The archive of a value (1D uint8). UnsupportedError, with the name, for what could not
    be read again: objects of other classes, tensors without values of their own."""
    buffer = io.BytesIO()
    try:
        torch.save(tree_map_only(torch.Tensor, _whole, value), buffer)
        with safe_globals(_SAFE):
            refused = get_unsafe_globals_in_checkpoint(io.BytesIO(buffer.getbuffer()))
    except Exception as error:  # what pickling an object raises is the object's to choose
        raise UnsupportedError(f"{name} cannot be kept in a checkpoint: {error!s:.200}") from error
    if refused:
        raise UnsupportedError(
            f"{name} holds {', '.join(refused)[:200]}, which a checkpoint cannot keep: what "
            f"is read may run no code; {_REMEDY}"
        )
    archive = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    try:  # the classes are not all that counts: an array of theirs may have any dtype
        _loaded(archive, "meta")
    except Exception as error:  # noqa: BLE001 - a pickle raises anything
        problem = f"cannot be kept in a checkpoint: {_reason(error)}"
        raise UnsupportedError(f"{name} {problem}; {_REMEDY}") from None
    return archive


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of its own in RAM: an archive would have all that a view is a part of."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def _loaded(archive: torch.Tensor, device: str) -> Any:
    with safe_globals(_SAFE):
        stream = io.BytesIO(archive.numpy().data)
        return torch.load(stream, map_location=device, weights_only=True)


@contextmanager
def refusals(
    what: str, remedy: str = "save it again with those alone, or load another checkpoint"
) -> Iterator[None]:
    """A context in which every error is a CheckpointError that names `what` and the remedy."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - a forged pickle raises anything
        problem = f"cannot be read as tensors and plain values: {_reason(error)}"
        raise CheckpointError(f"{what} {problem}; {remedy}") from None


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 2 and lines[0].startswith("Weights only load failed"):
        lines = lines[-2:]  # before that stands how to run what the file names
    return plain(lines[0], 200) if lines else type(error).__name__


def tensor_records(tensors: Mapping[str, torch.Tensor]) -> list[BufferRecord]:
    """The records of tensors, as a manifest lists them."""
    return [
        BufferRecord(name=name, dtype=DTYPE_NAMES[tensor.dtype], shape=list(tensor.shape))
        for name, tensor in tensors.items()
    ]


def value_of(reader: CheckpointReader, record: BufferRecord) -> Any:
    """A value of a run, which was `packed`. CheckpointError if it is malformed."""
    archive = _read(reader, record, reader.run_tensor(record))
    with refusals(f"{reader.path}: {record.name}"):
        return _loaded(archive, "cpu")


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
    record = next((each for each in run.tensors if each.name == STATE), None) if run else None
    if record is None:
        return {}
    if not isinstance(state := value_of(reader, record), dict):
        raise CheckpointError(f"{reader.path}: its state is no dict; load another checkpoint")
    return state
