"""The tensors of a transformers model as its files have them, from a stream of its weights.

transformers converts a model's tensors to the hub's format with torch (`revert_weight_conversion`).
Each tensor is converted by itself: first without values, which says what becomes of it. One that is
the same in both is written as its pieces come; one that becomes others (the packed experts of a
layer) is converted again, with values, once all its elements are there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from offload.checkpoint.foreign.weight_shards import Write
from offload.integrations.model_tensors import ModelTensors, raw_bytes

_log = logging.getLogger("offload")


class ModelInHubFormat:
    """The tensors to save of a transformers model: its own, each from where it is. `tensors` has
    them by name on the meta device, `owners` are the tiers that some of them are in."""

    def __init__(self, model: PreTrainedModel, *, hub_format: bool = True) -> None:
        """Without `hub_format` tensors stay as they are, and so do those of a model several of
        whose tensors are one in files; a warning says so. Raise UnsupportedError for an entry of
        the state dict that is not a tensor."""
        self._model = model
        self._own = ModelTensors(model, model._keys_to_ignore_on_save or ())
        self.owners = self._own.owners
        self._described = remove_tied_weights_from_state_dict(self._own.tensors, model)
        self.dtype = next(t.dtype for t in self._described.values() if t.is_floating_point())
        self.tensors: Mapping[str, Tensor] = self._described
        # in files, of tensors that are the same there
        self.names = {name: name for name in self._described}
        self.experts: dict[str, str] = {}  # packed parameters by their matrices' names in files
        self._raw: dict[str, tuple[Tensor, int]] = {}  # bytes, and how many have come
        if hub_format:
            self._convert()

    def _convert(self) -> None:
        """Find out what becomes of each tensor."""
        tensors = revert_weight_conversion(self._model, dict(self._described))
        names: dict[str, str] = {}
        experts: dict[str, str] = {}
        for name, own in self._described.items():
            for target, made in revert_weight_conversion(self._model, {name: own}).items():
                if target not in tensors or tensors[target].shape != made.shape:
                    _log.warning(
                        "tensors keep the names and shapes that they have in memory, which "
                        "from_pretrained opens as well: %s of files is %s and others",
                        target, name,
                    )  # fmt: skip
                    return
                if made is own:
                    names[name] = target
                elif own.ndim == 3 and made.ndim == 2 and target.endswith(".weight"):
                    experts[target] = name
        self.tensors, self.names, self.experts = tensors, names, experts

    def write(self, write: Write) -> None:
        """Write every tensor's bytes, in any order of tensors. With several ranks, the one that
        writes calls it; `stream_weights` describes the others' part."""

        def take(name: str, elements: range, raw: Tensor) -> None:
            if name in self.names:
                write(self.names[name], raw)
                return
            tensor, itemsize = self._described[name], self._described[name].itemsize
            if name not in self._raw:
                self._raw[name] = torch.empty(tensor.nbytes, dtype=torch.uint8), 0
            whole, there = self._raw[name]
            whole[elements.start * itemsize : elements.stop * itemsize] = raw
            self._raw[name] = whole, there + raw.numel()
            if there + raw.numel() == tensor.nbytes:
                del self._raw[name]
                value = whole.view(tensor.dtype).view(tensor.shape)
                for target, each in revert_weight_conversion(self._model, {name: value}).items():
                    write(target, raw_bytes(each))

        self._own.stream(self._described.keys(), take)
