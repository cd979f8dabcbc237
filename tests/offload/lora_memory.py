"""LoRA of three lines on a model whose weights do not fit the host budget. Prints bytes as JSON.

python lora_memory.py SWAP
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import torch
from torch import Tensor, nn

import offload
from offload.process import machine
from offload.tiers.units import parse_bytes

WIDTH, LAYERS, RANK, STEPS = 1024, 50, 4, 2  # 200 MiB of weights
HOST = "64MiB"


class Adapted(nn.Module):
    """A linear layer whose own weight is frozen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.down = nn.Linear(width, RANK, bias=False)
        self.up = nn.Linear(RANK, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + torch.tanh(self.base(x) + self.up(self.down(x)))
        return output


def build(layers: int) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*(Adapted(WIDTH) for _ in range(layers)))


def keys(swap: str) -> dict[str, Any]:
    return {
        "device": "cpu",
        "budget": {"host": HOST, "nvme": "1GiB"},
        "nvme": {"paths": [swap]},
        "placement": {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"},
        "groups": {"blocks": ["Adapted"]},
        "optimizer": {"chunk": 1 << 16},
    }


def train(layers: int, swap: str, steps: int) -> dict[str, Any]:
    model = build(layers)
    with offload.initialize(model, keys(swap)) as engine:
        engine.settle()
        before = engine.report()
        generator = torch.Generator().manual_seed(0)
        for _ in range(steps):
            model(torch.randn(2, WIDTH, generator=generator)).square().mean().backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        engine.settle()
        after = engine.report()
        return {
            "written": after.bytes_moved["nvme write"] - before.bytes_moved["nvme write"],
            "read": after.bytes_moved["nvme read"] - before.bytes_moved["nvme read"],
            "nvme": after.tiers["nvme"].peak_by_class,
        }


def main() -> None:
    swap = sys.argv[1]
    train(2, swap, 1)  # what the frameworks and compiled kernels take
    gc.collect()
    machine.trim_memory()
    baseline = machine.peak_rss_nbytes()
    measured = train(LAYERS, swap, STEPS)
    measured |= {"rss": machine.peak_rss_nbytes() - baseline, "host": parse_bytes(HOST)}
    print(json.dumps({**measured, "layers": LAYERS, "steps": STEPS}))


if __name__ == "__main__":
    main()
