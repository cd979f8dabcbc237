"""Suggestions for wrong keys and values: other programs' names, and values of another type."""

from __future__ import annotations

import contextlib
import difflib
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from offload.config.fields import Section, section_of
from offload.config.file import KeyPath, dump_yaml

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
_YES, _NO = {"yes", "on", "true", "1", "y"}, {"no", "off", "false", "0", "n"}
_NOTHING = {"none", "null", "nil", "off", "no", ""}
_TYPES = {  # of a ValueError's text, where a field reads its values itself
    "expected true, false": "bool_type", "expected a whole number": "int_type",
}  # fmt: skip


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


def unknown_key(path: KeyPath, found: Any, root: type[BaseModel], place: str) -> str:
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
            return f"; did you mean `{target}`?{_moved(target, found, root, place)}"
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


def _moved(target: str, found: Any, root: type[BaseModel], place: str) -> str:
    """Return ` write ...` if the value can stay as it is."""
    path = tuple(target.split("."))
    nested: Any = found
    for part in reversed(path):
        nested = {part: nested}
    try:
        root.model_validate(nested)
    except ValidationError:
        return ""
    return f" write {written(path, found, place)}"


def written(path: KeyPath, value: Any, place: str) -> str:
    """Return a key and its value as they are written in that place: in a file, or as an option."""
    keys = [str(part) for part in path]
    if place.startswith("-o "):
        return "-o " + shlex.quote(f"{'.'.join(keys)}={_text(value)}")
    text = f"{keys[-1]}: {_text(value)}"
    for key in reversed(keys[:-1]):
        text = f"{key}: {{{text}}}"
    return text


def _text(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return repr(value) if is_number else dump_yaml(value, inline=True)


def other_shape(kind: str, message: str, path: KeyPath, found: Any, root: Any, place: str) -> str:
    """Return `; write ...` for a value of another type with only one possible meaning, else ""."""
    kind = next((name for text, name in _TYPES.items() if message.startswith(text)), kind)
    match kind:
        case "model_type":
            return _in_a_section(path, found, root, place)
        case "tuple_type":
            numbers = [_number(item, float) for item in _items(found)]
            value: Any = _items(found) if None in numbers else numbers
            if found is None or (len(numbers) == 1 and numbers[0] is not None):
                return ""
        case "bool_type":
            word = str(found).lower()
            value = True if word in _YES else False if word in _NO else None
        case "int_type" | "int_from_float":
            value = _number(found, int)
        case "float_type":
            value = _number(found, float)
        case _:
            return ""
    return "" if value is None else f"; write {written(path, value, place)}"


def _in_a_section(path: KeyPath, found: Any, root: Any, place: str) -> str:
    """Return `; write ...` for a value in the place of a section, as that of its main key."""
    section = model_at(root, path)
    if section is None or not issubclass(section, Section) or not section.main:
        return ""
    if found is None and not place.startswith("-o "):
        return "; indent its keys below it, or remove it"
    if isinstance(found, str) and re.match(r"\w+:\S", found):
        return f"; write a space after the colon: {found.replace(':', ': ', 1)}"
    key = (*path, section.main)
    for value in [] if found is None else _readings(found):
        with contextlib.suppress(ValidationError):
            section.model_validate({section.main: value})
            return f"; write {written(key, value, place)}"
    field = section.model_fields[section.main]
    example = next(iter(field.examples or ()), field.default)
    return f"; write for example {written(key, example, place)}"


def _readings(found: Any) -> Iterator[Any]:
    """Yield the value as it is, under offload's word for it, and as a list."""
    yield found
    for allowed in (("device", "host", "nvme"), ("adamw", "adam"), ("int8", "int4")):
        word = near(str(found), allowed, 0.8)
        if word is not None:
            yield word
    yield _items(found)


def _items(found: Any) -> list[Any]:
    return [part.strip() for part in found.split(",")] if isinstance(found, str) else [found]


def _number(found: Any, kind: type) -> Any:
    """Return the number that a text or a list of one stands for; None if there is none."""
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if isinstance(found, bool) or not isinstance(found, str | int | float):
        return None
    try:
        number = float(found.replace("_", "") if isinstance(found, str) else found)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    if kind is int:
        return int(number) if number.is_integer() else None
    return number


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
