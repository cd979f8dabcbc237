"""`model.save_pretrained` of a transformers model in tiers or in files, streamed.

transformers' own method writes every file but the weights. They are written here from where they
are, one piece at a time, as it would have written them: the same names, shards and index.
"""

import inspect
import os
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel

from offload.checkpoint.foreign.exporting import write_shards
from offload.checkpoint.format.disk import entries, make_folder, storage_errors, sync_file
from offload.engine import Engine
from offload.engine_lookup import tiers_of
from offload.integrations.transformers.hub_format import ModelInHubFormat, stream_weights
from offload.tiered_model import TieredModel
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
        owners = tiers_of(model)
        if _goes_its_own_way(model, owners, given):
            PreTrainedModel.save_pretrained(model, *args, **kwargs)
            return
        engines = [each for each in owners if isinstance(each, Engine)]
        ranks = next((each.ranks for each in engines), None)
        if ranks is None and not given["is_main_process"]:
            return
        if ranks is not None and ranks.rank > 0:
            for each in engines:  # this rank's part of what the first one writes
                stream_weights(each, lambda *_: None)
            return
        folder = Path(given["save_directory"])
        _check_elsewhere(model, folder)
        # config, generation config, a custom model's code; old shards are removed
        others = {**given, **given.get("kwargs", {}), "state_dict": {}, "is_main_process": True}
        others.pop("kwargs", None)
        with storage_errors("creating", folder):
            make_folder(folder, parents=True)
        PreTrainedModel.save_pretrained(model, **others)
        for entry in entries(folder):  # of save_pretrained: not those in folders below
            if entry.is_file(follow_symlinks=False):
                sync_file(folder / entry.name)
        saved = ModelInHubFormat(model, hub_format=given["save_original_format"])
        write_shards(
            saved.tensors, saved.write, folder, given["max_shard_size"], variant=given["variant"],
            metadata={"total_parameters": model.num_parameters()},
        )  # fmt: skip


def _goes_its_own_way(
    model: PreTrainedModel, owners: Sequence[TieredModel], given: Mapping[str, Any]
) -> bool:
    in_memory = not owners and not any(isinstance(each, LazyTensor) for each in model.parameters())
    several = dist.is_initialized() and dist.get_world_size() > 1
    return (
        in_memory
        or (several and not (owners and all(isinstance(each, Engine) for each in owners)))
        or given["state_dict"] is not None
        or given["push_to_hub"]
        or given["distributed_checkpoint"]
        or getattr(model, "_hf_peft_config_loaded", False)
        or getattr(model, "hf_quantizer", None) is not None
        or os.path.isfile(given["save_directory"])  # which it says is none
    )


def _check_elsewhere(model: PreTrainedModel, folder: Path) -> None:
    """Raise PathError if weights would be written over the files that they are read from."""
    if not any(isinstance(each, LazyTensor) for each in model.parameters()) or not folder.is_dir():
        return
    models = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    # no folder where it was moved, or was relative to another one
    own = {name for each in models for name in (each.name_or_path, each.config.name_or_path)}
    if any(os.path.isdir(each) and os.path.samefile(folder, each) for each in own):
        raise PathError(
            f"{folder} has the files that this model's weights are read from; name another folder, "
            "or save it when it is dispatched"
        )
