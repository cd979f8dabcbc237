"""`param.grad` on several ranks: what one rank does otherwise keeps no other waiting, and changes
nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offload
from offload.errors import StateError
from tests.offload.engine_cases import (
    HOST,
    TinyLM,
    assert_same_bits,
    batches,
    config,
    seeded,
    states_of,
)
from tests.ranks.processes import run_ranks
from tests.ranks.programs import BUDGET, OPTIMIZER, Branches

Values = dict[str, Tensor]
STEPS = 3


def start(folder: str, model: Any = TinyLM) -> offload.Engine:
    torch.set_num_threads(1)
    keys = config(Path(folder), HOST, budget=BUDGET, optimizer=OPTIMIZER, zero={"stage": 3})
    return offload.initialize(seeded(model), keys)


def both(run: Callable[[str, bool], Values], folder: str) -> tuple[Values, Values]:
    return run(folder, False), run(folder, True)


def clip(model: nn.Module) -> None:
    norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
    assert bool(norm.isfinite())
    assert norm > 0


def idle_between(folder: str, reads: bool) -> Values:
    """The last rank has no data for the second pass of each step."""
    with start(folder) as engine:
        model, data = engine.module, iter(batches(2 * STEPS, seed=dist.get_rank()))
        for _ in range(STEPS):
            model.loss(next(data)).backward()
            if reads:
                norm = model.head.weight.grad.norm()
                assert bool(norm.isfinite())
            if dist.get_rank() == 1:
                engine.idle()
            else:
                model.loss(next(data)).backward()
            clip(model)
            engine.optimizer.step()
            model.zero_grad()
        return states_of(engine)


def test_a_norm_read_before_a_rank_is_idle_is_read_again(tmp_path: Path) -> None:
    for a, b in run_ranks(2, tmp_path, both, idle_between, str(tmp_path)):
        # sums of passes are rounded where ranks have agreed amid them
        assert a.keys() == b.keys()
        for name, value in a.items():
            torch.testing.assert_close(b[name], value, rtol=1e-4, atol=1e-5, msg=name)


def keep_on_one(folder: str, keeps: bool) -> Values:
    with start(folder) as engine:
        model = engine.module
        for tokens in batches(STEPS, seed=dist.get_rank()):
            model.loss(tokens).backward()
            kept = model.head.weight.grad if keeps and dist.get_rank() == 0 else None
            engine.optimizer.step()
            model.zero_grad()
            engine.optimizer.zero_grad()
            if kept is not None:
                with pytest.raises(StateError, match=r"cleared.*several ranks.*clone"):
                    kept.sum()
        return states_of(engine)


def test_a_gradient_that_one_rank_keeps_holds_up_no_other(tmp_path: Path) -> None:
    for a, b in run_ranks(2, tmp_path, both, keep_on_one, str(tmp_path)):
        assert_same_bits(b, a)


def zero_branches(folder: str, to_zero: bool) -> Values:
    """Each rank takes another branch, and the other one in the next step."""
    with start(folder, Branches) as engine:
        for number in range(STEPS):
            tokens = torch.full((2, 7), dist.get_rank() + number)
            engine.module(tokens).backward()
            engine.optimizer.step()
            engine.module.zero_grad(set_to_none=not to_zero)
        return states_of(engine)


def test_a_gradient_that_is_zero_here_is_another_rank_s(tmp_path: Path) -> None:
    for a, b in run_ranks(2, tmp_path, both, zero_branches, str(tmp_path)):
        assert_same_bits(b, a)


def zero_and_idle(folder: str, to_zero: bool) -> Values:
    with start(folder) as engine:
        model, data = engine.module, batches(STEPS, seed=dist.get_rank())
        for number, tokens in enumerate(data):
            if number and dist.get_rank() == 1:
                engine.idle()
            else:
                model.loss(tokens).backward()
            clip(model)
            engine.optimizer.step()
            model.zero_grad(set_to_none=not to_zero)
        return states_of(engine)


def test_a_rank_with_zeroed_gradients_is_idle(tmp_path: Path) -> None:
    for a, b in run_ranks(2, tmp_path, both, zero_and_idle, str(tmp_path)):
        assert_same_bits(b, a)
