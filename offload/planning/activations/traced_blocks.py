"""Chooses the repeated blocks that a trace runs, and the stand-ins for the others.

Identical blocks (same class, settings, parameter shapes) do the same to the same inputs. Of a
stretch of them, in which they may alternate with some period, four periods are run:

    run      0    1    2    . . . . .    n-1        each a block, or a period of several
             │    │    └── counts for all that are skipped as well
             │    └─────── what every period keeps until backward; must be what 2 keeps
             └──────────── may differ: nothing was computed before it

A skipped block gives on what it was given, so that nothing is kept or computed for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from offload.planning.activations.live_bytes import Alive
from offload.planning.activations.pass_watch import PassWatch
from offload.zero.groups.discovery import Unit

_RUN = 4  # periods of a stretch
_LONGEST_PERIOD = 8
_SIMPLE = (bool, int, float, str, type(None))


class CannotSkipError(Exception):
    """Blocks differ more than they appear to: all of them have to be run."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Blocks `[start, stop)` that repeat every `period`. Only whole periods are skipped."""

    start: int
    stop: int
    period: int

    @property
    def skipped(self) -> int:
        """The number of periods that are not run."""
        return max(0, (self.stop - self.start) // self.period - _RUN)

    def role(self, index: int) -> int:
        """The period (0 to 3) that a block is in or that counts for it; -1 if the block is skipped,
        4 if it is left over."""
        number = (index - self.start) // self.period
        if number < _RUN - 1:
            return number
        return -1 if number < _RUN - 1 + self.skipped else number - self.skipped


def stretches(blocks: Sequence[Unit]) -> list[Stretch]:
    """Find the stretches of blocks in which skipping saves work; other blocks are run."""
    signatures = _signatures(blocks)
    found = []
    start = 0
    while start < len(signatures):
        best = max(
            (_stretch(signatures, start, period) for period in range(1, _LONGEST_PERIOD + 1)),
            key=lambda stretch: stretch.skipped * stretch.period,
        )
        if best.skipped:
            found.append(best)
            start = best.stop
        else:
            start += 1
    return found


def _stretch(signatures: Sequence[Any], start: int, period: int) -> Stretch:
    stop = start + period
    while stop < len(signatures) and signatures[stop] == signatures[stop - period]:
        stop += 1
    return Stretch(start, min(stop, len(signatures)), period)


def _signatures(blocks: Sequence[Unit]) -> list[Any]:
    """The settings that determine each block's work, except values and its own number."""
    settings = [_settings(unit.module) for unit in blocks]
    places = [int(place) if place.isdigit() else 0 for place in map(_last_name, blocks)]
    numbers = {
        key
        for key in set().union(*settings)
        if len({_distance(each.get(key), n) for n, each in zip(places, settings, strict=True)}) == 1
        and len({str(each.get(key)) for each in settings}) > 1
    }
    return [{key: value for key, value in each.items() if key not in numbers} for each in settings]


def _last_name(unit: Unit) -> str:
    """The last part of a unit's name: `12` of `model.layers.12`."""
    return unit.name.rpartition(".")[2]


def _distance(value: Any, place: int) -> Any:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value - place if is_number else str(value)


def _settings(block: nn.Module) -> dict[tuple[str, str], Any]:
    """The classes, plain attributes and shapes of a block's modules, by module and name."""
    found: dict[tuple[str, str], Any] = {}
    for name, module in block.named_modules():
        found[name, ""] = type(module)
        for key, value in vars(module).items():
            if isinstance(value, _SIMPLE):
                found[name, key] = value
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found[name, key] = tuple(tensor.shape), tensor.dtype, tensor.requires_grad
    return found


@contextmanager
def watched_blocks(
    model: nn.Module, units: Sequence[Unit], watch: PassWatch, *, skip: bool
) -> Iterator[None]:
    """Report the position of the forward to `watch`. With `skip`, skip most of many equal
    blocks."""
    blocks = [unit for unit in units if unit.repeated]
    counted: dict[int, _CountedStretch] = {}
    for stretch in stretches(blocks) if skip else ():
        counted.update(dict.fromkeys(range(stretch.start, stretch.stop), _CountedStretch(
            stretch, blocks, watch)))  # fmt: skip
    with ExitStack() as stack:
        for unit in units:
            if not unit.repeated and unit.module is not model:
                for hook in _told_by_hooks(unit, blocks, watch):
                    stack.callback(hook.remove)
        for index, unit in enumerate(blocks):
            watched = _WatchedBlock(unit, index, watch, counted.get(index))
            stack.enter_context(replaced_forward(unit.module, watched))
        begin = model.register_forward_pre_hook(lambda module, args: watch.begin())
        stack.callback(begin.remove)
        yield


def _told_by_hooks(unit: Unit, blocks: Sequence[Unit], watch: PassWatch) -> list[RemovableHandle]:
    block = next((each for each in blocks if unit.name.startswith(f"{each.name}.")), None)
    if block is not None:  # a table of experts
        place = unit.name.removeprefix(block.name)
        return [
            unit.module.register_forward_pre_hook(lambda module, args: watch.enter_inside(place)),
            unit.module.register_forward_hook(
                lambda module, args, output: watch.leave_inside(place)
            ),
        ]
    return [
        unit.module.register_forward_pre_hook(lambda module, args: watch.enter(unit.name)),
        unit.module.register_forward_hook(lambda module, args, output: watch.leave(unit.name)),
    ]


class _WatchedBlock:
    """The forward of one block, which is watched or skipped."""

    def __init__(
        self, unit: Unit, index: int, watch: PassWatch, counted: _CountedStretch | None
    ) -> None:
        self._unit = unit
        self._index = index
        self._watch = watch
        self._counted = counted
        self._own: Callable[..., Any] = unit.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._counted is not None:
            return self._counted.call(self._index, self._own, args, kwargs)
        self._watch.enter(self._unit.name)
        output = self._own(*args, **kwargs)
        self._watch.leave(self._unit.name)
        return output


class _CountedStretch:
    """The blocks of one stretch, some of which count for others."""

    def __init__(self, stretch: Stretch, blocks: Sequence[Unit], watch: PassWatch) -> None:
        self._stretch = stretch
        self._blocks = blocks
        self._watch = watch
        # by place in the period; the first two are compared
        self._neighbours = [watch.part(1) for _ in range(stretch.period)]
        self._for_all = [watch.part(1 + stretch.skipped) for _ in range(stretch.period)]
        for one, other in zip(self._neighbours, self._for_all, strict=True):
            watch.expect_alike(one, other)
        self._understudies = [Understudy() for _ in range(stretch.period)]
        self._alive = Alive()  # when the neighbours began, later when those that count for all did
        self._each = Alive()  # what a period leaves alive
        self._in_all: Alive | None = None  # alive once all periods that are skipped would have run
        self._between = 0  # operations outside of blocks, when the neighbours began
        self._next = stretch.start

    def call(self, index: int, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run or skip a block. Raise CannotSkipError if blocks are called out of their order."""
        if index != self._next:
            raise CannotSkipError
        self._next += 1
        role = self._stretch.role(index)
        place = (index - self._stretch.start) % self._stretch.period
        if place == 0:
            self._begin(role)
        if role < 0:
            return self._understudies[place].stand_in(args, kwargs)
        name = self._blocks[index].name
        part = None
        if role == 1:
            part = self._neighbours[place]
        elif role == 2:
            part = self._for_all[place]
            name = self._blocks[index + self._stretch.skipped * self._stretch.period].name
        self._watch.enter(name, part)
        output = own(*args, **kwargs)
        self._watch.leave(name)
        if role == 2:
            self._understudies[place].learn(args, kwargs, output)
        return output

    def _begin(self, role: int) -> None:
        """Begin a period. Raise CannotSkipError if anything is computed between blocks: that code
        also runs for skipped blocks, but not on the inputs that it would receive."""
        now, between = self._watch.live.now, self._watch.rest.forward.operations
        if role in (0, 1):
            self._between = between
        elif between != self._between:
            raise CannotSkipError
        if role == 1:
            self._alive = now
        elif role == 2:
            self._each, self._alive = now - self._alive, now
            self._watch.add_more(self._each * self._stretch.skipped)
        elif role in (-1, 3):
            if self._in_all is None:
                if now - self._alive != self._each:
                    raise CannotSkipError
                self._in_all = now + self._watch.more
            self._watch.add_more(self._in_all - now - self._watch.more)


class Understudy:
    """Stands in for skipped blocks, with the input and output of the block that is run for them."""

    def __init__(self) -> None:
        self._given: Any = None
        self._sources: list[int] = []  # per tensor of the output: which leaf it is as the input
        self._leaves: list[Any] = []
        self._structure: pytree.TreeSpec | None = None

    def learn(self, args: Any, kwargs: Any, output: Any) -> None:
        """Remember a call. Raise CannotSkipError if an output tensor has no input like it."""
        given = pytree.tree_leaves((args, kwargs))
        self._given = [_kind(leaf) for leaf in given]
        leaves, self._structure = pytree.tree_flatten(output)
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._sources = [
            _like(leaf, given) if isinstance(leaf, torch.Tensor) else -1 for leaf in leaves
        ]

    def stand_in(self, args: Any, kwargs: Any) -> Any:
        """Return an output. Raise CannotSkipError if the input differs from the learnt one."""
        given = pytree.tree_leaves((args, kwargs))
        if self._structure is None or [_kind(leaf) for leaf in given] != self._given:
            raise CannotSkipError
        pairs = zip(self._sources, self._leaves, strict=True)
        leaves = [given[source] if source >= 0 else leaf for source, leaf in pairs]
        return pytree.tree_unflatten(leaves, self._structure)


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, _SIMPLE) else type(leaf)


def _like(output: torch.Tensor, given: Sequence[Any]) -> int:
    for place, leaf in enumerate(given):
        if isinstance(leaf, torch.Tensor) and _kind(leaf) == _kind(output):
            return place
    raise CannotSkipError


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Make `module` call `forward` inside. Its own forward is restored afterwards, on the instance
    only if it was there before."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.forward = before
