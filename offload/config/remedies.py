"""Suggestions for wrong keys and words: misspellings, and other programs' names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from offload.config.fields import section_of
from offload.config.file import KeyPath

# Values, and keys of one section, by the names that other programs have for them: the first that is
# allowed is meant.
_WORDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("cpu", "ram", "memory", "dram", "system", "host_memory"), ("host",)),
    **dict.fromkeys(("gpu", "cuda", "vram", "hbm", "gpu_memory"), ("device", "cuda")),
    **dict.fromkeys(("disk", "ssd", "hdd", "storage", "file", "files", "swap"), ("nvme",)),
    **dict.fromkeys(("bfloat16", "bf16-mixed", "bf16-true"), ("bf16",)),
    **dict.fromkeys(("float16", "half", "16", "16-mixed", "16-true"), ("fp16",)),
    **dict.fromkeys(("float32", "float", "full", "32", "32-true"), ("fp32",)),
    **dict.fromkeys(("8bit", "8-bit", "8"), ("int8",)),
    **dict.fromkeys(("4bit", "4-bit", "4"), ("int4",)),
    **dict.fromkeys(("adam_w", "adamw_torch", "adamw_torch_fused", "adamw_hf"), ("adamw",)),
    "name": ("type",), "learning_rate": ("lr",), "batch_size": ("batch",),
}  # fmt: skip
_NONE_NEAR = {"fp8", "adafactor"}  # a name that looks alike is something else
# Keys of other programs, and offload's keys.
_KEYS: dict[str, str] = {
    **dict.fromkeys(
        ("max_grad_norm", "gradient_clipping", "grad_clip", "max_norm", "gradient_clip_val"),
        "clip_grad_norm",
    ),
    **dict.fromkeys(
        ("grad_accum", "gradient_accumulation", "accumulate_grad_batches", "accumulation_steps"),
        "gradient_accumulation_steps",
    ),
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpointing", "checkpoint", "checkpointing"),
        "placement.activations.checkpoint",
    ),
    **dict.fromkeys(("dtype", "torch_dtype", "mixed_precision", "bf16", "fp16"), "precision"),
    **dict.fromkeys(("quantization", "load_in_4bit", "load_in_8bit"), "storage.weights"),
    **dict.fromkeys(("offload_folder", "nvme_path", "swap_dir", "swap_path"), "nvme.paths"),
    **dict.fromkeys(("batch_size", "per_device_train_batch_size"), "train.batch"),
    **dict.fromkeys(("seq_len", "seq_length", "max_length", "sequence_length"), "train.sequence"),
    "batch": "train.batch", "sequence": "train.sequence", "model": "train.model",
    "learning_rate": "optimizer.lr", "max_memory": "budget", "zero_stage": "zero.stage",
    "max_steps": "train.steps",
}  # fmt: skip
_DEEPSPEED = {
    "zero_optimization", "offload_optimizer", "offload_param", "train_batch_size",
    "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer", "steps_per_print",
    "wall_clock_breakdown", "aio",
}  # fmt: skip
_NOTHING = {"none", "null", "nil", "off", "no", ""}


def suggestion(found: str, allowed: Iterable[str]) -> str:
    """Return a suggestion such as `; did you mean `lr`? allowed: a, b, c`."""
    names = tuple(allowed)
    close = near(found, names)
    hint = f"; did you mean `{close}`?" if close else ";"
    return f"{hint} allowed: {', '.join(names)}" if names else ""


def near(found: str, names: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the one of `names` that is meant: another program's name for it, or a misspelling."""
    known = tuple(names)
    word = found.strip("[]'\" ").lower().removeprefix("torch.")
    other = [name for name in _WORDS.get(word, ()) if name in known]
    close = [] if word in _NONE_NEAR else difflib.get_close_matches(word, known, 1, cutoff)
    return next(iter([*other, *close]), None)


def unknown_key(path: KeyPath, found: Any, root: type[BaseModel]) -> str:
    """Return a hint for a key that its section does not have: its name here, or its section."""
    name = str(path[-1])
    section = model_at(root, path[:-1])
    names = tuple(section.model_fields) if section else ()
    if name in _DEEPSPEED or (name in ("bf16", "fp16") and isinstance(found, Mapping)):
        return (
            "; it is a key of DeepSpeed, whose file `offload migrate ds_config.json -o "
            "offload.yaml` turns into one of offload"
        )
    if near(name, names, 0.8) is None:
        target = _KEYS.get(name.lower().replace("-", "_")) or _only_home(name, root)
        if target is not None and target.split(".") != [str(part) for part in path]:
            return f"; did you mean `{target}`?"
    return suggestion(name, names)


def _only_home(name: str, root: type[BaseModel]) -> str | None:
    """Return the least nested key of that name in another section."""
    homes = sorted(_paths_to(name, root), key=len)
    alone = len(homes) == 1 or (len(homes) > 1 and len(homes[0]) < len(homes[1]))
    return ".".join(homes[0]) if alone else None


def _paths_to(name: str, model: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    for key, field in model.model_fields.items():
        if key == name:
            yield (key,)
        inner = section_of(field.annotation)
        if inner is not None:
            yield from ((key, *path) for path in _paths_to(name, inner))


def left_out(path: KeyPath, found: Any, root: type[BaseModel]) -> str:
    """Return `; leave it out: no clipping` for a word or a number that means none."""
    section = model_at(root, path[:-1])
    field = section.model_fields.get(str(path[-1])) if section else None
    extra = field.json_schema_extra if field is not None else None
    absent = extra.get("x-absent") if isinstance(extra, dict) else None
    means_none = found in (0, False) or str(found).lower() in _NOTHING
    return f"; leave it out for {absent}" if absent and means_none else ""


def model_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """Return the section at a path."""
    current: type[BaseModel] | None = model
    for part in path:
        field = current.model_fields.get(str(part)) if current else None
        current = section_of(field.annotation) if field else None
    return current
