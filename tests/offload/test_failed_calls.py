"""Exceptions amid a forward, a backward or a loss leave no trace.

Most compare with plain PyTorch. Parameters, gradients and optimizer states are on nvme unless a
test says otherwise.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.offload.engine_cases import (
    MARKS,
    TinyLM,
    assert_same_bits,
    batches,
    losses_of,
    seeded,
    states_of,
)
from tests.offload.plain_training import MakeEngine, tokens_loss

pytestmark = MARKS


# ----------------------------------------------------------------------- errors on the way
class Failing(TinyLM):
    fail = ""

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        if self.fail == "backward":
            logits.register_hook(_raise)
        if self.fail == "forward":
            raise RuntimeError("on purpose")
        return logits


def _raise(_: Any) -> None:
    raise RuntimeError("on purpose")


def failing_block(*_: Any) -> None:
    raise RuntimeError("on purpose")


@pytest.mark.sample(2)
@pytest.mark.parametrize("where", ["forward", "block", "backward", "loss"])
def test_training_goes_on_after_an_exception_as_if_it_had_not_been(
    make: MakeEngine, where: str
) -> None:
    plain = make(seeded(Failing))
    expected = losses_of(plain, batches(4))
    engine = make(seeded(Failing))
    model: Any = engine.module
    losses = losses_of(engine, batches(4)[:2])
    model.fail = where
    hook = model.blocks[1].mlp.register_forward_hook(failing_block) if where == "block" else None

    def fails() -> None:
        loss = tokens_loss(model, batches(1)[0])
        loss = loss if where != "loss" else _Raising.apply(loss)
        loss.backward()

    for _ in range(3):
        with pytest.raises(RuntimeError, match="on purpose"):
            fails()
    if hook is not None:
        hook.remove()
    model.fail = ""
    engine.optimizer.zero_grad()
    losses += losses_of(engine, batches(4)[2:])

    assert losses == expected
    assert_same_bits(states_of(engine), states_of(plain))
    engine.check_integrity()
    report = engine.report().tiers
    assert all(tier.peak_nbytes <= tier.budget_nbytes for tier in report.values())
    held = engine.report().tiers["host"].used_nbytes
    assert held <= plain.report().tiers["host"].budget_nbytes
    assert all(not group.is_gathered for group in engine.store.groups)


class _Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("on purpose")
