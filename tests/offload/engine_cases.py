"""What the engine's tests share: a small language model, and configurations."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
import offload.tiered_model
from offload.errors import BudgetError
from offload.process.child import child_environment
from offload.tiers.units import parse_bytes
from tests.offload.engine_states import (  # noqa: F401 - tests in other folders look for them here
    assert_same_bits,
    assert_scheduler_is_saved,
    bits,
    differing,
    gradients_of,
    losses_of,
    parameters_of,
    states_of,
)

# The engine's device. `make gpu-check` sets it; tests that go by it take MARKS.
ON = os.environ.get("OFFLOAD_TEST_DEVICE", "cpu")
MARKS = [pytest.mark.gpu] if ON == "cuda" else []
# Several processes share a GPU, and an engine takes the whole of an open budget.
DEVICE_BUDGET: dict[str, str] = {"device": "32MiB"} if ON == "cuda" else {}


def on_a_gpu_too(test: Any) -> Any:
    """Marks one test of a module whose other tests would show nothing there."""
    for mark in MARKS:
        test = mark(test)
    return test


def on_the_cpu_alone(why: str) -> pytest.MarkDecorator:
    """A mark for a test that would mean nothing on a GPU."""
    return pytest.mark.skipif(ON != "cpu", reason=why)


VOCABULARY, WIDTH, LENGTH, BATCH = 37, 32, 6, 2
NVME: dict[str, Any] = {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"}
HOST: dict[str, Any] = {"parameters": "host", "gradients": "host", "optimizer": "host"}
DEVICE: dict[str, Any] = {"parameters": "device", "gradients": "host", "optimizer": "host"}


class Block(nn.Module):
    """Pre-norm attention and MLP. Its two gains are frozen."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, bias=False, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )  # fmt: skip
        self.gain = nn.Parameter(torch.full((width,), 0.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0] * self.gain
        y: Tensor = self.mlp(x)
        return x + y * self.gain


class TinyLM(nn.Module):
    """Embedding, blocks, norm, and a head tied to the embedding."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor) -> Tensor:
        logits = self(tokens[:, :-1]).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> Any:
    """A model whose values depend on `seed` alone."""
    torch.manual_seed(seed)
    return build()


def batches(count: int, seed: int = 1, on: str = ON) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, LENGTH + 1)
    return [torch.randint(VOCABULARY, shape, generator=generator).to(on) for _ in range(count)]


def config(folder: Path, placement: Mapping[str, Any] = NVME, **keys: Any) -> dict[str, Any]:
    """A configuration with budgets of megabytes, swap files under `folder`."""
    on = keys.setdefault("device", ON)
    budget = keys.pop("budget", {"host": "16MiB", "nvme": "64MiB"})
    return {
        "budget": {**(DEVICE_BUDGET if on == ON else {}), **budget},
        # machines that run tests have slow disks, and do other things
        "nvme": {"paths": [str(folder)], "backend": "threads", "timeout_s": 600.0},
        "placement": dict(placement),
        **keys,
    }


def plan_for_a_gpu(patch: pytest.MonkeyPatch, **more: Any) -> None:
    """Engines plan as for a machine with a GPU of 1 GiB; host memory stands in for its memory."""
    real = offload.tiered_model.this_machine
    patch.setattr(
        offload.tiered_model,
        "this_machine",
        lambda *args: dataclasses.replace(real(*args), device_nbytes=1 << 30, **more),
    )


def saved_step(folder: Path, keys: Mapping[str, Any]) -> Path:
    """A checkpoint of the small model after one step."""
    with offload.initialize(seeded(TinyLM), dict(keys)) as engine:
        losses_of(engine, batches(1))
        engine.save_checkpoint(folder / "saved")
    return folder / "saved"


def flip_bit(file: Path) -> None:
    """Change one bit of a file's last byte."""
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def said_by(program: Path | str, *arguments: str) -> Any:
    """The JSON that a program (a file, or its text) prints, in a process of its own with one thread
    of PyTorch's: several would mostly wait for each other."""
    named = ["-c", program] if isinstance(program, str) else [str(program)]
    done = subprocess.run(
        [sys.executable, *named, *arguments], capture_output=True, text=True, timeout=300,
        env={**child_environment(), "OMP_NUM_THREADS": "1"}, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def min_budget(build: Callable[[], nn.Module], keys: dict[str, Any]) -> dict[str, str]:
    """The budget with the bytes of host memory that a refusal asks for."""
    budget = {**DEVICE_BUDGET, "host": "4KiB", "nvme": "64MiB"}
    with pytest.raises(BudgetError) as refusal:
        offload.initialize(seeded(build), {**keys, "budget": budget})
    needed = re.search(r"of the ([\d.]+) (\w+) needed", str(refusal.value))
    assert needed, str(refusal.value)
    unit = parse_bytes(f"1{needed[2]}")
    rounding = 0 if unit == 1024 else unit // 20  # one decimal is shown
    nbytes = float(needed[1]) * unit + rounding
    return {**budget, "host": f"{math.ceil(nbytes / 1024)}KiB"}
