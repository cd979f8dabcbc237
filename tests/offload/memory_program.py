"""Trains two steps with everything on nvme and prints its peak memory as JSON.

python memory_program.py LAYERS HOST_MIB FOLDER
"""

from __future__ import annotations

import gc
import json
import sys

import torch

import offload
from offload.config import OffloadConfig
from offload.gpt import build_meta_model
from offload.process import machine


def config_of(layers: int, host_mib: int, folder: str) -> OffloadConfig:
    return OffloadConfig.load(
        {
            "budget": {"host": f"{host_mib}MiB", "nvme": "4GiB"},
            "nvme": {"paths": [folder]},
            "placement": {
                "parameters": "nvme", "gradients": "nvme", "optimizer": "nvme",
                "activations": {"tier": "device", "checkpoint": True},
            },
            "optimizer": {"chunk": 262144},
            "train": {"model": {"layers": layers, "hidden": 512, "heads": 8, "mlp": 1536}},
        }
    )  # fmt: skip


def main() -> None:
    layers, host_mib, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    config = config_of(layers, host_mib, folder)
    tokens = torch.randint(0, 256, (1, 17))
    model = build_meta_model(config)
    states = 16 * sum(p.numel() for p in model.parameters())
    warm_up(config)
    gc.collect()
    machine.trim_memory()
    baseline = machine.rss_nbytes()
    with offload.initialize(model, config) as engine:
        for _ in range(2):
            model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        engine.settle()
        engine.check_integrity()
        host = engine.report().tiers["host"]
    peak = machine.peak_rss_nbytes()
    print(json.dumps({"baseline": baseline, "peak": peak, "states": states,
                      "budget": host.budget_nbytes, "ledger_peak": host.peak_nbytes}))  # fmt: skip


def warm_up(config: OffloadConfig) -> None:
    """What the frameworks take: kernels compiled, math libraries and thread pools started."""
    small = OffloadConfig.load(
        config.to_dict(), ["placement.parameters=host", "placement.gradients=host",
                           "placement.optimizer=host", "train.model.layers=2"],
    )  # fmt: skip
    model = build_meta_model(small)
    tokens = torch.randint(0, 256, (1, 17))
    with offload.initialize(model, small) as engine:
        model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
        engine.optimizer.step()
        engine.settle()


if __name__ == "__main__":
    main()
