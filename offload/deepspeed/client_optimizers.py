"""Optimizers that a program makes: the rule of ours with the same numbers, or a refusal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from offload.config.optimizer_kinds import KINDS
from offload.deepspeed.ops.lion import FusedLion
from offload.tiers.errors import UnsupportedError

_CLASSES: dict[type, str] = {
    torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.Adagrad: "adagrad",
    torch.optim.SGD: "sgd", FusedLion: "lion",
}  # fmt: skip
# Of how torch computes a step, not of its result.
_HOW = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")


@dataclass(frozen=True)
class ClientOptimizer:
    """What one says: our `optimizer` section, and the param groups."""

    section: dict[str, Any]
    groups: list[dict[str, Any]]
    given: torch.optim.Optimizer

    @classmethod
    def of(cls, given: torch.optim.Optimizer) -> ClientOptimizer:
        """UnsupportedError for a class without a rule, or a number that its rule lacks."""
        kind = _kind(given)
        numbers = {key: given.defaults[key] for key in KINDS[kind].defaults}
        groups = [
            {key: value for key, value in group.items() if key not in _HOW}
            for group in given.param_groups
            if group["params"]
        ]
        for key in ("amsgrad", "momentum"):  # states are kept for the group that needs them
            if key in numbers:
                numbers[key] = max([numbers[key], *(group[key] for group in groups)])
        for group in groups:
            if group.get("initial_accumulator_value", 0):
                raise UnsupportedError(
                    "Adagrad(initial_accumulator_value=...): Adagrad begins with zeros here"
                )
        plain = {key: _plain(value) for key, value in numbers.items()}
        if plain.get("nesterov"):  # each group has its own
            plain["nesterov"] = bool(plain["momentum"] and not plain["dampening"])
        return cls({"type": kind, **plain}, groups, given)

    def take_over(self, optimizer: Any) -> None:
        """`optimizer`, the engine's, goes on where the given one was; the given one's param groups
        become the engine's, so that schedulers and loops that hold it change those."""
        if self.given.state:
            optimizer.load_state_dict(self.given.state_dict())
            self.given.state.clear()
        self.given.param_groups = optimizer.param_groups


def _kind(given: torch.optim.Optimizer) -> str:
    kind = _CLASSES.get(type(given))
    if kind is None:
        names = ", ".join(f"{each.__name__}" for each in _CLASSES)
        raise UnsupportedError(
            f"{type(given).__name__} has no rule here, and its states could not be kept in tiers; "
            f"use one of {names}, or an optimizer section in the configuration"
        )
    decoupled = {group.get("decoupled_weight_decay", kind == "adamw") for group in
                 given.param_groups}  # fmt: skip
    if kind in ("adam", "adamw"):
        if len(decoupled) > 1:
            raise UnsupportedError(
                "decoupled_weight_decay differs among param groups; one optimizer has one rule"
            )
        return "adamw" if decoupled.pop() else "adam"
    return kind


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value
