"""`optimizer:`, the optimizer and how its states are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from offload.config.fields import AutoBool, AutoChunk, KeyedError, Section, StateFormatName, key
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
        numbers = {key: group[key] for key in self.defaults if key != "betas"}
        if "betas" in self.defaults:
            numbers["beta1"], numbers["beta2"] = group["betas"]
        numbers |= self.fixed
        taken = {field.name for field in fields(self.scalars) if field.init}
        return {
            key: bool(value) if isinstance(self.defaults.get(key, value), bool) else float(value)
            for key, value in numbers.items()
            if key in taken and key not in _OF_A_STEP
        }


KINDS = {
    name: OptimizerKind(scalars, fixed, {**scalars.defaults, **scalars.type_defaults.get(name, {})})
    for scalars in RULES
    for name, fixed in scalars.types.items()
}

_NUMBERS = tuple(dict.fromkeys(key for kind in KINDS.values() for key in kind.defaults))
if TYPE_CHECKING:
    Type = str
else:
    Type = Literal[tuple(KINDS)]
_MAX = 1e9  # far below what float32 holds, which updates are computed in
_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """The optimizer and how its states are kept. Numbers left out or null are torch.optim's."""

    type: Type = key("adamw")
    """adamw decays weights directly; adam adds the decay to the gradient; lion, adagrad and sgd
    keep one state instead of two (sgd without momentum none)."""
    lr: float = key(1e-3, example=3e-4, ge=0, le=_MAX)
    """Learning rate; schedulers of torch.optim change it on engine.optimizer."""
    betas: Annotated[tuple[_Beta, _Beta] | None, Field(strict=False)] = key(
        None, example=[0.9, 0.95]
    )
    """Decay rates of the moments, each from 0 to less than 1."""
    eps: float | None = key(None, example=1e-6, ge=0, le=_MAX)
    """Added to the denominator of an update."""
    weight_decay: float = key(0.01, example=0.1, ge=0, le=_MAX)
    """Weight decay: adamw and lion shrink weights by lr x weight_decay, the others add it times the
    weight to the gradient."""
    amsgrad: bool | None = key(None, example=True)
    """Use the largest second moment seen; keeps a third state."""
    momentum: float | None = key(None, example=0.9, ge=0, le=_MAX)
    """Momentum; 0 keeps no state."""
    dampening: float | None = key(None, example=0.1, ge=0, le=_MAX)
    """Dampening of the momentum, which has to be set."""
    nesterov: bool | None = key(None, example=True)
    """Nesterov's momentum, which has to be set; without dampening."""
    lr_decay: float | None = key(None, example=1e-4, ge=0, le=_MAX, unit="per step")
    """Decay of the learning rate with the count of steps."""
    maximize: bool = key(False)
    """Ascend instead of descend."""
    master: Literal["auto", "split", "fp32", "none"] = key("auto", example="fp32")
    """Master weights: split (bf16 weight + 16-bit remainder), fp32 (a full copy), none (fp32
    weights are their own; bf16 weights are rounded stochastically, an approximation). auto: split
    for bf16, fp32 for fp16, none for fp32."""
    states: StateFormatName = key("fp32", example="int8")
    """Format of the optimizer's states. bf16 and int8 are approximations."""
    in_backward: AutoBool = key("auto", example=True)
    """Update each group as soon as its gradients are there, behind the rest of the backward; every
    begun step must then be taken. auto: only in `offload train`, and there where no clipping or
    skipping needs all gradients first."""
    chunk: AutoChunk = key("auto", example=1 << 20, per_rank=True, unit="elements")
    """Elements per piece streamed in the update: a multiple of 1024, rounded up to one of 2048
    where parameters have 16 bits (pieces are whole pages). auto: one or two million, fewer where
    budget.host is small, more where nothing is on nvme and there are many cores."""

    @model_validator(mode="wrap")
    @classmethod
    def _fill_defaults(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill in the chosen optimizer's defaults for the numbers that were not set;
        `model_fields_set` names only those that were."""
        if not isinstance(value, Mapping):
            return validate(value)
        kind = KINDS.get(str(value.get("type", "adamw")))
        if kind is None:
            return validate(value)
        absent = {key: default for key, default in kind.defaults.items() if value.get(key) is None}
        filled = validate({**value, **absent})
        filled.model_fields_set.difference_update(absent)
        return filled

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        kind = KINDS[self.type]
        for name in _NUMBERS:
            if name not in kind.defaults and getattr(self, name) is not None:
                having = [each for each, other in KINDS.items() if name in other.defaults]
                raise KeyedError(
                    f"{name}: {self.type} has none; remove it, or set type: {' or '.join(having)}",
                    name,
                    "type",
                )
        if self.nesterov and (not self.momentum or self.dampening):
            raise KeyedError("nesterov: true needs momentum above 0 and no dampening", "nesterov")
        if self.amsgrad and self.states != "fp32":
            raise self.contradiction(
                "amsgrad", "states",
                ": the largest second moment is kept in fp32 only; set states: fp32",
            )  # fmt: skip
        return self

    @property
    def numbers(self) -> dict[str, Any]:
        """The keys of the chosen optimizer's param groups, and their values."""
        return {key: getattr(self, key) for key in KINDS[self.type].defaults}

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the states kept per parameter."""
        return KINDS[self.type].scalars.kept_for(self.numbers)
