"""Trains two steps of a model whose activations dominate and prints its peak memory as JSON.

python activation_program.py TIER CHECKPOINT FOLDER
"""

from __future__ import annotations

import json
import sys

import torch

import offload
from offload.config import OffloadConfig
from offload.gpt import build_meta_model
from offload.process import machine

STEPS, HOST_MIB = 2, 256


def main() -> None:
    tier, checkpoint, folder = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    config = OffloadConfig.load(
        {
            "budget": {"host": f"{HOST_MIB}MiB", "nvme": "4GiB"},
            "nvme": {"paths": [folder]},
            "placement": {
                "parameters": "host", "gradients": "host", "optimizer": "host",
                "activations": {"tier": tier, "checkpoint": checkpoint},
            },
            "train": {"model": {"layers": 6, "hidden": 256, "heads": 4, "max_sequence": 512}},
        }
    )  # fmt: skip
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (8, 513))
    model = build_meta_model(config)
    with offload.initialize(model, config) as engine:
        for _ in range(STEPS):
            loss = model(tokens[:, :-1], tokens[:, 1:]).loss
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        engine.settle()
        engine.check_integrity()
        report = engine.report()
    moved = report.bytes_moved
    print(json.dumps({"peak": machine.peak_rss_nbytes(), "loss": loss.item(),
                      "parked": moved.get("activations parked", 0) // STEPS,
                      "stayed": moved.get("activations stayed", 0),
                      "written": moved["nvme write"] // STEPS,
                      "host_peak": report.tiers["host"].peak_nbytes,
                      "host_budget": report.tiers["host"].budget_nbytes}))  # fmt: skip


if __name__ == "__main__":
    main()
