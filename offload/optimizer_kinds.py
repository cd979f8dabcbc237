"""The optimizers there are: the keys of their param groups, their defaults and their states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from offload.kernels.rules import (
    AdagradScalars,
    AdamScalars,
    LionScalars,
    Scalars,
    SgdScalars,
    state_names,
)

Number = float | bool


@dataclass(frozen=True)
class OptimizerKind:
    """One `optimizer.type`. `defaults` has its keys of a param group, named as torch names them,
    with torch's values (Lion: its paper's)."""

    scalars: type[Scalars]
    defaults: Mapping[str, Any]
    numbers: Callable[[Mapping[str, Any]], dict[str, Number]]  # of a param group, for `scalars`

    def states(self, numbers: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the states kept, for these values of a param group's keys."""
        return state_names(
            self.scalars,
            amsgrad=bool(numbers.get("amsgrad", False)),
            momentum=bool(numbers.get("momentum", True)),
        )


def _adam(decoupled: bool) -> Callable[[Mapping[str, Any]], dict[str, Number]]:
    def numbers(group: Mapping[str, Any]) -> dict[str, Number]:
        return {
            **_named(group, "lr", "eps", "weight_decay"), **_betas(group),
            "decoupled": decoupled, "maximize": bool(group["maximize"]),
        }  # fmt: skip

    return numbers


def _lion(group: Mapping[str, Any]) -> dict[str, Number]:
    flags = {"maximize": bool(group["maximize"])}
    return {**_named(group, "lr", "weight_decay"), **_betas(group), **flags}


def _adagrad(group: Mapping[str, Any]) -> dict[str, Number]:
    flags = {"maximize": bool(group["maximize"])}
    return {**_named(group, "lr", "lr_decay", "eps", "weight_decay"), **flags}


def _sgd(group: Mapping[str, Any]) -> dict[str, Number]:
    flags = {"maximize": bool(group["maximize"]), "nesterov": bool(group["nesterov"])}
    return {**_named(group, "lr", "momentum", "dampening", "weight_decay"), **flags}


def _named(group: Mapping[str, Any], *keys: str) -> dict[str, Number]:
    return {key: float(group[key]) for key in keys}


def _betas(group: Mapping[str, Any]) -> dict[str, Number]:
    beta1, beta2 = group["betas"]
    return {"beta1": float(beta1), "beta2": float(beta2)}


_ADAM = {
    "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False,
    "maximize": False,
}  # fmt: skip
KINDS = {
    "adamw": OptimizerKind(AdamScalars, _ADAM, _adam(decoupled=True)),
    "adam": OptimizerKind(AdamScalars, _ADAM, _adam(decoupled=False)),
    "lion": OptimizerKind(
        LionScalars,
        {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False},
        _lion,
    ),
    "adagrad": OptimizerKind(
        AdagradScalars,
        {"lr": 1e-2, "lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0, "maximize": False},
        _adagrad,
    ),
    "sgd": OptimizerKind(
        SgdScalars,
        {
            "lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0,
            "nesterov": False, "maximize": False,
        },
        _sgd,
    ),
}  # fmt: skip
