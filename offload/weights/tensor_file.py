"""Tensors in safetensors files, read when they are asked for."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from offload.checkpoint.format.disk import OpenFile
from offload.checkpoint.format.manifest import MANIFEST, PARAMETERS, is_data_file
from offload.checkpoint.format.safetensors_file import StoredTensor, parse_header
from offload.checkpoint.format.user_state import DTYPES
from offload.tiers.errors import CheckpointError

_PIECE_NUMEL = 1 << 22


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor that is in a file as it is. `read_into(tensor, start_bytes, buffer)` is that of its
    file, or of the reader of its checkpoint, which compares what it reads with its hash."""

    path: Path
    read_into: Callable[[StoredTensor, int, memoryview], None]
    tensor: StoredTensor

    @property
    def name(self) -> str:
        return self.tensor.info.name

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.tensor.info.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.info.shape

    @property
    def nbytes(self) -> int:
        return self.tensor.info.nbytes

    def read(self, *, rounded: bool = True) -> torch.Tensor:
        return self.raw(0, self.nbytes).view(self.dtype).reshape(self.shape)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return rows `start` to `stop` of the first dimension."""
        step = self.nbytes // self.shape[0]
        flat = self.raw(start * step, (stop - start) * step).view(self.dtype)
        return flat.reshape(stop - start, *self.shape[1:])

    def row(self, number: int) -> "Stored":
        """Return row `number` of the first dimension."""
        info = replace(self.tensor.info, shape=self.shape[1:])
        at = self.tensor.offset_bytes + number * info.nbytes
        return replace(self, tensor=replace(self.tensor, info=info, offset_bytes=at))

    def pieces(self, numel: int) -> Iterator[torch.Tensor]:
        """Yield all elements in order, 1D, `numel` at a time."""
        step = numel * self.dtype.itemsize
        for start in range(0, self.nbytes, step):
            yield self.raw(start, min(step, self.nbytes - start)).view(self.dtype)

    def raw(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return bytes, 1D uint8."""
        flat = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            self.read_into(self.tensor, offset, flat.numpy().data)
        return flat


def stored_tensors(files: Iterable[Path]) -> dict[str, Stored]:
    """Return every tensor of safetensors files. They keep the contents that a file had when it was
    opened, even if another one takes its name. Raises CheckpointError if a file is none of these,
    or if two share a name."""
    stored: dict[str, Stored] = {}
    for path in files:
        file = open_weights(path)
        tensors = parse_header(
            lambda offset, buffer, file=file: file.read_all(buffer, offset),  # type: ignore[misc]
            file.status().st_size, path.name, str(path),
        )  # fmt: skip
        for name, tensor in tensors.items():
            if name in stored:
                raise CheckpointError(f"{name} is in {stored[name].path} and in {path}; remove one")
            stored[name] = Stored(path, partial(read_into, file), tensor)
    return stored


def open_weights(path: Path) -> OpenFile:
    """Raises CheckpointError if it cannot be opened."""
    try:
        return OpenFile(path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"cannot open {path}: {error.strerror}") from None


def read_into(file: OpenFile, tensor: StoredTensor, start_bytes: int, buffer: memoryview) -> None:
    file.read_all(buffer, tensor.offset_bytes + start_bytes)


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is a checkpoint. Raises CheckpointError for a part of one, which has no
    hashes of its own, and for an impossible path."""
    try:
        real = Path(os.path.realpath(path))
    except ValueError as error:  # a NUL
        raise CheckpointError(f"no weights at {str(path)!r}: {error}") from None
    for folder in real.parents[:2]:
        part = str(real.relative_to(folder))
        if (part == PARAMETERS or is_data_file(part)) and (folder / MANIFEST).is_file():
            raise CheckpointError(f"{path} is a part of a checkpoint; name its folder, {folder}")
    return all(os.path.lexists(real / name) for name in (MANIFEST, PARAMETERS))


def check_shape(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raise CheckpointError unless a tensor of the files has the shape that the model wants."""
    if shape != wanted:
        raise CheckpointError(f"weights: {name} has shape {shape}, in the model {wanted}")


def check_range(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise CheckpointError if a finite value would become infinite in `dtype`."""
    limit = torch.finfo(dtype).max
    if torch.finfo(tensor.dtype).max <= limit:
        return
    for piece in tensor.reshape(-1).split(_PIECE_NUMEL):
        lost = piece[piece.isfinite() & piece.to(dtype).isinf()]
        if lost.numel():
            raise CheckpointError(
                f"weights: {name} ({tensor.dtype}) holds {float(lost[0]):g}, more than {dtype} can "
                f"({limit:g}); use a precision with a larger range"
            )
