"""Pipelines of diffusers whose models compute from the tiers, and share their budgets.

pipe = open_pipeline("stable-diffusion-3.5", dtype=torch.bfloat16)    # weights stay in their files
dispatch(pipe, "offload.yaml")
image = pipe("a cat", num_inference_steps=20).images[0]

diffusers itself makes the pipeline, its tokenizers and its scheduler. Its models are given lazy
tensors (`lazy_tensors`), whose values `dispatch` reads one group at a time.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import accelerate
import torch
import transformers
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.hooks.group_offloading import _GROUP_OFFLOADING
from diffusers.models.modeling_utils import no_init_weights
from diffusers.pipelines import pipeline_loading_utils as loading
from torch import nn

import offload
from offload.checkpoint.foreign.model_files import CONFIG, read_json, weight_files
from offload.config import OffloadConfig
from offload.config.paths import StrPath, path_of
from offload.display.words import some_of
from offload.integrations.transformers.hub_names import not_local
from offload.integrations.transformers.pretrained import open_pretrained
from offload.tiers.errors import CheckpointError, ConfigError, UnsupportedError
from offload.weights.lazy_tensors import LazyTensor, lazy_tensors

P = TypeVar("P")
_PIPELINE = "model_index.json"
_FILES = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json")
_MOVES = (
    "offload moves the weights of this pipeline, which are in tiers: leave out this call; budget "
    "and device in offload's configuration say how much memory they take, and where"
)
_LORA = (
    "load adapters before dispatch(pipe), or close the tiers first, which gives the weights back: "
    "offload.dispatched(pipe.vae).close(keep='host')"
)
# Methods of a pipeline that is dispatched, and of its models, and what to do instead.
_REFUSED = {
    **dict.fromkeys(
        ("enable_group_offload", "enable_model_cpu_offload", "enable_sequential_cpu_offload"),
        _MOVES,
    ),
    **dict.fromkeys(("load_lora_weights", "load_lora_adapter"), _LORA),
}
# Arguments of from_pretrained, and why open_pipeline does not take them.
_ARGUMENTS = {
    "device_map": "budget and device in offload's configuration say where weights are",
    "quantization_config": "storage.weights in offload's configuration quantizes weights",
    "torch_dtype": "it is called dtype here",
}


def dispatch(pipe: P, config: StrPath | Mapping[str, Any] | OffloadConfig | None = None) -> P:
    """Spread the weights of all models of a pipeline over tiers: text encoders, denoiser and VAE
    share one budget, and each has it to itself while it computes.

    Returns `pipe`, the same object; its images have the bits that they have in RAM.
    `offload.dispatched(pipe.vae)` (or of another of its models) returns the owner of the tiers.

    `config` is that of `offload.dispatch`. Without `groups.blocks` the blocks are the innermost
    ones that the models' classes name (`_no_split_modules`): of a UNet its residual and
    transformer blocks. Models in another format than most weights (a VAE in fp32) stay in RAM.

    Raises what `offload.dispatch` raises, and UnsupportedError for group offloading.
    """
    if not isinstance(pipe, DiffusionPipeline):
        raise ConfigError(
            f"{type(pipe).__name__} is not a pipeline of diffusers; offload.dispatch(model, config)"
            " takes a model, and an nn.ModuleDict of several models that share a budget"
        )
    models = {n: m for n, m in pipe.components.items() if isinstance(m, nn.Module)}
    for name, model in models.items():
        hooks = (getattr(each, "_diffusers_hook", None) for each in model.modules())
        if any(hook is not None and hook.get_hook(_GROUP_OFFLOADING) for hook in hooks):
            raise UnsupportedError(
                f"{name} has hooks of enable_group_offload, which move its weights, and offload "
                "does that here: make the pipeline without them"
            )
    loaded = OffloadConfig.load({} if config is None else config)
    if not loaded.groups.blocks:
        groups = loaded.groups.model_copy(update={"blocks": _innermost_blocks(models.values())})
        loaded = loaded.model_copy(update={"groups": groups})
    whole = offload.dispatch(nn.ModuleDict(models), loaded)
    owners: list[Any] = [pipe, *models.values()]  # another pipeline may call the models' methods
    refused = [(vars(each), name) for each in owners for name in _REFUSED if hasattr(each, name)]
    for methods, name in refused:
        methods[name] = partial(_refuse, name)
    offload.dispatched(whole).before_close(partial(_allow, refused))
    return pipe


def _refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError(f"{name}(): {_REFUSED[name]}")


def _allow(refused: Iterable[tuple[dict[str, Any], str]]) -> None:
    for methods, name in refused:
        methods.pop(name, None)


def _innermost_blocks(models: Iterable[nn.Module]) -> tuple[str, ...]:
    """Return the classes of blocks that hold no other blocks. (A block of a UNet may have a third
    of its weights.)"""
    blocks: dict[str, bool] = {}
    for model in models:
        names = {n for m in model.modules() for n in getattr(m, "_no_split_modules", None) or ()}
        for module in model.modules():
            kinds = [type(each).__name__ for each in module.modules()]
            if kinds[0] in names and next(module.parameters(), None) is not None:
                blocks[kinds[0]] = blocks.get(kinds[0], True) and names.isdisjoint(kinds[1:])
    return tuple(sorted(name for name, is_innermost in blocks.items() if is_innermost))


# ------------------------------------------------------------------------------------ opening
def open_pipeline(
    folder: StrPath, *, pipeline_class: Any = DiffusionPipeline,
    dtype: torch.dtype | Mapping[str, torch.dtype] = torch.float32, variant: str | None = None,
    **components: Any,
) -> Any:  # fmt: skip
    """Return the pipeline in `folder`, with weights that stay in its safetensors files until
    `dispatch(pipe, ...)` spreads them over the tiers: it is never whole in RAM.

    `pipeline_class` is the pipeline's class, by default the one that model_index.json names;
    `dtype` that of its models, or a mapping from names of models (and "default") to formats.
    Files of a `variant` ("fp16") are read where there are any. `components` are all else that
    `DiffusionPipeline.from_pretrained` takes: components to use in the place of the folder's, None
    to leave one out (`safety_checker=None`).

    Raises ConfigError if `folder` is no such folder, CheckpointError if weights do not fit,
    UnsupportedError for quantized models of diffusers.
    """
    for argument in _ARGUMENTS.keys() & components.keys():
        raise ConfigError(f"{argument}=: {_ARGUMENTS[argument]}")
    dtypes = dtype if isinstance(dtype, Mapping) else {"default": dtype}
    for each in dtypes.values():
        if not isinstance(each, torch.dtype):
            raise ConfigError(f"dtype: {each!r} is not a torch.dtype, such as torch.bfloat16")
    folder = path_of(folder, "folder")
    if not folder.is_dir():
        raise ConfigError(not_local(str(folder)))
    if not (folder / _PIPELINE).is_file():
        raise ConfigError(
            f"{folder} has no {_PIPELINE}; name a folder that pipe.save_pretrained wrote"
        )
    opened = {}
    for name, entry in read_json(folder / _PIPELINE).items():
        if name in components or not isinstance(entry, list) or entry[0] is None:
            continue
        kind = _class_of(*entry)
        own = dtypes.get(name, dtypes.get("default", torch.float32))
        if issubclass(kind, ModelMixin):
            opened[name] = _open_model(kind, folder / name, own, variant)
        elif issubclass(kind, transformers.PreTrainedModel):
            has_variant = any((folder / name).glob(f"model.*{variant}*"))
            opened[name] = open_pretrained(
                folder / name, model_class=kind, dtype=own, variant=variant if has_variant else None
            )
    return pipeline_class.from_pretrained(
        str(folder), local_files_only=True, dtype=dict(dtypes), **opened, **components
    )


def _class_of(library: str, name: str) -> Any:
    from diffusers import pipelines

    kind, _ = loading.get_class_obj_and_candidates(
        library, name, loading.ALL_IMPORTABLE_CLASSES, pipelines, hasattr(pipelines, library)
    )
    return kind


def _open_model(kind: Any, folder: Path, dtype: torch.dtype, variant: str | None) -> nn.Module:
    """Return a model of diffusers with lazy parameters, as its own `from_pretrained` makes it."""
    settings = kind.load_config(str(folder), local_files_only=True)
    if settings.get("quantization_config"):
        raise UnsupportedError(
            f"{folder / CONFIG} has a quantization_config, and offload does not read quantized "
            "models of diffusers; take the folder of the original, and set storage.weights"
        )
    parts = [name.rpartition(".") for name in _FILES if variant]
    named = [f"{stem}.{variant}.{suffix}" for stem, _, suffix in parts]
    files = weight_files(folder, [*named, *_FILES])
    if not files:
        raise ConfigError(
            f"{folder} has no {' and no '.join(_FILES)}: offload reads no pickles; name the "
            "variant= of files that are there, or write the folder anew with pipe.save_pretrained, "
            "on a machine that you trust with it"
        )
    before = kind._set_default_torch_dtype(dtype)
    try:
        with no_init_weights(), accelerate.init_empty_weights():
            model: Any = kind.from_config(settings)
    finally:
        torch.set_default_dtype(before)
    tensors: dict[str, Any] = lazy_tensors(files)
    model._fix_state_dict_keys_on_load(tensors)
    wide = set(kind._keep_in_fp32_modules or ())
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            is_wide = not wide.isdisjoint(name.split("."))
            tensors[name] = tensor.to(torch.float32 if is_wide else dtype)
    _fill(model, tensors, folder)
    model.register_to_config(_name_or_path=str(folder))
    return model.eval()  # type: ignore[no-any-return]


def _fill(model: nn.Module, tensors: Mapping[str, LazyTensor], folder: Path) -> None:
    try:
        missing = model.load_state_dict(tensors, strict=False, assign=True).missing_keys
    except RuntimeError as error:  # of other shapes
        raise CheckpointError(f"{folder} does not fit {type(model).__name__}: {error}") from error
    if missing:
        raise CheckpointError(
            f"{folder} has no {some_of(missing)}, which {type(model).__name__} needs; get the whole"
            " folder, or load it with diffusers and save it again"
        )
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, LazyTensor):
                module._buffers[name] = buffer.value()
