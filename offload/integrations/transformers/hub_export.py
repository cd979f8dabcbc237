"""Writes the model of a checkpoint in the hub's format without an engine: its class is built on the
meta device, so that transformers can name its tensors in files."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offload.checkpoint.foreign.exporting import ExportedTensor, HubFiles
from offload.checkpoint.foreign.model_files import check_counts
from offload.checkpoint.format.manifest import ITEMSIZE, ModelRecord
from offload.integrations.transformers.pretrained import is_model_class
from offload.tiers.errors import UnsupportedError
from offload.zero.groups.bits import DTYPES

if TYPE_CHECKING:
    from offload.checkpoint.foreign.weight_shards import Write
    from offload.integrations.transformers.changed_weights import Change, NamedTensors
    from offload.integrations.transformers.hub_format import HubFormat

_log = logging.getLogger("offload")


def write_hub_format(
    record: ModelRecord, tensors: Sequence[ExportedTensor], folder: Path,
    change: Change | None = None,
) -> HubFiles | None:  # fmt: skip
    """Write the safetensors files that transformers' `save_pretrained` would write, streamed, and
    their index. Return None, and log the reason, if transformers cannot name the tensors; with a
    `change` of weights raise UnsupportedError instead."""
    try:
        saved = _Converted(record, tensors)
    except Exception as error:
        if change is not None:
            raise UnsupportedError(
                f"what is a linear layer is not known, and nothing was written: {error}"
            ) from error
        _log.warning(
            "tensors keep the names and shapes that they have in memory, which from_pretrained "
            "opens as well (%s: %s)", type(error).__name__, error,
        )  # fmt: skip
        return None
    return write_files(saved, saved.model, folder, change)


def write_files(
    saved: NamedTensors, model: nn.Module, folder: Path, change: Change | None = None
) -> HubFiles:
    """Write the safetensors files of a model, and their index."""
    from offload.checkpoint.foreign.weight_shards import SHARD, write_shards
    from offload.integrations.transformers.changed_weights import ChangedWeights

    changed = None if change is None else ChangedWeights(saved, model, change)
    names = write_shards(changed or saved, folder, SHARD)
    return HubFiles(names, {} if changed is None else changed.config())


class _Converted:
    def __init__(self, record: ModelRecord, tensors: Sequence[ExportedTensor]) -> None:
        check_counts(record.config, len(tensors), "the checkpoint's configuration")
        self.model = model = _on_meta(record)
        ignored = model._keys_to_ignore_on_save or ()
        self._own = [tensor for tensor in tensors if tensor.info.name not in ignored]
        from offload.integrations.transformers.hub_format import HubFormat

        own = {t.info.name: (t.info.shape, DTYPES[t.info.dtype]) for t in self._own}
        self._format: HubFormat = HubFormat(model, own)
        self.tensors = self._format.tensors

    @property
    def names(self) -> Mapping[str, str]:
        return self._format.names

    @property
    def experts(self) -> Mapping[str, str]:
        return self._format.experts

    def write(self, write: Write) -> None:
        for tensor in self._own:
            first, itemsize = 0, ITEMSIZE[tensor.info.dtype]
            for piece in tensor.pieces():
                raw: Tensor = torch.frombuffer(piece, dtype=torch.uint8)
                elements = range(first, first + raw.numel() // itemsize)
                self._format.take(tensor.info.name, elements, raw, write)
                first = elements.stop


def _on_meta(record: ModelRecord) -> Any:
    """Return the model without values. Raise UnsupportedError for a class not of transformers."""
    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedError("transformers is not installed")
    import transformers

    name = record.config["architectures"][0]
    kind: Any = getattr(transformers, name, None)
    if not is_model_class(transformers, kind):
        raise UnsupportedError(f"transformers {transformers.__version__} has no model {name}")
    settings = kind.config_class.from_dict(dict(record.config))
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return kind(settings)
