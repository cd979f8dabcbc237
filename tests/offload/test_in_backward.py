"""Updates that begin during backward: same bits, and a loop that breaks the promise is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.errors import ConfigError, StateError
from tests.offload.engine_cases import HOST, MARKS, NVME, ON, TinyLM, batches, config, seeded
from tests.offload.engine_states import assert_same_bits, losses_of, states_of, train_step

pytestmark = MARKS

OPTIMIZER = {"lr": 3e-3, "chunk": 2048}


def ahead(folder: Path, placement: dict[str, Any] = NVME, **keys: Any) -> dict[str, Any]:
    return config(folder, placement, optimizer={**OPTIMIZER, "in_backward": True}, **keys)


class Unused(nn.Module):
    """One parameter of a group never gets a gradient, one only in every other pass."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.sometimes = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.always(x)
        return self.sometimes(x) if self.calls % 2 else x


def test_groups_with_unused_parameters_are_updated_at_the_step(tmp_path: Path) -> None:
    def run(keys: dict[str, Any]) -> dict[str, torch.Tensor]:
        with offload.initialize(seeded(Unused), keys) as engine:
            for number in range(4):
                torch.manual_seed(number)
                train_step(engine.optimizer, engine.module(torch.randn(3, 8).to(ON)).square().sum())
            return states_of(engine)

    assert_same_bits(run(ahead(tmp_path)), run(config(tmp_path, NVME, optimizer=OPTIMIZER)))


def test_a_second_backward_before_the_step_is_an_error(tmp_path: Path) -> None:
    model = seeded(TinyLM)
    with offload.initialize(model, ahead(tmp_path)):
        first, second = batches(2)
        model.loss(first).backward()
        with pytest.raises(StateError, match="gradient_accumulation_steps"):
            model.loss(second).backward()
        next(model.parameters()).grad = None  # closing is possible all the same


def test_zero_grad_instead_of_a_step_is_an_error(tmp_path: Path) -> None:
    model = seeded(TinyLM)
    with offload.initialize(model, ahead(tmp_path)) as engine:
        model.loss(batches(1)[0]).backward()
        with pytest.raises(StateError, match=r"step\(\) after every backward"):
            engine.optimizer.zero_grad()


def test_norms_are_known_and_clipping_is_refused(tmp_path: Path) -> None:
    """Clipping to infinity asks only for the norm of all gradients (transformers' Trainer does)."""
    tokens = batches(1)[0]
    plain, model = seeded(TinyLM).to(ON), seeded(TinyLM)
    plain.loss(tokens).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), float("inf"))
    with offload.initialize(model, ahead(tmp_path)) as engine:
        engine.backward(model.loss(tokens))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        torch.testing.assert_close(norm, expected)
        with pytest.raises(StateError, match="set in_backward: false to clip"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), float(norm) / 2)
        engine.optimizer.step()


def test_gradients_are_refused_also_while_their_update_runs(tmp_path: Path) -> None:
    with offload.initialize(seeded(TinyLM), ahead(tmp_path)) as engine:
        for tokens in batches(3):
            engine.backward(engine.module.loss(tokens))
            for param in engine.module.parameters():  # the last updates have just begun
                if param.grad is not None:
                    with pytest.raises(StateError, match="set in_backward: false to read"):
                        param.grad.clone()
            engine.optimizer.step()


def test_a_pass_that_was_dropped_does_not_count_for_the_update(tmp_path: Path) -> None:
    def run(dropped: bool) -> dict[str, torch.Tensor]:
        model = seeded(TinyLM)
        with offload.initialize(model, ahead(tmp_path, gradient_accumulation_steps=2)) as engine:
            first, second, third = batches(3)
            if dropped:
                model.loss(first).backward()
                engine.optimizer.zero_grad()
            model.loss(second).backward()
            model.loss(third).backward()
            engine.optimizer.step()
            return states_of(engine)

    assert_same_bits(run(dropped=True), run(dropped=False))


@pytest.mark.parametrize(
    "keys",
    [{"clip_grad_norm": 1.0}, {"precision": "fp16"}, {"skip_nonfinite": True}],
    ids=["clipping", "fp16", "skipping"],
)
def test_what_needs_all_gradients_contradicts_it(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="in_backward: true contradicts"):
        offload.OffloadConfig.load({"optimizer": {"in_backward": True}, **keys})
    resolved = offload.OffloadConfig.load(keys).owning_the_loop()
    assert resolved.optimizer.in_backward is False


@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
def test_numbers_set_between_backward_and_step_are_an_error(tmp_path: Path, placement: Any) -> None:
    """With nothing changed: set back, the loop goes on as if they had never been set."""

    def run(disturb: bool) -> dict[str, torch.Tensor]:
        model = seeded(TinyLM)
        with offload.initialize(model, ahead(tmp_path, placement)) as engine:
            (group,) = engine.optimizer.param_groups
            for tokens in batches(3):
                model.loss(tokens).backward()
                if disturb:
                    group["lr"] = 0.0
                    for _ in range(2):
                        with pytest.raises(
                            StateError, match=r"lr was set from 0.003 to 0.0.*after"
                        ):
                            engine.optimizer.step()
                    group["lr"] = OPTIMIZER["lr"]
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            return states_of(engine)

    assert_same_bits(run(True), run(False))


def test_a_parameter_put_into_a_param_group_after_its_update_is_an_error(tmp_path: Path) -> None:
    model = seeded(TinyLM)
    rest = [p for p in model.parameters() if p.requires_grad and p is not model.position]
    with offload.initialize(model, ahead(tmp_path), parameters=rest) as engine:
        model.loss(batches(1)[0]).backward()
        engine.optimizer.add_param_group({"params": [model.position]})
        with pytest.raises(StateError, match=r"update of position .*added to the param groups"):
            engine.optimizer.step()


@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
def test_a_load_in_place_of_the_step_forgets_what_was_updated(
    tmp_path: Path, placement: Any
) -> None:
    model = seeded(TinyLM)
    with offload.initialize(model, ahead(tmp_path, placement)) as engine:
        losses_of(engine, batches(1))
        engine.save_checkpoint(tmp_path / "saved")
        expected = losses_of(engine, batches(2, seed=2))
        states = states_of(engine)
        model.loss(batches(1, seed=3)[0]).backward()
        engine.load_checkpoint(tmp_path / "saved")
        assert losses_of(engine, batches(2, seed=2)) == expected
        assert_same_bits(states_of(engine), states)
