"""Two ranks that train a DeepSpeed loop train what one does with all the data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offload.deepspeed as deepspeed
from offload.deepspeed.engine import EngineModule
from tests.deepspeed.loops import BASE, batch, initialized, model, same, weights
from tests.ranks.processes import run_ranks

mse = nn.functional.mse_loss
TWO = {**BASE, "gradient_accumulation_steps": 2}


def trained(stage: int, operation: str, folder: str) -> tuple[list[torch.Tensor], list[int]]:
    rank = dist.get_rank()
    config = {**TWO, "zero_optimization": {"stage": stage}, "gradient_allreduce_op": operation}
    net = model(rank)  # the first rank's counts
    with initialized(net, config) as engine:
        sizes = [engine.train_batch_size(), engine.world_size]
        for number in range(6):
            x, y = batch(2 * number + rank)
            loss = mse(engine(x), y)
            if number % 2:
                loss.backward()
            else:
                engine.backward(loss)
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


def alone(operation: str) -> list[torch.Tensor]:
    net = model(0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    parts = 4 if operation == "mean" else 2
    for step in range(3):
        for number in range(4 * step, 4 * step + 4):
            (mse(net(batch(number)[0]), batch(number)[1]) / parts).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        net[0].bias.fill_(1.0)
    return weights(net)


@pytest.mark.parametrize(("stage", "operation"), [(2, "sum"), (3, "mean")])
def test_two_ranks(stage: int, operation: str, tmp_path: Path) -> None:
    results: Any = run_ranks(2, tmp_path, trained, stage, operation, str(tmp_path / "saved"))
    for found, sizes in results:
        assert sizes == [8, 2]
        assert same(found, alone(operation))


@dataclasses.dataclass
class Pair:
    loss: torch.Tensor
    out: torch.Tensor


class Anything:
    __slots__ = ("loss", "out")

    def __init__(self, loss: torch.Tensor, out: torch.Tensor) -> None:
        self.loss, self.out = loss, out


class Returning(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.net, self.kind = model(), kind

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = self.net(x)
        return self.kind(mse(out, y), out)


def by_loss(net: Any, number: int) -> torch.Tensor:
    found: torch.Tensor = net(*batch(number)).loss
    return found


def by_penalty(net: Any, number: int) -> torch.Tensor:
    """A term that flows through no output."""
    of = net.module if isinstance(net, EngineModule) else net
    return by_loss(net, number) + of.net[0].weight.pow(2).sum()


# what the model returns, a loss of it, and whether the loop calls backward itself
SUMMED = [
    (Pair, by_loss, True), (Anything, by_loss, True), (Anything, by_penalty, True),
    (Pair, by_loss, False),
]  # fmt: skip


def summed() -> list[torch.Tensor]:
    config = {**BASE, "gradient_accumulation_steps": 1, "gradient_allreduce_op": "sum"}
    found = []
    for kind, loss_of, by_hand in SUMMED:
        with initialized(Returning(kind), config) as engine:
            loss = loss_of(engine, dist.get_rank())
            loss.backward() if by_hand else engine.backward(loss)  # type: ignore[func-returns-value]
            gradient = deepspeed.utils.safe_get_full_grad(engine.module.net[0].weight)
            assert gradient is not None
            found.append(gradient.clone())
            engine.step()
            found.append(torch.tensor(engine.get_global_grad_norm()))
    return found


def test_a_sum_over_ranks_is_one_whatever_the_model_returns(tmp_path: Path) -> None:
    found: Any = run_ranks(2, tmp_path, summed)
    expected = []
    for kind, loss_of, _ in SUMMED:
        plain = Returning(kind)
        for number in range(2):
            loss_of(plain, number).backward()
        gradient = plain.net[0].weight.grad
        assert gradient is not None
        norm = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
        expected += [gradient, norm]
    for of_rank in found:
        for number, (ours, theirs) in enumerate(zip(of_rank, expected, strict=True)):
            if number % 2:
                assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
            else:
                assert torch.equal(ours, theirs)
