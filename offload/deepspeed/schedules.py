"""DeepSpeed's learning-rate schedules as torch's `LambdaLR`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field
from torch.optim import lr_scheduler

from offload.config.suggestions import suggestion
from offload.deepspeed.keys import Number, read
from offload.tiers.errors import ConfigError

REQUIRED = object()  # a parameter without a default
OWN = object()  # ... whose default is each param group's own learning rate


def _warmup_steps(p: Mapping[str, Any]) -> float:
    return float(max(2, p["warmup_num_steps"]))


# A formula takes the parameters and a count: how often `scheduler.step()` was called.
def _warmup(count: int, p: Mapping[str, Any]) -> float:
    """Rise from 0 to 1. The first two steps are at 0, as in DeepSpeed."""
    done, steps = max(count - 1, 0), _warmup_steps(p)
    if done >= steps:
        return 1.0
    is_linear = p["warmup_type"] == "linear"
    return done / steps if is_linear else 1.0 / math.log(steps) * math.log(done + 1)


def _warmup_decay(count: int, p: Mapping[str, Any]) -> float:
    """Rise from 0 to 1, then fall linearly to 0."""
    done, steps, total = max(count - 1, 0), _warmup_steps(p), p["total_num_steps"]
    if done < steps:
        return _warmup(count, p)
    return max(0.0, float(total - done) / float(max(1.0, total - steps)))


def _warmup_cosine(count: int, p: Mapping[str, Any]) -> float:
    """Rise from a share to 1, then follow a cosine to another. The first step is at 0."""
    if count == 0:
        return 0.0
    done, steps, total = count - 1, _warmup_steps(p), p["total_num_steps"]
    if done < steps:
        first: float = p["warmup_min_ratio"]
        return first + _warmup(count, p) * (1.0 - first)
    final: float = p["cos_min_ratio"]
    progress = min(1.0, (done - steps + 1) / max(1, total - steps))
    return max(0.0, final + (1.0 - final) * (1 + math.cos(math.pi * progress)) / 2)


_STEPS = {"warmup_num_steps": 1000, "warmup_type": "log"}
_WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": OWN, **_STEPS}
# The formula of each of DeepSpeed's schedules, and its parameters with their defaults.
KINDS: dict[str, tuple[Callable[[int, Mapping[str, Any]], float], Mapping[str, Any]]] = {
    "WarmupLR": (_warmup, _WARMUP),
    "WarmupDecayLR": (
        _warmup_decay, {"total_num_steps": REQUIRED, **_WARMUP, "warmup_max_lr": 0.001}
    ),
    "WarmupCosineLR": (
        _warmup_cosine,
        {"total_num_steps": REQUIRED, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001, **_STEPS},
    ),
}  # fmt: skip
# The types of values that are no numbers, and of numbers with a bound.
_TYPES = {
    "warmup_type": Literal["log", "linear"],
    "warmup_num_steps": Annotated[Number, Field(ge=1)],
}


@dataclass(frozen=True)
class Schedule:
    """One of `KINDS` with its numbers."""

    type: str
    params: Mapping[str, Any]

    @classmethod
    def of(cls, kind: str, params: Mapping[str, Any]) -> Schedule:
        """Create a schedule with its defaults filled in. Raise ConfigError for an unknown type, or
        for parameters that the type does not have."""
        if kind not in KINDS:
            raise ConfigError(
                f"scheduler.type: {kind!r} is not supported{suggestion(kind, KINDS)}; make another "
                "one of torch.optim.lr_scheduler in code: deepspeed.initialize(lr_scheduler=...)"
            )
        known = KINDS[kind][1]
        for name in params:
            if name not in known:
                hint = suggestion(name, known)
                raise ConfigError(f"scheduler.params.{name}: unknown key of {kind}{hint}")
        full = {}
        for name, default in known.items():
            value, key = params.get(name), f"scheduler.params.{name}"
            if value is None and default is REQUIRED:
                raise ConfigError(f"{key}: missing; {kind} needs it")
            try:
                given = None if value is None else read(_TYPES.get(name, Number), value)
            except ValueError as error:
                raise ConfigError(f"{key}: {error}, found {value!r}") from None
            full[name] = default if given is None else given
        return cls(kind, full)

    def on(self, optimizer: Any) -> lr_scheduler.LRScheduler:
        """Return the scheduler of a torch.optim.Optimizer."""
        groups = optimizer.param_groups
        functions = [self._function(float(group["lr"])) for group in groups]
        if not self._is_factor:
            for group in groups:
                group.update(lr=1.0, initial_lr=1.0)
        return lr_scheduler.LambdaLR(optimizer, functions)

    @property
    def _is_factor(self) -> bool:
        """Whether the formula multiplies each param group's own learning rate."""
        return self.type == "WarmupCosineLR" or (
            self.params["warmup_max_lr"] is OWN and not self.params["warmup_min_lr"]
        )

    def _function(self, own: float) -> Callable[[int], float]:
        """Return a function of the count for a param group of learning rate `own`: a learning rate,
        or a factor (see `_is_factor`)."""
        p, formula = self.params, KINDS[self.type][0]
        if self._is_factor:
            return lambda steps: formula(steps, p)
        low = p["warmup_min_lr"]
        high = own if p["warmup_max_lr"] is OWN else p["warmup_max_lr"]
        return lambda steps: low + (high - low) * formula(steps, p)

    def code(self) -> str:
        """Return Python code that creates this scheduler of `optimizer`."""
        given = {name: value for name, value in self.params.items() if value is not OWN}
        return (
            "from offload.deepspeed.schedules import Schedule\n\n"
            f'scheduler = Schedule.of("{self.type}", {given!r}).on(optimizer)\n'
        )
