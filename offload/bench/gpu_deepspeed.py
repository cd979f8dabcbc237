"""DeepSpeed ZeRO-3 with parameters and optimizer offloaded to the host, on a GPU, as a peer.

Driven through its public interface with its documented offload settings: pinned memory, its CPU
Adam (compiled beforehand), bf16, activation checkpointing by the
model as ours has it. The model is built inside `zero.Init`, so it is never whole in device memory.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offload.bench.gpu_step import whole_model
from offload.bench.step_deepspeed import LossOnly
from offload.bench.step_systems import Batch, adamw_arguments

if TYPE_CHECKING:
    from offload.config import OffloadConfig

_QUIET = 10**9  # steps between its progress lines


class DeepSpeedOnGpu:
    """One process that is its own world."""

    def __init__(self, config: OffloadConfig, device: torch.device) -> None:
        _alone()
        deepspeed: Any = importlib.import_module("deepspeed")
        settings = settings_of(config)
        torch.manual_seed(config.seed)
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = LossOnly(whole_model(config))
        self._engine: Any = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=settings
        )[0]
        self._at = 0.0

    def step(self, batch: Batch) -> float:
        loss = self._engine(*batch)
        self._engine.backward(loss)
        value = float(loss.item())
        self._at = time.perf_counter()
        self._engine.step()
        return value

    def losses_at(self) -> float:
        return self._at

    def moved(self) -> dict[str, int]:
        return {}  # it does not count

    def close(self) -> None:
        import torch.distributed as dist

        self._engine.destroy()
        dist.destroy_process_group()


def compile_adam() -> float:
    """Let it compile its CPU Adam, which it keeps on disk; the seconds that took."""
    _alone()
    started = time.perf_counter()
    adam: Any = importlib.import_module("deepspeed.ops.adam")
    adam.DeepSpeedCPUAdam([nn.Parameter(torch.zeros(8))])
    return time.perf_counter() - started


def settings_of(config: OffloadConfig) -> dict[str, Any]:
    """Its configuration: everything on the host, the rest as ours has it."""
    offloaded = {"device": "cpu", "pin_memory": True}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.train.batch,
        "gradient_accumulation_steps": 1,
        "steps_per_print": _QUIET,
        "optimizer": {"type": "AdamW", "params": adamw_arguments(config)},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3, "offload_param": dict(offloaded), "offload_optimizer": dict(offloaded),
            "overlap_comm": True, "contiguous_gradients": True,
        },
    }  # fmt: skip
    if config.clip_grad_norm is not None:
        settings["gradient_clipping"] = config.clip_grad_norm
    return settings


def _alone() -> None:
    """What a launcher would set for a world of one; and where this interpreter's ninja is."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    folder = str(Path(sys.executable).parent)
    if folder not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join((folder, os.environ["PATH"]))
