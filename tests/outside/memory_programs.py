"""What `memory.assert_streams` runs: training, then saving or loading, through one framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import offload
from tests.outside.memory import WIDTH, measured, meta_model, settings


def steps(model: Any, optimizer: Any) -> None:
    for _ in range(2):
        model(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def dcp(part: str, folder: Path) -> None:
    import torch.distributed.checkpoint as distributed_checkpoint

    from offload.integrations.distributed_checkpoint import EngineState

    model = meta_model()
    with offload.initialize(model, settings(str(folder))) as engine:
        call = getattr(distributed_checkpoint, part)
        measured(
            lambda: steps(model, engine.optimizer),
            lambda: call({"app": EngineState(engine)}, checkpoint_id=folder / "saved"),
        )
