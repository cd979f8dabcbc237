"""Parameters mirrored in the device tier, as on a GPU, with host memory in the GPU's place.

Every copy between host and device, every slot and every eviction is what a GPU run does; only the
memory behind the device tier and the streams are the CPU's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
import offload.tiered_model
from offload.errors import BudgetError, UnsupportedError
from tests.offload.engine_cases import (
    HOST,
    MARKS,
    ON,
    TinyLM,
    batches,
    config,
    on_the_cpu_alone,
    plan_for_a_gpu,
    seeded,
)
from tests.offload.engine_states import assert_same_bits, bits, losses_of
from tests.offload.order_cases import on_a_checked_device

pytestmark = MARKS

SPLIT = {"device": "30%", "host": "30%", "nvme": "40%"}
# little more than the unit that runs; the kernels of a GPU take 52 KiB besides
TIGHT, TIGHT_SPLIT = ("84KiB", "120KiB") if ON == "cpu" else ("136KiB", "172KiB")


@pytest.fixture
def mirrored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan as for a machine with a GPU of 1 GiB."""
    plan_for_a_gpu(monkeypatch)


def run(tmp_path: Path, parameters: Any, **keys: Any) -> tuple[list[float], dict[str, Any], Any]:
    model = seeded(TinyLM)
    settings = config(tmp_path, {**HOST, "parameters": parameters}, **keys)
    with offload.initialize(model, settings) as engine:
        losses = losses_of(engine, batches(6))
        values = model.state_dict()  # one group at a time: all at once need not fit
        engine.check_integrity()
        return losses, values, engine.report()


@pytest.fixture
def reference(tmp_path: Path) -> tuple[list[float], dict[str, Any]]:
    losses, values, _ = run(tmp_path, "host")
    return losses, values


@on_the_cpu_alone("there a GPU's size is not known beforehand")
def test_within_a_gpu_s_budget_the_bits_are_the_same_and_the_sum_is_said(
    tmp_path, mirrored, reference, capfd
):
    budget = {"gpu": "90%", "host": "16MiB", "nvme": "64MiB"}
    losses, values, report = run(tmp_path, "host", budget=budget)
    assert losses == reference[0]
    assert_same_bits(values, reference[1])
    tier = report.tiers["device"]
    assert 0 < tier.peak_nbytes <= tier.budget_nbytes == 2 << 20
    assert re.search(
        r"offload: GPU 921.6 MiB: device tier 2.0 MiB \(parameters of the unit that runs .* KiB, "
        r"and copies\), context and workspaces 676.0 MiB, 243.6 MiB for the pass",
        capfd.readouterr().err,
    )
    settings = config(tmp_path, HOST, budget={**budget, "gpu": "600MiB"})
    with pytest.raises(BudgetError, match=r"budget.gpu: 600.0 MiB is .* short"):
        offload.initialize(seeded(TinyLM), settings)


@pytest.mark.sample(4)
@pytest.mark.parametrize("parameters", ["host", "nvme", "device", SPLIT], ids=str)
@pytest.mark.parametrize("device_budget", ["1MiB", TIGHT])
def test_mirrored_parameters_train_to_the_same_bits(
    tmp_path, reference, mirrored, parameters, device_budget
):
    if parameters == "device" and device_budget != "1MiB":
        pytest.skip("all parameters are at home on the device: there is nothing to give up")
    budget = {"device": device_budget, "host": "16MiB", "nvme": "64MiB"}
    if parameters == SPLIT and device_budget != "1MiB":
        budget["device"] = TIGHT_SPLIT
    losses, values, report = run(tmp_path, parameters, budget=budget)
    assert losses == reference[0]
    assert_same_bits(values, reference[1])
    assert report.tiers["device"].peak_nbytes <= report.tiers["device"].budget_nbytes
    if parameters != "device":
        assert report.bytes_moved["host to device"] > 0


def test_a_device_that_cannot_hold_one_unit_is_refused_before_anything_is_allocated(
    tmp_path, mirrored
):
    with pytest.raises(BudgetError, match=r"budget.device: 8.0 KiB is .* short"):
        run(tmp_path, "host", budget={"device": "8KiB", "host": "16MiB"})


@on_the_cpu_alone("a GPU has such kernels")
@pytest.mark.parametrize("state_class", ["gradients", "optimizer"])
def test_what_needs_a_gpu_kernel_is_refused(tmp_path, mirrored, state_class):
    settings = config(tmp_path, {**HOST, state_class: "device"})
    with pytest.raises(UnsupportedError, match=rf"placement.{state_class}: device"):
        offload.initialize(seeded(TinyLM), settings)


pytestmark = on_the_cpu_alone("a GPU is stood in for")


@on_the_cpu_alone("a GPU is stood in for")
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
