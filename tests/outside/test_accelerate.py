"""accelerate's loops, with its own Accelerator and with `OffloadAccelerator`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import offload
from offload.errors import ConfigError, StateError, UnsupportedError
from tests.offload.engine_cases import assert_same_bits, assert_scheduler_is_saved
from tests.outside.trainer_cases import (
    ACCUMULATE,
    CLIP,
    PLACEMENTS,
    Rows,
    assert_close,
    forget,
    plain_optimizer,
    settings,
    tiny_llama,
    values_of,
)

accelerate = pytest.importorskip("accelerate")
integration = pytest.importorskip("offload.integrations.accelerate")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.usefixtures("quiet_trainers")

STEPS = 4


class Run:
    """The loop that accelerate's own documentation shows, in pieces."""

    def __init__(self, kind: Any, model: Any, optimizer: Any, **keys: Any) -> None:
        forget()
        self.accelerator = kind(cpu=True, gradient_accumulation_steps=ACCUMULATE, **keys)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
        loader = DataLoader(Rows(2 * ACCUMULATE * STEPS, seed=1), batch_size=2)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.losses: list[float] = []
        self.norms: list[float] = []

    def go(self, begin: int, end: int) -> Run:
        loader = self.accelerator.skip_first_batches(self.loader, begin)
        for number, batch in enumerate(loader, begin):
            if number == end:
                break
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                    self.norms.append(float(norm))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
        return self


@pytest.mark.sample(2)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_loop_trains_as_plainly_and_resumes_to_the_bit(placement: str, tmp_path: Path) -> None:
    kind, half, whole = integration.OffloadAccelerator, 2 * ACCUMULATE, STEPS * ACCUMULATE
    expected_model = tiny_llama()
    expected = Run(accelerate.Accelerator, expected_model, plain_optimizer(expected_model))
    expected.go(0, whole)
    model = tiny_llama()
    with offload.initialize(model, settings(tmp_path, PLACEMENTS[placement])) as engine:
        run = Run(kind, model, engine.optimizer).go(0, half)
        run.accelerator.save_state(str(tmp_path / "saved"))
        assert_scheduler_is_saved(engine)
        assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
            "offload", "random_states_0.pkl", "scheduler.bin",
        ]  # fmt: skip
        run.go(half, whole)
        assert_close((run.losses, run.norms), (expected.losses, expected.norms))
        assert_close(values_of(model), values_of(expected_model))
        weights = values_of(model)
    again = tiny_llama()
    with offload.initialize(again, settings(tmp_path, PLACEMENTS[placement])) as engine:
        resumed = Run(kind, again, engine.optimizer)
        resumed.accelerator.load_state(str(tmp_path / "saved"))
        resumed.go(half, whole)
        assert resumed.losses == run.losses[half:]
        assert_same_bits(values_of(again), weights)


def test_what_a_plain_accelerator_saved_is_loaded(tmp_path: Path) -> None:
    expected_model = tiny_llama()
    expected = Run(accelerate.Accelerator, expected_model, plain_optimizer(expected_model))
    expected.go(0, ACCUMULATE)
    expected.accelerator.save_state(str(tmp_path / "saved"))
    expected.go(ACCUMULATE, 3 * ACCUMULATE)
    model = tiny_llama()
    with offload.initialize(model, settings(tmp_path, PLACEMENTS["nvme"])) as engine:
        run = Run(integration.OffloadAccelerator, model, engine.optimizer)
        run.accelerator.load_state(str(tmp_path / "saved"))
        run.go(ACCUMULATE, 3 * ACCUMULATE)
        assert_close(values_of(model), values_of(expected_model))


def test_a_models_weights_are_saved_as_those_of_a_plain_accelerator(tmp_path: Path) -> None:
    model: Any = nn.Sequential(tiny_llama(), nn.BatchNorm1d(3))
    plain = accelerate.Accelerator(cpu=True)
    plain.save_model(model, tmp_path / "expected")
    with offload.initialize(model, settings(tmp_path, PLACEMENTS["nvme"])) as engine:
        accelerator = integration.OffloadAccelerator(cpu=True)
        prepared, _ = accelerator.prepare(model, engine.optimizer)
        accelerator.save_model(prepared, tmp_path / "found")
    expected, actual = (
        safetensors.load_file(tmp_path / folder / "model.safetensors")
        for folder in ("expected", "found")
    )
    assert_same_bits({name: actual[name] for name in expected}, expected)


def test_saving_between_the_passes_of_a_step_is_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    with offload.initialize(model, settings(tmp_path, PLACEMENTS["nvme"])) as engine:
        run = Run(integration.OffloadAccelerator, model, engine.optimizer).go(0, 1)
        with pytest.raises(StateError, match="gradients wait"):
            run.accelerator.save_state(str(tmp_path / "saved"))


def test_a_second_engine_is_refused(tmp_path: Path) -> None:
    accelerator = integration.OffloadAccelerator(cpu=True)
    with (
        offload.initialize(tiny_llama(), settings(tmp_path, PLACEMENTS["nvme"])) as first,
        offload.initialize(tiny_llama(), settings(tmp_path, PLACEMENTS["nvme"])) as second,
    ):
        accelerator.prepare(first.module, first.optimizer)
        with pytest.raises(UnsupportedError, match="this is the second one"):
            accelerator.prepare(second.module, second.optimizer)
        first.close()
        accelerator.prepare(second.module, second.optimizer)
        assert accelerator.engine is second
        accelerator.free_memory()
        assert accelerator.engine is None


def test_two_precisions_are_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    keys = {"precision": "bf16"}
    with (
        offload.initialize(model, settings(tmp_path, PLACEMENTS["host"], **keys)) as engine,
        pytest.raises(ConfigError, match=r"precision: bf16.*mixed_precision='bf16'"),
    ):
        Run(integration.OffloadAccelerator, model, engine.optimizer, mixed_precision="bf16")


def test_autocast_is_accelerates(tmp_path: Path) -> None:
    expected_model = tiny_llama()
    keys = {"mixed_precision": "bf16"}
    expected = Run(accelerate.Accelerator, expected_model, plain_optimizer(expected_model), **keys)
    expected.go(0, ACCUMULATE)
    model = tiny_llama()
    with offload.initialize(model, settings(tmp_path, PLACEMENTS["nvme"])) as engine:
        run = Run(integration.OffloadAccelerator, model, engine.optimizer, **keys)
        assert run.go(0, ACCUMULATE).losses == expected.losses
