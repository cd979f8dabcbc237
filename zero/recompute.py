"""Repeated blocks give up their activations and compute them again in backward.

Each block's forward becomes a checkpoint around itself (Chen et al., 2016, by way of
`torch.utils.checkpoint`): modules, names and state dicts stay as they are. What a block was given
is saved by whatever hooks are active, so its boundary goes where other activations go.

    forward     hooks: gather ▶ checkpoint(own forward) ▶ release
    backward    the checkpoint ▶ module(...) ▶ hooks: gather ▶ own forward ▶ release

Selective: what matrix products and attention gave is kept (`zero/kept_products.py`).

Random numbers are drawn again as they were: those of torch's default generators, and of generators
that are attributes of a block's modules (`torch.Generator`, `random.Random`). Nobody watches others
(Python's `random` functions, NumPy, a generator that lives elsewhere): a block that draws from them
gets wrong gradients, and no error.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils import _pytree as pytree

from offload.tiers.errors import UnsupportedError
from offload.zero.discovery import Unit
from offload.zero.handles import Keeper
from offload.zero.kept_products import KeepProducts

_log = logging.getLogger("offload")
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
Generator = torch.Generator | random.Random


class Recomputation:
    """Installed in every repeated block. `remove` takes it out again."""

    def __init__(
        self, units: Sequence[Unit], *, selective: bool, keeper: Keeper | None, by_hooks: bool
    ) -> None:
        """What selective keeps goes to `keeper`, if there is one.

        `by_hooks`: in backward the block is called as a module, so that its hooks gather its
        parameters. Otherwise somebody else holds them while it is computed again.
        """
        self.selective = selective
        self.keeper = keeper
        self.by_hooks = by_hooks
        self._said_nested = False
        self._blocks = [_Block(unit, self) for unit in units if unit.repeated]
        if not self._blocks:
            _log.warning(
                "placement.activations.checkpoint recomputes nothing: the model has no repeated "
                "blocks; name the class of those to recompute in groups.blocks"
            )

    def say_nested(self, name: str) -> None:
        """Once: the model does it itself."""
        if not self._said_nested:
            self._said_nested = True
            _log.warning(
                "placement.activations.checkpoint: %s is inside of a checkpoint of the model's own "
                "(gradient_checkpointing) and is not checkpointed again; turn one of the two off",
                name,
            )

    def remove(self) -> None:
        for block in self._blocks:
            block.remove()


class _Block:
    """One block's forward, as a checkpoint around its own."""

    def __init__(self, unit: Unit, owner: Recomputation) -> None:
        self._unit = unit
        self._owner = owner
        self._again: list[AbstractContextManager[Any]] = []  # one per computation again, under way
        self._overrides = "forward" in unit.module.__dict__
        self._own: Callable[..., Any] = unit.module.forward
        unit.module.forward = self

    def remove(self) -> None:
        if self._overrides:
            self._unit.module.forward = self._own
        else:
            del self._unit.module.__dict__["forward"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._again:
            with self._again[-1]:
                return self._own(*args, **kwargs)
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return self._own(*args, **kwargs)  # in backward: somebody else computes it again
        if _in_checkpoint():
            self._owner.say_nested(self._unit.name)
            return self._own(*args, **kwargs)
        self._refuse_caches((*args, *kwargs.values()))
        # all tensors as positional arguments: those are saved, others would only be referred to
        leaves, structure = pytree.tree_flatten((args, kwargs))
        return torch.utils.checkpoint.checkpoint(
            self._run, structure, *leaves, use_reentrant=False, context_fn=self._contexts
        )

    def _run(self, structure: pytree.TreeSpec, *leaves: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        if not self._again:
            return self._own(*args, **kwargs)
        return (self._unit.module if self._owner.by_hooks else self)(*args, **kwargs)

    def _contexts(self) -> Contexts:
        generators = _generators(self._unit.module)
        if not self._owner.selective:
            return nullcontext(), self._computing_again(_SameRandom(generators, nullcontext()))
        kept = KeepProducts(self._owner.keeper)
        return kept.first_pass(), self._computing_again(_SameRandom(generators, kept.again()))

    def _computing_again(self, context: AbstractContextManager[Any]) -> _Again:
        """`context` is entered around the block's own forward alone: what gathers its parameters
        is no part of what is computed again."""
        return _Again(self._again, context)

    def _refuse_caches(self, values: Sequence[Any]) -> None:
        for value in values:
            if hasattr(value, "get_seq_length") and hasattr(value, "update"):
                raise UnsupportedError(
                    f"placement.activations.checkpoint: {self._unit.name} is given a "
                    f"{type(value).__name__}, which computing it again would fill twice; call the "
                    "model with use_cache=False, or set checkpoint: false"
                )


class _Again:
    """A context that can be entered once per backward pass."""

    def __init__(
        self, stack: list[AbstractContextManager[Any]], context: AbstractContextManager[Any]
    ) -> None:
        self._stack = stack
        self._context = context

    def __enter__(self) -> None:
        self._stack.append(self._context)

    def __exit__(self, *error: object) -> None:
        self._stack.pop()


class _SameRandom:
    """Around a computation again: `generators` draw what they drew after this was made, and then go
    on from where they were. Enters `inner` as well."""

    def __init__(self, generators: Sequence[Generator], inner: AbstractContextManager[Any]) -> None:
        self._generators = generators
        self._inner = inner
        self._first = _states(generators)
        self._now: list[Any] = []

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._now = _states(self._generators)
        _set_states(self._generators, self._first)

    def __exit__(self, *error: Any) -> None:
        _set_states(self._generators, self._now)
        self._inner.__exit__(*error)


def _generators(module: nn.Module) -> list[Generator]:
    """Those that a block keeps for itself and that have a state."""
    values = (value for each in module.modules() for value in vars(each).values())
    found = [value for value in values if isinstance(value, (torch.Generator, random.Random))]
    return [each for each in found if not isinstance(each, random.SystemRandom)]


def _states(generators: Sequence[Generator]) -> list[Any]:
    return [g.getstate() if isinstance(g, random.Random) else g.get_state() for g in generators]


def _set_states(generators: Sequence[Generator], states: Sequence[Any]) -> None:
    for generator, state in zip(generators, states, strict=True):
        if isinstance(generator, random.Random):
            generator.setstate(state)
        else:
            generator.set_state(state)


def _in_checkpoint() -> bool:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__
