"""A folder of transformers made smaller: fewer blocks, pruned weights, weights in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offload.checkpoint.disk import storage_errors
from offload.checkpoint.exporting import check_new, pending_output, write_others
from offload.checkpoint.model import model_record
from offload.display.progress import progress
from offload.integrations.changed_weights import Change
from offload.integrations.hub_export import write_files
from offload.integrations.pretrained import open_pretrained
from offload.integrations.weight_files import Write
from offload.lazy_tensors import LazyTensor
from offload.tiered_model import TieredModel
from offload.tiers.errors import ConfigError, UnsupportedError
from offload.zero.hooks import UnitHooks

_PIECE_NUMEL = 1 << 22
_SPELT = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def compress(
    source: str | Path | nn.Module,
    out: str | Path,
    *,
    layers: Sequence[int] | None = None,
    prune: str | None = None,
    storage: str | None = None,
    group_size: int = 64,
    skip: Sequence[str] | None = None,
    format: str | None = None,  # noqa: A002
) -> list[Path]:
    """Write a folder that transformers' `from_pretrained` opens; its files. One tensor is in RAM at
    a time.

    `source`: a folder that `offload.open_pretrained` opens (quantised ones, too), or a model: of
    `open_pretrained`, dispatched, or an engine's. `out` must not exist, and is complete or absent.

    `layers` are the numbers of the blocks that are kept, from 0. `prune` sets weights to zero:
    "2:4", in every four inputs the two smallest, or a share of each weight ("30%"). `storage`
    quantises: "int4", "int8" or "nf4", with `group_size` elements per scale, each rounded to the
    nearest. `format` is whose files have the codes: "compressed-tensors" (int4, int8; the default),
    "gptq" (int4, int8), "awq" (int4) or "bitsandbytes" (nf4). The codes are those of `storage:` in
    the configuration: a model whose weights are stored so computes with the same values
    (`quantised.writing` names what is rounded otherwise). Pruning and quantising are of the weights
    of linear layers, and of experts where files have each by itself (not in bitsandbytes), but
    those that `skip` names (modules, or ends of their names; by default `lm_head`).

    ConfigError for what cannot be done with this model, PathError where `out` cannot be made,
    CheckpointError for values that the format does not hold.
    """
    change = Change.of(prune, storage, group_size, skip, format)
    asked = change if prune is not None or storage is not None else None
    if asked is None and layers is None:
        raise ConfigError("nothing is asked for: give layers, prune or storage")
    out = Path(out)
    check_new(out)
    model = _model_of(source, layers)
    saved = ModelInHubFormat(model)
    saved.check(change)
    record = model_record(model)
    if record is None:
        raise UnsupportedError(f"the configuration of {type(model).__name__} is no JSON")
    folder = None if record.folder is None else Path(record.folder)
    with pending_output(out) as pending:
        with storage_errors("creating", pending):
            pending.mkdir()
        files = write_files(saved, model, pending, asked)
        config = {**files.config, "dtype": _SPELT[saved.dtype]}
        names = [*files.names, *write_others(record, folder, config, pending)]
    return [out / name for name in names]


def _model_of(source: str | Path | nn.Module, layers: Sequence[int] | None) -> Any:
    import transformers

    if not isinstance(source, nn.Module):
        model = open_pretrained(source)
        if layers is not None:
            from offload.integrations.layer_reduction import keep_layers

            keep_layers(model, layers)
        return model
    if layers is not None:
        raise UnsupportedError("layers are taken out of a folder; give that, and not the model")
    if not isinstance(source, transformers.PreTrainedModel):
        raise UnsupportedError(
            f"{type(source).__name__} is no model of transformers; only those say what a folder "
            "has to hold"
        )
    return source


class ModelInHubFormat:
    """What is saved of a model of transformers: `tensors` has them by name on the meta device."""

    def __init__(self, model: Any) -> None:
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        from offload.integrations.hub_format import HubFormat

        owners = (UnitHooks.owner_of(module) for module in model.modules())
        self._owner = next((each for each in owners if isinstance(each, TieredModel)), None)
        ignored = model._keys_to_ignore_on_save or ()
        state = {
            name: tensor for name, tensor in model.state_dict(keep_vars=True).items()
            if name not in ignored
        }  # fmt: skip
        described = {name: self._described(tensor) for name, tensor in state.items()}
        kept = remove_tied_weights_from_state_dict(dict(described), model)
        self._state = {name: state[name] for name in kept}
        self.dtype = next(t.dtype for t in described.values() if t.is_floating_point())
        own = {name: (tensor.shape, tensor.dtype) for name, tensor in kept.items()}
        self._format: Any = HubFormat(model, own)
        self.tensors: dict[str, Tensor] = self._format.tensors

    def check(self, change: Change) -> None:
        """UnsupportedError where codes would change values that the model computes with."""
        kept = None if self._owner is None else self._owner.config.storage
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        if self._owner is not None and not alone:
            raise UnsupportedError(
                "of a model on several ranks none writes a folder by itself; save a checkpoint, "
                "and write it with offload checkpoint export --storage"
            )
        target = change.target
        if target is None or kept is None or kept.weights != target.weights.name:
            return
        experts = any(not change.skips(packed) for packed in self.experts.values())
        if not target.keeps_codes(self.dtype, expert=experts):
            raise UnsupportedError(
                f"the model computes with weights in {kept.weights}, which {target.library} would "
                f"round to other values of {self.dtype}; write another format, or compress the "
                "model's folder"
            )

    @property
    def names(self) -> dict[str, str]:
        found: dict[str, str] = self._format.names
        return found

    @property
    def experts(self) -> dict[str, str]:
        found: dict[str, str] = self._format.experts
        return found

    def _described(self, tensor: Tensor) -> Tensor:
        """Of the same shape and format, on the meta device; of tied ones the same object is not
        needed: transformers knows them by name."""
        spec = None if self._owner is None else self._owner.store.spec_of(tensor)
        if spec is None or self._owner is None:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return torch.empty(spec.shape, dtype=self._owner.store.dtype, device="meta")

    def write(self, write: Write) -> None:
        nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        with progress("saving weights", nbytes) as came:
            for name, first, piece in self._pieces():
                raw = piece.contiguous().view(-1).view(torch.uint8)
                self._format.take(name, range(first, first + piece.numel()), raw, write)
                came(raw.numel())

    def _pieces(self) -> Iterator[tuple[str, int, Tensor]]:
        """Of each tensor its elements, 1D and in order, from which one on."""
        places: dict[int, list[tuple[str, int]]] = {}
        for name, tensor in self._state.items():
            if self._owner is None or self._owner.store.spec_of(tensor) is None:
                yield from _pieces_of(name, tensor)
                continue
            for number, row in enumerate(self._owner.store.rows_of(tensor)):
                places.setdefault(id(row), []).append((name, number))
        for group in self._owner.store.groups if self._owner is not None else ():
            with self._owner.gathered(*group.params):  # type: ignore[union-attr]
                for row in group.params:
                    for name, number in places.get(id(row), ()):
                        yield name, number * row.numel(), row.detach().cpu().reshape(-1)


def _pieces_of(name: str, tensor: Any) -> Iterator[tuple[str, int, Tensor]]:
    if not isinstance(tensor, LazyTensor):
        yield name, 0, tensor.detach().cpu().reshape(-1)
        return
    first = 0
    for piece in tensor.pieces(_PIECE_NUMEL):
        yield name, first, piece
        first += piece.numel()
