"""What every rank runs in the tests of experts that are spread over ranks, under an engine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offload.moe import MoE
from tests.offload.engine_cases import NVME, WIDTH, TinyLM
from tests.ranks.programs import Case

EXPERTS = 4


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH, bias=False))


class MoEBlock(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = MoE(WIDTH, expert, EXPERTS, k=2, top2_2nd_expert_sampling=False, **options)
        self.l_aux = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y, self.l_aux, _ = self.moe(self.norm(x))
        return x + y


class MoELM(TinyLM):
    """The same values on every rank, whatever `ep_size`."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(3)
        super().__init__(blocks=1)
        self.blocks.extend(MoEBlock(**options) for _ in range(2))

    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens) + 0.01 * sum(block.l_aux for block in self.blocks[1:])


def spread(ep_size: int, **options: Any) -> partial[MoELM]:
    return partial(MoELM, ep_size=ep_size, drop_tokens=False, **options)


def case(ep_size: int, stage: int, placement: Mapping[str, Any] = NVME, **keys: Any) -> Case:
    return Case(stage, dict(placement), spread(ep_size), **keys)
