"""Field types of the configuration that a plain annotation cannot express.

Each is one `Annotated` alias: parsed by one function whose ValueError is written for the user, and
described by a `Kind` for `offload config explain`.
"""

from __future__ import annotations

import os
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError

from offload.kernels.weight_formats import QuantType
from offload.swap.io.backends import BACKENDS
from offload.tiers import accelerator
from offload.tiers.placement import Placement
from offload.tiers.tier import TIERS, Tier
from offload.tiers.units import parse_bytes, parse_percent

if TYPE_CHECKING:
    BackendName = str
    DeviceName = str
    WeightFormatName = str
else:
    BackendName = Literal["auto", *BACKENDS]
    DeviceName = Literal["auto", "cpu", *accelerator.KINDS]
    WeightFormatName = Literal[*(code.name.lower() for code in QuantType)]
MAX_THREADS = 4096  # no machine has more cores; a slip of the finger does
_MAX_DEPTH = 4096  # groups fetched ahead: more than any model has
_MAX_CHUNK = 1 << 34  # elements: no group has more
_MIN_BUDGET = 1024  # bytes: fewer are a number without its unit
_VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|\{\w+\})")


class Section(BaseModel):
    """A part of the configuration: frozen, and unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def contradiction(self, key: str, other: str, why: str) -> KeyedError:
        """Return the error about two keys of this section; `why` says what else, and what to do."""
        first, second = (f"{name}: {_shown(getattr(self, name))}" for name in (key, other))
        return KeyedError(f"{first} contradicts {second}{why}", key, other)


def shared_settings(section: Section, path: str = "") -> dict[str, str]:
    """Return the settings that all ranks of a run must have alike, by key: those whose field is not
    marked `per_rank`. Every configuration has the same keys."""
    settings: dict[str, str] = {}
    for name, field in type(section).model_fields.items():
        extra, value = field.json_schema_extra, getattr(section, name)
        if isinstance(extra, dict) and extra.get("x-per-rank"):
            continue
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            settings |= shared_settings(value, f"{path}{name}.")
        else:  # also of a section that may be absent
            settings[path + name] = str(value)
    return settings


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a field that is a section, including an optional one."""
    options: tuple[Any, ...] = (annotation,)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        options = typing.get_args(annotation)
    for option in options:
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


@dataclass(frozen=True)
class Kind:
    """The allowed values of a type, described in words for the reference."""

    text: str
    absent: str = ""  # the meaning of no value


def key(
    default: Any, *, example: Any = None, unit: str = "", absent: str = "",
    per_rank: bool = False, **bounds: Any,
) -> Any:  # fmt: skip
    """A key of a section, with what the reference says about it beside its docstring.

    `default`: `...` for a key that has to be given. `absent`: the meaning of a default of None.
    `per_rank`: ranks that train together may have different values, for the result does not depend
    on it. `bounds`: those of pydantic's Field (`ge`, `lt`, ...).
    """
    said: dict[str, Any] = {"x-unit": unit, "x-absent": absent, "x-per-rank": per_rank}
    return Field(
        default,
        examples=None if example is None else [example],
        json_schema_extra={name: value for name, value in said.items() if value} or None,
        **bounds,
    )


def section(model: type[Section], *, per_rank: bool = False) -> Any:
    """A section with its defaults, where a file says nothing of it; `per_rank` as of `key`."""
    extra = key(..., per_rank=per_rank).json_schema_extra
    return Field(default_factory=model, json_schema_extra=extra)


@dataclass(frozen=True)
class Percent:
    """A share (0..1) of the machine's capacity; written `80%`."""

    fraction: float

    def __str__(self) -> str:
        return _percent(self.fraction)


StateFormatName = Literal["fp32", "bf16", "int8"]


class UnknownNameError(ValueError):
    """A name that is not one of `allowed`; the error carries both for a suggestion."""

    def __init__(self, name: str, allowed: tuple[str, ...], what: str) -> None:
        self.name = name
        self.allowed = allowed
        super().__init__(f"{name!r} is not {what}")


class KeyedError(ValueError):
    """A contradiction found by a section: the line of `key` (relative to it) is named, or that of
    `other`, the key that it contradicts."""

    def __init__(self, message: str, key: str, other: str | None = None) -> None:
        self.path = tuple(key.split("."))
        self.other = None if other is None else tuple(other.split("."))
        super().__init__(message)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _percent(fraction: float) -> str:
    """Return the shortest text that `parse_percent` reads back to exactly this fraction."""
    return f"{Decimal(repr(fraction)).scaleb(2):f}%"


def _parse_budget(value: Any) -> int | Percent | None:
    if value is None or value == "auto" or isinstance(value, Percent):
        return None if value == "auto" else value
    if isinstance(value, str) and "%" in value:
        return Percent(parse_percent(value))
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{value!r} is not a size; write for example 8GiB, 80% or auto")
    if str(value).strip().startswith("-"):
        raise ValueError(f"{value!r} is negative; write for example 8GiB, 80% or auto")
    nbytes = parse_bytes(value)
    if 0 < nbytes < _MIN_BUDGET:
        raise ValueError(
            f"{value!r} is {nbytes} bytes; write the unit, for example {nbytes}GiB, or a share, "
            f"for example {min(nbytes, 100)}%"
        )
    return nbytes


def _dump_budget(value: int | Percent | None) -> int | str | None:
    return str(value) if isinstance(value, Percent) else value


def _tier_names() -> tuple[str, ...]:
    return tuple(tier.name for tier in TIERS)


def _parse_tier(value: Any) -> str:
    names = _tier_names()
    if value not in names:
        raise PydanticKnownError("literal_error", {"expected": ", ".join(map(repr, names))})
    return str(value)


def _check_further_tier(name: str) -> str:
    if name not in _tier_names():
        raise PydanticKnownError("extra_forbidden")
    return name


def parse_split(value: Any) -> Placement | None:
    if value is None or value == "auto":
        return None
    if isinstance(value, Placement):
        return value
    names = _tier_names()
    if isinstance(value, str):
        if value not in names:
            raise UnknownNameError(value, (*names, "auto"), "a tier")
        return Placement.on(Tier.named(value))
    if not isinstance(value, dict) or not value:
        raise ValueError(
            f"expected a tier ({', '.join(names)}), auto, or a split like "
            f"{{host: 40%, nvme: 60%}}; found {value!r}"
        )
    shares = {tier: _parse_share(tier, share) for tier, share in value.items()}
    total = sum(shares.values())
    if abs(total - 1) > 1e-9:
        raise ValueError(f"the shares sum to {total * 100:.10g}%; they must sum to 100%")
    return Placement(tuple((Tier.named(tier), share) for tier, share in shares.items()))


def _parse_share(tier: Any, share: Any) -> float:
    if tier not in _tier_names():
        raise UnknownNameError(str(tier), _tier_names(), "a tier")
    if not isinstance(share, str):
        raise ValueError(f"the share of {tier} is {share!r}; write a percentage like 40%")
    return parse_percent(share)


def _dump_split(value: Placement | None) -> str | dict[str, str] | None:
    if value is None:
        return None
    shares = {tier.name: share for tier, share in value.shares}
    if list(shares.values()) == [1.0]:
        return next(iter(shares))
    return {tier: _percent(share) for tier, share in shares.items()}


def _check_path(value: str) -> str:
    """Check that the path can be a file name, and that the user in it exists."""
    shown = repr(value) if len(value) <= 60 else f"{value[:57]!r}..."
    if "\0" in value:
        raise ValueError(f"{shown} has a NUL character, which no path can have")
    variable = _VARIABLE.search(value)
    if variable is not None:
        raise ValueError(
            f"{shown}: {variable[0]} is not replaced in a configuration; write the path itself, or "
            "use -o on the command line, where the shell replaces it"
        )
    if os.path.expanduser(value).startswith("~"):
        user = value.partition("/")[0]
        raise ValueError(
            f"{shown}: there is no user {user[1:]!r} here; name the folder itself, or ./{user}"
        )
    return value


PathText = Annotated[str, Field(min_length=1), AfterValidator(_check_path), Kind("path")]
Budget = Annotated[
    int | Percent | None,
    PlainValidator(_parse_budget),
    PlainSerializer(_dump_budget),
    Kind("size (8GiB, 8GB or a number), percentage or auto", absent="auto"),
]
TierText = Annotated[str, PlainValidator(_parse_tier), Kind("device, host or nvme")]
FurtherTier = Annotated[str, AfterValidator(_check_further_tier)]
Split = Annotated[
    Placement | None,
    PlainValidator(parse_split),
    PlainSerializer(_dump_split),
    Kind("tier, split over tiers, or auto", absent="auto"),
]
AutoBool = bool | Literal["auto"]
Recompute = bool | Literal["selective", "auto"]
AutoThreads = Annotated[int, Field(ge=1, le=MAX_THREADS)] | Literal["auto"]
AutoDepth = Annotated[int, Field(ge=0, le=_MAX_DEPTH)] | Literal["auto"]
AutoChunk = Annotated[int, Field(ge=1024, le=_MAX_CHUNK, multiple_of=1024)] | Literal["auto"]


# ---------------------------------------------------------------- types in words
_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}
_BOUNDS = {"multiple_of": "in steps of", "ge": "from", "gt": "above", "le": "to", "lt": "below"}


def kind_of(field: FieldInfo) -> Kind:
    """Return the allowed values of a key in words."""
    kinds = [item for item in field.metadata if isinstance(item, Kind)]
    kind = kinds[0] if kinds else Kind(_type_text(field.annotation))
    return replace(kind, text=f"{kind.text} {_bounds(field.metadata)}".strip())


def _type_text(annotation: Any) -> str:
    """Return a type in words: `bool | None` is `true or false`."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return _listed([str(value) for value in inner])
    if origin is Annotated:
        kinds = [item.text for item in inner[1:] if isinstance(item, Kind)]
        bounds = [bound for item in inner[1:] for bound in getattr(item, "metadata", ())]
        return kinds[0] if kinds else f"{_type_text(inner[0])} {_bounds(bounds)}".strip()
    if origin is tuple:
        number = "" if inner[-1] is ... else f"{len(inner)} "
        return f"list of {number}{_type_text(inner[0])}s"
    options = [option for option in inner if option is not type(None)]
    if not options:
        return _WORDS[annotation]
    texts = [_type_text(option) for option in options]
    return _listed([word for text in texts for word in re.split(", | or ", text)])


def _bounds(metadata: Sequence[Any]) -> str:
    """Return the bounds in words, `from 0 to 3` or `above 0 and below 1`; "" without any."""
    bounds = {
        name: f"{words} {_number(getattr(item, name))}"
        for name, words in _BOUNDS.items()
        for item in metadata
        if hasattr(item, name)
    }
    return (" and " if "lt" in bounds else " ").join(bounds.values())


def _number(value: float) -> str:
    whole = int(value)
    if whole > 1 << 16 and whole & (whole - 1) == 0:
        return f"2^{whole.bit_length() - 1}"
    return f"{whole:,}" if whole == value else f"{value:g}"


def _listed(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
