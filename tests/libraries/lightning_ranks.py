"""One of two processes of a Lightning run: `... lightning_ranks STRATEGY FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import torch

from offload.integrations.lightning import OffloadStrategy
from tests.libraries.test_lightning import Lit, keys_for, rows
from tests.offload.engine_cases import seeded
from tests.outside.trainer_cases import values_of


def run(strategy: Any, folder: Path, resume: Path | None = None) -> Any:
    module = seeded(Lit)
    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=folder, save_top_k=-1, filename="{epoch}"
    )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, logger=False, callbacks=[saving],
        enable_progress_bar=False, enable_model_summary=False, max_epochs=2,
        accumulate_grad_batches=2, gradient_clip_val=0.5,
    )  # fmt: skip
    trainer.fit(module, rows(), ckpt_path=None if resume is None else str(resume))
    return module, trainer


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    keys = keys_for(folder, zero={"stage": 3})
    strategy = "ddp" if name == "ddp" else OffloadStrategy(keys)
    module, trainer = run(strategy, folder / name)
    weights = values_of(module)
    if name != "ddp":
        strategy.engine.close()
        again = OffloadStrategy(keys)
        resumed, _ = run(again, folder / "again", folder / name / "epoch=0.ckpt")
        for key, value in values_of(resumed).items():
            assert torch.equal(value, weights[key]), key
        again.engine.close()
    if trainer.is_global_zero:
        torch.save([weights, module.losses], folder / f"{name}.pt")


if __name__ == "__main__":
    main()
