"""Ranks that go different ways, each in a way of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import offload
from offload.errors import RankError
from tests.offload.engine_cases import HOST, NVME, config, seeded

TIMEOUT_S = 60.0  # far longer than any of these may take
SOON_S = 5.0
SLOW_S = 4.5  # far longer than it takes to find ranks that wait for each other
WIDTH = 16


class Towers(nn.Module):
    """Some of several towers, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )

    def forward(self, order: tuple[int, ...]) -> Tensor:
        x = torch.ones(2, WIDTH)
        for number in order:
            x = x + self.towers[number](x)
        loss: Tensor = x.square().mean()
        return loss


Engine = offload.Engine
Way = Callable[[Engine, int, Path], None]


def towers(*orders: tuple[int, ...]) -> Way:
    """Of each rank, the last one of all that follow."""

    def way(engine: Engine, rank: int, folder: Path) -> None:
        engine.backward(engine.module(orders[min(rank, len(orders) - 1)]))
        engine.optimizer.step()

    return way


def step(engine: Engine) -> None:
    forward(engine).backward()
    step_now(engine)


def step_now(engine: Engine) -> None:
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def forward(engine: Engine) -> Tensor:
    loss: Tensor = engine.module((0, 1, 2, 3))
    return loss


def without_backward(engine: Engine, rank: int, folder: Path) -> None:
    loss = forward(engine)
    if rank:
        loss.backward()
    step_now(engine)
    step(engine)


def ends_earlier(engine: Engine, rank: int, folder: Path) -> None:
    for _ in range(1 + rank):
        step(engine)
    if rank == 0:
        engine.close()
        time.sleep(2 * SOON_S)  # it goes on with other things


def saves_alone(engine: Engine, rank: int, folder: Path) -> None:
    if rank == 0:
        engine.save_checkpoint(folder / "alone")
    step(engine)
    step(engine)


def state_dict_alone(engine: Engine, rank: int, folder: Path) -> None:
    if rank == 0:
        engine.module.state_dict()
    step(engine)
    step(engine)


def evaluates_alone(engine: Engine, rank: int, folder: Path) -> None:
    if rank == 0:
        engine.module.eval()
        with torch.no_grad():
            forward(engine)
        engine.module.train()
    step(engine)
    step(engine)


def steps_once_more(engine: Engine, rank: int, folder: Path) -> None:
    if rank == 0:
        engine.optimizer.step()
    step(engine)
    step(engine)


def slow(*places: str) -> Way:
    """A rank that takes its time, which is no fault."""

    def way(engine: Engine, rank: int, folder: Path) -> None:
        for place in places:
            loss = forward(engine)
            if rank == 0 and place == "forward":
                time.sleep(SLOW_S)
            if rank == 0 and place == "backward":
                loss.register_hook(lambda _: time.sleep(SLOW_S))
            loss.backward()
            if rank == 1 and place == "step":
                time.sleep(SLOW_S)
            step_now(engine)
        if rank == 1 and len(places) > 1:
            time.sleep(SLOW_S)
        engine.save_checkpoint(folder / "saved")

    return way


ALL = (0, 1, 2, 3)
WAYS: dict[str, Way] = {
    "skips the first": towers(ALL, (1, 2, 3)),
    "skips one": towers(ALL, (0, 1, 3)),
    "skips the last": towers(ALL, (0, 1, 2)),
    "another order": towers(ALL, (0, 2, 1, 3)),
    "twice": towers(ALL, (0, 1, 2, 3, 0)),
    "without backward": without_backward,
    "ends earlier": ends_earlier,
    "saves alone": saves_alone,
    "state dict alone": state_dict_alone,
    "evaluates alone": evaluates_alone,
    "steps once more": steps_once_more,
    "slow": slow("forward"),
    "slow everywhere": slow("forward", "backward", "step"),
}


def go(name: str, stage: int, folder: str) -> tuple[float, str]:
    """How long this rank's way took, and the error that it ended with, if any."""
    torch.set_num_threads(1)
    keys: dict[str, Any] = {"zero": {"stage": stage, "timeout_s": TIMEOUT_S}}
    placement = NVME if stage == 3 else HOST
    swap = Path(folder) / "swap"
    with offload.initialize(seeded(Towers), config(swap, placement, **keys)) as engine:
        step(engine)
        step(engine)
        began, text = time.monotonic(), ""
        try:
            WAYS[name](engine, dist.get_rank(), Path(folder))
        except RankError as error:
            text = str(error)
        return time.monotonic() - began, text
