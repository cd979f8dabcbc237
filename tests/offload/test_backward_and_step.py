"""Backward passes and steps in every order that PyTorch allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import StateError
from tests.offload.engine_cases import HOST, MARKS, NVME, ON, WIDTH, TinyLM, batches, config, seeded
from tests.offload.engine_states import (
    assert_same_bits,
    bits,
    gradients_of,
    losses_of,
    parameters_of,
    states_of,
)
from tests.offload.plain_training import (
    EVERYWHERE,
    MakeEngine,
    check,
    noise,
    square_loss,
    tokens_loss,
)

pytestmark = MARKS


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_several_backward_passes_add_up_in_fp32(make: MakeEngine, precision: str) -> None:
    """Also unannounced, with gradient_accumulation_steps left at 1."""
    data = batches(3)
    alone: dict[str, Tensor] = {}
    for tokens in data:
        engine = make(seeded(TinyLM), precision=precision)
        tokens_loss(engine.module, tokens).backward()
        for name, gradient in gradients_of(engine).items():
            alone[name] = alone[name] + gradient.float() if name in alone else gradient.float()
        engine.close()

    engine = make(seeded(TinyLM), precision=precision)
    for tokens in data:
        tokens_loss(engine.module, tokens).backward()
    together = gradients_of(engine)

    assert {gradient.dtype for gradient in together.values()} == {torch.float32}
    assert_same_bits(together, alone)


def test_a_step_with_fewer_passes_than_configured_is_refused_but_for_the_last(
    make: MakeEngine,
) -> None:
    engine = make(seeded(TinyLM), gradient_accumulation_steps=2)

    def step(passes: int) -> None:
        for tokens in batches(passes):
            tokens_loss(engine.module, tokens).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    with pytest.raises(StateError, match=r"gradient_accumulation_steps: 2 .* came after 1"):
        step(1)
    engine.optimizer.zero_grad()
    step(2)
    step(1)  # an epoch may end so
    with pytest.raises(StateError, match="gradient_accumulation_steps: 2"):
        step(1)  # so it was not the last


def test_a_non_finite_gradient_is_applied_where_no_step_is_skipped_and_is_said_once(
    make: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """`test_nonfinite.py` has the steps that are skipped."""
    model = nn.Linear(4, 4)
    engine = make(model)
    for _ in range(2):
        engine.backward(model(torch.ones(1, 4, device=ON)).sum() * float("inf"))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    assert engine.report().skipped_steps == 0
    assert not engine.values.full(model.weight).isfinite().any()
    said = [r.message for r in caplog.records if "not finite" in r.message]
    assert len(said) == 1
    assert "applied" in said[0]


def test_a_step_without_gradients_changes_nothing(make: MakeEngine) -> None:
    engine = make(seeded(TinyLM))
    losses_of(engine, batches(1))
    before = states_of(engine)
    engine.optimizer.step()
    assert_same_bits(states_of(engine), before)


def test_backward_of_a_graph_older_than_a_step_is_an_error(make: MakeEngine) -> None:
    for placement in (NVME, HOST):
        engine = make(seeded(TinyLM), placement)
        old = tokens_loss(engine.module, batches(1)[0])
        losses_of(engine, batches(1))
        with pytest.raises(StateError, match=r"run backward before optimizer\.step"):
            old.backward()


def test_a_changed_activation_is_an_error_in_backward_as_in_torch(make: MakeEngine) -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x).exp()  # exp keeps its result for backward
            y.add_(1)
            return y

    engine = make(seeded(Changes))
    loss = square_loss(engine.module, noise(2, WIDTH))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("placement", EVERYWHERE)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_parameter_changed_in_its_forward_keeps_the_change(
    make: MakeEngine, placement: Any, precision: str
) -> None:
    """`max_norm` writes into the weight during the forward."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(50, WIDTH, max_norm=1.0), nn.Linear(WIDTH, 2))

    tokens = batches(1)[0]
    if precision == "fp32":
        check(make, build, square_loss, batches(4), placement)
    engine = make(seeded(build), placement, precision=precision)
    with torch.no_grad():
        engine.module(tokens)
    model: Any = engine.module
    with engine.gathered():
        norms = model[0].weight[tokens.flatten()].float().norm(dim=1)
        assert model[0].weight.float().norm(dim=1).max() > 2
    assert norms.max() <= 1.01
    master = engine.values.read(model[0].weight, "master")
    assert bits(master.to(model[0].weight.dtype)) == bits(parameters_of(engine)["0.weight"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_second_pass_that_was_not_planned_sums_in_host_memory(
    tmp_path: Path, precision: str
) -> None:
    def gradients(placement: dict[str, str]) -> dict[str, object]:
        model = seeded(TinyLM)
        with offload.initialize(model, config(tmp_path, placement, precision=precision)) as engine:
            for tokens in batches(2):
                engine.backward(model.loss(tokens))
            engine.settle()
            engine.check_integrity()
            nvme = engine.report().tiers.get("nvme")
            assert nvme is None or not nvme.by_class.get("gradients")
            return gradients_of(engine)  # type: ignore[return-value]

    assert_same_bits(gradients(NVME), gradients(HOST))  # type: ignore[arg-type]
