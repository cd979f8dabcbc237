"""`model.save_pretrained` of a transformers model that trains through an engine, streamed.

transformers' own method writes every file but the weights. They are written here from the tiers,
one piece at a time, as it would have written them: the same names, shards and index.
"""

from __future__ import annotations

import inspect
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from huggingface_hub import get_torch_storage_size, split_state_dict_into_shards_factory
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from offload.checkpoint.disk import check_room, storage_errors, sync_folder
from offload.checkpoint.model import DTYPE_NAMES
from offload.checkpoint.safetensors_file import SafetensorsWriter, TensorInfo, file_nbytes
from offload.checkpoint.weights import stream_weights
from offload.integrations.hub_format import HubFormat

if TYPE_CHECKING:
    from offload.engine import Engine

_METADATA = {"format": "pt"}


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
    """The safetensors files of an engine's model, and their index where there are several. What is
    in `folder` is replaced when the new files are complete. Not `writes`: a rank that sends its
    part."""
    if not writes:
        stream_weights(engine, lambda *_: None)
        return
    assert isinstance(engine.module, PreTrainedModel)
    saved = HubFormat(engine, hub_format=hub_format)
    pattern = _named(SAFE_WEIGHTS_NAME, variant).replace(".safetensors", "{suffix}.safetensors")
    split = split_state_dict_into_shards_factory(
        saved.tensors, filename_pattern=pattern, max_shard_size=max_shard_size,
        get_storage_size=get_torch_storage_size,
        get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,  # its own knows no meta
    )  # fmt: skip
    with _Files(folder, split.filename_to_tensors, saved.tensors) as files:
        saved.write(files.append)
        files.finish()
    if split.is_sharded:
        metadata = {"total_parameters": engine.module.num_parameters(), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        path = folder / _named(SAFE_WEIGHTS_INDEX_NAME, variant)
        with storage_errors("writing", path):
            path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    sync_folder(folder)


def _named(name: str, variant: str | None) -> str:
    stem, _, ending = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{ending}"


class _Files:
    """Safetensors files that are filled side by side; a context manager. None of them has its name
    before `finish`."""

    def __init__(
        self, folder: Path, names: Mapping[str, Sequence[str]], tensors: Mapping[str, Tensor]
    ) -> None:
        sections = {file: _sections(held, tensors) for file, held in names.items()}
        check_room(folder, sum(file_nbytes(each, _METADATA) for each in sections.values()))
        self._final: dict[Path, Path] = {}
        self._file_of: dict[str, SafetensorsWriter] = {}
        self._open = ExitStack()
        self._open.callback(self._remove)
        with ExitStack() as failed:
            failed.callback(self._open.close)
            for file, each in sections.items():
                pending = folder / f".{file}.tmp-{secrets.token_hex(6)}"
                self._final[pending] = folder / file
                writer = SafetensorsWriter(pending, each, _METADATA)
                self._open.enter_context(writer)
                self._file_of.update(dict.fromkeys(names[file], writer))
            failed.pop_all()

    def append(self, name: str, raw: Tensor) -> None:
        """A tensor's next bytes."""
        self._file_of[name].append(f"={name}", raw.numpy().data)

    def finish(self) -> None:
        for writer in dict.fromkeys(self._file_of.values()):
            writer.finish()
        for pending, final in self._final.items():
            with storage_errors("writing", final):
                os.replace(pending, final)

    def _remove(self) -> None:
        for pending in self._final:
            pending.unlink(missing_ok=True)

    def __enter__(self) -> _Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._open.close()


def _sections(names: Sequence[str], tensors: Mapping[str, Tensor]) -> dict[str, list[TensorInfo]]:
    """One per tensor, as they come in any order. Wide dtypes first, so that each is aligned."""
    ordered = sorted(names, key=lambda name: (-tensors[name].itemsize, name))
    return {
        f"={name}": [TensorInfo(name, DTYPE_NAMES[tensors[name].dtype], tuple(tensors[name].shape))]
        for name in ordered
    }
