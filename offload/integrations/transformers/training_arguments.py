"""One configuration from the engine's YAML file and transformers' TrainingArguments.

A value in the YAML file holds; others come from the arguments. Values in both must be equal;
arguments always have some value, and count as set if it is not their default.

An engine takes the place of the optimizer that a trainer's `create_optimizer` sets up: it needs
that one's param groups and numbers, and none of its states, which are created in the tiers.
"""

import functools
import inspect
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from offload.config import OffloadConfig
from offload.config.optimizer import KINDS
from offload.config.paths import StrPath
from offload.optimizers.client import CLASSES, ClientOptimizer, equal_numbers, named_keys
from offload.tiers.errors import ConfigError, StateError, UnsupportedError

Source = StrPath | Mapping[str, Any] | OffloadConfig

# `optim` of TrainingArguments -> `optimizer.type`. What is fused, paged or for a device of its own
# there differs in speed only.
_TYPES = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_torch_npu_fused": "adamw",
    "paged_adamw_32bit": "adamw", "sgd": "sgd", "adagrad": "adagrad", "lion_32bit": "lion",
    "paged_lion_32bit": "lion",
}  # fmt: skip
# a key of `optimizer:` -> the arguments that say the same
_NUMBERS = {
    "lr": ("learning_rate",), "betas": ("adam_beta1", "adam_beta2"), "eps": ("adam_epsilon",),
    "weight_decay": ("weight_decay",),
}  # fmt: skip
_NOT_ADAMS = {("eps", "adagrad"), ("eps", "muon")}
_PRECISIONS: dict[torch.dtype | None, str] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def settle(source: Source, args: TrainingArguments, model: nn.Module | None) -> OffloadConfig:
    """Return the configuration for training `model` with these arguments.

    Raise ConfigError if the two name different values, UnsupportedError for an `optim` without a
    counterpart here.
    """
    config = OffloadConfig.load(source)  # its errors name file, line and key
    named = named_keys(source)
    merged = {
        **named,
        "device": _pick(named, args, "device", args.device.type),
        "seed": _pick(named, args, "seed", args.seed, "seed"),
        "gradient_accumulation_steps": _passes(named, args),
        "precision": _precision(named, args, model),
        "optimizer": _optimizer(named.get("optimizer") or {}, args),
        # 0 turns clipping off there
        "clip_grad_norm": _pick(
            named, args, "clip_grad_norm", args.max_grad_norm or None, "max_grad_norm"
        ),
    }  # fmt: skip
    known = {key: value for key, value in merged.items() if value is not None}
    return OffloadConfig.load({**config.to_dict(), **known})


def arguments_for(config: OffloadConfig) -> dict[str, Any]:
    """Return the optimizer's numbers as the TrainingArguments that say the same."""
    arguments: dict[str, Any] = {}
    for key, value in config.optimizer.numbers.items():
        names = _NUMBERS.get(key, ())
        arguments.update(zip(names, value if len(names) > 1 else [value], strict=False))
    return arguments


def _is_named(args: TrainingArguments, name: str) -> bool:
    """Whether an argument differs from its default."""
    return bool(getattr(args, name) != getattr(type(args), name))


def _pick(
    named: Mapping[str, Any], args: TrainingArguments, key: str, theirs: Any, *arguments: str,
    section: str = "",
) -> Any:  # fmt: skip
    """Return the YAML's value if it has one, else `theirs`, the value of the arguments."""
    configured = named.get(key)
    if configured is None or configured == "auto":
        return theirs
    says = not arguments or any(_is_named(args, name) for name in arguments)
    if says and not equal_numbers(configured, theirs):
        texts = [f"{name}={getattr(args, name)!r}" for name in arguments]
        raise ConfigError(
            f"{section}{key}: {configured} in the offload configuration, and TrainingArguments say "
            f"{', '.join(texts) or theirs}; name it in one of the two"
        )
    return configured


def _passes(named: Mapping[str, Any], args: TrainingArguments) -> int:
    """Return the backward passes of a step. Trainer counts them by its own argument, whose default
    counts as set."""
    configured, theirs = named.get("gradient_accumulation_steps"), args.gradient_accumulation_steps
    if configured not in (None, theirs):
        raise ConfigError(
            f"gradient_accumulation_steps: {configured} in the offload configuration, and "
            f"TrainingArguments say {theirs}, by which Trainer steps; set "
            f"gradient_accumulation_steps={configured} in TrainingArguments"
        )
    return int(theirs)


# --------------------------------------------------------------------------- precision
def _precision(named: Mapping[str, Any], args: TrainingArguments, model: nn.Module | None) -> str:
    """Return the precision. `bf16=True` and `fp16=True` mean weights in that format and a master
    copy, as in other engines that take the model over. `precision: fp32` with `bf16=True` is
    autocast, as in plain Trainer. By default it is the format of the model."""
    asked = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    configured = named.get("precision")
    if configured is None:
        return asked or _PRECISIONS.get(_dtype_of(model), "fp32")
    if asked not in (None, configured) and (configured, asked) != ("fp32", "bf16"):
        raise ConfigError(
            f"precision: {configured} in the offload configuration, and TrainingArguments say "
            f"{asked}=True; name it in one of the two"
        )
    return str(configured)


def _dtype_of(model: nn.Module | None) -> torch.dtype | None:
    """Return the dtype of most trained parameters, by their elements; None without any."""
    counts: dict[torch.dtype, int] = {}
    for param in () if model is None else model.parameters():
        if param.requires_grad:
            counts[param.dtype] = counts.get(param.dtype, 0) + param.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=None)


# --------------------------------------------------------------------------- optimizer
def _optimizer(named: Mapping[str, Any], args: TrainingArguments) -> dict[str, Any]:
    type_ = _type(named, args)
    defaults = KINDS[type_].defaults
    if type_ in ("sgd", "adagrad") and args.optim_args:  # which Trainer reads for them
        raise UnsupportedError(
            f"optim_args={args.optim_args!r}: leave it out, and write these numbers under "
            "optimizer: in the offload configuration"
        )
    theirs = {
        "lr": args.learning_rate, "weight_decay": args.weight_decay,
        "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon,
    }  # fmt: skip
    numbers = {
        key: _pick(named, args, key, value, *_NUMBERS[key], section="optimizer.")
        for key, value in theirs.items()
        if key in defaults and (key, type_) not in _NOT_ADAMS
    }
    if type_ == "muon":  # the arguments' lr and decay are all parameters'; its own keys hold
        both = {**theirs, **numbers}
        numbers |= {f"adamw_{key}": named.get(f"adamw_{key}", both[key]) for key in theirs}
    return {**named, "type": type_, **numbers}


def _type(named: Mapping[str, Any], args: TrainingArguments) -> str:
    optim = str(getattr(args.optim, "value", args.optim))
    configured, theirs = named.get("type"), _TYPES.get(optim)
    says = _is_named(args, "optim")
    if configured is not None and (not says or configured == theirs):
        return str(configured)
    if configured is not None:
        raise ConfigError(
            f"optimizer.type: {configured} in the offload configuration, and TrainingArguments say "
            f"optim={optim!r}; name it in one of the two"
        )
    if theirs is not None:
        return theirs
    raise UnsupportedError(
        f"optim={optim!r} is no optimizer that offload has ({', '.join(KINDS)}); set optim to one "
        f"of {', '.join(_TYPES)}, or leave it out and set optimizer.type in the offload "
        "configuration (and states: int8 there for states in 8 bits)"
    )


# --------------------------------------------------------------------------- the trainer's own
class GroupsOnly(torch.optim.Optimizer):
    """Param groups and numbers of an `optimizer.type`; it has no states and makes no step."""

    kind: str

    def __init__(self, params: Any, **numbers: Any) -> None:
        super().__init__(params, {**KINDS[self.kind].defaults, **numbers})

    # without torch's wrapper, which imports torch._dynamo
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)

    def step(self, closure: Any = None) -> Any:
        raise StateError(
            "this optimizer only has the param groups for the engine's; training begins with "
            "trainer.train(), and its optimizer is trainer.optimizer"
        )


@functools.cache
def groups_only(kind: str) -> type[GroupsOnly]:
    """Return the class that stands for an `optimizer.type`."""
    return type("GroupsOnly", (GroupsOnly,), {"kind": kind})


def client_of(trainer: Trainer) -> ClientOptimizer:
    """Return the numbers and param groups of `trainer.optimizer`. Raises UnsupportedError if it has
    no rule here."""
    given, who = trainer.optimizer, type(trainer).__name__
    if given is None:
        raise UnsupportedError(
            f"{who}.create_optimizer made no optimizer: self.optimizer is None after it; set it "
            "there"
        )
    try:
        own = {type(given): given.kind} if isinstance(given, GroupsOnly) else CLASSES
        return ClientOptimizer.of(given, own)
    except UnsupportedError as error:
        raise UnsupportedError(f"the optimizer of {who}: {error}") from None


@contextmanager
def changed_arguments(args: TrainingArguments, **values: Any) -> Generator[None]:
    """Give arguments other values for a while."""
    before = {name: getattr(args, name) for name in values}
    try:
        for name, value in values.items():
            setattr(args, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(args, name, value)
