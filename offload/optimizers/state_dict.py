"""Checks that a state dict fits this optimizer, before anything is changed.

Dicts of `torch.optim` are taken, too: the same keys and shapes. One that differs in kind is refused
by a ValueError, as torch does for param groups of other sizes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from offload.config.optimizer import KINDS
from offload.zero.tensors.local_tensors import is_dtensor

_STEPS_LIMIT = 1 << 53  # what the floats that torch counts in can tell apart
_KIND_NUMBERS = frozenset(key for kind in KINDS.values() for key in kind.defaults)


@dataclass(frozen=True, slots=True)
class Kept:
    """The states of one parameter."""

    name: str
    shape: tuple[int, ...]
    states: tuple[str, ...]
    counts_steps: bool  # torch's optimizer of this kind does


def check_sizes(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Raise ValueError unless it has the param groups' sizes."""
    saved = state_dict["param_groups"]
    if len(saved) != len(groups):
        raise ValueError(
            "loaded state dict has a different number of parameter groups: "
            f"{len(saved)}, this optimizer has {len(groups)}"
        )
    for number, (mine, theirs) in enumerate(zip(groups, saved, strict=True)):
        if len(mine["params"]) != len(theirs.get("params", ())):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of "
                f"optimizer's group: {len(theirs.get('params', ()))} parameters in group {number}, "
                f"here {len(mine['params'])}"
            )


def check_kind(type_: str, present: Mapping[str, Any], numbers: Mapping[str, Any]) -> None:
    """Raise ValueError unless `numbers` are those of an optimizer of this type, and a param group
    has its kinds of numbers at `present`."""
    mine = KINDS[type_].defaults
    if "params" in numbers:
        raise ValueError("a param group's numbers hold params")
    lacking = [key for key in mine if key not in numbers]
    foreign = sorted(key for key in numbers if key in _KIND_NUMBERS and key not in present)
    if lacking or foreign:
        what = [f"lacks {', '.join(lacking)}"] if lacking else []
        what += [f"has {', '.join(foreign)}"] if foreign else []
        raise ValueError(
            f"a param group {' and '.join(what)}: it is not of optimizer.type: {type_}"
        )
    if numbers.get("decoupled_weight_decay", type_ == "adamw") != (type_ == "adamw"):
        raise ValueError(
            f"a param group has decoupled_weight_decay={numbers['decoupled_weight_decay']!r}, "
            f"optimizer.type: {type_} says the opposite"
        )


def check_state(kept: Kept, param: torch.Tensor, state: Any) -> dict[str, Any]:
    """Return a parameter's state, with `step` as an int; empty before the first update.

    Raises ValueError unless it can be taken over as it is.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"the state of {kept.name} is a {type(state).__name__}, no dict")
    given = {key: value for key, value in state.items() if value is not None}
    if not given:
        return {}
    unknown = [str(key) for key in given if key not in ("step", "master", *kept.states)]
    # torch's SGD counts no steps: a buffer means that there was one
    needed = ("step", *kept.states) if kept.counts_steps else kept.states
    lacking = [key for key in needed if key not in given]
    if unknown or lacking:
        what = f"has {', '.join(unknown)}" if unknown else f"lacks {', '.join(lacking)}"
        raise ValueError(
            f"the state of {kept.name} {what}; this optimizer keeps step"
            f"{''.join(', ' + name for name in kept.states)}"
        )
    for key, value in given.items():
        if key != "step":
            check_tensor(f"{key} of {kept.name}", kept, param, value)
    return {**given, "step": count_of_steps(kept.name, given.get("step", 1))}


def count_of_steps(name: str, value: Any) -> int:
    """Return a count of steps. Raises ValueError for a value that is none."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    steps = float(value) if isinstance(value, Real) else math.nan
    if not 0 <= steps < _STEPS_LIMIT or not steps.is_integer():
        raise ValueError(f"step of {name} is {value!r:.40}, and no count of steps")
    return int(steps)


def check_tensor(what: str, kept: Kept, param: torch.Tensor, value: Any) -> None:
    """Raise ValueError unless the value can be one of the states."""
    shape = tuple(param.shape) if is_dtensor(value) else kept.shape
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
        shown = getattr(value, "shape", type(value).__name__)
        raise ValueError(f"{what}: expected a tensor of shape {shape}, found {shown}")
