"""What `memory.assert_streams` runs: training, then saving or loading, through one framework."""

from pathlib import Path
from typing import Any

import torch

from tests.outside.memory import WIDTH, measured, meta_model, settings


def steps(model: Any, optimizer: Any) -> None:
    for _ in range(2):
        model(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trainer(part: str, folder: Path) -> None:
    import lightning
    from torch.utils.data import DataLoader

    from offload.integrations.lightning import OffloadStrategy

    class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = None

        def configure_model(self) -> None:
            self.model = self.model or meta_model()

        def training_step(self, batch: Any, _: int) -> Any:
            assert self.model is not None
            return self.model(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    keys = settings(str(folder))
    del keys["optimizer"]["type"]
    strategy = OffloadStrategy(keys)
    made = lightning.Trainer(
        accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False,
        max_steps=2, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module, rows, saved = Lit(), DataLoader(torch.randn(8, WIDTH), batch_size=2), folder / "saved"

    def load() -> None:
        made.fit_loop.epoch_loop.max_steps = 3
        made.fit(module, rows, ckpt_path=str(saved))

    measured(
        lambda: made.fit(module, rows),
        (lambda: made.save_checkpoint(saved)) if part == "save" else load,
    )
    strategy.engine.close()
