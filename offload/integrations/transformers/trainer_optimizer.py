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
from transformers import Trainer, TrainingArguments

from offload.config.optimizer import KINDS
from offload.optimizers.client import CLASSES, ClientOptimizer
from offload.tiers.errors import StateError, UnsupportedError


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
