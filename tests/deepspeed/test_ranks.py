"""Two ranks that train a DeepSpeed loop train what one does with all the data."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offload.deepspeed as deepspeed
from tests.deepspeed.loops import BASE, batch, initialized, model, same, weights
from tests.ranks.processes import run_ranks

mse = nn.functional.mse_loss
TWO = {**BASE, "gradient_accumulation_steps": 2}


def trained(stage: int, folder: str) -> tuple[list[torch.Tensor], list[int]]:
    rank = dist.get_rank()
    config = {**TWO, "zero_optimization": {"stage": stage}}
    net = model(rank)  # the first rank's counts
    with initialized(net, config) as engine:
        sizes = [engine.train_batch_size(), engine.world_size]
        for number in range(6):
            x, y = batch(2 * number + rank)
            engine.backward(mse(engine(x), y))
            engine.step()
        engine.save_checkpoint(folder, client_state={"rank": rank})
        path, state = engine.load_checkpoint(folder)
        assert path is not None
        assert state == {"rank": 0}
        with deepspeed.zero.GatheredParameters(net[0].bias, modifier_rank=1):
            net[0].bias.data.fill_(float(rank))
        assert net[0].bias.eq(1).all()
        with deepspeed.zero.GatheredParameters(net.parameters()):
            return weights(net), sizes


def alone() -> list[torch.Tensor]:
    net = model(0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(3):
        for number in range(4 * step, 4 * step + 4):
            (mse(net(batch(number)[0]), batch(number)[1]) / 4).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        net[0].bias.fill_(1.0)
    return weights(net)


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks(stage: int, tmp_path: Path) -> None:
    results: Any = run_ranks(2, tmp_path, trained, stage, str(tmp_path / "saved"))
    for numbers, sizes in results:
        assert sizes == [8, 2]
        assert same(numbers, alone())
