"""Layer-wise micro-batching: a block runs over all micro-batches before the next block begins.

    blocks of a step      0: a b c d   1: a b c d   2: a b c d        weights cross each link once
    gradient accumulation a: 0 1 2     b: 0 1 2     c: 0 1 2  ...     ... once per micro-batch

(GreedySnake calls it vertical scheduling.) The model is called with the whole batch. Each block
splits its tensors along the first dimension, computes each piece with a graph of its own, and
returns the whole result; in backward it goes through the pieces again, last to first as autograd
would, sums their gradients, and hands on one gradient per parameter.

In fp32 the result is bit for bit that of `torch.cat([block(piece) for piece in x.split(...)])`,
except that a weight used several times by one block is summed in another order: autograd adds all
uses in one chain, here those of a piece are added first, then the pieces, then calls of the block.
In 16 bits the sum over pieces is kept in fp32 and rounded once.

A block that is called without gradients has nothing to go through again: it computes its pieces one
after the other.

Blocks that cannot be split are refused: batch norm on installation, other objects when they are
given to a block, and other mixing of samples by a comparison, the first time a block is called in a
mode (`micro_batch_checks.py`). So is a backward that computes only chosen gradients
(`torch.autograd.grad`, `backward(inputs=...)`): pieces are differentiated in a pass of their own,
which does not know the choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
import torch.utils.checkpoint
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from offload.swap.threads.shield import interrupted_in_waits
from offload.tiers.errors import StateError, UnsupportedError
from offload.zero.groups.discovery import Unit
from offload.zero.recompute.micro_batch_checks import (
    SMALLER_BATCHES,
    Pieces,
    check_joinable,
    refuse_batch_norm,
    refuse_chosen_gradients,
    refuse_mixing,
    refuse_outer_checkpoint,
    refuse_output,
)
from offload.zero.recompute.recompute import ReplacedForward

# Entered around the backward of a block, with its groups (by index) and whether more of their
# gradients are on the way: another call of the block waits for its backward.
BlockBackward = Callable[[Sequence[int], bool], AbstractContextManager[None]]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class MicroBatching:
    """Installed in every repeated block of a model. `remove` takes it out again."""

    def __init__(
        self, count: int, units: Sequence[Unit], backward: BlockBackward, *, compare: bool = True,
        check: Callable[[str, Any, Any], None] | None = None,
    ) -> None:  # fmt: skip
        """Raises UnsupportedError if no block can be split, or a block holds a batch norm.

        `compare=False` skips the test for mixed samples: without values it cannot be made. `check`
        is given the name, args and kwargs of each block that is called without gradients."""
        blocks = blocks_of(count, units)
        self._blocks = [_BatchedBlock(unit, count, backward, compare, check) for unit in blocks]

    def remove(self) -> None:
        for block in self._blocks:
            block.remove()


def blocks_of(count: int, units: Sequence[Unit]) -> list[Unit]:
    """Return the blocks that run over `count` pieces. Raises UnsupportedError if there are none,
    one holds a batch norm, or one shares parameters with another module."""
    blocks = [unit for unit in units if unit.repeated]
    if not blocks:
        raise UnsupportedError(
            f"micro_batches: {count} needs repeated blocks, and none were found in this model; "
            f"name their class in groups.blocks, or {SMALLER_BATCHES}"
        )
    users = Counter(group for unit in units for group in unit.groups)
    for unit in blocks:
        refuse_batch_norm(unit, count)
        if any(users[group] > 1 for group in unit.groups):
            raise UnsupportedError(
                f"micro_batches: {count}: {unit.name} shares parameters with another module, whose "
                f"gradients would come in another pass; give it its own, or {SMALLER_BATCHES}"
            )
    return blocks


class _BatchedBlock(ReplacedForward):
    """One block: its forward is replaced by the loop over pieces."""

    def __init__(
        self, unit: Unit, count: int, backward: BlockBackward, compare: bool,
        check: Callable[[str, Any, Any], None] | None,
    ) -> None:  # fmt: skip
        self.unit = unit
        self.count = count
        self.backward = backward
        self._check = check
        # how it was called when it was seen to treat samples alone; None: not looked at
        self._alone: set[tuple[bool, ...]] | None = set() if compare else None
        self._waiting: WeakSet[_Call] = WeakSet()
        super().__init__(unit.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        training = torch.is_grad_enabled()
        batch = self._batch(leaves)
        if batch < self.count:
            if not training:  # nothing adds up: a small batch (generation) may go in one piece
                return self.own(*args, **kwargs)
            raise StateError(
                f"{self.unit.name}: a batch of {batch} cannot be split into micro_batches: "
                f"{self.count}; use larger batches (the model gets all micro-batches at once), or "
                "lower micro_batches"
            )
        refuse_outer_checkpoint(self.unit)
        if not training and self._check is not None:
            self._check(self.unit.name, args, kwargs)
        self._refuse_objects(leaves)
        pieces = Pieces(leaves, structure, batch, self.count)
        self._refuse_mixing_once(pieces)
        if not training:
            return self._in_turn(pieces)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        whole = _Whole(batch)
        # A tensor that requires a gradient, so that backward comes here even if no input does.
        needed = torch.empty(0, requires_grad=True, device=tensors[0].device)
        whole.outputs = list(_OverPieces.apply(self, pieces, whole, needed, *tensors))
        return whole.result()

    def _in_turn(self, pieces: Pieces) -> Any:
        """Compute one piece after the other, without a graph."""
        whole = _Whole(pieces.batch)
        for number in range(self.count):
            call = pieces.call(number, pieces.leaves)
            output = self.run(call)
            whole.put(number, pieces, pytree.tree_flatten(output), self.unit.name)
        return whole.result()

    def run(self, call: tuple[Any, Any]) -> Any:
        args, kwargs = call
        return self.own(*args, **kwargs)

    def called(self) -> _Call:
        """Return a call, for its graph to keep until backward has gone through it."""
        call = _Call()
        self._waiting.add(call)
        return call

    def backward_of(self, call: _Call) -> AbstractContextManager[None]:
        """Return a context for the backward of one call."""
        self._waiting.discard(call)
        return self.backward(self.unit.groups, bool(self._waiting))

    def _refuse_objects(self, leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                raise UnsupportedError(
                    f"{self.unit.name}: micro_batches cannot split a {type(leaf).__name__} given "
                    "to the block; pass tensors and plain numbers only (transformers: "
                    "use_cache=False)"
                )

    def _batch(self, leaves: Sequence[Any]) -> int:
        """Return the first tensor's first dimension."""
        sizes = [x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.dim() > 0]
        if not sizes:
            raise UnsupportedError(f"{self.unit.name}: no tensor is given to the block to split")
        return sizes[0]

    def _refuse_mixing_once(self, pieces: Pieces) -> None:
        """Compare once per mode of its modules and choice of arguments that are split."""
        mode = (*(each.training for each in self.unit.module.modules()), *pieces.split)
        if self._alone is not None and mode not in self._alone:
            refuse_mixing(self.unit, self.run, pieces)
            self._alone.add(mode)


class _Call:
    """One call of a block whose backward is still to come, or was given up with its graph."""


@dataclass(slots=True)
class _Whole:
    """The outputs of all pieces as one: tensors are filled piece by piece."""

    batch: int
    structure: pytree.TreeSpec | None = None
    leaves: list[Any] = field(default_factory=list)  # what is no tensor; None in tensors' places
    places: list[int] = field(default_factory=list)  # of tensors among the leaves
    outputs: list[torch.Tensor] = field(default_factory=list)

    def put(
        self, number: int, pieces: Pieces, output: tuple[list[Any], pytree.TreeSpec], name: str
    ) -> list[torch.Tensor]:
        """Copy a piece's outputs, which are flattened, to their place; its tensors.
        UnsupportedError for others than tensors that are not the same for every piece."""
        leaves, structure = output
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        span = pieces.spans[number]
        check_joinable(tensors, span, name)
        others = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        for other in others:
            if not isinstance(other, _PLAIN):
                refuse_output(f"a {type(other).__name__}", name)
        if self.structure is None:
            self.structure, self.leaves = structure, others
            self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
            self.outputs = [t.new_empty((self.batch, *t.shape[1:])) for t in tensors]
        elif structure != self.structure or others != self.leaves:
            refuse_output("outputs that differ between pieces in more than tensors", name)
        for whole, tensor in zip(self.outputs, tensors, strict=True):
            whole[span] = tensor.detach()
        return tensors

    def result(self) -> Any:
        assert self.structure is not None, "every piece was put"
        for place, output in zip(self.places, self.outputs, strict=True):
            self.leaves[place] = output
        return pytree.tree_unflatten(self.leaves, self.structure)


@dataclass(slots=True)
class _InputGradients:
    """Gradients of a block's inputs, whole. Those of split inputs are filled piece by piece, those
    of inputs that all pieces share are summed."""

    shapes: Sequence[tuple[torch.Size, torch.dtype, torch.device]]
    split: Sequence[bool]
    found: dict[int, torch.Tensor] = field(default_factory=dict)

    def take(self, place: int, span: slice, gradient: torch.Tensor) -> None:
        if not self.split[place]:
            known = self.found.get(place)
            self.found[place] = gradient if known is None else known + gradient
            return
        if place not in self.found:
            shape, dtype, device = self.shapes[place]
            self.found[place] = torch.zeros(shape, dtype=dtype, device=device)
        self.found[place][span] = gradient


class _Entry(torch.autograd.Function):
    """An input of one piece. Unlike a leaf, its graph does not keep the value alive."""

    @staticmethod
    def forward(
        ctx: Any, sink: list[_InputGradients], place: int, span: slice, value: torch.Tensor,
        needed: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        ctx.sink, ctx.place, ctx.span = sink, place, span
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.sink[0].take(ctx.place, ctx.span, gradient)
        return None, None, None, None, None


class _OverPieces(torch.autograd.Function):
    """Forward builds a graph per piece and keeps their ends; backward runs them, last to first."""

    @staticmethod
    def forward(
        ctx: Any, block: _BatchedBlock, pieces: Pieces, whole: _Whole, needed: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        places = [i for i, leaf in enumerate(pieces.leaves) if isinstance(leaf, torch.Tensor)]
        differentiable = [
            place for place, t in zip(places, tensors, strict=True) if t.requires_grad
        ]
        ctx.block, ctx.spans, ctx.places = block, pieces.spans, places
        ctx.shapes = {p: (t.shape, t.dtype, t.device) for p, t in zip(places, tensors, strict=True)}
        ctx.split = pieces.split
        ctx.sink = []
        ctx.ends = []
        for number, span in enumerate(pieces.spans):
            with torch.enable_grad():
                call = _entered(pieces, number, differentiable, ctx.sink)
                output = block.run(call)
            produced = whole.put(number, pieces, pytree.tree_flatten(output), block.unit.name)
            ctx.ends.append([_edge(tensor) for tensor in produced])
            del output, produced, call, span
        # what needs no gradient here needs none outside: torch chooses other kernels for what does
        ctx.mark_non_differentiable(
            *(o for i, o in enumerate(whole.outputs) if all(e[i] is None for e in ctx.ends))
        )
        ctx.call = block.called()
        return tuple(whole.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        refuse_chosen_gradients(ctx.block.unit)
        if ctx.ends is None:
            raise RuntimeError(
                "backward through a block under micro_batches a second time: its graphs are freed "
                "in the first pass; call the model again"
            )
        ends, ctx.ends = ctx.ends, None
        inputs = _InputGradients(ctx.shapes, ctx.split)
        ctx.sink.append(inputs)
        # an interrupt on the way out of the block would leave its parameters gathered
        with interrupted_in_waits, ctx.block.backward_of(ctx.call):
            for number in reversed(range(len(ends))):
                span = ctx.spans[number]
                pairs = zip(ends[number], gradients, strict=True)
                roots = [(end, g[span]) for end, g in pairs if end is not None and g is not None]
                if roots:
                    torch.autograd.backward([e for e, _ in roots], [g for _, g in roots])
                ends[number] = []
        ctx.sink.clear()
        return (None, None, None, None, *(inputs.found.get(place) for place in ctx.places))


def _entered(
    pieces: Pieces, number: int, differentiable: Sequence[int], sink: list[_InputGradients]
) -> tuple[Any, Any]:
    """Return one piece's (args, kwargs), with differentiable inputs at the start of a new graph."""
    span = pieces.spans[number]
    leaves = [x.detach() if isinstance(x, torch.Tensor) else x for x in pieces.leaves]
    args = pieces.call(number, leaves)
    if not differentiable:
        return args
    flat, structure = pytree.tree_flatten(args)
    for place in differentiable:
        needed = torch.empty(0, requires_grad=True, device=flat[place].device)
        flat[place] = _Entry.apply(sink, place, span, flat[place], needed)
    args, kwargs = pytree.tree_unflatten(flat, structure)
    return args, kwargs


def _edge(tensor: torch.Tensor) -> Any:
    """Return the end of a piece's graph, without keeping the tensor. None without a graph."""
    return torch.autograd.graph.get_gradient_edge(tensor) if tensor.requires_grad else None
