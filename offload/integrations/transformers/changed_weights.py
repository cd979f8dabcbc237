"""The weights of a model as they are written into a folder, in codes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offload.checkpoint.foreign.weight_shards import Write
from offload.process import machine
from offload.quantised.writing import Target, configuration, described, encoded
from offload.tiers.errors import ConfigError
from offload.zero.groups.storage import HEAD, is_named

if TYPE_CHECKING:
    from offload.integrations.transformers.hub_format import ModelInHubFormat

_log = logging.getLogger("offload")


@dataclass(frozen=True)
class Change:
    """Selects the weights to encode: those of linear layers and experts, except in `skip`."""

    target: Target
    skip: Sequence[str] | None = None  # None: HEAD, where there is one

    def skips(self, name: str) -> bool:
        """Whether a parameter stays as it is."""
        skip = (HEAD,) if self.skip is None else self.skip
        return any(is_named(name, each) for each in skip)


class ChangedWeights:
    """The tensors of `saved`, in codes. One tensor is in memory at a time; experts that are stored
    together are, too."""

    def __init__(self, saved: ModelInHubFormat, model: nn.Module, change: Change) -> None:
        """Raise ConfigError for a weight that cannot be encoded so, or if there is none to
        encode."""
        self._saved = saved
        self._change = change
        linear, self._unchanged = _linear_layers(saved, model, change)
        self._modules = [name.removesuffix(".weight") for name in linear]
        self._experts = _experts(saved, change)
        self._names = {saved.names[name] for name in linear} | self._experts  # in files
        _check(saved, model, change, self._names)
        self._raw: dict[str, tuple[Tensor, int]] = {}  # bytes, and how many have come
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in saved.tensors.items():
            if name in self._names:
                parts = described(name, tensor, change.target, expert=name in self._experts)
                self.tensors |= {_part(name, end): part for end, part in parts.items()}
            else:
                self.tensors[name] = tensor

    def config(self) -> Mapping[str, Any]:
        """Return the entries of config.json that describe the codes."""
        dtype = next(self._saved.tensors[name].dtype for name in self._names)
        others = dict.fromkeys(self._unchanged)
        for name in self._unchanged:
            file = self._saved.names.get(f"{name}.weight", f"{name}.weight")
            others[file.removesuffix(".weight")] = None
        said = configuration(
            self._change.target, self._modules, list(others), dtype, experts=bool(self._experts)
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
        made = encoded(name, tensor, self._change.target, expert=name in self._experts)
        for end, part in made.items():
            write(_part(name, end), part.contiguous().view(-1).view(torch.uint8))
        machine.trim_memory()  # else freed memory of each tensor adds up


def _part(name: str, end: str) -> str:
    return f"{name.removesuffix('.weight')}.{end}"


def _linear_layers(
    saved: ModelInHubFormat, model: nn.Module, change: Change
) -> tuple[list[str], list[str]]:
    """Return the model's names of the weights to encode, and of the other linear layers."""
    for pattern in change.skip or ():
        if not any(is_named(name, pattern) for name, _ in model.named_parameters()):
            raise ConfigError(
                f"skip: {pattern!r:.60} names no module and no parameter of {type(model).__name__}"
            )
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    shared = {*tied, *tied.values()}
    chosen, others = [], []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        weight = f"{name}.weight"
        # weights in another shape in files (fused) stay as they are
        may = weight in saved.names and type(module) is nn.Linear
        if may and weight not in shared and not change.skips(weight):
            chosen.append(weight)
        else:  # libraries take subclasses (routers) for linear layers
            others.append(name)
    return chosen, others


def _experts(saved: ModelInHubFormat, change: Change) -> set[str]:
    """Return the names in files of the experts' matrices to encode."""
    if not change.target.holds_experts:
        return set()
    for packed in saved.experts.values():
        if change.skips(packed):
            raise ConfigError(
                f"{packed} is skipped, and transformers looks for codes of all experts in a folder "
                "of compressed-tensors, and for nothing else: skip no experts, or write nf4"
            )
    return set(saved.experts)


def _check(
    saved: ModelInHubFormat, model: nn.Module, change: Change, chosen: Collection[str]
) -> None:
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
