"""Random number generators that a block may draw from, and drawing the same again.

Known are the global ones (torch's of each device, Python's, NumPy's) and those that are attributes
of the block's modules. Other generators are not covered.

Python's and NumPy's own functions make an object for each of a state's 624 words, which takes
longer than a small block's forward. Where the words are found in memory, as a probe has shown, they
are copied as bytes.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from offload.tiers import accelerator
from offload.zero.block_state import modules_of

Generator = torch.Generator | random.Random | np.random.RandomState | np.random.Generator
_KINDS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
_OTHERS = frozenset({bool, int, float, str, type(None), dict, OrderedDict, set})  # most attributes
# the hidden instances whose methods are the modules' functions
_PYTHON: random.Random = random._inst
_NUMPY: np.random.RandomState = np.random.mtrand._rand


def generators_of(module: nn.Module) -> list[Generator]:
    """Python's and NumPy's, and those that a block keeps for itself and that have a state."""
    found = [
        value
        for _, each in modules_of(module)
        for value in vars(each).values()
        if type(value) not in _OTHERS and _is_generator(type(value))  # type: ignore[arg-type]
    ]
    return [_PYTHON, _NUMPY, *found]


def default_generators(tensors: Sequence[torch.Tensor]) -> list[Generator]:
    """Torch's, for the CPU and the devices of `tensors`."""
    devices = {tensor.device for tensor in tensors if accelerator.is_accelerator(tensor.device)}
    return [torch.default_generator, *(accelerator.of(each).generator(each) for each in devices)]


_WORDS = 624  # of a Mersenne Twister, 32 bits each; a position within them comes before or after
_NBYTES = 4 * (_WORDS + 1)


def _python_words(generator: random.Random) -> bytes:
    return ctypes.string_at(id(generator) + object.__basicsize__, _NBYTES)


def _numpy_words(generator: np.random.RandomState) -> bytes:
    bits: Any = generator._bit_generator
    return ctypes.string_at(bits.ctypes.state_address, _NBYTES)


def _python_state(words: bytes, gauss_next: float | None) -> Any:
    position, *rest = struct.unpack(f"=i{_WORDS}I", words)
    return 3, (*rest, position), gauss_next


def _numpy_state(words: bytes) -> Any:
    """Without a second number of a pair of normal ones."""
    (position,) = struct.unpack_from("=i", words, 4 * _WORDS)
    key = np.frombuffer(words, np.uint32, _WORDS)
    state = {"key": key, "pos": position}
    return {"bit_generator": "MT19937", "state": state, "has_gauss": 0, "gauss": 0.0}


def _finds_python_words() -> bool:
    probe = random.Random(1)
    probe.random()
    return bool(_python_state(_python_words(probe), None) == probe.getstate())


def _finds_numpy_words() -> bool:
    probe = np.random.RandomState(1)
    probe.random_sample()
    return _is_same(_numpy_state(_numpy_words(probe)), probe.get_state(legacy=False))


class _Words:
    """Cheap states of the two global generators, of which one may tell that nothing was drawn."""

    def __init__(self) -> None:
        self._of_python = _finds_python_words()
        self._of_numpy = _finds_numpy_words()
        # NumPy's words when they were last seen without a second normal number: there is one only
        # after a draw, which changes the words
        self._single = b""

    def state(self, generator: Generator) -> Any:
        """None where it has to be asked for in full."""
        if generator is _PYTHON and self._of_python:
            return _python_words(_PYTHON), _PYTHON.gauss_next  # type: ignore[attr-defined]
        if generator is not _NUMPY or not self._of_numpy:
            return None
        if type(_NUMPY._bit_generator) is not np.random.MT19937:
            return None
        words = _numpy_words(_NUMPY)
        if words != self._single:
            if _NUMPY.get_state(legacy=False)["has_gauss"]:
                return None
            self._single = words
        return words

    @staticmethod
    def whole(state: Any) -> Any:
        """As the generator takes it."""
        if type(state) is bytes:
            return _numpy_state(state)
        if type(state) is tuple and type(state[0]) is bytes:
            return _python_state(*state)
        return state


class RandomState:
    """Generators as they were when this was made."""

    def __init__(self, generators: Sequence[Generator]) -> None:
        self._generators = generators
        self._first = [_state(each) for each in generators]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside they draw the same again; afterwards they go on from where they were."""
        now = [_state(each) for each in self._generators]
        self._put(self._first, now)
        try:
            yield
        finally:
            self._put(now, [_state(each) for each in self._generators])

    def moved(self) -> bool:
        """Whether anything was drawn since."""
        now = [_state(each) for each in self._generators]
        return not all(map(_is_same, now, self._first))

    def _put(self, states: Sequence[Any], now: Sequence[Any]) -> None:
        """Set it only if it differs: comparing costs less than setting."""
        for generator, state, current in zip(self._generators, states, now, strict=True):
            if _is_same(state, current):
                continue
            if isinstance(generator, random.Random):
                generator.setstate(_Words.whole(state))
            elif isinstance(generator, np.random.RandomState):
                generator.set_state(_Words.whole(state))
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            else:
                generator.set_state(state)


@functools.cache
def _is_generator(kind: type) -> bool:
    return issubclass(kind, _KINDS) and not issubclass(kind, random.SystemRandom)


def _state(generator: Generator) -> Any:
    words = _words.state(generator)
    if words is not None:
        return words
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.get_state()


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        same_kind = isinstance(b, dict) and a.keys() == b.keys()
        return same_kind and all(_is_same(a[key], b[key]) for key in a)
    return bool(a == b)


_words = _Words()
