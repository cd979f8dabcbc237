"""Runs cases read as JSON from standard input; one line of JSON each with what was measured."""

import json
import sys
from typing import Any

import torch

import offload
from offload.config import OffloadConfig
from offload.gpt import build_meta_model
from offload.process.machine import peak_rss_nbytes

STEPS = 3


def run(source: dict[str, Any], *, own_loop: bool) -> dict[str, Any]:
    """Peaks of every tier after some steps, and of the process."""
    config = OffloadConfig.load(source)
    config = config.owning_the_loop() if own_loop else config
    train, passes = config.train, config.gradient_accumulation_steps
    model = build_meta_model(config)
    generator = torch.Generator().manual_seed(1)
    with offload.initialize(model, config) as engine:
        for _ in range(STEPS):
            for _ in range(passes):
                tokens = torch.randint(256, (train.batch, train.sequence), generator=generator)
                loss = model(tokens, tokens).loss / passes
                engine.backward(loss)
                del loss, tokens
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        engine.settle()
        tiers = engine.report().tiers
        return {
            "tiers": {name: tier.peak_nbytes for name, tier in tiers.items()},
            "rss": peak_rss_nbytes(),
        }


def main() -> None:
    for case in json.load(sys.stdin):
        print(json.dumps(run(case["config"], own_loop=case["own_loop"])), flush=True)


if __name__ == "__main__":
    main()
