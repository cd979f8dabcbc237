"""The tensors of a transformers model as its files have them, from a stream of its weights.

transformers converts a model's tensors to the hub's format with torch (`revert_weight_conversion`).
Each tensor is converted by itself: first without values, which says what becomes of it. One that is
the same in both is written as its pieces come; one that becomes others (the packed experts of a
layer) is converted again, with values, once all its elements are there.

Each tensor is streamed from where it is: a tier, a file or memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from offload.checkpoint.engine import model as engine_model
from offload.checkpoint.engine.shards import PieceAccess, ShardReader, on_all, refresh
from offload.checkpoint.foreign.exporting import Write
from offload.display.byte_progress import progress
from offload.engine import Engine
from offload.engine_lookup import tiers_of
from offload.tiered_model import TieredModel
from offload.tiers.errors import UnsupportedError
from offload.weights.lazy_tensors import LazyTensor
from offload.zero.groups.layout import ParamSpec

_log = logging.getLogger("offload")
_PIECE_NUMEL = 1 << 22
# Takes a parameter, a range of its elements, and their bytes (1D uint8).
Take = Callable[[ParamSpec, range, Tensor], None]


class ModelInHubFormat:
    """The tensors to save of a transformers model: its own, each from where it is. `tensors` has
    them by name on the meta device, `owners` are the tiers that some of them are in."""

    def __init__(self, model: PreTrainedModel, *, hub_format: bool = True) -> None:
        """Without `hub_format` tensors stay as they are, and so do those of a model several of
        whose tensors are one in files; a warning says so. Raise UnsupportedError for an entry of
        the state dict that is not a tensor."""
        self._model = model
        self.owners = tiers_of(model)
        self._sources: dict[tuple[int, str], list[str]] = {}  # names, by owner and parameter
        self._others: dict[str, Tensor] = {}  # that are in no tier
        described = self._describe_all(model._keys_to_ignore_on_save or ())
        self._described = remove_tied_weights_from_state_dict(described, model)
        self.dtype = next(t.dtype for t in self._described.values() if t.is_floating_point())
        self.tensors: Mapping[str, Tensor] = self._described
        # in files, of tensors that are the same there
        self.names = {name: name for name in self._described}
        self.experts: dict[str, str] = {}  # packed parameters by their matrices' names in files
        self._raw: dict[str, tuple[Tensor, int]] = {}  # bytes, and how many have come
        if hub_format:
            self._convert()

    def _describe_all(self, ignored: Collection[str]) -> dict[str, Tensor]:
        """Return parameters and persistent buffers by all their names, on the meta device."""
        described = {}
        for name, value in self._model.state_dict(keep_vars=True).items():
            if name in ignored:
                continue
            if not isinstance(value, Tensor):
                raise UnsupportedError(
                    f"{name} is a {type(value).__name__}, which a safetensors file cannot hold; "
                    "engine.save_checkpoint saves it, or save_pretrained(state_dict=) without it"
                )
            described[name] = self._describe(name, value)
        return described

    def _describe(self, name: str, value: Tensor) -> Tensor:
        for number, owner in enumerate(self.owners):
            spec = owner.store.spec_of(value)
            if spec is not None:
                self._sources.setdefault((number, spec.name), []).append(name)
                return torch.empty(spec.shape, dtype=owner.store.dtype, device="meta")
        self._others[name] = value
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

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

    def write(self, write: Write, whole: Collection[str] = ()) -> None:
        """Write every tensor's bytes, in any order of tensors, and those of the names in `whole` in
        one piece. With several ranks, the one that writes calls it; `stream_weights` describes the
        others' part."""

        def take(name: str, elements: range, raw: Tensor) -> None:
            same = self.names.get(name)
            if same is not None and same not in whole:
                write(same, raw)
                return
            tensor, itemsize = self._described[name], self._described[name].itemsize
            if name not in self._raw:
                self._raw[name] = torch.empty(tensor.nbytes, dtype=torch.uint8), 0
            buffer, there = self._raw[name]
            buffer[elements.start * itemsize : elements.stop * itemsize] = raw
            self._raw[name] = buffer, there + raw.numel()
            if there + raw.numel() < tensor.nbytes:
                return
            del self._raw[name]
            if same is not None:
                write(same, buffer)
                return
            value = buffer.view(tensor.dtype).view(tensor.shape)
            for target, each in revert_weight_conversion(self._model, {name: value}).items():
                write(target, raw_bytes(each))

        self._stream(take)

    def _stream(self, take: Callable[[str, range, Tensor], None]) -> None:
        """Give every tensor to `take`: a name, a range of elements, and their bytes (1D uint8)."""
        for number, owner in enumerate(self.owners):

            def take_spec(
                spec: ParamSpec, elements: range, raw: Tensor, number: int = number
            ) -> None:
                for name in self._sources.get((number, spec.name), ()):
                    if name in self._described:
                        take(name, elements, raw)

            if isinstance(owner, Engine):
                stream_weights(owner, take_spec)
            else:
                _stream_dispatched(owner, take_spec)
        others = {name: tensor for name, tensor in self._others.items() if name in self._described}
        nbytes = sum(tensor.nbytes for tensor in others.values())
        with progress("saving weights", nbytes) as on_bytes:
            for name, tensor in others.items():
                first, pieces = 0, iter([tensor])
                if isinstance(tensor, LazyTensor):
                    pieces = tensor.pieces(_PIECE_NUMEL)
                for piece in pieces:
                    elements = range(first, first + piece.numel())
                    take(name, elements, raw_bytes(piece.cpu()))
                    on_bytes(piece.nbytes)
                    first = elements.stop


def _stream_dispatched(owner: TieredModel, take: Take) -> None:
    """Do the same as `stream_weights` for a dispatched model: one group at a time."""
    store = owner.store
    with progress("saving weights", sum(group.state.nbytes for group in store.groups)) as on_bytes:
        for group in store.groups:
            with owner.gathered(*group.params):
                for param in group.params:
                    spec, first = store.whole_of(param)
                    values = param.detach().cpu()
                    take(spec, range(first, first + values.numel()), raw_bytes(values))
            on_bytes(group.state.nbytes)


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, 1D uint8."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def stream_weights(engine: Engine, take: Take) -> None:
    """Call `take(spec, elements, raw)` for every part of every parameter, from its first element to
    its last: `elements` of the parameter, and their bytes (1D uint8, valid during the call), in the
    format that the model computes in. Parts of one parameter may come between those of another.

    Waits for pending updates first and changes nothing in the engine; one piece is in memory at a
    time. With several ranks all have to call it; `take` is called on the first one, and its errors,
    and those of reading a rank's part, are raised on every rank.

    StateError inside `engine.gathered` or a forward, or after a load that failed half-way;
    UnsupportedError where experts are spread over ranks.
    """
    if engine.spread.ep_size > 1:
        raise UnsupportedError(
            f"this rank has 1 of {engine.spread.ep_size} parts of the model's experts, and would "
            "write no others; use engine.save_checkpoint, which writes all, and `offload "
            "checkpoint export`"
        )
    groups, itemsize = engine.store.groups, engine.store.own.nbytes
    nbytes = itemsize * sum(spec.numel for group in groups for spec in group.layout.params)
    reader = ShardReader(PieceAccess(), engine.ranks, itemsize)
    with (
        on_all(engine.ranks, "the model's weights were not saved"),
        progress("saving weights", nbytes) as on_bytes,
    ):
        engine.store.check_usable()
        engine.values.adopt_changes()
        engine.settle()
        engine.store.refuse_amid_use("weights cannot be saved")
        refresh(engine.store)
        entries = engine_model.Entries(engine)
        for state in engine.optimizer_states:
            for elements, raw in reader.weights(state, 0):
                for spec, here, there in entries.overlaps(state.group.layout.params, elements):
                    part = raw[here.start * itemsize : here.stop * itemsize]
                    reader.attempt(take, spec, range(there.start, there.stop), part)
                    on_bytes(part.nbytes)
                    del part
                del raw
            reader.meet()
