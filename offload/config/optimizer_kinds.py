"""The available optimizers by `optimizer.type`, as `kernels.rules` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from offload.kernels.rules import RULES, Scalars

Number = float | bool

_OF_A_STEP = ("step", "grad_scale")  # not of a param group


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer that `optimizer.type` can name."""

    scalars: type[Scalars]
    fixed: Mapping[str, bool]  # numbers that the type decides
    defaults: Mapping[str, Any]  # keys of a param group, named as torch names them, with its values

    def numbers(self, group: Mapping[str, Any]) -> dict[str, Number]:
        """Return the numbers of a param group that `scalars` takes."""
        found = {key: group[key] for key in self.defaults if key != "betas"}
        if "betas" in self.defaults:
            found["beta1"], found["beta2"] = group["betas"]
        found |= self.fixed
        taken = {field.name for field in fields(self.scalars) if field.init}  # type: ignore[arg-type]
        return {
            key: bool(value) if isinstance(self.defaults.get(key, value), bool) else float(value)
            for key, value in found.items()
            if key in taken and key not in _OF_A_STEP
        }


KINDS = {
    name: OptimizerKind(scalars, fixed, {**scalars.defaults, **scalars.type_defaults.get(name, {})})
    for scalars in RULES
    for name, fixed in scalars.types.items()
}
