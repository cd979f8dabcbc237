"""Weights on their way into a folder: pruned, or in codes."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from offload import machine
from offload.integrations.pruning import Pruning
from offload.integrations.weight_files import Tensors, Write
from offload.quantised.reading import transposed_weights
from offload.quantised.writing import Target, configuration, described, encoded
from offload.tiers.errors import ConfigError
from offload.zero.storage import HEAD, is_named

_log = logging.getLogger("offload")
_NUMBER = re.compile(r"\.\d+\.")
_EXPERT = re.compile(r"\.\d+\.[^.]+\.weight$")


@dataclass(frozen=True)
class Change:
    """What becomes of the weights of linear layers and experts, but those that `skip` names."""

    pruning: Pruning | None = None
    target: Target | None = None
    skip: Sequence[str] | None = None  # None: HEAD, where there is one

    @staticmethod
    def of(
        prune: str | None, storage: str | None, group_size: int, skip: Sequence[str] | None,
        library: str | None = None,
    ) -> Change:  # fmt: skip
        """ConfigError for what there is not."""
        if storage is None and library is not None:
            raise ConfigError(
                f"format: {library!r:.40} has codes: say which by storage (int4, ...)"
            )
        target = None if storage is None else Target.of(storage, group_size, library)
        return Change(None if prune is None else Pruning(prune), target, skip)

    def skips(self, name: str) -> bool:
        """Whether a parameter stays as it is."""
        skip = (HEAD,) if self.skip is None else self.skip
        return any(is_named(name, each) for each in skip)


class NamedTensors(Tensors, Protocol):
    """What is written of a model."""

    @property
    def names(self) -> Mapping[str, str]:
        """By the model's names those in files, of tensors that are the same in both."""

    @property
    def experts(self) -> Mapping[str, str]:
        """Matrices of single experts, by their names in files: the packed parameter of each."""


class ChangedWeights:
    """`saved`, changed. One tensor is in memory at a time, of experts those that come together."""

    def __init__(self, saved: NamedTensors, model: nn.Module, change: Change) -> None:
        """ConfigError for a weight that cannot be changed so; where nothing would be."""
        self._saved = saved
        self._change = change
        own_transposed = transposed_weights(model)
        self._transposed = {saved.names.get(name, name) for name in own_transposed}
        linear, self._unchanged = _linear_layers(saved, model, change, own_transposed)
        self._modules = [name.removesuffix(".weight") for name in linear]
        self._experts, left = _experts(saved, change)
        self._unchanged += left
        self._names = {saved.names[name] for name in linear} | self._experts  # in files
        _check(saved, model, change, self._names)
        if change.target is not None and change.target.of_blocks_alone:
            _check_blocks(self._modules, model, change.target.library)
        self._raw: dict[str, tuple[Tensor, int]] = {}  # bytes, and how many have come
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in saved.tensors.items():
            if name in self._names and change.pruning is not None:
                change.pruning.check(name, tuple(self._as_linear(name, tensor).shape))
            if name in self._names and change.target is not None:
                parts = described(name, tensor, change.target, expert=name in self._experts)
                self.tensors |= {_part(name, end): part for end, part in parts.items()}
            else:
                self.tensors[name] = tensor

    def config(self) -> Mapping[str, Any]:
        """What config.json says of it."""
        target = self._change.target
        if target is None:
            return {}
        dtype = next(self._saved.tensors[name].dtype for name in self._names)
        others = dict.fromkeys(self._unchanged)
        for name in self._unchanged:
            file = self._saved.names.get(f"{name}.weight", f"{name}.weight")
            others[file.removesuffix(".weight")] = None
        said = configuration(
            target, self._modules, list(others), dtype, experts=bool(self._experts)
        )
        return {"quantization_config": said}

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
        if self._change.target is None:
            write(name, tensor.view(-1).view(torch.uint8))
            return
        made = encoded(name, tensor, self._change.target, expert=name in self._experts)
        for end, part in made.items():
            write(_part(name, end), part.contiguous().view(-1).view(torch.uint8))
        machine.trim_memory()  # else what was freed of each tensor adds up

    def _as_linear(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.t() if name in self._transposed else tensor


def _part(name: str, end: str) -> str:
    return f"{name.removesuffix('.weight')}.{end}"


def _linear_layers(
    saved: NamedTensors, model: nn.Module, change: Change, transposed: Collection[str]
) -> tuple[list[str], list[str]]:
    """Of the model: names of the weights to be changed, and of the linear layers that are not."""
    for pattern in change.skip or ():
        if not any(is_named(name, pattern) for name, _ in model.named_parameters()):
            raise ConfigError(
                f"skip: {pattern!r:.60} names no module and no parameter of {type(model).__name__}"
            )
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    shared = {*tied, *tied.values()}
    chosen, others = [], []
    for name, module in model.named_modules():
        weight = f"{name}.weight"
        linear = type(module) is nn.Linear
        if not isinstance(module, nn.Linear) and weight not in transposed:
            continue
        # what files have in another shape (fused) stays as it is
        may = weight in saved.names and (linear or change.target is None)
        if may and weight not in shared and not change.skips(weight):
            chosen.append(weight)
        elif isinstance(module, nn.Linear):  # libraries take subclasses (routers) for linear layers
            others.append(name)
    return chosen, others


def _experts(saved: NamedTensors, change: Change) -> tuple[set[str], list[str]]:
    """In files: names of the experts' matrices to be changed, and of modules of experts that are
    not."""
    if change.target is not None and not change.target.holds_experts:
        return set(), []
    chosen, left = set(), {}
    for name, packed in saved.experts.items():
        if change.skips(packed):
            left[_EXPERT.sub("", name)] = packed
        else:
            chosen.add(name)
    if left and change.target is not None and change.target.library == "compressed-tensors":
        raise ConfigError(
            f"{next(iter(left.values()))} is skipped, and transformers looks for codes of all "
            "experts in a folder of compressed-tensors, and for nothing else: skip no experts, or "
            "write another format (nf4, or int4 for gptq or awq)"
        )
    return chosen, list(left)


def _check(saved: NamedTensors, model: nn.Module, change: Change, chosen: Collection[str]) -> None:
    if not chosen:
        skip = (HEAD,) if change.skip is None else change.skip
        raise ConfigError(
            f"no weight of {type(model).__name__} is left to be changed: its linear layers are "
            f"skipped ({', '.join(skip)}), or its files have them fused"
        )
    left = [
        name for name, tensor in saved.tensors.items()
        if ".experts." in name and tensor.ndim > 1 and name not in chosen
    ]  # fmt: skip
    if left:
        _log.warning(
            "%d tensors of experts stay as they are (%s, ...): they are skipped, files have them "
            "fused, or it is bitsandbytes, which knows linear layers alone", len(left), left[0],
        )  # fmt: skip
    elif saved.experts and change.target is not None and change.target.of_blocks_alone:
        _log.warning(
            "%d matrices of experts are in codes of %s, for offload and what computes with experts "
            "one by one; transformers itself does not read them (it would initialise them anew): "
            "for it, skip the experts",
            len(saved.experts), change.target.library,
        )  # fmt: skip


def _check_blocks(modules: Sequence[str], model: nn.Module, library: str) -> None:
    """ConfigError for linear layers in which the format's libraries look for no codes."""
    blocks = dict.fromkeys(_NUMBER.split(name, maxsplit=1)[0] for name in modules)
    outside = [name for name in modules if not _NUMBER.search(name)]
    if outside or len(blocks) > 1:
        named = outside or [next(n for n in modules if n.startswith(f"{b}.")) for b in blocks]
        raise ConfigError(
            f"{library} has codes for one list of blocks alone, and {', '.join(named[:4])} would "
            f"be chosen of {type(model).__name__}; skip what is outside of its blocks"
        )
    last = [name for name, _ in model.named_parameters()][-1].removesuffix(".weight")
    if library == "awq" and last in modules:
        raise ConfigError(f"{last}: of awq, transformers never reads a model's last layer; skip it")
