"""A gradient that is not finite, anywhere: the step is skipped as if it had not been, and said."""

from __future__ import annotations

import logging
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import NonfiniteError
from tests.offload.engine_cases import HOST, MARKS, NVME, TinyLM, batches, seeded
from tests.offload.engine_states import assert_same_bits, states_of
from tests.offload.plain_training import MakeEngine

pytestmark = MARKS

STEPS = 5
SPECULATIVE = {"parameters": "nvme", "gradients": "host", "optimizer": "nvme"}
SPLIT = {"parameters": "host", "gradients": "nvme", "optimizer": {"host": "40%", "nvme": "60%"}}


class Bad:
    """Puts a value that is not finite into one element of a parameter's gradient, in one backward
    pass of one step."""

    def __init__(self, model: nn.Module, name: str, step: int, number: int, value: float) -> None:
        self._at, self._value = (step, number), value
        self.now = (-1, -1)
        self.done = False
        model.get_parameter(name).register_hook(self._spoil)

    def _spoil(self, gradient: Tensor) -> Tensor:
        if self.now != self._at:
            return gradient
        self.done = True
        spoilt = gradient.clone()
        spoilt.view(-1)[spoilt.numel() // 3] = self._value
        return spoilt


def train(engine: offload.Engine, passes: int, left_out: int | None, bad: Bad | None) -> list[Any]:
    """Losses of all steps but the one that is `left_out`, and the states after each step."""
    seen: list[Any] = []
    data = batches(STEPS * passes)
    for step in range(STEPS):
        if step == left_out and bad is None:
            continue
        for number in range(passes):
            if bad is not None:
                bad.now = (step, number)
            loss = engine.module.loss(data[step * passes + number])  # type: ignore[operator]
            engine.backward(loss / passes)
            if step != left_out:
                seen.append(loss.item())
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        assert engine.optimizer.step_was_skipped is (step == left_out)
    return seen


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(300 if metafunc.config.getoption("--long") else 5))


@pytest.mark.sample(3)
def test_a_step_that_is_skipped_leaves_no_trace_wherever_it_went_wrong(
    make: MakeEngine, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    """Parameter, step, pass, value, placement, precision and optimizer are drawn."""
    draw = random.Random(seed)
    names = [name for name, p in seeded(TinyLM).named_parameters() if p.requires_grad]
    name, step, passes = draw.choice(names), draw.randrange(STEPS), draw.choice([1, 1, 2, 3])
    keys: dict[str, Any] = {
        "precision": draw.choice(["fp32", "bf16"]), "skip_nonfinite": True,
        "gradient_accumulation_steps": passes,
        "clip_grad_norm": draw.choice([None, 0.5, 1e9]),
        "optimizer": {
            "type": draw.choice(["adamw", "lion", "adagrad"]), "lr": 1e-2, "chunk": 2048,
            "states": draw.choice(["fp32", "bf16"]),
        },
    }  # fmt: skip
    placement = draw.choice([NVME, HOST, SPECULATIVE, SPECULATIVE, SPLIT])
    if keys["precision"] == "bf16" and passes > 1:  # whose fp32 sums are not put on nvme
        placement = {**placement, "gradients": "host"}

    with make(seeded(TinyLM), placement, **keys) as engine:
        expected = train(engine, passes, step, None)
        expected_states = states_of(engine)
    engine = make(seeded(TinyLM), placement, **keys)
    value = draw.choice([float("nan"), float("inf"), -float("inf")])
    bad = Bad(engine.module, name, step, draw.randrange(passes), value)
    with caplog.at_level(logging.WARNING, "offload"):
        assert train(engine, passes, step, bad) == expected
    assert bad.done
    assert_same_bits(states_of(engine), expected_states)
    engine.check_integrity()
    said = [r.message for r in caplog.records if "not finite" in r.message]
    assert said == [
        f"the gradient of {name} is not finite: step {step + 1} is skipped; later ones are "
        "logged as INFO, and report() counts them"
    ]


def spoil_all(engine: offload.Engine, count: int = 1, factor: float = float("nan")) -> None:
    for tokens in batches(count):
        engine.backward(engine.module.loss(tokens) * factor)  # type: ignore[operator]
        engine.optimizer.step()
        engine.optimizer.zero_grad()


@pytest.mark.parametrize("placement", [NVME, HOST], ids=["nvme", "host"])
def test_fp16_keeps_its_states_and_follows_gradscalers_schedule(
    make: MakeEngine, placement: dict[str, Any]
) -> None:
    scaling = {"initial": 4.0, "growth_interval": 2}
    engine = make(seeded(TinyLM), placement, precision="fp16", loss_scale=scaling)
    scale, tracker = torch.full((), 4.0), torch.zeros((), dtype=torch.int32)
    for overflows in (False, False, False, True, True, True, True, True, True, False, False):
        before = states_of(engine)
        spoil_all(engine, factor=float("inf") if overflows else 1.0)
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflows)), 2.0, 0.5, 2)
        assert engine.report().loss_scale == scale.item()
        if overflows:
            assert_same_bits(states_of(engine), before)
    assert scale.item() == 0.25  # below 1 and up again


def test_the_first_skipped_step_is_a_warning_and_later_ones_are_information(
    make: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(seeded(TinyLM), HOST, skip_nonfinite=True)
    with caplog.at_level(logging.INFO, "offload"):
        caplog.clear()
        spoil_all(engine, 3)
    said = [r for r in caplog.records if "not finite" in r.message]
    assert [r.levelname for r in said] == ["WARNING", "INFO", "INFO"]
    assert re.match(
        r"gradients of (\d+) of \1 parameters are not finite \(first position, last "
        r"norm\.bias\): step 1 is skipped",
        said[0].message,
    ), said[0].message
    assert said[2].message.endswith(": step 3 is skipped")


def test_too_many_skipped_steps_in_a_row_are_an_error_that_loses_nothing(
    make: MakeEngine, tmp_path: Path
) -> None:
    engine = make(seeded(TinyLM), NVME, skip_nonfinite=True, max_skipped_steps=3)
    spoil_all(engine, 2, factor=1.0)
    states = states_of(engine)
    spoil_all(engine, 2)
    spoil_all(engine, 1, factor=1.0)  # the row begins anew
    engine.save_checkpoint(tmp_path / "checkpoint")
    states = states_of(engine)
    spoil_all(engine, 2)
    for count in (3, 4):
        with pytest.raises(
            NonfiniteError,
            match=rf"max_skipped_steps: {count} steps in a row were skipped for infinite or NaN "
            r"gradients, first in position; weights and optimizer states are as before",
        ) as caught:
            spoil_all(engine, 1)
        assert caught.value.skipped_steps == count
        assert caught.value.parameters[-1] == "norm.bias"
        engine.optimizer.zero_grad()
    assert engine.optimizer.step_was_skipped
    assert engine.report().skipped_steps == 6
    assert_same_bits(states_of(engine), states)
    engine.load_checkpoint(tmp_path / "checkpoint")
    spoil_all(engine, 2)
    spoil_all(engine, 1, factor=1.0)
    engine.check_integrity()


def test_first_overflows_of_fp16_are_no_error(make: MakeEngine) -> None:
    """From a scale that needs many halvings until gradients fit."""
    engine = make(seeded(TinyLM), HOST, precision="fp16", loss_scale={"initial": 2.0**40})
    spoil_all(engine, 40, factor=1.0)
    report = engine.report()
    assert 20 < report.skipped_steps < 40
    assert report.steps + report.skipped_steps == 40
