"""Trains two steps of the built-in model and prints as JSON what memory they took.

python memory_program.py CONFIG BATCH LENGTH
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

STEPS = 2


def main() -> None:
    config = OffloadConfig.load(json.loads(sys.argv[1]))
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (int(sys.argv[2]), int(sys.argv[3]) + 1))
    model = build_meta_model(config)
    states = 16 * sum(p.numel() for p in model.parameters())
    warm_up(config)
    gc.collect()
    machine.trim_memory()
    baseline = machine.rss_nbytes()
    with offload.initialize(model, config) as engine:
        for _ in range(STEPS):
            loss = model(tokens[:, :-1], tokens[:, 1:]).loss
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        engine.settle()
        engine.check_integrity()
        report = engine.report()
    host, moved = report.tiers["host"], report.bytes_moved
    print(json.dumps({"baseline": baseline, "peak": machine.peak_rss_nbytes(), "states": states,
                      "budget": host.budget_nbytes, "ledger_peak": host.peak_nbytes,
                      "loss": loss.item(), "stayed": moved.get("activations stayed", 0),
                      "parked": moved.get("activations parked", 0) // STEPS}))  # fmt: skip


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
