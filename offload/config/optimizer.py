"""`optimizer:`, the optimizer and how its states are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from offload.config.fields import AutoBool, AutoChunk, KeyedError, Section, StateFormatName, key
from offload.kernels.rules import RULES, Scalars

Number = float | bool

_NOT_NUMBERS = frozenset({"betas", "ns_coefficients", "adjust_lr_fn"})
_ADJUSTS = ("original", "match_rms_adamw")
_OF_A_STEP = ("step", "grad_scale")  # not of a param group


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer that `optimizer.type` can name."""

    scalars: type[Scalars]
    fixed: Mapping[str, bool]  # numbers that the type decides
    defaults: Mapping[str, Any]  # keys of a param group, named as torch names them, with its values

    def numbers(self, group: Mapping[str, Any]) -> dict[str, Number]:
        """Return the numbers of a param group that `scalars` takes."""
        numbers = {key: group[key] for key in self.defaults if key not in _NOT_NUMBERS}
        if "betas" in self.defaults:
            numbers["beta1"], numbers["beta2"] = group["betas"]
        if "ns_coefficients" in self.defaults:
            if (adjusts := group["adjust_lr_fn"]) not in (None, *_ADJUSTS):
                raise ValueError(f"adjust_lr_fn: expected {' or '.join(_ADJUSTS)}, got {adjusts!r}")
            numbers["ns_a"], numbers["ns_b"], numbers["ns_c"] = group["ns_coefficients"]
            numbers["matches_adamw"] = adjusts == _ADJUSTS[1]
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

# Beside Muon: the param groups of AdamW, by the keys of the section.
BESIDE_MUON = {
    f"adamw_{key}": KINDS["adamw"].defaults[key] for key in ("lr", "betas", "eps", "weight_decay")
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
    keep one state instead of two (sgd without momentum none); muon (torch.optim.Muon) has one state
    and orthogonalises it for the matrices of blocks, and trains all others by adamw."""
    lr: float = key(1e-3, example=3e-4, ge=0, le=_MAX)
    """Learning rate; schedulers of torch.optim change it on engine.optimizer."""
    betas: Annotated[tuple[_Beta, _Beta] | None, Field(strict=False)] = key(
        None, example=[0.9, 0.95]
    )
    """Decay rates of the moments, each from 0 to less than 1."""
    eps: float | None = key(None, example=1e-6, ge=0, le=_MAX)
    """Added to the denominator of an update."""
    weight_decay: float = key(0.01, example=0.1, ge=0, le=_MAX)
    """Weight decay: adamw, lion and muon shrink weights by lr x weight_decay, the others add it
    times the weight to the gradient."""
    amsgrad: bool | None = key(None, example=True)
    """Use the largest second moment seen; keeps a third state."""
    momentum: float | None = key(None, example=0.9, ge=0, le=_MAX)
    """Momentum; 0 keeps no state."""
    dampening: float | None = key(None, example=0.1, ge=0, le=_MAX)
    """Dampening of the momentum, which has to be set."""
    nesterov: bool | None = key(None, example=True)
    """Nesterov's momentum, which has to be set; without dampening."""
    ns_coefficients: Annotated[tuple[float, float, float] | None, Field(strict=False)] = key(
        None, example=[3.4445, -4.775, 2.0315]
    )
    """The coefficients of a Newton-Schulz iteration: a X + (b X X^T + c (X X^T)^2) X."""
    ns_steps: int | None = key(None, example=6, ge=0, lt=100)
    """Newton-Schulz iterations of an update."""
    ns_dtype: Literal["bf16", "fp32"] = key("bf16", example="fp32")
    """The format of Newton-Schulz products. bf16: as in torch.optim.Muon. fp32: more exact, and on
    CPUs without bf16 products up to a hundred times as fast."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = key(
        None, example="match_rms_adamw"
    )
    """How muon's lr depends on a matrix: original multiplies it by max(1, rows / columns)**0.5,
    match_rms_adamw by 0.2 max(rows, columns)**0.5, for an lr and a decay tuned for adamw."""
    adamw_lr: float | None = key(None, example=3e-4, ge=0, le=_MAX)
    """With muon: the learning rate of the parameters that adamw trains."""
    adamw_betas: Annotated[tuple[_Beta, _Beta] | None, Field(strict=False)] = key(
        None, example=[0.9, 0.95]
    )
    """With muon: adamw's decay rates."""
    adamw_eps: float | None = key(None, example=1e-6, ge=0, le=_MAX)
    """With muon: adamw's eps."""
    adamw_weight_decay: float | None = key(None, example=0.1, ge=0, le=_MAX)
    """With muon: adamw's weight decay."""
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
        defaults = {**kind.defaults, **(BESIDE_MUON if "ns_steps" in kind.defaults else {})}
        absent = {key: default for key, default in defaults.items() if value.get(key) is None}
        filled = validate({**value, **absent})
        filled.model_fields_set.difference_update(absent)
        return filled

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        kind = KINDS[self.type]
        for name in _NUMBERS:
            value = getattr(self, name)
            is_set = value if name == "maximize" else value is not None  # it is false by default
            if name not in kind.defaults and is_set:
                having = [each for each, other in KINDS.items() if name in other.defaults]
                raise KeyedError(
                    f"{name}: {self.type} has none; remove it, or set type: {' or '.join(having)}",
                    name,
                    "type",
                )
        if self.type != "muon":
            unused = [*BESIDE_MUON, *(["ns_dtype"] if self.ns_dtype != "bf16" else [])]
            for name in [each for each in unused if getattr(self, each) is not None]:
                raise KeyedError(f"{name}: needs type: muon; remove it", name, "type")
        if self.type != "muon" and self.nesterov and (not self.momentum or self.dampening):
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
    def kinds(self) -> tuple[str, ...]:
        """The types of its param groups: with muon, there are some of adamw."""
        return (self.type, "adamw") if self.type == "muon" else (self.type,)

    def numbers_of(self, kind: str) -> dict[str, Any]:
        """The keys of its param groups of one of the `kinds`, and their values."""
        if kind == self.type:
            return self.numbers
        given = {key.removeprefix("adamw_"): getattr(self, key) for key in BESIDE_MUON}
        return {**KINDS[kind].defaults, **given}

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the states kept per parameter; with muon, of those that adamw trains."""
        kind = self.kinds[-1]
        return KINDS[kind].scalars.kept_for(self.numbers_of(kind))
