"""The optimizer that a trainer's `create_optimizer` sets up, for an engine to take over.

The engine needs its param groups and numbers before it is made, and no states: those are created in
the tiers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from offload.config.optimizer import KINDS
from offload.optimizers.client import CLASSES, ClientOptimizer
from offload.tiers.errors import StateError, UnsupportedError

_NAMED = 3  # parameters that an error names


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


def client_of(trainer: Trainer, mixin: type, model: nn.Module) -> ClientOptimizer:
    """Return the numbers and param groups of `trainer.optimizer`.

    Raises UnsupportedError, which names who made the optimizer, if it has no rule here or trains
    parameters that are not the model's.
    """
    given, source = trainer.optimizer, source_of(trainer, mixin)
    if given is None:
        raise UnsupportedError(
            f"{source} made no optimizer: self.optimizer is None after it; set it there"
        )
    try:
        own = {type(given): given.kind} if isinstance(given, GroupsOnly) else CLASSES
        client = ClientOptimizer.of(given, own)
    except UnsupportedError as error:
        raise UnsupportedError(f"{source}: {error}") from None
    _refuse_outside(trainer, client, source, model)
    return client


def source_of(trainer: Trainer, mixin: type) -> str:
    """Return the name of the method or argument that sets up the trainer's optimizer."""
    for each in type(trainer).__mro__:
        for name in "create_optimizer", "get_optimizer_cls_and_kwargs":
            if name in vars(each) and each not in (mixin, Trainer):
                return f"{each.__name__}.{name}"
    return (
        "optimizers=" if trainer.optimizer_cls_and_kwargs is None else "optimizer_cls_and_kwargs="
    )


def _refuse_outside(
    trainer: Trainer, client: ClientOptimizer, source: str, model: nn.Module
) -> None:
    inside = set(map(id, model.parameters()))
    outside = [p for group in client.groups for p in group["params"] if id(p) not in inside]
    if not outside:
        return
    names = {
        id(param): f"{attribute}.{name}"
        for attribute, module in vars(trainer).items()
        if isinstance(module, nn.Module)
        for name, param in module.named_parameters()
    }
    texts = [names.get(id(p), f"one of shape {tuple(p.shape)}") for p in outside[:_NAMED]]
    more = f" and {len(outside) - _NAMED} more" if len(outside) > _NAMED else ""
    raise UnsupportedError(
        f"{source} trains {len(outside)} parameters that are not in the trainer's model, a "
        f"{type(model).__name__}: {', '.join(texts)}{more}. The engine trains its model's alone; "
        "make them part of the model before the trainer is made (model.head = head), or leave "
        "them out of the param groups"
    )


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
