"""A dispatched model beside a GPU, with host memory in the GPU's place: weights are copied to slots
of the device, and the order of streams is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.offload.engine_cases import TinyLM, batches, bits, config, on_the_cpu_alone, seeded
from tests.offload.order_cases import on_a_checked_device

pytestmark = on_the_cpu_alone("a GPU is stood in for")

SPLIT = {"device": "30%", "host": "30%", "nvme": "40%"}


@pytest.mark.sample(4)
@pytest.mark.parametrize("parameters", ["host", "nvme", "device", SPLIT, None], ids=str)
def test_logits_are_those_in_ram(tmp_path: Path, monkeypatch: Any, parameters: Any) -> None:
    tokens = batches(1)[0][:, :-1]
    with torch.no_grad():
        expected = seeded(lambda: TinyLM(4))(tokens)
    on_a_checked_device(monkeypatch)
    budget = {"device": "176KiB", "host": "1MiB", "nvme": "64MiB"}
    placement = {} if parameters is None else {"parameters": parameters}
    keys = config(tmp_path, placement, budget=budget, device="cpu", prefetch=1)
    model = offload.dispatch(seeded(lambda: TinyLM(4)), keys)
    with offload.dispatched(model) as dispatched, torch.no_grad():
        assert dispatched.plan.gpu
        assert dispatched.report().tiers["device"].by_class.get("staging", 0) == 0
        for _ in range(3):
            output = model(tokens)
            assert bits(output) == bits(expected)
        dispatched.check_integrity()
