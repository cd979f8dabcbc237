"""One training system in a process of its own, stepping on command.

    python benchmarks/systems.py {plain,host,nvme} CONFIG BATCH SEQUENCE

reads a line `step` from standard input, trains one step and answers with one JSON line. Processes
that step in turn are compared under the same conditions, whatever else the machine is doing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import offload
from offload.config import OffloadConfig
from offload.machine import peak_rss_nbytes
from offload.train.model import LanguageModel, build_meta_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PLACEMENTS = {
    "host": ["placement.parameters=host", "placement.gradients=host",
             "placement.optimizer=host", "budget.host=6GiB"],
    "nvme": [],
}  # fmt: skip


def tokens(config: OffloadConfig, step: int, batch: int, sequence: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    shape = (batch, sequence + 1)
    return torch.randint(0, config.train.model.vocab, shape, generator=generator)


class Plain:
    """PyTorch as one writes it without offload: bf16 weights, fp32 master, fused AdamW."""

    def __init__(self, config: OffloadConfig) -> None:
        torch.manual_seed(0)
        model = LanguageModel(config.train.model, checkpoint_activations=True)
        self.model = model.to(DTYPES[config.precision])
        self.mixed = config.precision != "fp32"
        params = list(self.model.parameters())
        self.masters = params
        if self.mixed:
            self.masters = [p.detach().float().requires_grad_() for p in params]
        adam = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=adam.lr, betas=adam.betas, weight_decay=adam.weight_decay, fused=True
        )

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = self.model(inputs, targets).loss
        loss.backward()
        params = list(self.model.parameters())
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        if self.mixed:
            self._step_masters(params)
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.item()

    def _step_masters(self, params: list[torch.nn.Parameter]) -> None:
        for master, param in zip(self.masters, params, strict=True):
            master.grad = param.grad.float()
            param.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for master, param in zip(self.masters, params, strict=True):
                param.copy_(master)
                master.grad = None

    def moved(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Nothing to give back."""


class Offloaded:
    """The same model through `offload.initialize`."""

    def __init__(self, config: OffloadConfig) -> None:
        self.model = build_meta_model(config)
        self.engine = offload.initialize(self.model, config)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = self.model(inputs, targets).loss
        loss.backward()
        self.engine.optimizer.step()
        self.engine.optimizer.zero_grad()
        return loss.item()

    def moved(self) -> dict[str, int]:
        return self.engine.report().bytes_moved

    def close(self) -> None:
        self.engine.check_integrity()
        self.engine.close()


def make(name: str, path: Path) -> tuple[Plain | Offloaded, OffloadConfig]:
    config = OffloadConfig.load(path, PLACEMENTS.get(name, []))
    return (Plain(config) if name == "plain" else Offloaded(config)), config


def serve(
    name: str, path: Path, shape: tuple[int, int], say: Callable[[dict[str, Any]], None]
) -> None:
    system, config = make(name, path)
    say({"ready": True, "rss": peak_rss_nbytes()})
    for step, _ in enumerate(sys.stdin):
        batch = tokens(config, step, *shape)
        start = time.perf_counter()
        loss = system.step(batch[:, :-1], batch[:, 1:])
        seconds = time.perf_counter() - start
        say({"seconds": seconds, "loss": loss, "rss": peak_rss_nbytes(), "moved": system.moved()})
    system.close()


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), (int(sys.argv[3]), int(sys.argv[4])), _say)
