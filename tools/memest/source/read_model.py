"""Reads every kind of source as a `ModelSource`."""

import math
import os
import stat
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from offload.config import OffloadConfig
from offload.config.sections import WrittenFor
from offload.config.training import MAX_PARAMS, ModelConfig
from offload.display.words import counted
from offload.integrations.transformers.hub_names import is_hub_name, not_local
from offload.tiers.errors import ConfigError, PathError
from offload.tools.memest.source.factory import build_named, is_named
from offload.tools.memest.source.hugging_face import check_configuration
from offload.tools.memest.source.input_files import read_json, refuse_code, status_of
from offload.tools.memest.source.model_source import ModelSource, SourceKind, key_of
from offload.tools.memest.source.stated_sizes import (
    StatedSizes,
    built_in_cache,
    built_in_model,
    built_in_shape,
    model_of,
)
from offload.tools.memest.source.transformers_models import (
    build_on_meta,
    fingerprint_parts,
    is_installed,
    library_cache,
    library_model,
)
from offload.zero.groups.model_shape import ModelShape

_FILE_SUFFIXES = (".json", ".safetensors", ".yaml", ".yml")
_CODE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_model(source: str, *, blocks: Sequence[str] = ()) -> ModelSource:
    """Return the model that `source` names: a file, a folder or `module:function`.

    `blocks`: class names of the repeated blocks, as `groups.blocks`. Nothing of a file is executed.
    Raise ConfigError with a one-line reason, PathError if a file cannot be read.
    """
    if not source:
        raise ConfigError("the model's name is empty; name a file, a folder or module:function")
    if is_named(source) and not os.path.exists(source):
        return replace(read_named(source, blocks), location=source)
    path = Path(source)
    if path.suffix.lower() not in _FILE_SUFFIXES and is_hub_name(source) and not path.exists():
        raise PathError(not_local(source))
    is_folder = stat.S_ISDIR(status_of(path).st_mode)
    model_source = read_folder(path, blocks) if is_folder else read_file(path, blocks)
    return replace(model_source, location=model_source.location or str(path.absolute()))


def read_file(path: Path, blocks: Sequence[str]) -> ModelSource:
    """Return the model that a file describes, by its content."""
    suffix = path.suffix.lower()
    start = refuse_code(path)
    if suffix in (".yaml", ".yml"):
        return read_yaml(path)
    if suffix == ".json" or start.lstrip()[:1] == b"{":
        return _read_json_file(path, blocks)
    if suffix == ".safetensors" or start[8:9] == b"{":
        return _from_weights([path], path, blocks)
    raise ConfigError(
        f"{path}: is no description of a model; name a config.json, a safetensors file or index, "
        "an offload YAML (.yaml), a folder with one of them, or module:function"
    )


def read_folder(path: Path, blocks: Sequence[str]) -> ModelSource:
    """Return the model of a folder: from its config.json, else from its safetensors files."""
    try:
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be listed: {error.strerror}") from None
    if "config.json" in names:
        return _read_json_file(path / "config.json", blocks)
    weights = _weights_in(path, blocks)
    if weights is not None:
        return weights
    code = sorted(name for name in names if name.endswith(_CODE_SUFFIXES))
    said = f"{code[0]} may hold code and is not opened" if code else f"{len(names)} other files"
    raise ConfigError(
        f"{path}: has neither config.json nor safetensors files ({said}); "
        "put the model's config.json there, or name another source"
    )


def _weights_in(folder: Path, blocks: Sequence[str]) -> ModelSource | None:
    """Return the model of a folder's safetensors files; None if it has none."""
    from offload.checkpoint.foreign.model_files import weight_files

    others = (path for path in sorted(folder.glob("*.safetensors")) if path.is_file())
    files = weight_files(folder) or list(others)
    return _from_weights(files, folder, blocks) if files else None


def read_named(source: str, blocks: Sequence[str]) -> ModelSource:
    """Return the model that a user's function returns."""
    from offload.zero.groups.parameter_grouping import group_parameters

    model = build_named(source)
    shape = group_parameters(model, blocks).shape()
    if not shape.numel:
        raise ConfigError(f"{source}: the model has no parameters; nothing of it is trained")
    none_trained = "no parameter is trained: all have requires_grad=False"
    return ModelSource(
        name=source,
        kind=SourceKind.FACTORY,
        shape=shape,
        fingerprint="",  # code may change between two calls
        notes=() if shape.numel_trainable else (none_trained,),
        build=lambda: model,
    )


def read_yaml(path: Path) -> ModelSource:
    """Return the model that an offload configuration was written for, else its built-in one, with
    the defaults if it names none."""
    config = OffloadConfig.load(path)
    if config.written_for is not None:
        return read_written_for(config, config.written_for)
    stated, model = "train" in config.model_fields_set, config.train.model
    shape = built_in_shape(model, config.groups.blocks)
    notes = () if stated else ("no train: section: the built-in model at its default size",)
    return replace(
        _built_in(path.name, SourceKind.YAML, model, shape, notes),
        context=model.max_sequence,
        config=config,
    )


def read_written_for(config: OffloadConfig, written_for: WrittenFor) -> ModelSource:
    """Return the model that `config` was written for, from its path at that time.

    Raise ConfigError if it is no longer there, or is another one. A function that only the
    configuration names is not called: its code runs if the user names it.
    """
    place = written_for.source
    if place is None or is_named(place):
        code = f" as {place}, code that runs only if you name it" if place is not None else ""
        raise ConfigError(
            f"written_for: this file was written for {written_for}{code}; {_name_it(place)}"
        )
    if not os.path.exists(place):
        raise ConfigError(
            f"written_for: this file was written for {written_for}, which is not at {place} any "
            f"more; {_name_it(None)}"
        )
    if place.lower().endswith((".yaml", ".yml")):
        raise ConfigError(f"{place}: is a configuration, too; name the model itself")
    model_source = read_model(place, blocks=config.groups.blocks)
    written_for.check(model_source.name, model_source.shape.numel)
    return replace(model_source, config=config)


def _name_it(source: str | None) -> str:
    source = source or "MODEL"
    return f"name it: `memest {source} --config FILE`"


def read_stated(sizes: StatedSizes) -> ModelSource:
    """Return a model of a few stated sizes. Raise ConfigError if they contradict each other."""
    model, notes = model_of(sizes)
    shape = built_in_shape(model)
    name = f"{counted(shape.numel)} parameters"
    return _built_in(name, SourceKind.STATED, model, shape, notes)


def _built_in(
    name: str, kind: SourceKind, model: ModelConfig, shape: ModelShape, notes: tuple[str, ...]
) -> ModelSource:
    return ModelSource(
        name=name, kind=kind, shape=shape, notes=notes, train_model=model,
        fingerprint=key_of({"built-in": model.model_dump(mode="json")}),
        build=cache(partial(built_in_model, model)), find_cache=partial(built_in_cache, model),
    )  # fmt: skip


def _read_json_file(path: Path, blocks: Sequence[str]) -> ModelSource:
    values = read_json(path)
    if isinstance(values, dict) and "weight_map" in values:
        from offload.checkpoint.foreign.model_files import weight_files

        return _from_weights(weight_files(path.parent, (path.name,)), path, blocks)
    return _read_configuration(values, path, blocks)


def _read_configuration(values: Any, path: Path, blocks: Sequence[str]) -> ModelSource:
    """Return the model that transformers builds; without transformers that of the weights beside
    the configuration, of which only the sizes are known."""
    configuration = check_configuration(values, str(path))
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    weights = None if is_installed() else _weights_in(path.parent, blocks)
    if weights is not None:
        note = "sizes alone, from the weights: transformers is not installed (offload[hf])"
        return replace(weights, name=name, notes=(note, *weights.notes))
    build = cache(partial(build_on_meta, configuration))
    model = library_model(configuration, blocks, build)
    if model.shape.numel > MAX_PARAMS:
        raise ConfigError(
            f"{path}: its sizes make {float(model.shape.numel):.3g} parameters; at most "
            f"{MAX_PARAMS:.0e} are counted"
        )
    return ModelSource(
        name=name or configuration.model_type,
        kind=SourceKind.CONFIGURATION,
        shape=model.shape,
        fingerprint=key_of(fingerprint_parts(configuration)),
        context=model.context,
        notes=configuration.notes,
        build=build,
        precision=configuration.precision,
        find_cache=partial(library_cache, configuration, build),
    )


def _from_weights(files: Sequence[Path], path: Path, blocks: Sequence[str]) -> ModelSource:
    """Return the model of safetensors files, whose headers alone are read. Raise CheckpointError
    for a file that is none, or damaged."""
    from offload.tools.memest.source.weight_names import is_trainable, model_of_names
    from offload.weights.tensor_file import stored_tensors
    from offload.zero.groups.parameter_grouping import group_parameters

    tensors = stored_tensors(files)
    model, buffers = model_of_names(tensors)
    shape = group_parameters(model).shape()
    if shape.numel == 0:
        formats = ", ".join(sorted({str(tensor.dtype) for tensor in tensors.values()}))
        raise ConfigError(f"{path}: holds no trainable weights: {formats or 'it is empty'}")
    notes = ["groups are told from the names of the weights"]
    if blocks:
        notes.append(f"groups.blocks ({', '.join(blocks)}) needs the model's classes: left aside")
    if buffers:
        notes.append(f"{len(buffers)} buffers are not counted, {buffers[0]} is one")
    fixed = sum(math.prod(t.shape) for t in tensors.values() if not is_trainable(t))
    if fixed:
        notes.append(f"{fixed:,} elements are quantized or integers and not trained")
    return ModelSource(
        name=path.resolve().name,
        kind=SourceKind.SAFETENSORS,
        shape=shape,
        fingerprint="",
        notes=tuple(notes),
    )
