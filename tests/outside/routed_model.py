"""A small model of experts, a module each or packed, for tests of what moves."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.outside.expert_cases import Shape

EXPERTS, HIDDEN, INNER = 8, 32, 32
Call = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """Each token goes to the experts that it is told to."""

    def __init__(self, generator: torch.Generator, *, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        if packed:
            self.experts = Shape(EXPERTS, HIDDEN, INNER).build(generator)
        else:
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(HIDDEN, 2 * INNER), nn.GELU(), nn.Linear(2 * INNER, HIDDEN))
                for _ in range(EXPERTS)
            )

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:  # [T, D], [T, K] -> [T, D]
        weights = self.gate(x).softmax(-1).gather(1, chosen)
        if self.packed:
            routed: Tensor = self.experts(x, chosen, weights)
            return x + routed
        assert isinstance(self.experts, nn.ModuleList), "not packed"
        for number, expert in enumerate(self.experts):
            tokens, place = (chosen == number).nonzero(as_tuple=True)
            if len(tokens):
                x = x.index_add(0, tokens, expert(x[tokens]) * weights[tokens, place, None])
        return x


class Routed(nn.Module):
    def __init__(self, layers: int, *, packed: bool, call: Call | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(Block(generator, packed=packed) for _ in range(layers))
        self._call: Call = call or (lambda block, x, chosen: block(x, chosen))

    def forward(self, x: Tensor, routing: Sequence[Tensor]) -> Tensor:
        for block, chosen in zip(self.layers, routing, strict=True):
            x = self._call(block, x, chosen)
        return x
