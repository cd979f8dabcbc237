"""Random numbers of a gate that come out the same when its forward is computed again.

Every call seeds its generator from the gate's seed, the bits of its input and those of its weight.
Recomputation has all of these again, whoever does it and in whatever order (a checkpoint of the
model's or of torch's, pieces of a batch, pipelines), and nothing has to be remembered meanwhile. An
optimizer step changes the weight, and with it all that is drawn from then on.
"""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
_ODD = -0x61C8864680B583EB  # 2^64 / golden ratio, as an int64: Fibonacci hashing


def fingerprint(values: Tensor) -> Tensor:
    """An int64 scalar made of the bits of a 2D tensor. It does not depend on the order of rows."""
    bits = values.detach().contiguous().view(_INTEGERS[values.element_size()])
    columns = bits.sum(dim=0, dtype=torch.int64)
    return _mixed(columns * (_ODD * torch.arange(1, 2 * len(columns), 2, device=bits.device))).sum()


def seed_from(*parts: Tensor) -> int:
    """One number from int64 scalars. Waits for the device."""
    seed = torch.zeros_like(parts[0])
    for part in parts:
        seed = _mixed(seed * _ODD + part)
    return int(seed.item())


def _mixed(bits: Tensor) -> Tensor:
    """Every bit depends on every one (Stafford's mix, as in SplitMix64)."""
    bits = (bits ^ (bits >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    bits = (bits ^ (bits >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return bits ^ (bits >> 31 & 0x1FFFFFFFF)


class Noise:
    """What one call of a gate draws. Values are fp32, on the generator's device."""

    def __init__(self, generator: torch.Generator, seed: int) -> None:
        """Seeds `generator`."""
        self._generator = generator
        generator.manual_seed(seed)

    def uniform(self, *shape: int) -> Tensor:
        """Of [0, 1)."""
        on = self._generator.device
        return torch.rand(shape, generator=self._generator, device=on, dtype=torch.float32)

    def jitter(self, *shape: int, epsilon: float = 1e-2) -> Tensor:
        """Of 1 ± epsilon."""
        return self.uniform(*shape) * (2 * epsilon) + (1 - epsilon)

    def gumbel(self, *shape: int) -> Tensor:
        """Of the standard Gumbel distribution: the largest of logits with it is a sample of their
        softmax."""
        least = torch.finfo(torch.float32).tiny
        return -torch.log(-torch.log(self.uniform(*shape).clamp(min=least)))
