"""Chooses the repeated blocks that a trace runs; the others are taken out of the model meanwhile.

Identical blocks (same class, settings, parameter shapes) do the same to the same inputs. Of a
stretch of them, in which they may alternate with some period, five periods are run:

    run      0    1    2    3    . . . . .    n-1        each a block, or a period of several
             │    │    │    └── counts for all that are left out as well
             │    │    └─────── what every period does and keeps until backward; 3 must be the same
             └────┴──────────── may differ: nothing was computed before them, no copy was in flight
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from offload.planning.activations.facts import NO_WORK
from offload.planning.activations.pass_watch import Alive, PassWatch
from offload.zero.groups.parameter_grouping import Unit

_RUN = 5  # periods of a stretch
_LONGEST_PERIOD = 8
Forward = Callable[..., Any]
_SIMPLE = (bool, int, float, str, type(None))


class CannotSkipError(Exception):
    """Blocks differ more than they appear to: all of them have to be run."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Blocks `[start, stop)` that repeat every `period`. Only whole periods are left out."""

    start: int
    stop: int
    period: int

    @property
    def skipped(self) -> int:
        """The number of periods that are not run."""
        return max(0, (self.stop - self.start) // self.period - _RUN)

    def split(self, blocks: Sequence[Unit]) -> tuple[list[Unit], list[Unit]]:
        """Return the blocks of the stretch that are run, and those that are left out."""
        first = self.start + (_RUN - 1) * self.period
        last = first + self.skipped * self.period
        run = [*blocks[self.start : first], *blocks[last : self.stop]]
        return run, list(blocks[first:last])


def stretches(model: nn.Module, blocks: Sequence[Unit], least: int) -> list[Stretch]:
    """Find the stretches of blocks in which skipping saves work, with periods of `least` blocks
    and more; other blocks are run."""
    signatures = _signatures(model, blocks)
    skippable = []
    start = 0
    while start < len(signatures):
        best = max(
            (_stretch(signatures, start, period) for period in range(least, _LONGEST_PERIOD + 1)),
            key=lambda stretch: stretch.skipped * stretch.period,
        )
        if best.skipped:
            skippable.append(best)
        start = best.stop if best.skipped else start + 1
    return skippable


def _stretch(signatures: Sequence[Any], start: int, period: int) -> Stretch:
    stop = start + period
    while stop < len(signatures) and signatures[stop] == signatures[stop - period]:
        stop += 1
    return Stretch(start, min(stop, len(signatures)), period)


def _signatures(model: nn.Module, blocks: Sequence[Unit]) -> list[dict[tuple[str, str], Any]]:
    """Return what determines each block's work, except values and the block's own number; blocks
    that are in no list of modules, or in different ones, have different signatures."""
    settings = [_settings(unit.module) for unit in blocks]
    numbers = {
        key for key in (settings[0] if len(blocks) > 1 else ())
        if all(str(each.get(key)) == _list_of(unit)[1]
               for unit, each in zip(blocks, settings, strict=True))
    }  # fmt: skip
    signatures = []
    for unit, each in zip(blocks, settings, strict=True):
        where, _ = _list_of(unit)
        in_list = isinstance(model.get_submodule(where), (nn.ModuleList, nn.Sequential))
        kept = {key: value for key, value in each.items() if key not in numbers}
        signatures.append({**kept, ("", "list"): where if in_list else unit.name})
    return signatures


def _list_of(unit: Unit) -> tuple[str, str]:
    """The name of the module that a block is in, and the block's own name there."""
    where, _, name = unit.name.rpartition(".")
    return where, name


def _settings(block: nn.Module) -> dict[tuple[str, str], Any]:
    """The classes, plain attributes and shapes of a block's modules, by module and name."""
    settings: dict[tuple[str, str], Any] = {}
    for name, module in block.named_modules():
        settings[name, ""] = type(module)
        for key, value in vars(module).items():
            if isinstance(value, _SIMPLE):
                settings[name, key] = value
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                settings[name, key] = tuple(tensor.shape), tensor.dtype, tensor.requires_grad
    return settings


@contextmanager
def watched_blocks(
    model: nn.Module, units: Sequence[Unit], watch: PassWatch, *, least: int | None
) -> Iterator[None]:
    """Report the position of the forward to `watch`. Most of many equal blocks in a list are left
    out and counted by the others, in periods of `least` blocks and more; None: each block is run.
    Raises CannotSkipError if they turn out to differ."""
    blocks = [unit for unit in units if unit.repeated]
    forwards: dict[str, Forward] = {}  # by the name of a block
    with ExitStack() as stack:
        for stretch in stretches(model, blocks, least) if least else ():
            run, left_out = stretch.split(blocks)
            there = model.get_submodule(_list_of(run[0])[0])
            stack.enter_context(_without(there, left_out))
            forwards.update(_CountedStretch(stretch, run, watch).forwards())
        for unit in units:
            in_block = any(unit.name.startswith(f"{block.name}.") for block in blocks)
            if unit.repeated or not (in_block or unit.module is model):
                forward = forwards.get(unit.name) or _watched(unit, watch)
                stack.enter_context(replaced_forward(unit.module, forward))
        begin = model.register_forward_pre_hook(lambda module, args: watch.begin())
        stack.callback(begin.remove)
        yield


def _watched(unit: Unit, watch: PassWatch, times: int = 1) -> Forward:
    """The forward of a block, reported to `watch`; its operations count `times` times."""
    own: Forward = unit.module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        watch.enter(times)
        return own(*args, **kwargs)

    return forward


@contextmanager
def _without(modules: nn.Module, left_out: Sequence[Unit]) -> Iterator[None]:
    """Take blocks out of the list of modules that they are in."""
    before = dict(modules._modules)
    gone = {id(unit.module) for unit in left_out}
    kept = [module for module in before.values() if id(module) not in gone]
    modules._modules.clear()
    modules._modules.update({str(place): module for place, module in enumerate(kept)})
    try:
        yield
    finally:
        modules._modules.clear()
        modules._modules.update(before)


class _CountedStretch:
    """The blocks of one stretch that are run, some of which count for those that are left out."""

    def __init__(self, stretch: Stretch, run: Sequence[Unit], watch: PassWatch) -> None:
        self._stretch, self._run, self._watch = stretch, run, watch
        self._alive, self._ran = Alive(), NO_WORK  # when the last period began
        self._kept, self._work = Alive(), NO_WORK  # by the period before the one that counts
        self._next = 0

    def forwards(self) -> Iterator[tuple[str, Forward]]:
        """The forward to call for each block, by the block's name."""
        for number, unit in enumerate(self._run):
            counts = number // self._stretch.period == 3
            times = 1 + self._stretch.skipped if counts else 1
            yield unit.name, self._begun(number, _watched(unit, self._watch, times))

    def _begun(self, number: int, own: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if number != self._next:
                raise CannotSkipError  # called out of their order
            self._next += 1
            if number % self._stretch.period == 0:
                self._begin(number // self._stretch.period)
            return own(*args, **kwargs)

        return forward

    def _begin(self, period: int) -> None:
        """Begin a period. Raise CannotSkipError if the two before it differ."""
        kept, self._alive = self._watch.live.now - self._alive, self._watch.live.now
        work, self._ran = self._watch.ran - self._ran, self._watch.ran
        if period == 3:
            self._kept, self._work = kept, work
            self._watch.add_more(kept * self._stretch.skipped)
        elif period == 4 and (kept, work) != (self._kept, self._work):
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
