"""What every rank runs in the tests of experts that are spread over ranks, under an engine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import offload
from offload.moe import MoE
from tests.offload.engine_cases import NVME, WIDTH, TinyLM, batches, config, states_of
from tests.ranks.programs import BUDGET, OPTIMIZER, Case

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


def keys_of(folder: str, stage: int, **keys: Any) -> dict[str, Any]:
    return config(
        Path(folder), NVME, budget=BUDGET, optimizer=OPTIMIZER, zero={"stage": stage},
        clip_grad_norm=0.5, **keys,
    )  # fmt: skip


def steps(engine: offload.Engine, first: int, last: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for number in range(first, last):
        engine.backward(engine.module.loss(batches(world_size, seed=number)[rank]))  # type: ignore[operator]
        engine.optimizer.step()
        engine.optimizer.zero_grad()


def save(folder: str, ep_size: int, name: str, precision: str) -> list[dict[str, Tensor]]:
    """The states of two steps, which are saved, and of two more."""
    torch.set_num_threads(1)
    with offload.initialize(spread(ep_size)(), keys_of(folder, 2, precision=precision)) as engine:
        steps(engine, 0, 2)
        engine.save_checkpoint(Path(folder) / name)
        then = states_of(engine)
        steps(engine, 2, 4)
        return [then, states_of(engine)]


def load(folder: str, ep_size: int, name: str, precision: str) -> list[dict[str, Tensor]]:
    """The states that were loaded, and those of two more steps."""
    torch.set_num_threads(1)
    model = spread(ep_size)()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    with offload.initialize(model, keys_of(folder, 3, precision=precision)) as engine:
        engine.load_checkpoint(Path(folder) / name)
        then = states_of(engine)
        steps(engine, 2, 4)
        return [then, states_of(engine)]


def save_and_load(folder: str, precision: str) -> dict[str, list[dict[str, Tensor]]]:
    """Saved at 1 and 2, each loaded at both."""
    found = {}
    for saved in (1, 2):
        found[f"{saved}"] = save(folder, saved, f"of {saved}", precision)
        for loaded in (1, 2):
            found[f"{saved} {loaded}"] = load(folder, loaded, f"of {saved}", precision)
    return found
