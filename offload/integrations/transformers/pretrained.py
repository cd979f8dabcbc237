"""Models of transformers, from a local folder in its format, never whole in RAM.

transformers itself builds the model, with its own `from_pretrained`: names, conversions, ties, new
heads and the report of missing weights are its own. It is given lazy tensors (`lazy_tensors`),
which it moves around; their values are read when the engine asks for them.
"""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offload.checkpoint.foreign.model_files import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    SINGLE,
    read_json,
    weight_files,
)
from offload.checkpoint.format.disk import storage_errors
from offload.config import OffloadConfig
from offload.config.paths import StrPath, path_of
from offload.display.plain_text import plain
from offload.display.words import some_of
from offload.engine import Engine, ParamGroups, initialize
from offload.integrations.loaded_weights import missing_in, overwrite
from offload.integrations.transformers.hub_names import not_local
from offload.quantized.gguf_file import Header, read_header
from offload.quantized.reading import settings_of, transposed_weights
from offload.tiered_model import DTYPES
from offload.tiers.errors import CheckpointError, ConfigError, OffloadError, UnsupportedError
from offload.weights.lazy_tensors import LazyTensor, lazy_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger("offload")
_ADAPTER = "adapter_config.json"
_COUNT = re.compile(r"(^|_)(num|n)_(\w+_)?(layers?|blocks?|experts?)$|_layers$|^layers$|^depths?$")
_ANY_COUNT, _ENTRY_NBYTES = 1000, 60  # of a tensor in a header, at least
_DOWNLOAD = "download the folder (hf download ID --local-dir FOLDER) and name it"
_STATES = "budget and placement in offload's configuration say where states are"
_QUANTIZED = (
    "quantized folders are read by what their config.json says, and storage in offload's "
    "configuration quantizes frozen weights"
)
# Arguments of transformers' from_pretrained, and their alternatives here.
_REFUSED = {
    "config": "give the model's settings by name (num_labels=3)",
    "state_dict": "build the model, load them, and call offload.initialize(model, config)",
    "device_map": _STATES, "max_memory": _STATES, "offload_folder": _STATES,
    "offload_buffers": _STATES, "low_cpu_mem_usage": "it never takes more memory than needed",
    "quantization_config": _QUANTIZED, "load_in_8bit": _QUANTIZED, "load_in_4bit": _QUANTIZED,
    "gguf_file": "name the file itself: FOLDER/NAME.gguf",
    "torch_dtype": "its name is dtype",
    "trust_remote_code": "import the folder's class "
    "(transformers.dynamic_module_utils.get_class_from_dynamic_module) and pass it as model_class=",
    "output_loading_info": "transformers logs what is missing and what is not expected",
    "subfolder": "name that folder itself",
    **dict.fromkeys(("cache_dir", "force_download", "revision", "token"), _DOWNLOAD),
    **dict.fromkeys(
        ("distributed_config", "device_mesh", "tp_plan", "tp_size"),
        "use parallelize_module and mesh=",
    ),
}  # fmt: skip


def from_pretrained(
    folder: StrPath,
    config: Any = None,
    *,
    model_class: Any = None,
    parameters: ParamGroups | None = None,
    mesh: DeviceMesh | None = None,
    **kwargs: Any,
) -> Engine:
    """Return an engine whose `module` is the transformers model in `folder`: config.json and
    safetensors files, or the GGUF file of that name. The model is never whole in RAM.

    `config`, `parameters` and `mesh` are those of `offload.initialize`, all else is
    that of `open_pretrained`. Call these two where the model is to be changed before it trains:
    adapters, frozen weights, groups of parameters. Raises what the two raise.
    """
    folder = path_of(folder, "folder")
    loaded = OffloadConfig.load({} if config is None else config)
    if "dtype" in kwargs:
        raise ConfigError(
            "dtype=: precision in offload's configuration says what the model computes with"
        )
    dtype = DTYPES[loaded.precision]
    model = open_pretrained(folder, model_class=model_class, dtype=dtype, **kwargs)
    # an engine computes in one format, and transformers keeps some models' weights in fp32
    wide = [n for n, p in model.named_parameters() if p.dtype.itemsize > dtype.itemsize]
    if wide:
        _log.warning(
            "transformers keeps %d parameters in fp32 (%s); here they are computed with in %s",
            len(wide), some_of(wide), loaded.precision,
        )  # fmt: skip
    return initialize(model, loaded, parameters=parameters, mesh=mesh)


def open_pretrained(
    folder: StrPath, *, model_class: Any = None, dtype: torch.dtype | str = "auto", **kwargs: Any
) -> nn.Module:
    """Return the transformers model in `folder`, in evaluation mode, with weights that stay in its
    files until `offload.initialize(model, ...)` spreads them over the tiers.

    `model_class` is a model's class or one of the AutoModel classes; by default the class that
    config.json names, and of a GGUF file, which may be in the place of the folder, the language
    model. `dtype` is that of new weights and buffers; "auto": as config.json says (of a GGUF file:
    fp32).
    `kwargs` are those of transformers' `from_pretrained` (`num_labels`, `attn_implementation`,
    `key_mapping`, `ignore_mismatched_sizes`, ...).

    Weights that the files lack are initialised by transformers, in RAM, and reported by it. Weights
    that the files have quantized to 4 or 8 bits (`offload.quantized`) are dequantized when they
    are read, and the model is one with ordinary weights.

    Raise ConfigError if `folder` is no such folder (pickles and names of a hub are not read),
    UnsupportedError for other quantized weights, CheckpointError if weights do not fit the model or
    their quantization.
    """
    import transformers

    folder = path_of(folder, "folder")
    for name in kwargs.keys() & _REFUSED.keys():
        raise ConfigError(f"{name}=: {_REFUSED[name]}")
    header = read_header(folder) if folder.is_file() and folder.suffix == ".gguf" else None
    where = folder if header else folder / CONFIG
    if header is None:
        _check_folder(folder)
        variant = kwargs.pop("variant", None)
        text = read_json(where)
        quantized = settings_of(text, folder)  # unsupported formats, before a class is looked for
        files = _files(folder, variant, text.get("transformers_weights"))
        _check_counts(text, _max_tensors(files), where)
    try:
        if header:
            return _opened_gguf(transformers, header, model_class, dtype, kwargs)
        settings, kind, kwargs = _settings(transformers, where, text, model_class, kwargs)
        return _opened(folder, files, kind, settings, text, quantized, dtype=dtype, **kwargs)
    except OffloadError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{where}: transformers makes no model of it ({type(error).__name__}: "
            f"{plain(' '.join(str(error)[:4000].split()), 1000)})"
        ) from error


def _max_tensors(files: Iterable[Path]) -> int:
    """The number of tensors that the headers of safetensors files have room for."""
    headers = 0
    for path in files:
        with storage_errors("reading", path), path.open("rb") as file:
            headers += min(int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size)
    return headers // _ENTRY_NBYTES


def _check_counts(config: Any, tensors: int, where: str | Path) -> None:
    """Raise ConfigError for a configuration with many more layers or experts than there are
    `tensors`: each would be made, and take memory, before it is seen to be missing."""
    limit = _ANY_COUNT + tensors
    left: list[tuple[str, Any]] = [("", config)]
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += ((key, each) for each in value)
        elif isinstance(value, int) and value > limit and _COUNT.search(key):
            raise ConfigError(
                f"{where}: {key[:80]} is {value!s:.20}, and the files have tensors for {limit} at "
                "most; get the folder from where you trust it"
            )


def _opened(
    folder: Path, files: list[Path], kind: Any, settings: Any, text: dict[str, Any],
    quantized: Mapping[str, Any] | None, /, **kwargs: Any,
) -> nn.Module:  # fmt: skip
    from transformers import GenerationConfig

    for each in (settings, settings.get_text_config()):  # the model has ordinary weights
        if hasattr(each, "quantization_config"):
            del each.quantization_config
    transposed = _transposed(kind, settings) if quantized is not None else set()
    tensors = lazy_tensors(files, quantized, transposed)
    if (folder / GENERATION_CONFIG).is_file():
        read_json(folder / GENERATION_CONFIG)  # refuses files that transformers would accept
        generation = GenerationConfig.from_pretrained(str(folder))
    else:  # config.json may hold what is for `generate`, which `settings` leaves out
        generation = GenerationConfig.from_model_config(text)
    return _made(folder, tensors, kind, settings, generation_config=generation, **kwargs)


def _opened_gguf(
    transformers: Any, header: Header, model_class: Any, dtype: torch.dtype | str,
    kwargs: dict[str, Any],
) -> nn.Module:  # fmt: skip
    from offload.integrations.transformers.gguf_models import config_of, gguf_tensors

    text, path = config_of(header), header.path
    _check_counts(text, len(header.tensors), path)
    if model_class is None and "architectures" not in text:  # an encoder names its class
        head = "Seq2SeqLM" if "t5" in header.architecture else "CausalLM"
        model_class = getattr(transformers, f"AutoModelFor{head}")
    settings, kind, kwargs = _settings(transformers, path, text, model_class, kwargs)
    tensors = gguf_tensors(header, text, kind, settings)
    generation = transformers.GenerationConfig.from_model_config(settings)
    return _made(path, tensors, kind, settings, generation_config=generation, dtype=dtype, **kwargs)


def _made(
    folder: Path, tensors: Mapping[str, LazyTensor], kind: Any, settings: Any, **kwargs: Any
) -> nn.Module:
    model: Any = built(kind, settings, tensors, folder, **kwargs)
    model.name_or_path = model.config.name_or_path = str(folder)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, LazyTensor):
                module._buffers[name] = buffer.value()
    # which needs transformers
    from offload.integrations.transformers.pretrained_save import StreamedSave

    for module in model.modules():
        StreamedSave.install(module)  # also the base model alone
    return model  # type: ignore[no-any-return]


def built(
    kind: Any, settings: Any, tensors: Mapping[str, LazyTensor], folder: Path, **kwargs: Any
) -> Any:
    """Build a model of transformers' class `kind` from the tensors of `folder`, by its own
    `from_pretrained`. Raise CheckpointError if the tensors do not fit."""
    try:
        return kind.from_pretrained(None, config=settings, state_dict=dict(tensors), **kwargs)
    except RuntimeError as error:
        raise CheckpointError(
            f"{folder} does not fit {kind.__name__}: {error} (transformers' report names the "
            "weights; ignore_mismatched_sizes=True initialises those of other shapes anew)"
        ) from error


def load_weights(engine: Engine, folder: Path) -> None:
    """Overwrite the model's parameters and persistent buffers with those of `folder`.

    Raise CheckpointError, with nothing changed, unless it has them all, under the model's own
    names or those of transformers' files.
    """
    import transformers

    model = engine.module
    files = weight_files(folder)
    if not files:
        raise CheckpointError(f"{folder} has no {SINGLE} and no {INDEX}; name another checkpoint")
    tensors = lazy_tensors(files)
    if missing_in(tensors, model) and isinstance(model, transformers.PreTrainedModel):
        tensors = _converted(model, folder, tensors)
    overwrite(engine, folder, tensors)


def _converted(model: Any, folder: Path, saved: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the weights under the model's own names: transformers builds a second such model from
    them. Weights that are missing take no RAM, as they are not written, and are left out."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        made = built(
            type(model), copy.deepcopy(model.config), saved, folder, dtype="auto",
            generation_config=getattr(model, "generation_config", None),
        )  # fmt: skip
    return {
        name: tensor for name, tensor in made.state_dict(keep_vars=True).items()
        if isinstance(tensor, LazyTensor)
    }  # fmt: skip


def _settings(
    transformers: Any, where: Path, text: Mapping[str, Any], model_class: Any,
    kwargs: dict[str, Any],
) -> tuple[Any, Any, dict[str, Any]]:  # fmt: skip
    """Return the model's configuration, its class, and the `kwargs` that are for the class."""
    if model_class is None:
        named = text.get("architectures")
        name = str(named[0]) if isinstance(named, list) and named else ""
        model_class = getattr(transformers, name, None) if name else None
        is_class = isinstance(model_class, type)  # the object of that name may be anything
        if not is_class or not issubclass(model_class, transformers.PreTrainedModel):
            raise ConfigError(
                f"{where} names {f'the class {name}' if name else 'no class'}, "
                f"and transformers {transformers.__version__} has none of that name; pass "
                "model_class= (AutoModelForCausalLM, or a class of your own)"
            )
    config_class = getattr(model_class, "config_class", None)
    if config_class is None:
        config_class, kwargs = transformers.AutoConfig, {**kwargs, "trust_remote_code": False}
    if where.name != CONFIG:
        kwargs = {**kwargs, "gguf_file": where.name}
    try:
        settings, left = config_class.from_pretrained(
            str(where.parent), return_unused_kwargs=True, local_files_only=True, **kwargs
        )
    except ValueError as error:
        wants_code = "trust_remote_code" in str(error)
        why = f"it needs code of its own; {_REFUSED['trust_remote_code']}" if wants_code else error
        raise ConfigError(f"{where}: {why}") from error
    left.pop("gguf_file", None)
    if config_class is transformers.AutoConfig:
        left.pop("trust_remote_code", None)
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            model_class = type(model_class.from_config(settings))
        if not isinstance(settings, model_class.config_class):  # the text model of several
            settings = settings.get_text_config()
    return settings, model_class, left


def _transposed(kind: Any, settings: Any) -> set[str]:
    """Return the names in files of the weights that are transposed, with the base model's prefix
    and without it."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        names = transposed_weights(kind(copy.deepcopy(settings)))  # which it adds to
    prefix = f"{kind.base_model_prefix}."
    return names | {name.removeprefix(prefix) for name in names} | {prefix + n for n in names}


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(not_local(str(folder)))
    if not (folder / CONFIG).is_file():
        raise ConfigError(
            f"{folder} has no config.json; name a folder that model.save_pretrained or "
            "`offload checkpoint export` wrote, or a GGUF file itself"
        )
    if (folder / _ADAPTER).is_file():
        raise UnsupportedError(
            f"{folder} holds an adapter ({_ADAPTER}); open the folder of its base model with "
            "offload.open_pretrained, call PeftModel.from_pretrained(model, ADAPTER, "
            "is_trainable=True), then offload.initialize"
        )


def _files(folder: Path, variant: str | None, named: str | None) -> list[Path]:
    """Return the weight files that transformers reads; the folder may contain others."""
    names = [SINGLE, INDEX] if named is None else [str(named)]
    if variant is not None:
        names = [f".{variant}.".join(name.rsplit(".", 1)) for name in names]
    files = weight_files(folder, names)
    if files:
        return files
    there = sorted(path.name for path in folder.iterdir() if path.is_file())
    raise ConfigError(
        f"{folder} has no {' and no '.join(names)} (found {', '.join(there[:6]) or 'nothing'}): "
        "offload opens no pickles and no files of other formats; get the whole folder, or load it "
        "with transformers once, on a machine that you trust with it, and write it again with "
        'model.save_pretrained("NEW")'
    )
