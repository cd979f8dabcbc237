"""Peak memory of training, saving and loading through a framework, in a process each."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offload.process.machine import peak_rss_nbytes

MIB = 1 << 20
LAYERS, WIDTH = 60, 1024  # 63 M parameters: 240 MiB of weights, 480 MiB of optimizer states
LIMIT = 256 * MIB


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def settings(folder: str) -> dict[str, Any]:
    tiers = ("parameters", "gradients", "optimizer")
    return {
        "device": "cpu", "budget": {"host": "96MiB", "nvme": "3GiB"}, "nvme": {"paths": [folder]},
        "placement": dict.fromkeys(tiers, "nvme"),
        "optimizer": {"type": "adamw", "lr": 1e-3, "chunk": 1 << 18},
    }  # fmt: skip


def meta_model() -> Deep:
    with torch.device("meta"):
        return Deep()


def assert_streams(name: str, folder: Path) -> None:
    """Saving and loading by `PROGRAMS[name]` take at most `LIMIT` more than training did."""
    peaks = {}
    for part in ("save", "load"):
        command = [sys.executable, "-m", "tests.outside.memory", name, part, str(folder)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr[-2000:]
        peaks[part] = json.loads(ended.stdout.splitlines()[-1])
    for part, peak in peaks.items():
        assert peak["after"] <= peak["training"] + LIMIT, (part, peaks)


def measured(train: Callable[[], None], then: Callable[[], None]) -> None:
    """Peaks of this process after training, and after what comes then."""
    train()
    training = peak_rss_nbytes()
    then()
    print(json.dumps({"training": training, "after": peak_rss_nbytes()}))


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


PROGRAMS = {"trainer": trainer}


def main() -> None:
    name, part, folder = sys.argv[1:]
    PROGRAMS[name](part, Path(folder))


if __name__ == "__main__":
    main()
