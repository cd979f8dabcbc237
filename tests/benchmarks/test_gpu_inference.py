"""What `make gpu-check` generates from the tiers, with host memory in the GPU's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.gpu_bits import Generation
from tests.offload.order_cases import on_a_checked_device

SAMPLE = ("weights on device", "weights on {", "int4 on device", "in bf16 on nvme", "in int8")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Host memory in the GPU's place."""
    on_a_checked_device(monkeypatch)
    return torch.device("cpu")


@pytest.fixture
def generation(device: torch.device, tmp_path: Path) -> Generation:
    return Generation(device, tmp_path)


@pytest.mark.slow
def test_what_is_generated_has_the_bits_of_the_model_in_memory(
    generation: Generation, long: bool
) -> None:
    checks = generation.checks()
    assert len(checks) == 13
    for name, check in checks.items():
        if long or any(part in name for part in SAMPLE):
            assert check() == "", name


def test_logits_that_differ_are_named(generation: Generation, monkeypatch: Any) -> None:
    real = generation._logits

    def changed(model: Any) -> list[torch.Tensor]:
        logits = real(model)
        logits[2][0, 0] += 0.5
        return logits

    monkeypatch.setattr(generation, "_plain", lambda values: changed(generation._model))
    found = generation.check({"parameters": "nvme"})
    assert found.startswith("the logits of token 2 are not the same: up to 0.5")
