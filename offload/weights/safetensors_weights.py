"""Weights of `weights=`: safetensors files whose tensors have the names of the model's."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn

from offload.checkpoint.foreign.model_files import own_file
from offload.checkpoint.format.reader import CheckpointReader
from offload.config.paths import StrPath, path_of
from offload.display.words import some_of
from offload.quantized.reading import settings_in, transposed_weights
from offload.tiers.errors import CheckpointError, ConfigError, UnsupportedError
from offload.weights.lazy_tensors import LazyTensor, LazyWeights, checked_tensors, lazy_tensors
from offload.weights.materialise import refuse_attributes
from offload.weights.spread_experts import SpreadExperts
from offload.weights.tensor_file import check_range, check_shape, is_checkpoint
from offload.zero.groups.parameter_grouping import managed
from offload.zero.tensors.local_tensors import is_dtensor

_log = logging.getLogger("offload")


@contextmanager
def first_weights(
    model: nn.Module, weights: StrPath | None, only: torch.dtype | None = None
) -> Iterator[LazyWeights]:
    """Provide the lazy weights of a model, and those of `weights`, if given: a safetensors file,
    all files of a folder, or an engine's checkpoint, which is compared with its hashes. Quantized
    ones, if config.json says so, have their values. Buffers, and parameters that stay in the model,
    are read now.

    Rounding to a model's precision may lose bits; no value becomes infinite, no kind of number
    becomes another, and no shape is broadcast: this raises CheckpointError, which names the tensor.
    Raises UnsupportedError for formats that are not read.
    """
    with LazyWeights(model, only) as lazy, ExitStack() as files:
        if weights is not None:
            if any(is_dtensor(param) for param in model.parameters()):
                raise UnsupportedError(
                    "weights= cannot fill a model whose parameters are DTensors; load them before "
                    "parallelize_module, or with torch.distributed.checkpoint after "
                    "offload.initialize"
                )
            refuse_attributes(model)
            _fill(model, lazy, _tensors_of(model, path_of(weights, "weights"), files), only)
        yield lazy


def _tensors_of(model: nn.Module, path: Path, files: ExitStack) -> dict[str, LazyTensor]:
    """Return tensors, some of them until `files` are closed."""
    if is_checkpoint(path):
        return checked_tensors(files.enter_context(CheckpointReader(path)))
    transposed = transposed_weights(model)
    if path.is_file():
        return lazy_tensors([path], None, transposed)
    names = sorted(file.name for file in path.glob("*.safetensors") if file.is_file())
    if not names:
        raise ConfigError(f"weights: {path} is no safetensors file and no folder with any")
    return lazy_tensors([own_file(path, name) for name in names], settings_in(path), transposed)


def _fill(
    model: nn.Module, lazy: LazyWeights, tensors: Mapping[str, LazyTensor], only: torch.dtype | None
) -> None:
    """Let the model have these tensors. Raises CheckpointError, which names them, if parameters are
    not among them; warns of buffers that are not, and of tensors that the model lacks."""
    tied: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(param), []).append(name)
    names = {each: name for each, own in tied.items() for name in reversed(own) if name in tensors}
    buffers = {name: buffer for name, buffer in _saved_buffers(model) if name in tensors}
    known = {*buffers, *(name for own in tied.values() for name in own)}
    unknown = [name for name in tensors if name not in known]
    missing = [own[0] for each, own in tied.items() if each not in names]
    if missing:
        theirs = f", which have {some_of(unknown)}" if unknown else ""
        raise CheckpointError(
            f"weights: no tensor {some_of(missing)} in the files{theirs} ({len(missing)} of "
            f"{len(tied)} parameters); names have to be the model's own, or those that "
            "offload.open_pretrained renames"
        )
    for param in model.parameters():
        name = names[id(param)]
        if managed(param, only):
            lazy.give(param, tensors[name])
        else:
            _set(name, param, tensors[name])
    for name, buffer in buffers.items():
        _set(name, buffer, tensors[name])
    others = tuple(SpreadExperts(model).prefixes)  # of experts that other ranks have
    _say(
        "tensors of the files are not the model's, and unused",
        [name for name in unknown if not name.startswith(others)],
    )
    _say(
        "buffers are not in the files and stay as the model has them",
        [name for name, _ in _saved_buffers(model) if name not in buffers],
    )


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of a state dict, by name."""
    for prefix, module in model.named_modules():
        for own, buffer in module._buffers.items():
            if buffer is not None and own not in module._non_persistent_buffers_set:
                yield f"{prefix}.{own}" if prefix else own, buffer


@torch.no_grad()
def _set(name: str, tensor: torch.Tensor, stored: LazyTensor) -> None:
    """Read the values of a tensor that stays in the model, as the same object."""
    check_shape(name, tuple(stored.shape), tuple(tensor.shape))
    values = stored.value()
    if values.dtype is not tensor.dtype:
        if not (values.is_floating_point() and tensor.is_floating_point()):
            raise CheckpointError(
                f"weights: {name} is {values.dtype} in the files and {tensor.dtype} in the model; "
                "convert it first"
            )
        check_range(name, values, tensor.dtype)
    if not tensor.is_meta:
        tensor.copy_(values)
        return
    made = values.to(tensor.dtype).requires_grad_(tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, made)


def _say(what: str, names: Sequence[str]) -> None:
    if names:
        _log.warning("weights: %d %s (%s)", len(names), what, some_of(names))
