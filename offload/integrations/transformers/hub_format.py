"""The tensors of a transformers model as its files have them, cut out of a stream of its weights.

transformers converts a model's tensors to the hub's format with torch (`revert_weight_conversion`).
It converts tensors without values here. A result that is a view of one parameter (a chunk of fused
projections, one of stacked experts, a transposed matrix) gives the place of each element:

    gate_up_proj   ├─ gate 0 ─┼── up 0 ──┼─ gate 1 ─┼── up 1 ──┤        as its pieces come
                        │          │          │          └──► experts.1.w3.weight
                        │          │          └──► experts.1.w1.weight
                        │          └──► experts.0.w3.weight
                        └──► experts.0.w1.weight

A contiguous view is written as it comes, any other one once it is complete. A result that is not a
view of one parameter (two of them concatenated) is converted again, with values, once all are
there.
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

from offload.checkpoint.engine.weights import Take, stream_weights
from offload.checkpoint.foreign.weight_shards import Write
from offload.display.progress import progress
from offload.engine import Engine
from offload.taking_over import tiers_of
from offload.tiered_model import TieredModel
from offload.tiers.errors import UnsupportedError
from offload.weights.lazy_tensors import LazyTensor
from offload.zero.groups.layout import ParamSpec

_PIECE_NUMEL = 1 << 22
Described = Mapping[str, tuple[Iterable[int], torch.dtype]]  # a state dict: shapes, dtypes


class HubFormat:
    """A model's tensors in the format of the hub: `tensors` has them by name on the meta device, in
    transformers' order, and of one storage where they are with values."""

    def __init__(self, model: PreTrainedModel, own: Described, *, hub_format: bool = True) -> None:
        """`own` are the model's tensors, each tied one once. Without `hub_format` they stay as they
        are. Raise UnsupportedError for a conversion that cannot be followed."""
        self._model = model
        self._own = {name: torch.Size(shape) for name, (shape, _) in own.items()}
        described = {name: _Valueless.like(name, *each) for name, each in own.items()}
        self.tensors: dict[str, Tensor] = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in described.items()
        }
        found: dict[str, Tensor] = {**described}
        if hub_format:
            self.tensors = revert_weight_conversion(model, self.tensors)
            found = revert_weight_conversion(model, found)
        self._views, self._joint = _sort(described, found)

    @property
    def names(self) -> dict[str, str]:
        """Names in files by the model's names, for the tensors that are the same in both."""
        return {
            name: views[0].target for name, views in self._views.items()
            if len(views) == 1 and name not in self._joint and views[0].is_whole(self._own[name])
        }  # fmt: skip

    @property
    def experts(self) -> dict[str, str]:
        """The packed parameter of each matrix of a single expert, by the matrix's name in files."""
        joint = [(name, target) for name, each in self._joint.items() for target in each.targets]
        parts = [(name, view.target) for name, views in self._views.items() for view in views]
        return {
            target: name for name, target in (*parts, *joint)
            if len(self._own[name]) == 3 and self.tensors[target].ndim == 2
            and target.endswith(".weight")
        }  # fmt: skip

    def take(self, name: str, elements: range, raw: Tensor, write: Write) -> None:
        """Take some elements of a tensor of the model, and their bytes (1D uint8); write the
        elements of files that they become, each tensor from its first element to its last. Tensors
        come in any order."""
        for view in self._views.get(name, ()):
            view.take(elements, raw, write)
        joint = self._joint.get(name)
        if joint is not None and joint.take(name, elements, raw):
            converted = revert_weight_conversion(self._model, joint.values())
            for target in joint.targets:
                write(target, _bytes(converted[target]))


class ModelInHubFormat:
    """The tensors to save of a transformers model: its own, each from where it is. `tensors` has
    them by name on the meta device, `owners` are the tiers that some of them are in."""

    def __init__(self, model: PreTrainedModel, *, hub_format: bool = True) -> None:
        """Raise UnsupportedError for an entry of the state dict that is not a tensor."""
        self.owners = tiers_of(model)
        self._sources: dict[tuple[int, str], list[str]] = {}  # names, by owner and parameter
        self._others: dict[str, Tensor] = {}  # that are in no tier
        described = remove_tied_weights_from_state_dict(self._describe(model), model)
        self._others = {n: value for n, value in self._others.items() if n in described}
        own = {name: (tensor.shape, tensor.dtype) for name, tensor in described.items()}
        self.dtype = next(t.dtype for t in described.values() if t.is_floating_point())
        self._format = HubFormat(model, own, hub_format=hub_format)
        self.tensors = self._format.tensors

    @property
    def names(self) -> dict[str, str]:
        return self._format.names

    @property
    def experts(self) -> dict[str, str]:
        return self._format.experts

    def _describe(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return the model's state dict on the meta device."""
        ignored = model._keys_to_ignore_on_save or ()
        described = {}
        for name, value in model.state_dict(keep_vars=True).items():
            if name in ignored:
                continue
            if not isinstance(value, Tensor):
                raise UnsupportedError(
                    f"{name} is a {type(value).__name__}, which a safetensors file cannot hold; "
                    "pass save_pretrained a state_dict= without it"
                )
            described[name] = self._described(name, value)
        return described

    def _described(self, name: str, value: Tensor) -> Tensor:
        for number, owner in enumerate(self.owners):
            spec = owner.store.spec_of(value)
            if spec is not None:
                self._sources.setdefault((number, spec.name), []).append(name)
                return torch.empty(spec.shape, dtype=owner.store.dtype, device="meta")
        self._others[name] = value
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    def write(self, write: Write) -> None:
        """Write every tensor's bytes, in any order of tensors. With several ranks, the one that
        writes calls it; `stream_weights` describes the others' part."""
        for number, owner in enumerate(self.owners):

            def take(spec: ParamSpec, elements: range, raw: Tensor, number: int = number) -> None:
                for name in self._sources.get((number, spec.name), ()):
                    self._format.take(name, elements, raw, write)

            if isinstance(owner, Engine):
                stream_weights(owner, take)
            else:
                _stream_dispatched(owner, take)
        nbytes = sum(tensor.nbytes for tensor in self._others.values())
        with progress("saving weights", nbytes) as came:
            for name, tensor in self._others.items():
                first = 0
                for piece in _pieces_of(tensor):
                    elements = range(first, first + piece.numel())
                    self._format.take(name, elements, _bytes(piece), write)
                    came(piece.nbytes)
                    first = elements.stop


def _stream_dispatched(owner: TieredModel, take: Take) -> None:
    """As `stream_weights`, of a dispatched model: one group at a time."""
    store = owner.store
    with progress("saving weights", sum(group.state.nbytes for group in store.groups)) as came:
        for group in store.groups:
            with owner.gathered(*group.params):
                for param in group.params:
                    spec, first = store.whole_of(param)
                    values = param.detach().cpu()
                    take(spec, range(first, first + values.numel()), _bytes(values))
            came(group.state.nbytes)


def _pieces_of(tensor: Tensor) -> Iterator[Tensor]:
    if isinstance(tensor, LazyTensor):
        yield from tensor.pieces(_PIECE_NUMEL)
    else:
        yield tensor.detach().cpu()


class _Valueless(Tensor):
    """A tensor on the meta device that records its sources, and stays a view if a contiguous copy
    of it is requested."""

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
        if func is Tensor.contiguous:
            return args[0]
        result = super().__torch_function__(func, types, args, kwargs)
        used = [t for t in tree_leaves((args, kwargs)) if isinstance(t, _Valueless)]
        for each in tree_leaves(result):
            if isinstance(each, _Valueless):
                each.sources = frozenset[str]().union(*(t.sources for t in used))
        return result


class _View:
    """A tensor to be saved that is a view of one parameter."""

    def __init__(self, target: str, tensor: Tensor) -> None:
        self.target = target
        self._size, self._stride, self._dtype = tensor.size(), tensor.stride(), tensor.dtype
        self._contiguous = tensor.is_contiguous()
        first = int(tensor.storage_offset())
        pairs = zip(self._size, self._stride, strict=True)
        last = first + sum((count - 1) * step for count, step in pairs)
        self._span = range(first, last + 1) if tensor.numel() else range(0)
        self._missing = len(self._span)
        self._gathered: Tensor | None = None  # the bytes of the span, while they come

    def is_whole(self, shape: torch.Size) -> bool:
        """Whether the view is the whole parameter, of this shape, unchanged."""
        return self._contiguous and self._size == shape and self._span.start == 0

    def take(self, elements: range, raw: Tensor, write: Write) -> None:
        """Take some of the parameter's elements, and their bytes."""
        lo, hi = max(elements.start, self._span.start), min(elements.stop, self._span.stop)
        if lo >= hi:
            return
        itemsize = self._dtype.itemsize
        part = raw[(lo - elements.start) * itemsize : (hi - elements.start) * itemsize]
        if self._contiguous:
            write(self.target, part)
            return
        if self._gathered is None:
            self._gathered = torch.empty(len(self._span) * itemsize, dtype=torch.uint8)
        start = lo - self._span.start
        self._gathered[start * itemsize : (start + hi - lo) * itemsize] = part
        self._missing -= hi - lo
        if not self._missing:
            whole = self._gathered.view(self._dtype).as_strided(self._size, self._stride)
            write(self.target, _bytes(whole))
            self._gathered = None


class _Joint:
    """Tensors to be saved that are computed from several parameters, or from one in another way."""

    def __init__(self, sources: Mapping[str, Tensor], targets: list[str]) -> None:
        self.targets = targets
        self._described = sources
        self._missing = {name: tensor.numel() for name, tensor in sources.items()}
        self._raw: dict[str, Tensor] = {}

    def take(self, name: str, elements: range, raw: Tensor) -> bool:
        """Take some of a parameter's elements, and their bytes; return True when all have come."""
        tensor = self._described[name]
        itemsize = tensor.dtype.itemsize
        if name not in self._raw:
            self._raw[name] = torch.empty(tensor.numel() * itemsize, dtype=torch.uint8)
        self._raw[name][elements.start * itemsize : elements.stop * itemsize] = raw
        self._missing[name] -= len(elements)
        return not any(self._missing.values())

    def values(self) -> dict[str, Tensor]:
        """Return the parameters, which are released here."""
        taken, self._raw = self._raw, {}
        return {
            name: taken[name].view(tensor.dtype).view(tuple(tensor.shape))
            for name, tensor in self._described.items()
        }


def _sort(
    described: Mapping[str, _Valueless], found: Mapping[str, Tensor]
) -> tuple[dict[str, list[_View]], dict[str, _Joint]]:
    """Return, by parameter, its views, and the conversion that it takes part in with others."""
    of_storage = {t.untyped_storage()._cdata: name for name, t in described.items()}
    views: dict[str, list[_View]] = {}
    joint: list[tuple[set[str], list[str]]] = []
    for target, tensor in found.items():
        with torch._C.DisableTorchFunctionSubclass():
            source = of_storage.get(tensor.untyped_storage()._cdata)
            if source is not None:
                views.setdefault(source, []).append(_View(target, tensor))
                continue
        sources, targets = set(getattr(tensor, "sources", ())), [target]
        if not sources:
            raise UnsupportedError(
                f"transformers converts {type(tensor).__name__} {target} in a way that cannot be "
                "followed; use save_pretrained(..., save_original_format=False)"
            )
        for each in [each for each in joint if each[0] & sources]:
            joint.remove(each)
            sources |= each[0]
            targets += each[1]
        joint.append((sources, targets))
    made = {}
    for sources, targets in joint:
        one = _Joint({name: described[name] for name in described if name in sources}, targets)
        made.update(dict.fromkeys(sources, one))
    return views, made


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
