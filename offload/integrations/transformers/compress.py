"""Compression of a transformers folder: weights in 8 or 4 bits."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from offload.checkpoint.engine.model import model_record
from offload.checkpoint.foreign.exporting import SHARD, Write, write_others, write_shards
from offload.checkpoint.format.disk import check_new, make_folder, pending_output, storage_errors
from offload.config.paths import StrPath, path_of
from offload.integrations.transformers.hub_format import ModelInHubFormat
from offload.integrations.transformers.pretrained import open_pretrained
from offload.kernels.weight_formats import QuantType, WeightFormat
from offload.process import machine
from offload.quantized.writing import LIBRARIES, configuration, described, quantize, weight_format
from offload.tiers.errors import ConfigError, UnsupportedError
from offload.zero.groups.storage import HEAD, is_named

_log = logging.getLogger("offload")
_SPELT = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def compress(
    source: StrPath | nn.Module,
    out: StrPath,
    *,
    storage: str,
    group_size: int = 64,
    skip: Sequence[str] | None = None,
) -> list[Path]:
    """Write a folder that transformers' `from_pretrained` opens; return its files. One tensor is in
    RAM at a time.

    `source`: a folder that `offload.open_pretrained` opens (quantized ones, too), or a model: of
    `open_pretrained`, dispatched, or an engine's. `out` must not exist, and is complete or absent.

    `storage` is "int4", "int8" or "nf4", with `group_size` elements per scale; each weight is
    rounded to the nearest level. Files of int4 and int8 are those of compressed-tensors, files of
    nf4 those of bitsandbytes. Values are those of `storage:` in the configuration: a model whose
    weights are stored so computes with the same ones (`quantized.writing` names the exceptions).
    The weights of linear layers are quantized, and those of experts if files store each separately
    (not in bitsandbytes), except those that `skip` names (modules, or ends of their names; by
    default `lm_head`).

    Raise ConfigError for options that do not work with this model, PathError if `out` cannot be
    created, CheckpointError for values that the format cannot hold.
    """
    weights = weight_format(storage, group_size)
    out = path_of(out, "out")
    check_new(out)
    model: Any = source if isinstance(source, nn.Module) else open_pretrained(source)
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(
            f"{type(model).__name__} is no model of transformers; only those say what a folder "
            "has to hold"
        )
    changed = ChangedWeights(model, weights, skip)
    record = model_record(model)
    if record is None:
        raise UnsupportedError(f"the configuration of {type(model).__name__} is no JSON")
    folder = None if record.folder is None else Path(record.folder)
    with pending_output(out) as pending:
        with storage_errors("creating", pending):
            make_folder(pending)
        names = write_shards(changed.tensors, changed.write, pending, SHARD)
        names += write_others(record, folder, changed.config(), pending)
    return [out / name for name in names]


class ChangedWeights:
    """The tensors of a model, those of linear layers and experts quantized, except in `skip`. One
    tensor is in memory at a time; experts that are stored together are, too."""

    def __init__(
        self, model: PreTrainedModel, weights: WeightFormat, skip: Sequence[str] | None
    ) -> None:
        """Raise UnsupportedError if quantization would change values that the model computes with,
        ConfigError for a weight that cannot be quantized so, or if there is none to quantize."""
        self._saved = saved = ModelInHubFormat(model)
        self._weights = weights
        self._skip = (HEAD,) if skip is None else skip
        self._check_values()
        for pattern in skip or ():
            if not any(is_named(name, pattern) for name, _ in model.named_parameters()):
                raise ConfigError(
                    f"skip: {pattern!r:.60} names no module and no parameter of "
                    f"{type(model).__name__}"
                )
        linear, self._unchanged = self._linear_layers(model)
        self._modules = [name.removesuffix(".weight") for name in linear]
        self._experts = self._experts_to_quantize()
        self._names = {saved.names[name] for name in linear} | self._experts  # in files
        self._check_chosen(model)
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in saved.tensors.items():
            if name in self._names:
                parts = described(name, tensor, weights, expert=name in self._experts)
                self.tensors |= {_part(name, end): part for end, part in parts.items()}
            else:
                self.tensors[name] = tensor

    def _skips(self, name: str) -> bool:
        """Whether a parameter stays as it is."""
        return any(is_named(name, each) for each in self._skip)

    def _check_values(self) -> None:
        saved, weights = self._saved, self._weights
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        if saved.owners and not alone:
            raise UnsupportedError(
                "of a model on several ranks none writes a folder by itself; save a checkpoint, "
                "load it in one process, and compress that model"
            )
        stored = [owner.config.storage for owner in saved.owners]
        if all(each is None or each.weights != weights.name for each in stored):
            return
        keeps = {
            QuantType.INT8: saved.dtype == torch.float32,
            QuantType.INT4: all(map(self._skips, saved.experts.values())),
            QuantType.NF4: True,
        }
        if not keeps[weights.quant_type]:
            raise UnsupportedError(
                f"the model computes with weights in {weights.name}, which "
                f"{LIBRARIES[weights.quant_type]} would round to other values of {saved.dtype}; "
                "write another format, or compress the model's folder"
            )

    def _linear_layers(self, model: nn.Module) -> tuple[list[str], list[str]]:
        """Return the model's names of the weights to quantize, and of the other linear layers."""
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        shared = {*tied, *tied.values()}
        chosen, others = [], []
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            weight = f"{name}.weight"
            # weights in another shape in files (fused) stay as they are
            may = weight in self._saved.names and type(module) is nn.Linear
            if may and weight not in shared and not self._skips(weight):
                chosen.append(weight)
            else:  # libraries take subclasses (routers) for linear layers
                others.append(name)
        return chosen, others

    def _experts_to_quantize(self) -> set[str]:
        """Return the names in files of the experts' matrices, which bitsandbytes has no place
        for."""
        if self._weights.quant_type is QuantType.NF4:
            return set()
        for packed in self._saved.experts.values():
            if self._skips(packed):
                raise ConfigError(
                    f"{packed} is skipped, and in a folder of compressed-tensors transformers "
                    "looks for quantized weights of all experts alone: skip no experts, or write "
                    "nf4"
                )
        return set(self._saved.experts)

    def _check_chosen(self, model: nn.Module) -> None:
        if not self._names:
            raise ConfigError(
                f"no weight of {type(model).__name__} is left to be changed: its linear layers are "
                f"skipped ({', '.join(self._skip)}), or its files have them fused"
            )
        left = [
            name for name, tensor in self._saved.tensors.items()
            if ".experts." in name and tensor.ndim > 1 and name not in self._names
        ]  # fmt: skip
        if left:
            _log.warning(
                "%d tensors of experts stay as they are (%s, ...): they are skipped, files have "
                "them fused, or it is bitsandbytes, which knows linear layers alone", len(left),
                left[0],
            )  # fmt: skip

    def config(self) -> Mapping[str, Any]:
        """Return the entries of config.json that describe the weights."""
        saved = self._saved
        dtype = next(saved.tensors[name].dtype for name in self._names)
        others = dict.fromkeys(self._unchanged)
        for name in self._unchanged:
            file = saved.names.get(f"{name}.weight", f"{name}.weight")
            others[file.removesuffix(".weight")] = None
        said = configuration(
            self._weights, self._modules, list(others), dtype, experts=bool(self._experts)
        )
        return {"quantization_config": said, "dtype": _SPELT[saved.dtype]}

    def write(self, write: Write) -> None:
        self._saved.write(partial(self._take, write), self._names)

    def _take(self, write: Write, name: str, raw: Tensor) -> None:
        if name not in self._names:
            write(name, raw)
            return
        like = self._saved.tensors[name]
        tensor = raw.view(like.dtype).view(like.shape)
        made = quantize(name, tensor, self._weights, expert=name in self._experts)
        for end, part in made.items():
            write(_part(name, end), part.contiguous().view(-1).view(torch.uint8))
        machine.trim_memory()  # else freed memory of each tensor adds up


def _part(name: str, end: str) -> str:
    return f"{name.removesuffix('.weight')}.{end}"
