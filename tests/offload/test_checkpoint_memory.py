"""A checkpoint streams: what it holds does not grow with the model."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.checkpoint.foreign.exporting import export
from offload.process.machine import peak_rss_nbytes, rss_nbytes
from tests.offload.engine_cases import HOST, NVME, ON, config

MIB = 1 << 20
CHUNK = 1 << 17  # elements: a record of 1.25 MiB
HELD = CHUNK * 10 + 4 * MIB  # one record, and the buffer that hashes are checked with
SLACK = 6 * MIB  # interpreter and allocator


class Deep(nn.Module):
    """16 x 1 M parameters: 160 MiB of weights and optimizer states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@contextmanager
def growth() -> Iterator[list[int]]:
    """How far the peak of the block's RSS lies above the RSS before it, in bytes."""
    gc.collect()
    with suppress(OSError):  # where the kernel allows it, the peak begins anew
        Path("/proc/self/clear_refs").write_text("5")
    before, increase = rss_nbytes(), [0]
    yield increase
    increase[0] = peak_rss_nbytes() - before


def step(engine: offload.Engine) -> None:
    x = torch.randn(2, 1024, device=ON).bfloat16()
    engine.backward(engine.module(x).float().square().mean())
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def begun(folder: Path, placement: Any, budget: dict[str, str]) -> offload.Engine:
    """An engine after two steps."""
    keys = config(folder, placement, precision="bf16", budget=budget, optimizer={"chunk": CHUNK})
    with torch.device("meta"):
        model = Deep()
    engine = offload.initialize(model, keys)
    for _ in range(2):
        step(engine)
    return engine


@pytest.mark.slow
def test_saving_loading_and_exporting_hold_a_few_chunks_beyond_the_budget(tmp_path: Path) -> None:
    budget = {"host": "24MiB", "nvme": "400MiB"}
    with begun(tmp_path, NVME, budget) as engine:
        engine.save_checkpoint(tmp_path / "saved")  # imports and hashes are paid for
        used = engine.report().tiers["host"].used_nbytes

        with growth() as saving:
            engine.save_checkpoint(tmp_path / "saved")
        assert engine.report().tiers["host"].used_nbytes == used, "residencies have changed"
        with growth() as loading:
            engine.load_checkpoint(tmp_path / "saved")
        with growth() as exporting:
            export(tmp_path / "saved", tmp_path / "model.safetensors", "fp32")

        assert (tmp_path / "model.safetensors").stat().st_size > 64 * MIB
        host = engine.report().tiers["host"]
        assert host.peak_nbytes <= host.budget_nbytes
        engine.check_integrity()
    assert saving[0] <= HELD + SLACK
    assert loading[0] <= HELD + SLACK
    assert exporting[0] <= 3 * 4 * MIB + SLACK


@pytest.mark.sample("host")
@pytest.mark.parametrize(
    ("placement", "host"), [(NVME, "24MiB"), (HOST, "400MiB")], ids=["nvme", "host"]
)
def test_saving_beside_training_holds_a_few_chunks_beyond_it(
    tmp_path: Path, placement: dict[str, Any], host: str
) -> None:
    budget = {"host": host, "nvme": "800MiB"}  # of old versions, too
    with begun(tmp_path, placement, budget) as engine:
        engine.save_checkpoint(tmp_path / "saved", wait=False)  # imports and hashes are paid for
        step(engine)
        engine.checkpoint_saved()
        engine.settle()
        with growth() as training:
            for _ in range(2):
                step(engine)
            engine.settle()
        with growth() as saving:
            engine.save_checkpoint(tmp_path / "saved", wait=False)
            assert not engine.checkpoint_saved(wait=False)
            for _ in range(2):
                step(engine)
            while not engine.checkpoint_saved(wait=False):
                step(engine)
            engine.settle()
        for name, tier in engine.report().tiers.items():
            assert tier.peak_nbytes <= tier.budget_nbytes, name
        engine.check_integrity()
    assert saving[0] <= training[0] + HELD + SLACK
