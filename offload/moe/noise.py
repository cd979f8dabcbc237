"""The random numbers of a gate, and the recognition of a repeated call.

Calls are numbered; the number and the gate's seed determine the random numbers. A call with the
same bits in its input and in the gate's weight has the same number: so any recomputation repeats
the numbers, in any order (by the model's checkpointing or torch's, of pieces of a batch, in
pipelines). Backward needs the weight as it was, so the numbers of calls before a step are dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # by the bytes of an element
_64_BITS = 2**64 - 1
_ODD = -0x61C8864680B583EB  # 2^64 / golden ratio, as an int64: Fibonacci hashing


def fingerprint(values: Tensor) -> Tensor:
    """Return an int64 scalar from the bits of a 2D tensor, independent of the order of rows."""
    bits = values.detach().contiguous().view(_INTEGERS[values.element_size()])
    columns = bits.sum(dim=0, dtype=torch.int64)
    factors = _ODD * torch.arange(1, 2 * len(columns), 2, device=bits.device)
    mixed = columns * factors
    return (mixed ^ (mixed >> 29)).sum()


def _mixed(number: int) -> int:
    """Return 64 bits, each depending on all bits of the number (SplitMix64, Steele et al.,
    2014)."""
    bits = number & _64_BITS
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _64_BITS
    return bits ^ bits >> 31


class Noise:
    """The random numbers of one call of a gate. Values are fp32, on the generator's device."""

    def __init__(self, generator: torch.Generator, seed: int, number: int) -> None:
        """Seed `generator` for call `number`."""
        self._generator = generator
        generator.manual_seed(_mixed(seed + number * _ODD))

    def uniform(self, *shape: int) -> Tensor:
        """Return uniform numbers in [0, 1)."""
        on = self._generator.device
        return torch.rand(shape, generator=self._generator, device=on, dtype=torch.float32)

    def jitter(self, *shape: int, epsilon: float = 1e-2) -> Tensor:
        """Return uniform numbers in 1 ± epsilon."""
        return self.uniform(*shape) * (2 * epsilon) + (1 - epsilon)

    def gumbel(self, *shape: int) -> Tensor:
        """Return numbers from the standard Gumbel distribution: the largest of logits with these
        added is a sample of their softmax."""
        least = torch.finfo(torch.float32).tiny
        return -torch.log(-torch.log(self.uniform(*shape).clamp(min=least)))
