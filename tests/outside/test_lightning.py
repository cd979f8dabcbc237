"""Lightning's Trainer and Fabric train through an engine as without one.

Lightning is not among what `make test` installs; this file is run by hand (CONTRIBUTING.md). Last
run with lightning 2.6.6 and torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
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

CLIPPING: dict[str, dict[str, Any]] = {
    "norm": {"gradient_clip_val": CLIP},
    "value": {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


def rows() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Rows(2 * ACCUMULATE * STEPS, seed=1), batch_size=2)


class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, model: Any, optimizer: Any) -> None:
        super().__init__()
        self.model = model
        self.given = [optimizer]
        self.losses: list[float] = []
        self.norms: list[float] = []

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = lightning.pytorch.utilities.grad_norm(self.model, norm_type=2)
        self.norms.append(float(norms["grad_2.0_norm_total"]))

    def configure_optimizers(self) -> Any:
        scheduler = torch.optim.lr_scheduler.LinearLR(self.given[0], total_iters=STEPS)
        return self.given, [scheduler]


def fit(
    folder: Path, model: Any, optimizer: Any, resume: Path | None = None, **keys: Any
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms; a checkpoint after 8 steps."""
    module = Lit(model, optimizer)
    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=folder, every_n_train_steps=8, save_top_k=-1, filename="{step}"
    )
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=STEPS, accumulate_grad_batches=ACCUMULATE, logger=False,
        callbacks=[saving], enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, **keys,
    )  # fmt: skip
    trainer.fit(module, rows(), ckpt_path=None if resume is None else str(resume))
    return module.losses, module.norms


@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_lightning_trains_and_resumes_as_without_an_engine(
    clipping: str, placement: str, tmp_path: Path
) -> None:
    def run(model: Any, optimizer: Any, name: str, resume: Path | None = None) -> Any:
        return fit(tmp_path / name, model, optimizer, resume, **CLIPPING[clipping])

    expected_model, model = tiny_llama(), tiny_llama()
    expected = run(expected_model, plain_optimizer(expected_model), "plain")
    keys = settings(tmp_path, PLACEMENTS[placement])
    with offload.initialize(model, keys) as engine:
        assert_close(run(model, engine.optimizer, "ours"), expected)
        assert_close(values_of(model), values_of(expected_model))
    # a checkpoint within an epoch begins it anew: what is resumed equals what Lightning resumes
    expected_model, model = tiny_llama(), tiny_llama()
    saved = tmp_path / "ours" / "step=8.ckpt"
    expected = run(expected_model, plain_optimizer(expected_model), "plain2", saved)
    with offload.initialize(model, keys) as engine:
        assert_close(run(model, engine.optimizer, "ours2", saved), expected)
        assert_close(values_of(model), values_of(expected_model))


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
