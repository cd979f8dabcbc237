"""The model of own_loop.py through Lightning's Trainer. The LightningModule is an ordinary one;
what offload adds is the strategy, marked with <--.

pip install 'offload[lightning]'
python examples/lightning_trainer.py        # again: it resumes where it was
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import lightning
except ImportError:
    sys.exit("Lightning is missing: pip install 'offload[lightning]'")

import torch
from own_loop import CONFIG, LENGTH, TEXT, Model, loss_of
from torch import Tensor

from offload.integrations.lightning import OffloadStrategy

TIERS = {key: CONFIG[key] for key in ("budget", "placement")}


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def training_step(self, rows: Tensor, _: int) -> Tensor:
        loss = loss_of(self.model, rows)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(steps: int, folder: Path) -> None:
    torch.manual_seed(0)
    rows = TEXT.unfold(0, LENGTH + 1, LENGTH // 4).contiguous()
    loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
    strategy = OffloadStrategy(TIERS)  # <--
    trainer = lightning.Trainer(
        strategy=strategy, max_steps=steps, accelerator="cpu", gradient_clip_val=1.0, logger=False,
        log_every_n_steps=1,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(folder, save_last=True)],
    )  # fmt: skip
    trainer.fit(Module(), loader, ckpt_path="last")
    print(f"step {trainer.global_step}: loss {trainer.logged_metrics['loss']:.3f}")
    print({n: f"{t.peak_nbytes >> 20} MiB" for n, t in strategy.engine.report().tiers.items()})
    strategy.engine.close()


if __name__ == "__main__":
    given = sys.argv[1:]
    main(int(given[0]) if given else 40, Path(given[1] if given[1:] else "runs/lightning"))
