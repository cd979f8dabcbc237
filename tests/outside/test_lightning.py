"""Lightning's Trainer and Fabric train through an engine as without one.

Lightning is not among what `make test` installs; this file is run by hand (CONTRIBUTING.md). Last
run with lightning 2.6.6 and torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

import offload
from tests.outside.trainer_cases import (
    ACCUMULATE,
    CLIP,
    PLACEMENTS,
    STEPS,
    Rows,
    assert_close,
    plain_optimizer,
    quiet,
    settings,
    tiny_llama,
    values_of,
)

lightning = pytest.importorskip("lightning")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


def rows() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Rows(2 * ACCUMULATE * STEPS, seed=1), batch_size=2)


def fabric(model: Any, optimizer: Any) -> tuple[list[float], list[float]]:
    made = lightning.Fabric(accelerator="cpu")
    made.launch()
    model, optimizer = made.setup(model, optimizer)
    losses, norms = [], []
    for number, batch in enumerate(made.setup_dataloaders(rows()), 1):
        loss = model(**batch).loss
        made.backward(loss / ACCUMULATE)
        losses.append(loss.item())
        if number % ACCUMULATE == 0:
            norms.append(float(made.clip_gradients(model, optimizer, max_norm=CLIP)))
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_fabric_loop_trains_as_without_an_engine(placement: str, tmp_path: Path) -> None:
    expected_model, model = tiny_llama(), tiny_llama()
    expected = fabric(expected_model, plain_optimizer(expected_model))
    with offload.initialize(model, settings(tmp_path, PLACEMENTS[placement])) as engine:
        assert_close(fabric(model, engine.optimizer), expected)
        assert_close(values_of(model), values_of(expected_model))
