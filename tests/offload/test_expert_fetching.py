"""Experts under an engine whose memory is too small for them: the same bits, whatever is routed
where, and a trace of the rest that no routing disturbs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offload
from offload.tiers.tier import Residency
from tests.offload.engine_cases import (
    HOST,
    NVME,
    WIDTH,
    TinyLM,
    batches,
    config,
    min_budget,
    seeded,
)
from tests.offload.engine_states import assert_same_bits, train_step
from tests.ranks.programs import Expert

EXPERTS = 8


class Routed(nn.Module):
    """Each token goes to one expert; the experts are called in the order `order`."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert(1200) for _ in range(EXPERTS))
        self.order: Callable[[list[int]], list[int]] = list

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        y = 0 * weights.unsqueeze(-1) * x  # the router has a gradient also without experts
        for index in self.order(chosen.unique().tolist()):
            here = chosen == index
            y[here] = weights[here].unsqueeze(-1) * self.experts[index](x[here])
        return x + y


class RoutedLM(TinyLM):
    """Blocks are computed `twice` each, or `again` in backward."""

    def __init__(self, *, again: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routed() for _ in range(3))
        self.again, self.twice = again, twice

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in [*self.blocks, *(self.blocks if self.twice else ())]:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _values(engine: offload.Engine) -> dict[str, Tensor]:
    """One by one: they do not fit together."""
    values = {}
    for name, param in engine.module.named_parameters():
        with engine.gathered(param):
            values[name] = param.detach().clone()
    return values


def _step(engine: offload.Engine, tokens: Tensor) -> None:
    engine.module.loss(tokens).backward()


def _plain(engine: offload.Engine, data: list[Tensor]) -> None:
    for tokens in data:
        _step(engine, tokens)
        engine.optimizer.step()
        engine.optimizer.zero_grad()


def _evaluating(engine: offload.Engine, data: list[Tensor]) -> None:
    for number, tokens in enumerate(data):
        with torch.no_grad():
            for other in data[: number % 3]:
                engine.module.loss(other)
        _plain(engine, [tokens])


def _accumulating(engine: offload.Engine, data: list[Tensor]) -> None:
    for number, tokens in enumerate(data):
        _step(engine, tokens)
        if number % 2:
            engine.optimizer.step()
            engine.optimizer.zero_grad()


def _two_forwards(engine: offload.Engine, data: list[Tensor]) -> None:
    for one, other in zip(data[::2], data[1::2], strict=True):
        train_step(engine.optimizer, engine.module.loss(one) + engine.module.loss(other))


def _in_any_order(engine: offload.Engine, data: list[Tensor]) -> None:
    orders: list[Any] = [sorted, lambda ids: ids[::-1], lambda ids: ids[1::2] + ids[::2]]
    orders.append(lambda ids: [])  # no tokens
    for number, tokens in enumerate(data):
        for place, block in enumerate(engine.module.blocks):
            block.order = orders[(number + place) % len(orders)]
        _plain(engine, [tokens])


LOOPS = [_plain, _evaluating, _accumulating, _two_forwards, _in_any_order]


@pytest.mark.sample("_plain")
@pytest.mark.parametrize("loop", LOOPS)
def test_experts_that_do_not_fit_train_with_the_bits_of_those_in_memory(
    loop: Callable[..., None], tmp_path: Path, long: bool
) -> None:
    hows: list[dict[str, bool]] = [{}, {"again": True}, {"twice": True}]
    number = LOOPS.index(loop) % len(hows)
    for how in hows if long else hows[number : number + 1]:
        _compare(loop, how, tmp_path)


def _compare(loop: Callable[..., None], how: dict[str, bool], tmp_path: Path) -> None:
    def build() -> RoutedLM:
        return RoutedLM(**how)

    values = []
    for placement in HOST, NVME:
        keys = config(tmp_path, placement, budget={"host": "64MiB", "nvme": "128MiB"})
        keys["optimizer"] = {"lr": 3e-3, "chunk": 16384}
        if placement is NVME:
            # torch's checkpoints keep all that a block has used until its backward is over
            host = "6MiB" if how.get("again") else min_budget(build, keys)["host"]
            keys["budget"] = {"host": host, "nvme": "128MiB"}
        with offload.initialize(seeded(build), keys) as engine:
            loop(engine, batches(4))
            values.append(_values(engine))
            if placement is NVME:
                assert len(engine.store.tables) == 3
    assert_same_bits(*values)


def test_no_routing_disturbs_the_trace_and_backward_finds_what_forward_used(tmp_path: Path) -> None:
    keys = config(tmp_path, NVME, budget={"host": "8MiB", "nvme": "128MiB"})
    keys["optimizer"] = {"lr": 3e-3, "chunk": 16384}
    with offload.initialize(seeded(RoutedLM), keys) as engine:
        data = batches(6)
        _plain(engine, data[:1])
        expected = list(engine.store.trace.cursor.upcoming())
        absent: list[str] = []
        store = engine.store
        fetcher, need = store.fetcher, store.fetcher.need

        def noting(item: Any, *, backward: bool = False) -> None:
            is_expert = store.table_of(item) is not None
            if backward and is_expert and item.state.residency() is Residency.ABSENT:
                absent.append(item.name)
            need(item, backward=backward)

        fetcher.need = noting  # type: ignore[method-assign]
        _in_any_order(engine, data[1:])
        assert list(engine.store.trace.cursor.upcoming()) == expected
        assert not absent
