"""DeepSpeed's learning-rate schedules as torch's `LambdaLR`: created here, or printed as code.

The functions below take a count: how often `scheduler.step()` was called. Their own source is
printed.
"""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from offload.config.remedies import suggestion
from offload.tiers.errors import ConfigError

REQUIRED = object()  # a parameter without a default
OWN = object()  # ... whose default is each param group's own learning rate
UNKNOWN = "auto"  # a number that transformers' Trainer fills in


# ---------------------------------------------------------------- functions that are printed
def warmup(count, steps, kind):  # type: ignore[no-untyped-def]
    """Rise from 0 to 1. The first two steps are at 0, as in DeepSpeed."""
    done = max(count - 1, 0)
    if done >= steps:
        return 1.0
    return done / steps if kind == "linear" else 1.0 / math.log(steps) * math.log(done + 1)


def warmup_decay(count, total, steps, kind):  # type: ignore[no-untyped-def]
    """Rise from 0 to 1, then fall linearly to 0 at `total`."""
    done = max(count - 1, 0)
    if done < steps:
        return warmup(count, steps, kind)
    return max(0.0, float(total - done) / float(max(1.0, total - steps)))


def warmup_cosine(count, total, steps, kind, least, final):  # type: ignore[no-untyped-def]
    """Rise from `least` to 1, then follow a cosine to `final`. The first step is at 0."""
    if count == 0:
        return 0.0
    done = count - 1
    if done < steps:
        return least + warmup(count, steps, kind) * (1.0 - least)
    progress = min(1.0, (done - steps + 1) / max(1, total - steps))
    return max(0.0, final + (1.0 - final) * (1 + math.cos(math.pi * progress)) / 2)


def range_test(count, steps, rate, staircase):  # type: ignore[no-untyped-def]
    """Start at 1, and grow by `rate` every `steps`."""
    intervals = float(count) / steps
    return 1 + rate * (math.floor(intervals) if staircase else intervals)


def cycle(count, first, second, first_stairs, second_stairs):  # type: ignore[no-untyped-def]
    """Rise from 0 to 1 in `first` steps, and fall back in `second`."""
    total, ratio = first + second, first / (first + second)
    x = 1.0 + count / total - math.floor(1 + count / total)
    share, stairs = (x / ratio, first_stairs) if x <= ratio else (
        (x - 1) / (ratio - 1), second_stairs)  # fmt: skip
    if stairs > 0:
        here = count % total
        exact = here * stairs / first if here <= first else (total - here) * stairs / second
        share = math.floor(exact) / stairs
    return share


def one_cycle(count, low, high, shape, decay_steps, decay_rate):  # type: ignore[no-untyped-def]
    """Return the learning rate: one cycle between `low` and `high`, then below `low`."""
    total = shape[0] + shape[1]
    if count - 1 < total:
        return low + (high - low) * cycle(count, *shape)
    if not decay_steps or not decay_rate:
        return low
    return low / (1 + decay_rate * ((count - total) / decay_steps))


def one_cycle_beta(count, low, high, shape, decay_steps, decay_rate):  # type: ignore[no-untyped-def]
    """Return the first beta: high where the learning rate is low."""
    total = shape[0] + shape[1]
    if count == 0:
        return low
    if count - 1 < total:
        return high - (high - low) * cycle(count, *shape)
    if not decay_steps or not decay_rate:
        return high
    return high * (1 + decay_rate * ((count - total) / decay_steps))


_USES: dict[Callable[..., Any], list[Callable[..., Any]]] = {
    warmup_decay: [warmup], warmup_cosine: [warmup], one_cycle: [cycle], one_cycle_beta: [cycle]
}  # fmt: skip

_WARMUP = {
    "warmup_min_lr": 0.0, "warmup_max_lr": OWN, "warmup_num_steps": 1000, "warmup_type": "log",
}  # fmt: skip
# Their parameters and defaults.
PARAMETERS: dict[str, dict[str, Any]] = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": {"total_num_steps": REQUIRED, **_WARMUP, "warmup_max_lr": 0.001},
    "WarmupCosineLR": {
        "total_num_steps": REQUIRED, "warmup_min_ratio": 0.0, "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001, "warmup_type": "log",
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0, "lr_range_test_staircase": False,
    },
    "OneCycle": {
        "cycle_min_lr": REQUIRED, "cycle_max_lr": REQUIRED, "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000, "cycle_second_step_size": None,
        "cycle_first_stair_count": 0, "cycle_second_stair_count": None, "decay_step_size": 0,
        "cycle_momentum": True, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": 0.0,
    },
}  # fmt: skip
# Parameters that transformers' Trainer fills in, and its nearest `lr_scheduler_type`.
FILLED = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
TRAINERS = {
    "WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine",
}  # fmt: skip
_LISTS = {
    "warmup_min_lr", "warmup_max_lr", "lr_range_test_min_lr", "cycle_min_lr", "cycle_max_lr",
    "cycle_min_mom", "cycle_max_mom",
}  # fmt: skip  # one number, or one per param group
_AT_LEAST_ONE = {"warmup_num_steps", "lr_range_test_step_size", "cycle_first_step_size"}


@dataclass(frozen=True)
class Schedule:
    """One of `PARAMETERS`, or a class of torch.optim.lr_scheduler, with its numbers."""

    type: str
    params: Mapping[str, Any]

    @classmethod
    def of(cls, kind: str, params: Mapping[str, Any]) -> Schedule:
        """Create a schedule with its defaults filled in. Raise ConfigError for an unknown type, or
        for parameters that the type does not have."""
        known = PARAMETERS.get(kind)
        if known is None:
            _check_torch(kind)
            return cls(kind, dict(params))
        for name in params:
            if name not in known and name != "last_batch_iteration":
                hint = suggestion(name, known)
                raise ConfigError(f"scheduler.params.{name}: unknown key of {kind}{hint}")
        if params.get("last_batch_iteration", -1) != -1:
            raise ConfigError(
                "scheduler.params.last_batch_iteration: a schedule begins at its beginning; load "
                "a checkpoint to go on, or call scheduler.step() as often"
            )
        full = {name: params.get(name, default) for name, default in known.items()}
        for name, value in full.items():
            _check(kind, name, value)
        return cls(kind, full)

    @property
    def is_torchs(self) -> bool:
        return self.type not in PARAMETERS

    @property
    def unfilled(self) -> list[str]:
        """The parameters that are `auto`."""
        return [name for name, value in self.params.items() if value == UNKNOWN]

    def on(self, optimizer: Any) -> Any:
        """Return the scheduler of a torch.optim.Optimizer."""
        from torch.optim import lr_scheduler

        if self.is_torchs:
            return getattr(lr_scheduler, self.type)(optimizer, **self.params)
        count = len(optimizer.param_groups)
        own = [float(group["lr"]) for group in optimizer.param_groups]
        functions = [self._function(self._of_group(i, count), own[i]) for i in range(count)]
        if not self.is_factor:
            for group in optimizer.param_groups:
                group.update(lr=1.0, initial_lr=1.0)
        if self._cycles_betas(optimizer):
            from offload.deepspeed.one_cycle import LambdaLRAndBetas

            betas = [self._beta_function(self._of_group(i, count)) for i in range(count)]
            return LambdaLRAndBetas(optimizer, functions, betas)
        return lr_scheduler.LambdaLR(optimizer, functions)

    @property
    def is_factor(self) -> bool:
        """Whether the function multiplies each param group's own learning rate."""
        return self.type == "WarmupCosineLR" or (
            self.params.get("warmup_max_lr") is OWN and (not self.params["warmup_min_lr"])
        )

    def _cycles_betas(self, optimizer: Any) -> bool:
        return bool(self.params.get("cycle_momentum")) and "betas" in optimizer.defaults

    def _of_group(self, index: int, count: int) -> dict[str, Any]:
        """Return one param group's parameters. Raise ConfigError for a list of another length."""
        found = dict(self.params)
        for name in _LISTS & found.keys():
            value = found[name]
            if isinstance(value, list | tuple):
                if len(value) != count:
                    raise ConfigError(
                        f"scheduler.params.{name}: {len(value)} values for {count} param groups"
                    )
                found[name] = value[index]
        return found

    def _function(self, p: Mapping[str, Any], own: float) -> Callable[[int], float]:
        """Return a function of the count: a learning rate, or a factor (see `is_factor`)."""
        call, args = self._call(p)
        if self.type in ("WarmupLR", "WarmupDecayLR"):
            if self.is_factor:
                return lambda count: call(count, *args)
            low = p["warmup_min_lr"]
            high = own if p["warmup_max_lr"] is OWN else p["warmup_max_lr"]
            return lambda count: low + (high - low) * call(count, *args)
        if self.type == "LRRangeTest":
            return lambda count: p["lr_range_test_min_lr"] * call(count, *args)
        return lambda count: call(count, *args)

    def _beta_function(self, p: Mapping[str, Any]) -> Callable[[int], float]:
        args = self._beta_args(p)
        return lambda count: one_cycle_beta(count, *args)

    def _call(self, p: Mapping[str, Any]) -> tuple[Callable[..., float], list[Any]]:
        match self.type:
            case "WarmupLR":
                return warmup, [_at_least_two(p["warmup_num_steps"]), _kind(p)]
            case "WarmupDecayLR":
                steps = _at_least_two(p["warmup_num_steps"])
                return warmup_decay, [p["total_num_steps"], steps, _kind(p)]
            case "WarmupCosineLR":
                steps = _at_least_two(p["warmup_num_steps"])
                rest = [p["warmup_min_ratio"], p["cos_min_ratio"]]
                return warmup_cosine, [p["total_num_steps"], steps, _kind(p), *rest]
            case "LRRangeTest":
                rest = [p["lr_range_test_step_rate"], p["lr_range_test_staircase"]]
                return range_test, [p["lr_range_test_step_size"], *rest]
        args = [p["cycle_min_lr"], p["cycle_max_lr"], _shape(p)]
        return one_cycle, [*args, p["decay_step_size"], p["decay_lr_rate"]]

    def _beta_args(self, p: Mapping[str, Any]) -> list[Any]:
        args = [p["cycle_min_mom"], p["cycle_max_mom"], _shape(p)]
        return [*args, p["decay_step_size"], p["decay_mom_rate"]]

    # ---------------------------------------------------------------- as code
    def code(self) -> str:
        """Return Python code that creates this scheduler of `optimizer`."""
        if self.is_torchs:
            args = "".join(f", {name}={_shown(value)}" for name, value in self.params.items())
            return (
                f"import torch\n\nscheduler = torch.optim.lr_scheduler.{self.type}"
                f"(optimizer{args})\n"
            )
        lists = [value for value in self.params.values() if isinstance(value, list | tuple)]
        count = len(lists[0]) if lists else 1
        groups = [self._of_group(index, count) for index in range(count)]
        lines = ["import math", "", "from torch.optim.lr_scheduler import LambdaLR", ""]
        cycled = self.type == "OneCycle" and self.params["cycle_momentum"]
        functions = [self._call(groups[0])[0], *([one_cycle_beta] if cycled else [])]
        used = [each for function in functions for each in _USES.get(function, [])]
        for function in dict.fromkeys([*used, *functions]):
            lines += ["", *_source(function).splitlines(), ""]
        lines.append("")
        if not self.is_factor:
            if self.params.get("warmup_max_lr") is OWN:
                lines += ['own = [group["lr"] for group in optimizer.param_groups]']
            lines += [
                "for group in optimizer.param_groups:  # below are learning rates, not factors",
                "    group.update(lr=1.0, initial_lr=1.0)",
            ]
        lines += self._code_of_call(groups, cycled=cycled)
        return "\n".join(lines) + "\n"

    def _code_of_call(self, groups: list[dict[str, Any]], *, cycled: bool) -> list[str]:
        formulas = [self._formula(p) for p in groups]
        if self.params.get("warmup_max_lr") is OWN and not self.is_factor:
            each = f"lambda count, high=high: {formulas[0]}"
            return [f"scheduler = LambdaLR(optimizer, [{each} for high in own])"]
        lambdas = [f"lambda count: {formula}" for formula in formulas]
        if not cycled:
            given = lambdas[0] if len(lambdas) == 1 else f"[{', '.join(lambdas)}]"
            return [f"scheduler = LambdaLR(optimizer, {given})"]
        from offload.deepspeed.one_cycle import LambdaLRAndBetas

        betas = []
        for p in groups:
            shown = ", ".join(map(_shown, self._beta_args(p)))
            betas.append(f"lambda count: one_cycle_beta(count, {shown})")
        times = "" if len(groups) > 1 else " * len(optimizer.param_groups)"
        return [
            *inspect.getsource(LambdaLRAndBetas).splitlines(), "", "",
            "scheduler = LambdaLRAndBetas(",
            f"    optimizer, [{', '.join(lambdas)}]{times},",
            f"    [{', '.join(betas)}]{times},",
            ")",
        ]  # fmt: skip

    def _formula(self, p: Mapping[str, Any]) -> str:
        call, args = self._call(p)
        made = f"{call.__name__}(count, {', '.join(map(_shown, args))})"
        if self.type in ("WarmupLR", "WarmupDecayLR") and not self.is_factor:
            low = _shown(p["warmup_min_lr"])
            high = "high" if p["warmup_max_lr"] is OWN else _shown(p["warmup_max_lr"])
            return f"{low} + ({high} - {low}) * {made}"
        if self.type == "LRRangeTest":
            return f"{_shown(p['lr_range_test_min_lr'])} * {made}"
        return made


def _source(function: Callable[..., Any]) -> str:
    return textwrap.dedent(inspect.getsource(function)).replace("  # type: ignore[no-untyped-def]",
                                                                "").rstrip()  # fmt: skip


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return repr(value)


def _at_least_two(steps: Any) -> Any:
    return max(2, steps)


def _kind(p: Mapping[str, Any]) -> str:
    return "linear" if p["warmup_type"] == "linear" else "log"


def _shape(p: Mapping[str, Any]) -> tuple[Any, ...]:
    first, second = p["cycle_first_step_size"], p["cycle_second_step_size"]
    stairs, others = p["cycle_first_stair_count"], p["cycle_second_stair_count"]
    first, second = float(first), float(first if second is None else second)
    return (first, second, stairs, stairs if others is None else others)


def _check(kind: str, name: str, value: Any) -> None:
    key = f"scheduler.params.{name}"
    if value is REQUIRED:
        raise ConfigError(f"{key}: missing; {kind} needs it")
    if value == UNKNOWN and name not in FILLED:
        raise ConfigError(
            f"{key}: auto: transformers' Trainer does not fill it in; write the value"
        )
    if value is OWN or value is None or value == UNKNOWN or isinstance(value, bool):
        return
    if name == "warmup_type":
        if value not in ("log", "linear"):
            raise ConfigError(f"{key}: {value!r} is neither log nor linear")
        return
    each = value if name in _LISTS and isinstance(value, list | tuple) else [value]
    for one in each:
        if isinstance(one, bool) or not isinstance(one, int | float) or not math.isfinite(one):
            raise ConfigError(f"{key}: expected a number, found {value!r}")
    if name in _AT_LEAST_ONE and not value >= 1:
        raise ConfigError(f"{key}: {value} must be at least 1")


def _check_torch(kind: str) -> None:
    from torch.optim import lr_scheduler

    found = getattr(lr_scheduler, kind, None)
    if not isinstance(found, type) or not issubclass(found, lr_scheduler.LRScheduler):
        hint = suggestion(kind, PARAMETERS)
        raise ConfigError(
            f"scheduler.type: {kind!r} is neither DeepSpeed's nor one of torch.optim.lr_scheduler"
            f"{hint}"
        )
