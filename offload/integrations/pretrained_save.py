"""`model.save_pretrained` of a transformers model in tiers or in files, streamed.

transformers' own method writes every file but the weights. They are written here from where they
are, one piece at a time, as it would have written them: the same names, shards and index.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel

from offload.checkpoint.disk import make_folder, storage_errors, sync_files
from offload.checkpoint.weights import stream_weights
from offload.config.paths import StrPath
from offload.engine import Engine
from offload.integrations.hub_format import EngineInHubFormat, ModelInHubFormat, owner_of
from offload.integrations.weight_files import write_shards
from offload.tiers.errors import PathError
from offload.weights.lazy_tensors import LazyTensor


class StreamedSave:
    """Replaces a model's own `save_pretrained`, with the same arguments.

    The model's own method, with complete tensors in memory, saves what cannot be streamed: a
    `state_dict=` that is given, adapters, quantized weights, `push_to_hub=True`, a dispatched model
    of several ranks. So does a model whose weights are in memory.
    """

    def __init__(self, model: PreTrainedModel, keeps: Engine | None = None) -> None:
        """Keep an engine alive as long as the model, without keeping the model alive."""
        self._model = weakref.ref(model)
        self._engine = keeps

    def __getstate__(self) -> PreTrainedModel | None:
        return self._model()

    def __setstate__(self, model: PreTrainedModel) -> None:
        self._model, self._engine = weakref.ref(model), None  # a copy saves itself

    @staticmethod
    def install(model: Any, keeps: Engine | None = None) -> None:
        """Replace the method of a model that transformers saves, until the engine that it
        `keeps` is closed. A class that overrides the method keeps it: it knows what else has to
        be written."""
        before = vars(model).get("save_pretrained")
        if getattr(type(model), "save_pretrained", None) is not PreTrainedModel.save_pretrained:
            return
        if before is not None and (not isinstance(before, StreamedSave) or before._engine):
            return  # it was done before
        vars(model)["save_pretrained"] = StreamedSave(model, keeps)
        if keeps is not None:
            restore = partial(vars(model).__setitem__, "save_pretrained", before)
            forget = partial(vars(model).pop, "save_pretrained")
            keeps.before_close(forget if before is None else restore)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Save the model; see transformers' `PreTrainedModel.save_pretrained`. With several ranks
        that train, all have to call it, and the first one writes."""
        model = self._model()
        assert model is not None, "it is called through the model"
        call = inspect.signature(PreTrainedModel.save_pretrained).bind(model, *args, **kwargs)
        call.apply_defaults()
        given = {name: value for name, value in call.arguments.items() if name != "self"}
        owner = owner_of(model)
        if _goes_its_own_way(model, owner, given):
            PreTrainedModel.save_pretrained(model, *args, **kwargs)
            return
        ranks = owner.runtime.ranks if isinstance(owner, Engine) else None
        writes = ranks is None or ranks.rank == 0
        if ranks is None and not given["is_main_process"]:
            return
        if owner is None:
            _check_elsewhere(model, given["save_directory"])
        folder, size = Path(given["save_directory"]), given["max_shard_size"]
        if writes:  # config, generation config, a custom model's code; old shards are removed
            others = {**given, **given.get("kwargs", {}), "state_dict": {}, "is_main_process": True}
            others.pop("kwargs", None)
            with storage_errors("creating", folder):
                make_folder(folder, parents=True)
            PreTrainedModel.save_pretrained(model, **others)
            sync_files(folder)
        variant, hub_format = given["variant"], given["save_original_format"]
        if isinstance(owner, Engine):
            save_weights(
                owner, folder, size, variant=variant, hub_format=hub_format, writes=writes
            )  # fmt: skip
            return
        write_shards(
            ModelInHubFormat(model, hub_format=hub_format), folder, size, variant=variant,
            metadata={"total_parameters": model.num_parameters()},
        )  # fmt: skip


def _goes_its_own_way(model: PreTrainedModel, owner: Any, given: Mapping[str, Any]) -> bool:
    in_memory = owner is None and not any(
        isinstance(tensor, LazyTensor) for tensor in model.parameters()
    )
    several = dist.is_initialized() and dist.get_world_size() > 1
    return (
        in_memory
        or (several and not isinstance(owner, Engine))
        or given["state_dict"] is not None
        or given["push_to_hub"]
        or given["distributed_checkpoint"]
        or getattr(model, "_hf_peft_config_loaded", False)
        or getattr(model, "hf_quantizer", None) is not None
        or os.path.isfile(given["save_directory"])  # which it says is none
    )


def _check_elsewhere(model: PreTrainedModel, folder: StrPath) -> None:
    """Raise PathError if weights would be written over the files that they are read from."""
    own = model.name_or_path  # no folder where it was moved, or was relative to another one
    if os.path.isdir(folder) and os.path.isdir(own) and os.path.samefile(folder, own):
        raise PathError(
            f"{folder} has the files that this model's weights are read from; name another folder, "
            "or save it when it is dispatched"
        )


def save_weights(
    engine: Engine, folder: Path, max_shard_size: int | str, *,
    variant: str | None, hub_format: bool, writes: bool,
) -> None:  # fmt: skip
    """Write the safetensors files of an engine's model, and their index if there are several.
    Without `writes`, this rank only sends its part."""
    if not writes:
        stream_weights(engine, lambda *_: None)
        return
    assert isinstance(engine.module, PreTrainedModel)
    write_shards(
        EngineInHubFormat(engine, hub_format=hub_format), folder, max_shard_size, variant=variant,
        metadata={"total_parameters": engine.module.num_parameters()},
    )  # fmt: skip
