"""Weights of `weights=`: safetensors files whose tensors have the names of the model's."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import nn

from offload.checkpoint.foreign.model_files import own_file
from offload.checkpoint.format.reader import CheckpointReader
from offload.config.paths import StrPath, path_of
from offload.quantised.reading import settings_in
from offload.tiers.errors import CheckpointError, ConfigError
from offload.weights.lazy_tensors import LazyTensor, lazy_tensors
from offload.weights.tensor_file import (
    check_range,
    check_shape,
    checked_tensors,
    checkpoint_at,
)
from offload.zero.groups.layout import ParamSpec

_log = logging.getLogger("offload")


class SafetensorsWeights:
    """Weights in a safetensors file, all files of a folder or an engine's checkpoint, tensor by
    tensor; quantised ones, if config.json says so, have their values. Those of a checkpoint have
    been compared with its hashes.

    Rounding to a model's precision may lose bits; no value becomes infinite, none is cut to an
    integer, and no shape is broadcast: this raises CheckpointError, which names the tensor.
    """

    def __init__(self, path: StrPath, transposed: Collection[str] = ()) -> None:
        """The quantised weights in `transposed` have the columns first in the model. Raises
        UnsupportedError for formats that are not read."""
        path = path_of(path, "weights")
        self._reader: CheckpointReader | None = None
        ours = checkpoint_at(path)
        if ours is None:
            self._tensors = _tensors_of(path, transposed)
            return
        folder, part = ours
        self._reader = CheckpointReader(folder)
        found = checked_tensors(self._reader, part)
        self._tensors = {name: LazyTensor(stored) for name, stored in found.items()}

    def close(self) -> None:
        """Release the files: a checkpoint may be removed again."""
        if self._reader is not None:
            self._reader.close()

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def check_names(self, model: nn.Module, others: Collection[str] = ()) -> None:
        """Raise CheckpointError, which names them, if parameters of the model are in no file. Warn
        about tensors that are neither the model's nor, by the prefixes of their names, those of
        `others`."""
        names: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
        known = {name for tied in names.values() for name in tied}
        for prefix, module in model.named_modules(
            remove_duplicate=False
        ):  # also those that are None
            known |= {f"{prefix}.{name}" if prefix else name for name in module._buffers}
        unknown = [
            name for name in self._tensors
            if name not in known and not name.startswith(tuple(others))
        ]  # fmt: skip
        missing = [tied[0] for tied in names.values() if not self._tensors.keys() & tied]
        if missing:
            theirs = f", which have {_few(unknown)}" if unknown else ""
            raise CheckpointError(
                f"weights: no tensor {_few(missing)} in the files{theirs} ({len(missing)} of "
                f"{len(names)} parameters); names have to be the model's own, or those that "
                "offload.open_pretrained renames"
            )
        if unknown:
            _log.warning(
                "weights: %d tensors of the files are not the model's, and unused (%s)",
                len(unknown), _few(unknown),
            )  # fmt: skip

    def tensor(self, spec: ParamSpec) -> LazyTensor:
        """Return the tensor of a parameter. Raises CheckpointError if it is in no file."""
        for name in spec.names:
            if name in self._tensors:
                return self._tensors[name]
        raise CheckpointError(f"weights: no tensor {' or '.join(spec.names)} in the files")

    def get_as(self, name: str, like: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor of the shape and dtype of `like`; None if it is not in the files."""
        found = self._tensors.get(name)
        if found is None:
            return None
        check_shape(name, tuple(found.shape), tuple(like.shape))
        tensor = found.value()
        if tensor.dtype == like.dtype:
            return tensor
        if tensor.is_floating_point() and like.is_floating_point():
            check_range(name, tensor, like.dtype)
            return tensor.to(like.dtype)
        return _exactly(name, tensor, like.dtype)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _exactly(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert to other numbers. Raises CheckpointError unless each value stays what it is."""
    if not tensor.is_complex():
        converted = tensor.to(dtype)
        if torch.equal(converted.to(tensor.dtype), tensor) and torch.equal(
            *(each.to(torch.complex128) for each in (converted, tensor))
        ):
            return converted
    raise CheckpointError(
        f"weights: {name} is {tensor.dtype} in the files and {dtype} in the model, which cannot "
        "hold the same values; convert it first"
    )


def _tensors_of(path: Path, transposed: Collection[str]) -> dict[str, LazyTensor]:
    if path.is_file():
        return lazy_tensors([path], None, transposed)
    names = sorted(file.name for file in path.glob("*.safetensors") if file.is_file())
    if not names:
        raise ConfigError(f"weights: {path} is no safetensors file and no folder with any")
    return lazy_tensors([own_file(path, name) for name in names], settings_in(path), transposed)
