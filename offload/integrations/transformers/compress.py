"""Compression of a transformers folder: weights in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from offload.checkpoint.engine.model import model_record
from offload.checkpoint.foreign.exporting import write_others
from offload.checkpoint.foreign.model_files import check_new, pending_output
from offload.checkpoint.foreign.weight_shards import SHARD, write_shards
from offload.checkpoint.format.disk import make_folder, storage_errors
from offload.config.paths import StrPath, path_of
from offload.integrations.transformers.changed_weights import Change, ChangedWeights
from offload.integrations.transformers.pretrained import open_pretrained
from offload.quantised.writing import Target
from offload.tiers.errors import UnsupportedError

if TYPE_CHECKING:
    from offload.integrations.transformers.hub_format import ModelInHubFormat

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

    `source`: a folder that `offload.open_pretrained` opens (quantised ones, too), or a model: of
    `open_pretrained`, dispatched, or an engine's. `out` must not exist, and is complete or absent.

    `storage` is "int4", "int8" or "nf4", with `group_size` elements per scale; each weight is
    rounded to the nearest code. Files of int4 and int8 are those of compressed-tensors, files of
    nf4 those of bitsandbytes. The codes are those of `storage:` in the configuration: a model whose
    weights are stored so computes with the same values (`quantised.writing` names the exceptions).
    The weights of linear layers are quantised, and those of experts if files store each separately
    (not in bitsandbytes), except those that `skip` names (modules, or ends of their names; by
    default `lm_head`).

    Raise ConfigError for options that do not work with this model, PathError if `out` cannot be
    created, CheckpointError for values that the format cannot hold.
    """
    from offload.integrations.transformers.hub_format import ModelInHubFormat

    change = Change(Target.of(storage, group_size), skip)
    out = path_of(out, "out")
    check_new(out)
    model = _model_of(source)
    saved = ModelInHubFormat(model)
    _check(saved, change)
    record = model_record(model)
    if record is None:
        raise UnsupportedError(f"the configuration of {type(model).__name__} is no JSON")
    folder = None if record.folder is None else Path(record.folder)
    with pending_output(out) as pending:
        with storage_errors("creating", pending):
            make_folder(pending)
        changed = ChangedWeights(saved, model, change)
        names = write_shards(changed, pending, SHARD)
        config = {**changed.config(), "dtype": _SPELT[saved.dtype]}
        names += write_others(record, folder, config, pending)
    return [out / name for name in names]


def _model_of(source: StrPath | nn.Module) -> Any:
    import transformers

    if not isinstance(source, nn.Module):
        return open_pretrained(source)
    if not isinstance(source, transformers.PreTrainedModel):
        raise UnsupportedError(
            f"{type(source).__name__} is no model of transformers; only those say what a folder "
            "has to hold"
        )
    return source


def _check(saved: ModelInHubFormat, change: Change) -> None:
    """Raise UnsupportedError if codes would change values that the model computes with."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if saved.owners and not alone:
        raise UnsupportedError(
            "of a model on several ranks none writes a folder by itself; save a checkpoint, load "
            "it in one process, and compress that model"
        )
    target = change.target
    stored = [owner.config.storage for owner in saved.owners]
    if all(each is None or each.weights != target.weights.name for each in stored):
        return
    experts = any(not change.skips(packed) for packed in saved.experts.values())
    if not target.keeps_codes(saved.dtype, expert=experts):
        raise UnsupportedError(
            f"the model computes with weights in {target.weights.name}, which {target.library} "
            f"would round to other values of {saved.dtype}; write another format, or compress "
            "the model's folder"
        )
