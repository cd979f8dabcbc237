"""Optimizers that a program makes before the engine: the same rule and numbers in tiers."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from offload.config import OffloadConfig
from offload.config.optimizer import KINDS
from offload.config.paths import StrPath
from offload.config.source import load_source
from offload.optimizers.matrices import USE_MUON
from offload.tiers.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from offload.models.trained import Trained

CLASSES: dict[type, str] = {
    torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.Adagrad: "adagrad",
    torch.optim.SGD: "sgd", torch.optim.Muon: "muon",
}  # fmt: skip
# Of how torch computes a step, not of its result.
_HOW = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")


@dataclass(frozen=True)
class ClientOptimizer:
    """The settings of a client's optimizer: the `optimizer` section, and the param groups."""

    section: dict[str, Any]
    groups: list[dict[str, Any]]
    given: torch.optim.Optimizer

    @classmethod
    def of(
        cls, given: torch.optim.Optimizer, classes: Mapping[type, str] = CLASSES
    ) -> ClientOptimizer:
        """Read the settings of `given`; `classes` maps the supported classes to the names of their
        rules. Raises UnsupportedError for another class, or for a number that its rule lacks."""
        kind = _kind(given, classes)
        numbers = {key: given.defaults[key] for key in KINDS[kind].defaults}
        groups = [
            {key: value for key, value in group.items() if key not in _HOW}
            for group in given.param_groups  # empty ones, too: a saved state has as many
        ]
        if isinstance(given, torch.optim.Muon):
            groups = [{**group, USE_MUON: True} for group in groups]
        for key in ("amsgrad", "momentum"):  # states are kept for the group that needs them
            if key in numbers:
                needed = [group[key] for group in groups if group["params"]]
                numbers[key] = max([numbers[key], *needed])
        if any(group.get("initial_accumulator_value") for group in groups):
            raise UnsupportedError(
                "Adagrad(initial_accumulator_value=...): Adagrad begins with zeros here"
            )
        plain = {key: _plain(value) for key, value in numbers.items()}
        if plain.get("nesterov"):  # each group has its own
            plain["nesterov"] = bool(plain["momentum"] and not plain.get("dampening"))
        return cls({"type": kind, **plain}, groups, given)

    def merged(self, named: dict[str, Any]) -> dict[str, Any]:
        """Return the `optimizer` section of a configuration that sets `named` in it: how states are
        kept.

        Raises ConfigError if `named` has another number or another type.
        """
        for key, value in self.section.items():
            configured = named.get(key)
            if configured is not None and not equal_numbers(configured, value):
                raise ConfigError(
                    f"optimizer.{key}: {configured} in the offload configuration, and the "
                    f"program's {type(self.given).__name__} has {key}={value}; name it in one of "
                    "the two"
                )
        return {**named, **self.section}

    def lend(self, engine: Trained, schedulers: Sequence[Any] = ()) -> None:
        """Let the engine's optimizer replace the given one. A program that kept that one changes
        the engine's param groups, and so do its `schedulers`, until the engine is closed."""
        given, optimizer = self.given, engine.optimizer
        if given.state:
            optimizer.load_state_dict(given.state_dict())
            given.state.clear()
        given.param_groups = optimizer.param_groups
        if schedulers:
            _Attached(optimizer)
        for scheduler in schedulers:
            _attach(scheduler, optimizer)
        _lent.add(given)

        def take_back() -> None:
            given.param_groups = [{**given.defaults, **group} for group in given.param_groups]
            for scheduler in schedulers:
                _attach(scheduler, given)

        engine.before_close(take_back)

    @property
    def was_lent(self) -> bool:
        """Whether an engine's optimizer took its place before: its states went there."""
        return self.given in _lent


_lent: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


class _Attached(LRScheduler):
    """A scheduler that changes nothing. torch warns if an optimizer's `step` does not know that
    there are schedulers."""

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]


def _attach(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    scheduler.optimizer = optimizer
    for inner in getattr(scheduler, "_schedulers", ()):  # SequentialLR, ChainedScheduler
        _attach(inner, optimizer)


def _kind(given: torch.optim.Optimizer, classes: Mapping[type, str]) -> str:
    kind = classes.get(type(given))
    if kind is None:
        names = ", ".join(each.__name__ for each in classes)
        raise UnsupportedError(
            f"{type(given).__name__} has no rule here, and its states could not be kept in tiers; "
            f"use one of {names}"
        )
    if kind not in ("adam", "adamw"):
        return kind
    decoupled = {
        group.get("decoupled_weight_decay", kind == "adamw") for group in given.param_groups
    }
    if len(decoupled) > 1:
        raise UnsupportedError(
            "decoupled_weight_decay differs among param groups; one optimizer has one rule"
        )
    return "adamw" if decoupled.pop() else "adam"


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def equal_numbers(one: Any, other: Any) -> bool:
    """Return whether two settings are the same, as written in different formats."""
    try:
        if isinstance(one, list | tuple):
            return [float(each) for each in one] == [float(each) for each in other]
        return bool(one == other or float(one) == float(other))
    except (TypeError, ValueError):
        return False


def named_keys(source: StrPath | Mapping[str, Any] | OffloadConfig) -> dict[str, Any]:
    """Return the keys that a configuration names; of one in memory, those not at their default."""
    if not isinstance(source, OffloadConfig):
        return dict(load_source(source).value)
    named = source.model_dump(mode="json", exclude_defaults=True)
    defaults = KINDS[source.optimizer.type].defaults
    optimizer = {
        key: value for key, value in named.get("optimizer", {}).items()
        if key not in defaults or getattr(source.optimizer, key) != defaults[key]
    }  # fmt: skip
    return {**named, "optimizer": optimizer}
