"""Splits the arguments of a block into pieces, and refuses blocks that cannot be split.

A batch norm is known by its class. Every other block is compared with itself, once in each mode, by
running it without a trace: two pieces together have to give what each gives alone. One that draws
random numbers (dropout) gives that in eval mode; in training the first piece's outputs have to stay
as they are when the second piece is exchanged. Mixing of samples that shows in no output of this
call is not seen: a branch behind a gate that is still zero, or one that a condition switches on
later.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offload.tiers.errors import UnsupportedError
from offload.zero.groups.discovery import Unit
from offload.zero.recompute.block_state import BlockState
from offload.zero.recompute.random_state import RandomState, default_generators, generators_of
from offload.zero.recompute.recompute import is_in_checkpoint

SMALLER_BATCHES = (
    "set micro_batches: 1 and give the model smaller batches (to train, with "
    "gradient_accumulation_steps)"
)
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}  # relative to the norm; 16 bits: 5e-2


def check_joinable(tensors: Sequence[torch.Tensor], span: slice, name: str) -> None:
    """Raise UnsupportedError for an output of the block `name` that is not one row per sample."""
    for tensor in tensors:
        if tensor.dim() == 0 or tensor.shape[0] != span.stop - span.start:
            raise UnsupportedError(
                f"{name}: micro_batches cannot join an output of shape {tuple(tensor.shape)}, "
                f"whose first dimension is not the batch; {SMALLER_BATCHES}"
            )


def refuse_batch_norm(unit: Unit, count: int) -> None:
    """Raise UnsupportedError for a block with a batch norm; `count` is that of micro-batches."""
    for name, module in unit.module.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UnsupportedError(
                f"micro_batches: {count}: {unit.name}.{name} is a {type(module).__name__}, which "
                "mixes the samples of a batch; use a norm over features (LayerNorm, GroupNorm), or "
                f"{SMALLER_BATCHES}"
            )


def refuse_chosen_gradients(unit: Unit) -> None:
    """Raise UnsupportedError in a backward pass that computes only chosen gradients."""
    if not torch.autograd._is_checkpoint_valid():
        raise UnsupportedError(
            f"{unit.name}: torch.autograd.grad and backward(inputs=...) cannot go through a block "
            "under micro_batches, since the gradients of all its parameters would be accumulated "
            "as well; call loss.backward(), or set micro_batches: 1"
        )


def refuse_output(what: str, name: str) -> NoReturn:
    """UnsupportedError for what the block `name` returned."""
    raise UnsupportedError(
        f"{name}: micro_batches cannot join {what}; return tensors, in tuples, lists and dicts, or "
        f"{SMALLER_BATCHES}"
    )


def refuse_outer_checkpoint(unit: Unit) -> None:
    """Raise UnsupportedError if the model itself recomputes the block that is being called."""
    if is_in_checkpoint():
        raise UnsupportedError(
            f"{unit.name}: the model checkpoints its blocks itself, around all micro-batches; turn "
            "that off and set placement.activations.checkpoint: true, which works within them"
        )


# ---------------------------------------------------------------- pieces
class Pieces:
    """The arguments of a block, piece by piece. Tensors whose first dimension is the batch are
    split (by views), everything else goes to every piece."""

    def __init__(
        self, leaves: Sequence[Any], structure: pytree.TreeSpec, batch: int, count: int
    ) -> None:
        self.leaves = leaves
        self.structure = structure
        self.batch = batch
        bounds = [batch * number // count for number in range(count + 1)]
        self.spans = [slice(lo, hi) for lo, hi in pairwise(bounds)]
        self.split = [
            isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
            for leaf in leaves
        ]

    def call(self, number: int, leaves: Sequence[Any]) -> tuple[Any, Any]:
        """Return (args, kwargs) of one piece, from whole leaves."""
        return self._call(self.spans[number], leaves)

    def pair(self, leaves: Sequence[Any]) -> tuple[Any, Any]:
        """Return (args, kwargs) of the first two pieces together."""
        return self._call(slice(0, self.spans[1].stop), leaves)

    def _call(self, span: slice, leaves: Sequence[Any]) -> tuple[Any, Any]:
        pairs = zip(leaves, self.split, strict=True)
        chosen = [leaf[span] if split else leaf for leaf, split in pairs]
        args, kwargs = pytree.tree_unflatten(chosen, self.structure)
        return args, kwargs


# ---------------------------------------------------------------- mixing of samples
Run = Callable[[tuple[Any, Any]], Any]


def refuse_mixing(unit: Unit, run: Run, pieces: Pieces) -> None:
    """Raise UnsupportedError for a block whose outputs for two pieces together are not those for
    each alone, or that changes its parameters. The block, its inputs and all random numbers are
    left as they were. One that draws random numbers is compared in eval mode, if it draws none
    then."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        _without_autocast_cache(),  # casts for this question would stay until its region ends
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # it will warn again when it is really called
        _Comparison(unit, run, pieces).make()


class _Comparison:
    def __init__(self, unit: Unit, run: Run, pieces: Pieces) -> None:
        self._unit = unit
        self._block = unit.module
        self._run = run
        self._pieces = pieces
        tensors = [leaf for leaf in pieces.leaves if isinstance(leaf, Tensor)]
        self._state = BlockState(self._block)
        self._random = RandomState([*default_generators(tensors), *generators_of(self._block)])
        self._draws = False  # random numbers, as far as was seen
        self._evaluates = False  # values are compared in eval mode

    def make(self) -> None:
        together = self._outputs_of_two(self._leaves())
        self._refuse_changes()
        drawn = None
        if self._draws:
            drawn = together, self._outputs_of_two(self._with_another_piece())
            self._evaluates, self._draws = True, False
            together = self._outputs_of_two(self._leaves())
        alone = [self._of_some(self._pieces.call(each, self._leaves())) for each in (0, 1)]
        for number, outputs in enumerate(alone):
            check_joinable(outputs, self._pieces.spans[number], self._unit.name)
        for place, whole in enumerate(together):
            joined = torch.cat([outputs[place] for outputs in alone])
            if joined.shape != whole.shape or not (self._draws or _is_close(joined, whole)):
                self._refuse("two micro-batches together do not give what each gives alone")
        if drawn is not None:
            first = self._pieces.spans[0]
            if not all(_is_close(a[first], b[first]) for a, b in zip(*drawn, strict=True)):
                self._refuse("the output of the first micro-batch depends on the second")

    def _refuse(self, why: str) -> NoReturn:
        raise UnsupportedError(
            f"{self._unit.name} ({type(self._block).__name__}): {why}, so it mixes samples, or its "
            f"first dimension is not the batch; {SMALLER_BATCHES}"
        )

    def _refuse_changes(self) -> None:
        changed = self._state.changed()
        if changed:
            raise UnsupportedError(
                f"{self._unit.name}: its forward changes its {', '.join(changed)} in place, which "
                "micro_batches would do once per piece; change parameters outside of the block, "
                f"let other tensors be buffers, or {SMALLER_BATCHES}"
            )

    def _outputs_of_two(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Return the outputs for the first two pieces together."""
        pair = self._pieces.pair(leaves)
        return self._of_some(pair) if len(self._pieces.spans) > 2 else self._outputs(pair)

    def _of_some(self, call: tuple[Any, Any]) -> list[Tensor]:
        """Return the outputs for a part of the batch. Raises UnsupportedError if it fails."""
        try:
            return self._outputs(call)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise UnsupportedError(
                f"{self._unit.name}: it fails on a piece of its batch ({error}); a tensor it is "
                "given has a first dimension as long as the batch that is not the batch, or it "
                f"needs the whole batch; {SMALLER_BATCHES}"
            ) from error

    def _outputs(self, call: tuple[Any, Any]) -> list[Tensor]:
        """Return the outputs, each time from the same state and with the same random numbers."""
        with self._random.again(), self._state.installed():
            if self._evaluates:
                self._block.eval()
            outputs = pytree.tree_leaves(self._run(call))
            self._draws = self._draws or self._random.moved()
        return [leaf for leaf in outputs if isinstance(leaf, Tensor)]

    def _leaves(self) -> list[Any]:
        """Return copies, up to the second piece: a block may write to what it is given."""
        stop = self._pieces.spans[1].stop
        pairs = zip(self._pieces.leaves, self._pieces.split, strict=True)
        return [
            (leaf[:stop] if split else leaf).detach().clone() if isinstance(leaf, Tensor) else leaf
            for leaf, split in pairs
        ]  # fmt: skip

    def _with_another_piece(self) -> list[Any]:
        """Return copies with the samples of the first piece in the place of the second."""
        first, second = self._pieces.spans[:2]
        leaves = self._leaves()
        for leaf, split in zip(leaves, self._pieces.split, strict=True):
            if split:
                leaf[second] = torch.cat([leaf[first]] * 2)[: second.stop - second.start]
        return leaves


def _is_close(a: Tensor, b: Tensor) -> bool:
    """Return whether `a` is `b` but for the order of sums; integers, inf and NaN must be equal."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite):
        return False
    if not torch.allclose(a[~finite], b[~finite], equal_nan=True):  # signs of inf, places of NaN
        return False
    finite_a, finite_b = a[finite].double(), b[finite].double()
    distance = (finite_a - finite_b).norm()
    return bool(distance <= _TOLERANCE.get(a.dtype, 5e-2) * finite_b.norm())


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
