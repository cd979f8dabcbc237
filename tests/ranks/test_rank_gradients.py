"""`param.grad` on several ranks: what one rank does otherwise keeps no other waiting, and changes
nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

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
from tests.ranks.programs import BUDGET, OPTIMIZER

Values = dict[str, Tensor]
STEPS = 3


def start(folder: str, model: Any = TinyLM) -> offload.Engine:
    torch.set_num_threads(1)
    keys = config(Path(folder), HOST, budget=BUDGET, optimizer=OPTIMIZER, zero={"stage": 3})
    return offload.initialize(seeded(model), keys)


def both(run: Callable[[str, bool], Values], folder: str) -> tuple[Values, Values]:
    return run(folder, False), run(folder, True)


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
                with pytest.raises(StateError, match=r"cleared.*clone"):
                    kept.sum()
        return states_of(engine)


def test_a_gradient_that_one_rank_keeps_holds_up_no_other(tmp_path: Path) -> None:
    for a, b in run_ranks(2, tmp_path, both, keep_on_one, str(tmp_path)):
        assert_same_bits(b, a)
