"""Weights on their way into a folder: pruned, or in codes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from offload import machine
from offload.integrations.pruning import Pruning
from offload.integrations.weight_files import Tensors, Write
from offload.kernels.weight_formats import Code, WeightFormat
from offload.quantised.reading import transposed_weights
from offload.quantised.writing import described, encoded, settings
from offload.tiers.errors import ConfigError
from offload.zero.storage import HEAD, is_named

_log = logging.getLogger("offload")


@dataclass(frozen=True)
class Change:
    """What becomes of the weights of linear layers, but those that `skip` names."""

    pruning: Pruning | None = None
    weights: WeightFormat | None = None
    skip: Sequence[str] | None = None  # None: HEAD, where there is one

    @staticmethod
    def of(
        prune: str | None, storage: str | None, group_size: int, skip: Sequence[str] | None
    ) -> Change:
        """ConfigError for what there is not."""
        weights = None
        if storage is not None:
            names = [code.name.lower() for code in Code]
            if storage not in names:
                raise ConfigError(f"storage: expected one of {', '.join(names)}, got {storage!r}")
            try:
                weights = WeightFormat(Code[storage.upper()], group_size)
            except ValueError as error:
                raise ConfigError(str(error)) from None
        return Change(None if prune is None else Pruning(prune), weights, skip)


class NamedTensors(Tensors, Protocol):
    """What is written of a model."""

    @property
    def names(self) -> Mapping[str, str]:
        """By the model's names those in files, of tensors that are the same in both."""


class ChangedWeights:
    """`saved`, changed. One tensor is in memory at a time, of experts those that come together."""

    def __init__(self, saved: NamedTensors, model: nn.Module, change: Change) -> None:
        """ConfigError for a weight that cannot be changed so; where nothing would be."""
        self._saved = saved
        self._change = change
        own_transposed = transposed_weights(model)
        self._transposed = {saved.names.get(name, name) for name in own_transposed}
        chosen, self._unchanged = _chosen(saved, model, change, own_transposed)
        self._modules = [name.removesuffix(".weight") for name in chosen]
        self._names = {saved.names[name] for name in chosen}  # in files
        self._raw: dict[str, tuple[Tensor, int]] = {}  # bytes, and how many have come
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in saved.tensors.items():
            if name in self._names and change.pruning is not None:
                change.pruning.check(name, tuple(self._as_linear(name, tensor).shape))
            if name in self._names and change.weights is not None:
                parts = described(name, tensor, change.weights)
                self.tensors |= {_part(name, end): part for end, part in parts.items()}
            else:
                self.tensors[name] = tensor

    def config(self) -> Mapping[str, Any]:
        """What config.json says of it."""
        weights = self._change.weights
        if weights is None:
            return {}
        dtype = next(self._saved.tensors[name].dtype for name in self._names)
        others = dict.fromkeys(self._unchanged)
        for name in self._unchanged:
            file = self._saved.names.get(f"{name}.weight", f"{name}.weight")
            others[file.removesuffix(".weight")] = None
        return {"quantization_config": settings(weights, self._modules, list(others), dtype)}

    def write(self, write: Write) -> None:
        self._saved.write(partial(self._take, write))

    def _take(self, write: Write, name: str, raw: Tensor) -> None:
        if name not in self._names:
            write(name, raw)
            return
        like = self._saved.tensors[name]
        if name not in self._raw:
            self._raw[name] = torch.empty(like.nbytes, dtype=torch.uint8), 0
        whole, there = self._raw[name]
        whole[there : there + raw.numel()] = raw
        self._raw[name] = whole, there + raw.numel()
        if there + raw.numel() < like.nbytes:
            return
        del self._raw[name]
        tensor = whole.view(like.dtype).view(like.shape)
        if self._change.pruning is not None:
            self._change.pruning.apply(self._as_linear(name, tensor))
        if self._change.weights is None:
            write(name, tensor.view(-1).view(torch.uint8))
            return
        for end, part in encoded(name, tensor, self._change.weights).items():
            write(_part(name, end), part.contiguous().view(-1).view(torch.uint8))
        machine.trim_memory()  # else what was freed of each tensor adds up

    def _as_linear(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.t() if name in self._transposed else tensor


def _part(name: str, end: str) -> str:
    return f"{name.removesuffix('.weight')}.{end}"


def _chosen(
    saved: NamedTensors, model: nn.Module, change: Change, transposed: Collection[str]
) -> tuple[set[str], list[str]]:
    """Of the model: names of the weights to be changed, and of the linear layers that are not."""
    skip = (HEAD,) if change.skip is None else change.skip
    for pattern in change.skip or ():
        if not any(is_named(name, pattern) for name, _ in model.named_parameters()):
            raise ConfigError(
                f"skip: {pattern!r:.60} names no module and no parameter of {type(model).__name__}"
            )
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    shared = {*tied, *tied.values()}
    chosen, others = set(), []
    for name, module in model.named_modules():
        weight = f"{name}.weight"
        linear = type(module) is nn.Linear
        if not linear and weight not in transposed:
            continue
        # what files have in another shape (fused, experts) stays as it is
        may = weight in saved.names and (linear or change.weights is None)
        if may and weight not in shared and not any(is_named(weight, each) for each in skip):
            chosen.add(weight)
        elif linear:
            others.append(name)
    if not chosen:
        raise ConfigError(
            f"no weight of {type(model).__name__} is left to be changed: its linear layers are "
            f"skipped ({', '.join(skip)}), or its files have them fused"
        )
    files = {saved.names[name] for name in chosen}
    experts = [
        name for name, tensor in saved.tensors.items()
        if ".experts." in name and tensor.ndim > 1 and name not in files
    ]  # fmt: skip
    if experts:
        _log.warning(
            "%d tensors of experts stay as they are (%s, ...): transformers computes with packed "
            "ones, which are no linear layers", len(experts), experts[0],
        )  # fmt: skip
    return chosen, others
