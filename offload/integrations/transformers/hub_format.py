"""The tensors of a transformers model as its files have them, from a stream of its weights.

transformers converts a model's tensors to the hub's format with torch (`revert_weight_conversion`).
It converts tensors without values here, which record what they are made of. A tensor that is the
same in both is written as its pieces come; others are converted again, with values, once all that
they are made of is there: the packed experts of a layer, or two projections that are fused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from offload.checkpoint.foreign.weight_shards import Write
from offload.integrations.model_tensors import ModelTensors, raw_bytes
from offload.tiers.errors import UnsupportedError

Described = Mapping[str, tuple[Iterable[int], torch.dtype]]  # a state dict: shapes, dtypes


class HubFormat:
    """A model's tensors in the format of the hub: `tensors` has them by name on the meta device, in
    transformers' order, and of one storage where they are with values."""

    def __init__(self, model: PreTrainedModel, own: Described, *, hub_format: bool = True) -> None:
        """`own` are the model's tensors, each tied one once. Without `hub_format` they stay as they
        are. Raise UnsupportedError for a conversion that cannot be followed."""
        self._model = model
        described = {name: _Valueless.like(name, *each) for name, each in own.items()}
        self.tensors: dict[str, Tensor] = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in described.items()
        }
        found: dict[str, Tensor] = {**described}
        if hub_format:
            self.tensors = revert_weight_conversion(model, self.tensors)
            found = revert_weight_conversion(model, found)
        self.names: dict[str, str] = {}  # in files, of tensors that are the same there
        self._conversions: dict[str, _Conversion] = {}  # by each of their sources
        for made in _conversions(described, found):
            if made.is_identity(found):
                self.names[made.sources[0]] = made.targets[0]
            else:
                self._conversions |= dict.fromkeys(made.sources, made)

    @property
    def experts(self) -> dict[str, str]:
        """The packed parameter of each matrix of a single expert, by the matrix's name in files."""
        return {
            target: name for name, made in self._conversions.items() for target in made.targets
            if made.described[name].ndim == 3 and self.tensors[target].ndim == 2
            and target.endswith(".weight")
        }  # fmt: skip

    def take(self, name: str, elements: range, raw: Tensor, write: Write) -> None:
        """Take some elements of a tensor of the model, and their bytes (1D uint8); write the
        elements of files that they become, each tensor from its first element to its last. Tensors
        come in any order."""
        if name in self.names:
            write(self.names[name], raw)
            return
        made = self._conversions[name]
        if made.take(name, elements, raw):
            converted = revert_weight_conversion(self._model, made.values())
            for target in made.targets:
                write(target, raw_bytes(converted.pop(target)))


class ModelInHubFormat:
    """The tensors to save of a transformers model: its own, each from where it is. `tensors` has
    them by name on the meta device, `owners` are the tiers that some of them are in."""

    def __init__(self, model: PreTrainedModel, *, hub_format: bool = True) -> None:
        """Raise UnsupportedError for an entry of the state dict that is not a tensor."""
        self._model = ModelTensors(model, model._keys_to_ignore_on_save or ())
        self.owners = self._model.owners
        described = remove_tied_weights_from_state_dict(self._model.tensors, model)
        own = {name: (tensor.shape, tensor.dtype) for name, tensor in described.items()}
        self._own = own.keys()
        self.dtype = next(t.dtype for t in described.values() if t.is_floating_point())
        self._format = HubFormat(model, own, hub_format=hub_format)
        self.tensors = self._format.tensors

    @property
    def names(self) -> dict[str, str]:
        return self._format.names

    @property
    def experts(self) -> dict[str, str]:
        return self._format.experts

    def write(self, write: Write) -> None:
        """Write every tensor's bytes, in any order of tensors. With several ranks, the one that
        writes calls it; `stream_weights` describes the others' part."""

        def take(name: str, elements: range, raw: Tensor) -> None:
            self._format.take(name, elements, raw, write)

        self._model.stream(self._own, take)


class _Valueless(Tensor):
    """A tensor on the meta device that records its sources."""

    sources: frozenset[str]

    @staticmethod
    def like(name: str, shape: Iterable[int], dtype: torch.dtype) -> _Valueless:
        made = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(_Valueless)
        made.sources = frozenset({name})
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        used = [t for t in tree_leaves((args, kwargs)) if isinstance(t, _Valueless)]
        for each in tree_leaves(result):
            if isinstance(each, _Valueless):
                each.sources = frozenset[str]().union(*(t.sources for t in used))
        return result


class _Conversion:
    """Tensors of files that are made of the same tensors of the model."""

    def __init__(self, described: Mapping[str, _Valueless], targets: list[str]) -> None:
        self.described = described
        self.targets = targets
        self._missing = {name: tensor.numel() for name, tensor in described.items()}
        self._raw: dict[str, Tensor] = {}

    @property
    def sources(self) -> list[str]:
        return list(self.described)

    def is_identity(self, found: Mapping[str, Tensor]) -> bool:
        """Whether one tensor becomes one that is the same."""
        if len(self.sources) != 1 or len(self.targets) != 1:
            return False
        own, made = self.described[self.sources[0]], found[self.targets[0]]
        with torch._C.DisableTorchFunctionSubclass():
            is_shared = own.untyped_storage()._cdata == made.untyped_storage()._cdata
            return is_shared and (own.shape, own.stride()) == (made.shape, made.stride())

    def take(self, name: str, elements: range, raw: Tensor) -> bool:
        """Take some of a tensor's elements, and their bytes; return True when all have come."""
        tensor = self.described[name]
        itemsize = tensor.dtype.itemsize
        if name not in self._raw:
            self._raw[name] = torch.empty(tensor.numel() * itemsize, dtype=torch.uint8)
        self._raw[name][elements.start * itemsize : elements.stop * itemsize] = raw
        self._missing[name] -= len(elements)
        return not any(self._missing.values())

    def values(self) -> dict[str, Tensor]:
        """Return the model's tensors, which are released here."""
        taken, self._raw = self._raw, {}
        return {
            name: taken[name].view(tensor.dtype).view(tuple(tensor.shape))
            for name, tensor in self.described.items()
        }


def _conversions(
    described: Mapping[str, _Valueless], found: Mapping[str, Tensor]
) -> Iterator[_Conversion]:
    """Yield the conversions of a model: no two have a source in common."""
    joint: dict[str, tuple[set[str], list[str]]] = {}  # by each source: all sources, and targets
    for target, tensor in found.items():
        sources, targets = set(getattr(tensor, "sources", ())), [target]
        if not sources:
            raise UnsupportedError(
                f"transformers converts {type(tensor).__name__} {target} in a way that cannot be "
                "followed; use save_pretrained(..., save_original_format=False)"
            )
        for others, theirs in {id(joint[n]): joint[n] for n in sources & joint.keys()}.values():
            sources |= others
            targets = theirs + targets
        joint |= dict.fromkeys(sources, (sources, targets))
    for sources, targets in {id(each): each for each in joint.values()}.values():
        yield _Conversion({n: t for n, t in described.items() if n in sources}, targets)
