"""Repeated blocks give up their activations and compute them again in backward.

Each block's forward becomes a checkpoint around itself (Chen et al., 2016, by way of
`torch.utils.checkpoint`): modules, names and state dicts stay as they are. The active hooks save a
block's inputs, so these go where other activations go.

    forward     hooks: gather ▶ checkpoint(own forward) ▶ release
    backward    the checkpoint ▶ gather ▶ own forward, from the same state ▶ release

Selective: the results of matrix products and attention are kept (`selective_checkpoint.py`). The
second computation leaves no trace: it begins with the buffers and attributes of the first, and its
changes to them are dropped (`block_state.py` says which are not covered). Hooks of the block
itself belong to its call in the forward; those of modules inside run again.

Random numbers are drawn again as they were: `random_state.py` says from which generators.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch.utils import _pytree as pytree

from offload.swap.threads.shield import interrupted_in_waits
from offload.tiers.errors import ModifiedError, UnsupportedError
from offload.zero.groups.parameter_grouping import Unit
from offload.zero.hooks.handles import Keeper, active_hooks, is_checkpoint
from offload.zero.recompute.block_state import BlockState
from offload.zero.recompute.random_state import RandomState, generators_of
from offload.zero.recompute.selective_checkpoint import SelectiveCheckpoint, watches_taken_off

_log = logging.getLogger("offload")
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class Holder(Protocol):
    """Holds the parameters of blocks (a `WeightStore`, which says what these methods do)."""

    def computing(self, unit: Unit) -> AbstractContextManager[None]: ...
    def versions(self, unit: Unit) -> tuple[int, ...]: ...


class Recomputation:
    """Recomputation of every repeated block, from creation until `remove`."""

    def __init__(
        self, units: Sequence[Unit], holder: Holder, *, selective: bool, keeper: Keeper | None
    ) -> None:
        """`keeper`, if there is one, gets the results that `selective` keeps."""
        self.holder = holder
        self.selective = selective
        self.keeper = keeper
        self._blocks = [_RecomputedBlock(unit, self) for unit in units if unit.repeated]
        if not self._blocks:
            _log.warning(
                "placement.activations.checkpoint recomputes nothing: the model has no repeated "
                "blocks; name the class of those to recompute in groups.blocks"
            )

    def remove(self) -> None:
        for block in self._blocks:
            block.remove()


class _RecomputedBlock:
    """One block's forward, called in the place of its `own`: a checkpoint around that."""

    def __init__(self, unit: Unit, owner: Recomputation) -> None:
        self._unit = unit
        self._owner = owner
        self._overrides = "forward" in vars(unit.module)
        self.own: Callable[..., Any] = unit.module.forward
        unit.module.forward = self

    def remove(self) -> None:
        if self._overrides:
            self._unit.module.forward = self.own
        else:
            del vars(self._unit.module)["forward"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return self.own(*args, **kwargs)  # in backward: an outer checkpoint computes it again
        if is_checkpoint(active_hooks()):  # of the model's own: that computes the block again
            return self.own(*args, **kwargs)
        self._refuse_caches((*args, *kwargs.values()))
        # all tensors as positional arguments: those are saved, others would only be referred to
        leaves, structure = pytree.tree_flatten((args, kwargs))
        call = _Call()
        with watches_taken_off():
            return torch.utils.checkpoint.checkpoint(
                self._run, call, structure, *leaves, use_reentrant=False,
                context_fn=partial(self._contexts, call),
            )  # fmt: skip

    def _run(self, call: _Call, structure: pytree.TreeSpec, *leaves: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        if call.is_first:
            call.is_first = False
            return self.own(*args, **kwargs)
        # around the block's own forward alone: what gathers its parameters is computed once
        held = self._owner.holder.computing(self._unit)
        with interrupted_in_waits, held, watches_taken_off(), call.as_it_was():
            return self.own(*args, **kwargs)

    def _contexts(self, call: _Call) -> Contexts:
        block = self._unit.module
        state, versions = BlockState(block), self._owner.holder.versions(self._unit)
        random = RandomState(generators_of(block))
        kept = SelectiveCheckpoint(self._owner.keeper) if self._owner.selective else None

        @contextmanager
        def first_pass() -> Iterator[None]:
            state.keep()
            with nullcontext() if kept is None else kept.first_pass():
                yield
            state.settle()
            self._refuse_changes(state.changed())

        @contextmanager
        def as_it_was() -> Iterator[None]:
            self._check_unchanged(state.changed(), versions)
            with ExitStack() as stack:
                stack.enter_context(state.installed())
                if kept is not None:
                    stack.enter_context(kept.calls_again())
                stack.enter_context(random.again())
                yield

        call.as_it_was = as_it_was
        return first_pass(), nullcontext()

    def _refuse_changes(self, names: Sequence[str]) -> None:
        if names:
            raise UnsupportedError(
                f"placement.activations.checkpoint: the forward of {self._unit.name} changes its "
                f"{', '.join(names)} in place, and computing it again would do so twice; change "
                "parameters outside of the block, let other tensors be buffers, or set "
                "checkpoint: false"
            )

    def _check_unchanged(self, names: Sequence[str], versions: tuple[int, ...]) -> None:
        now = self._owner.holder.versions(self._unit)
        if names or now != versions:
            what = ", ".join(names) or "its parameters, by an optimizer step,"
            raise ModifiedError(
                f"backward computes {self._unit.name} again and needs it as it was in the forward, "
                f"but {what} changed since; make changes before the forward or after the "
                "backward, or set placement.activations.checkpoint: false"
            )

    def _refuse_caches(self, values: Sequence[Any]) -> None:
        for value in values:
            if hasattr(value, "get_seq_length") and hasattr(value, "update"):
                raise UnsupportedError(
                    f"placement.activations.checkpoint: {self._unit.name} is given a "
                    f"{type(value).__name__}, which computing it again would fill twice; call the "
                    "model with use_cache=False, or set checkpoint: false"
                )


@dataclass(slots=True, eq=False)
class _Call:
    """One call of a block in a forward. If an interrupt leaves it behind, no other is disturbed."""

    is_first: bool = True  # it has not been computed yet
    # makes what is around the block's forward when it is computed again
    as_it_was: Callable[[], AbstractContextManager[None]] = nullcontext
