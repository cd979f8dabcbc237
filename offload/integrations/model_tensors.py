"""The tensors of a model to save, each streamed from where it is: a tier, a file or memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn

from offload.checkpoint.engine.weights import Take, stream_weights
from offload.display.byte_progress import progress
from offload.engine import Engine
from offload.engine_lookup import tiers_of
from offload.tiered_model import TieredModel
from offload.tiers.errors import UnsupportedError
from offload.weights.lazy_tensors import LazyTensor
from offload.zero.groups.layout import ParamSpec

_PIECE_NUMEL = 1 << 22
# Takes a tensor's name, a range of its elements, and their bytes (1D uint8).
TakeNamed = Callable[[str, range, Tensor], None]


class ModelTensors:
    """Parameters and persistent buffers: `tensors` has them on the meta device by all their names,
    `owners` are the tiers that some of them are in."""

    def __init__(self, model: nn.Module, ignored: Collection[str] = ()) -> None:
        """Raise UnsupportedError for an entry of the state dict that is not a tensor."""
        self.owners = tiers_of(model)
        self.tensors: dict[str, Tensor] = {}
        self._sources: dict[tuple[int, str], list[str]] = {}  # names, by owner and parameter
        self._others: dict[str, Tensor] = {}  # that are in no tier
        for name, value in model.state_dict(keep_vars=True).items():
            if name in ignored:
                continue
            if not isinstance(value, Tensor):
                raise UnsupportedError(
                    f"{name} is a {type(value).__name__}, which a safetensors file cannot hold; "
                    "engine.save_checkpoint saves it, or save_pretrained(state_dict=) without it"
                )
            self.tensors[name] = self._described(name, value)

    def _described(self, name: str, value: Tensor) -> Tensor:
        for number, owner in enumerate(self.owners):
            spec = owner.store.spec_of(value)
            if spec is not None:
                self._sources.setdefault((number, spec.name), []).append(name)
                return torch.empty(spec.shape, dtype=owner.store.dtype, device="meta")
        self._others[name] = value
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    def stream(self, names: Collection[str], take: TakeNamed) -> None:
        """Give the elements of the named tensors to `take`, in any order of tensors. With several
        ranks, the one that writes calls it; `stream_weights` describes the others' part."""
        for number, owner in enumerate(self.owners):

            def take_spec(
                spec: ParamSpec, elements: range, raw: Tensor, number: int = number
            ) -> None:
                for name in self._sources.get((number, spec.name), ()):
                    if name in names:
                        take(name, elements, raw)

            if isinstance(owner, Engine):
                stream_weights(owner, take_spec)
            else:
                _stream_dispatched(owner, take_spec)
        others = {name: tensor for name, tensor in self._others.items() if name in names}
        nbytes = sum(tensor.nbytes for tensor in others.values())
        with progress("saving weights", nbytes) as came:
            for name, tensor in others.items():
                first = 0
                for piece in _pieces_of(tensor):
                    elements = range(first, first + piece.numel())
                    take(name, elements, raw_bytes(piece))
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
                    take(spec, range(first, first + values.numel()), raw_bytes(values))
            came(group.state.nbytes)


def _pieces_of(tensor: Tensor) -> Iterator[Tensor]:
    if isinstance(tensor, LazyTensor):
        yield from tensor.pieces(_PIECE_NUMEL)
    else:
        yield tensor.detach().cpu()


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, 1D uint8."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
