"""Random number generators that a block may draw from, and drawing the same again.

Known are the global ones (torch's of each device, Python's, NumPy's) and those that are attributes
of the block's modules. Other generators are not covered.
"""

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._mode_utils import no_dispatch

from offload.tiers import accelerator

Generator = torch.Generator | random.Random | np.random.RandomState | np.random.Generator
_KINDS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
_MAX_POOL = 1024  # words of a seed sequence: its time is their square
_OTHERS = frozenset({bool, int, float, str, type(None), dict, OrderedDict, set})  # most attributes
# the hidden instances whose methods are the modules' functions
_PYTHON: random.Random = random._inst
_NUMPY: np.random.RandomState = np.random.mtrand._rand


def generators_of(module: nn.Module) -> list[Generator]:
    """Return Python's and NumPy's generators, and those with a state that a block has."""
    return [_PYTHON, _NUMPY, *_own_generators(module).values()]


def named_generators(module: nn.Module, device: torch.device) -> dict[str, Generator]:
    """Return all of the above and torch's, by names that another process has for them, too."""
    generators: dict[str, Generator] = {"python": _PYTHON, "numpy": _NUMPY}
    return generators | torch_generators(device) | _own_generators(module)


def _own_generators(module: nn.Module) -> dict[str, Generator]:
    return {
        f"module {path}.{name}": value
        for path, each in module.named_modules()
        for name, value in vars(each).items()
        if type(value) not in _OTHERS and is_generator(value)
    }


def torch_generators(device: torch.device) -> dict[str, Generator]:
    """Return torch's generators for the CPU and for `device`, by name."""
    generators: dict[str, Generator] = {"torch": torch.default_generator}
    if accelerator.is_accelerator(device):
        generators[device.type] = accelerator.of(device).generator(device)
    return generators


class RandomState:
    """Generators as they were when this was made. Watches of operations do not see it."""

    def __init__(self, generators: Sequence[Generator]) -> None:
        self._generators = generators
        self._first = self._states()

    def _states(self) -> list[Any]:
        with no_dispatch():
            return [state_of(each) for each in self._generators]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, generators draw the same again; afterwards they go on from where they were."""
        now = self._states()
        self._put(self._first, now)
        try:
            yield
        finally:
            self._put(now, self._states())

    def _put(self, states: Sequence[Any], now: Sequence[Any]) -> None:
        """Set the states that differ: comparing costs less than setting."""
        for generator, state, current in zip(self._generators, states, now, strict=True):
            with no_dispatch():
                if not _is_same(state, current):
                    set_state(generator, state)


def is_generator(value: object) -> bool:
    """Return whether `state_of` knows the object."""
    kind = type(value)
    return issubclass(kind, _KINDS) and not issubclass(kind, random.SystemRandom)


def state_of(generator: Generator) -> Any:
    """Return a state that decides a generator's next draws, and its next children."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return {**bits.state, "seed_seq": _seeds_of(bits)}
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.get_state()


def set_state(generator: Generator, state: Any) -> None:
    """Let a generator draw what it drew after `state_of`. Raises ValueError, TypeError or
    RuntimeError for a value that is no state of its kind."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
        _set_seeds(generator.bit_generator, state.get("seed_seq"))
    else:
        generator.set_state(state)


def _seeds_of(bits: np.random.BitGenerator) -> dict[str, Any] | None:
    """Return the seeds that its children are made from; None if they are of no class of NumPy's."""
    seeds = bits.seed_seq
    return dict(seeds.state) if type(seeds) is np.random.SeedSequence else None


def _set_seeds(bits: np.random.BitGenerator, saved: dict[str, Any] | None) -> None:
    if saved is None or _is_same(saved, _seeds_of(bits)):
        return
    if saved["pool_size"] > _MAX_POOL:
        raise ValueError(f"a seed sequence of {saved['pool_size']} words; at most {_MAX_POOL}")
    new = np.random.SeedSequence(**saved)
    bits.__setstate__((bits.state, new))  # type: ignore[attr-defined]  # as unpickling does


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        same_kind = isinstance(b, dict) and a.keys() == b.keys()
        return same_kind and all(_is_same(a[key], b[key]) for key in a)
    return bool(a == b)
