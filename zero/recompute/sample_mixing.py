"""Tests whether a block mixes the samples of a batch, by running it without a trace.

    values        two pieces together give what each gives alone
    dependence    what the first piece gives, and the gradients that come from it, stay as they are
                  when the second one is exchanged

Values are compared in the mode that the block is in; one that draws random numbers there (dropout)
is compared in eval mode, if it draws none in that. For dependence the same numbers are drawn. A
branch behind a gate that is zero now shows in the gate's gradient. Not seen is mixing that neither
values nor first derivatives of this call show: a branch behind two gates in a row, behind a
condition, or switched on later by something else than the mode.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offload.tiers.errors import UnsupportedError
from offload.zero.groups.discovery import Unit
from offload.zero.recompute.block_state import BlockState
from offload.zero.recompute.micro_batch_checks import SMALLER_BATCHES, check_joinable, is_close
from offload.zero.recompute.random_state import RandomState, default_generators, generators_of
from offload.zero.tensors.local_tensors import local_of

_log = logging.getLogger("offload")
_SKETCH_PARTS = 16  # of a gradient, each of which gives a sum and a norm


class Pieces(Protocol):
    """The arguments of a block, piece by piece."""

    @property
    def leaves(self) -> Sequence[Any]: ...

    @property
    def spans(self) -> Sequence[slice]: ...

    @property
    def split(self) -> Sequence[bool]:
        """Whether each of the leaves is split."""
        ...

    def call(self, number: int, leaves: Sequence[Any]) -> tuple[Any, Any]: ...

    def pair(self, leaves: Sequence[Any]) -> tuple[Any, Any]: ...


Run = Callable[[tuple[Any, Any]], Any]


def refuse_mixing(unit: Unit, run: Run, pieces: Pieces, *, gradients: bool = True) -> None:
    """Raise UnsupportedError for a block that mixes the samples of a batch. `gradients`: some are
    computed."""
    _Question(unit, run, pieces).ask(gradients=gradients)


class _Question:
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

    def ask(self, *, gradients: bool) -> None:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            _without_autocast_cache(),  # casts for this question would stay until its region ends
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # it will warn again when it is really called
            self._compare_values()
            if gradients:
                self._compare_dependence()

    # ---------------------------------------------------------------- values
    def _compare_values(self) -> None:
        together = self._together()
        self._refuse_changes()
        if self._draws:
            self._evaluates, self._draws = True, False
            together = self._together()
        alone = self._alone()
        for number, outputs in enumerate(alone):
            check_joinable(outputs, self._pieces.spans[number], self._unit.name)
        for place, whole in enumerate(together):
            joined = torch.cat([outputs[place] for outputs in alone])
            if joined.shape != whole.shape or not (self._draws or is_close(joined, whole)):
                self._refuse("two micro-batches together do not give what each gives alone")

    def _refuse_changes(self) -> None:
        changed = self._state.changed()
        if changed:
            raise UnsupportedError(
                f"{self._unit.name}: its forward changes its {', '.join(changed)} in place, which "
                "micro_batches would do once per piece; change parameters outside of the block, "
                f"let other tensors be buffers, or {SMALLER_BATCHES}"
            )

    def _alone(self) -> list[list[Tensor]]:
        return [self._of_some(self._pieces.call(each, self._leaves())) for each in (0, 1)]

    def _together(self) -> list[Tensor]:
        pair = self._pieces.pair(self._leaves())
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
            outputs = _tensors(self._run(call))
            self._draws = self._draws or self._random.moved()
        return outputs

    def _leaves(self) -> list[Any]:
        """Return copies, up to the second piece: a block may write to what it is given, and
        inference tensors have no graph."""
        stop = self._pieces.spans[1].stop
        pairs = zip(self._pieces.leaves, self._pieces.split, strict=True)
        return [
            (leaf[:stop] if split else leaf).detach().clone() if isinstance(leaf, Tensor) else leaf
            for leaf, split in pairs
        ]  # fmt: skip

    # ---------------------------------------------------------------- dependence
    def _compare_dependence(self) -> None:
        try:
            found = self._first_piece(self._leaves())
            others = self._first_piece(self._with_other_samples())
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            _log.warning(
                "micro_batches: %s gives no gradients that could be compared (%s): samples that "
                "are mixed where no value shows it are not noticed", self._unit.name, error,
            )  # fmt: skip
            return
        for what in found | others:
            # a gradient that came in one of the two alone, like that of an expert which no sample
            # of the first piece chose, is zero in the other
            value, dtype = found.get(what) or _zeros_like(others[what])
            other, _ = others.get(what) or _zeros_like(found[what])
            if value.shape != other.shape or not is_close(value, other, dtype):
                self._refuse(f"the {what} of the first samples of a batch depends on the others")

    def _with_other_samples(self) -> list[Any]:
        """Return arguments with other samples, as good ones, in place of the second piece: those of
        the first, scaled (signs, zeros and infinities stay)."""
        first, second = self._pieces.spans[:2]
        generator = torch.Generator().manual_seed(1)

        def exchanged(leaf: Tensor) -> Tensor:
            kept = leaf[first]
            rows = kept[torch.arange(second.stop - second.start) % len(kept)]
            if rows.is_floating_point():
                rows = rows * torch.empty(rows.shape).uniform_(0.5, 1, generator=generator).to(rows)
            return torch.cat([kept, rows])

        pairs = zip(self._leaves(), self._pieces.split, strict=True)
        return [exchanged(leaf) if split else leaf for leaf, split in pairs]

    def _first_piece(self, leaves: Sequence[Any]) -> dict[str, tuple[Tensor, torch.dtype]]:
        """Return the first piece's output, of two, and sketches of the gradients from it."""
        span = self._pieces.spans[0]
        inputs = {n: x.requires_grad_() for n, x in enumerate(leaves) if _is_float(x)}
        # copies: a block may write to its inputs, not to leaves
        found: dict[str, tuple[Tensor, torch.dtype]] = {}
        with (
            torch.enable_grad(), _own_graph(), self._random.again(), self._state.installed(),
            _own_parameters(self._block) as params,
        ):  # fmt: skip
            given = [x.clone() if n in inputs else x for n, x in enumerate(leaves)]
            outputs = _tensors(self._run(self._pieces.pair(given)))
            found.update(
                {f"output {n}": (o[span].detach(), o.dtype) for n, o in enumerate(outputs)}
            )
            roots = [output for output in outputs if output.requires_grad]
            for name, param in params.items():
                param.register_post_accumulate_grad_hook(partial(_take_sketch, found, name))
            if roots:
                cotangents = [_cotangent(root, span) for root in roots]
                torch.autograd.backward(
                    roots, cotangents, inputs=[*params.values(), *inputs.values()]
                )
        for number, leaf in inputs.items():
            if leaf.grad is not None:
                self._check_input(number, leaf.grad, found)
        return found

    def _check_input(
        self, number: int, gradient: Tensor, found: dict[str, tuple[Tensor, torch.dtype]]
    ) -> None:
        """Check that nothing goes to the second piece."""
        if not self._pieces.split[number]:
            _add_sketch(found, f"input {number}", gradient)
            return
        span = self._pieces.spans[0]
        _add_sketch(found, f"input {number}", gradient[span])
        if gradient[span.stop :].nan_to_num(posinf=0, neginf=0).any():
            self._refuse("the output of the first samples of a batch depends on the others")

    def _refuse(self, what: str) -> None:
        raise UnsupportedError(
            f"{self._unit.name} ({type(self._block).__name__}): {what}, so it mixes "
            f"samples, or its first dimension is not the batch; {SMALLER_BATCHES}"
        )


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def _zeros_like(sketch: tuple[Tensor, torch.dtype]) -> tuple[Tensor, torch.dtype]:
    return torch.zeros_like(sketch[0]), sketch[1]


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _cotangent(output: Tensor, span: slice) -> Tensor:
    """Return a cotangent: random for the samples of `span`, zero for the others."""
    whole = torch.zeros_like(output)
    generator = torch.Generator().manual_seed(2)
    whole[span] = torch.randn(output[span].shape, generator=generator).to(whole)
    return whole


def _take_sketch(
    found: dict[str, tuple[Tensor, torch.dtype]], name: str, param: Tensor
) -> None:  # fmt: skip
    """Take a sketch at once, so that no more than one gradient is there at a time."""
    gradient, param.grad = param.grad, None
    assert gradient is not None, "it has come"
    _add_sketch(found, name, local_of(gradient))


def _add_sketch(
    found: dict[str, tuple[Tensor, torch.dtype]], name: str, gradient: Tensor
) -> None:  # fmt: skip
    """Add sums and norms of a gradient's parts; none if not finite, as any sample may cause."""
    parts = gradient.detach().reshape(-1).tensor_split(_SKETCH_PARTS)
    sums = [part.sum(dtype=torch.float64) for part in parts]
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    sketch = torch.stack([*sums, *norms]).cpu()
    if not sketch.isfinite().all():
        sketch = torch.zeros_like(sketch)
    found[f"gradient of {name}, which comes from the output,"] = sketch, gradient.dtype


@contextmanager
def _own_parameters(block: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Inside, the block computes with leaves of the same values, whose gradients are not taken."""
    leaves: dict[int, Tensor] = {}
    names: dict[str, Tensor] = {}
    before = [(module, dict(module._parameters)) for module in block.modules()]
    for name, param in block.named_parameters():
        leaf = leaves[id(param)] = param.detach()
        if leaf.is_floating_point():
            names[name] = leaf.requires_grad_()
    try:
        for module, params in before:
            own: Any = module._parameters
            own.update({k: leaves[id(p)] for k, p in params.items() if p is not None})
        yield names
    finally:
        for module, params in before:
            module._parameters.update(params)


def _own_graph() -> AbstractContextManager[Any]:
    """Inside, saved tensors stay as they are: neither parked nor handles."""
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t)


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
