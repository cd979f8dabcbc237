"""`model.save_pretrained` of a transformers model that trains through an engine, streamed.

transformers' own method writes every file but the weights. They are written here from the tiers,
one piece at a time, as it would have written them: the same names, shards and index.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from offload.checkpoint.weights import stream_weights
from offload.integrations.hub_format import EngineInHubFormat
from offload.integrations.weight_files import write_shards

if TYPE_CHECKING:
    from offload.engine import Engine


class StreamedSave:
    """In the place of a model's own `save_pretrained`, with its arguments, until the engine is
    closed. It keeps the engine alive for as long as the model.

    What it cannot stream goes the model's own way, through complete tensors in memory: a
    `state_dict=` that is given, adapters, quantized weights, `push_to_hub=True`.
    """

    def __init__(self, engine: Engine) -> None:
        model = engine.module
        assert isinstance(model, PreTrainedModel)
        self._engine = engine
        self._model = model
        self._own: Callable[..., Any] = model.save_pretrained
        self._signature = inspect.signature(self._own)

    @staticmethod
    def install(engine: Engine) -> None:
        """For an engine's model, if it is one that transformers saves. A class with a method of its
        own keeps it: it knows what else has to be written."""
        model = engine.module
        if "save_pretrained" in vars(model):
            return  # it was done before
        if getattr(type(model), "save_pretrained", None) is PreTrainedModel.save_pretrained:
            vars(model)["save_pretrained"] = StreamedSave(engine)
            engine.before_close(lambda: vars(model).pop("save_pretrained"))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """See transformers' `PreTrainedModel.save_pretrained`. Of several ranks all have to call
        it, and the first one writes."""
        call = self._signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        if self._goes_its_own_way(given):
            self._own(*args, **kwargs)
            return
        ranks = self._engine.runtime.ranks
        writes = ranks is None or ranks.rank == 0
        if ranks is None and not given["is_main_process"]:
            return
        if writes:  # config, generation config, a custom model's code; old shards are removed
            others = {**given, **given.get("kwargs", {}), "state_dict": {}, "is_main_process": True}
            others.pop("kwargs", None)
            self._own(**others)
        save_weights(
            self._engine, Path(given["save_directory"]), given["max_shard_size"],
            variant=given["variant"], hub_format=given["save_original_format"], writes=writes,
        )  # fmt: skip

    def _goes_its_own_way(self, given: Mapping[str, Any]) -> bool:
        model = self._model
        return (
            given["state_dict"] is not None
            or given["push_to_hub"]
            or given["distributed_checkpoint"]
            or getattr(model, "_hf_peft_config_loaded", False)
            or getattr(model, "hf_quantizer", None) is not None
            or os.path.isfile(given["save_directory"])  # which it says is none
        )


def save_weights(
    engine: Engine, folder: Path, max_shard_size: int | str, *,
    variant: str | None, hub_format: bool, writes: bool,
) -> None:  # fmt: skip
    """The safetensors files of an engine's model, and their index where there are several. Not
    `writes`: a rank that sends its part."""
    if not writes:
        stream_weights(engine, lambda *_: None)
        return
    assert isinstance(engine.module, PreTrainedModel)
    write_shards(
        EngineInHubFormat(engine, hub_format=hub_format), folder, max_shard_size, variant=variant,
        metadata={"total_parameters": engine.module.num_parameters()},
    )  # fmt: skip
