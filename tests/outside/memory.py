"""Peak memory of training, saving and loading through a framework, in a process each."""

import importlib
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


def main() -> None:
    name, part, folder = sys.argv[1:]
    programs = importlib.import_module("tests.outside.memory_programs")
    getattr(programs, name)(part, Path(folder))


if __name__ == "__main__":
    main()
