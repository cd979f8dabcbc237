"""Gradients and optimizer states on the device, stepped there: the bits of an all-host run.

The kernels are Triton's, on the GPU if there is one. Without one they run in Triton's interpreter,
and host memory stands in for the device's: slots, stagings, copies and the order of calls are those
of a GPU, only the streams are missing.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import offload
import offload.memory.tier_manager
import offload.tiered_model
import offload.zero.step.update
from offload.errors import UnsupportedError
from offload.kernels.gpu import triton_gradients, triton_optimizer
from offload.memory.tier_manager import TierManager
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier
from tests.kernels import triton_device
from tests.kernels.triton_device import launches
from tests.offload.engine_cases import HOST, batches, config, plan_for_a_gpu, seeded
from tests.offload.engine_states import assert_same_bits, losses_of, states_of
from tests.offload.order_cases import Net
from tests.offload.storage_cases import adapted, round_to

__all__ = ["launches"]
pytestmark = triton_device.MARKS

STEPS = 2
ON_GPU = triton_device.DEVICE == "cuda"
BUDGET = {"device": "2MiB", "host": "16MiB", "nvme": "64MiB"}
SPLIT = {"device": "40%", "host": "60%"}


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients and updates come from two threads; the interpreter knows one program at a time."""
    if ON_GPU:
        return
    monkeypatch.setattr(triton_gradients, "_UNROLL", 4)  # it saves time on a GPU, and costs it here
    lock = threading.Lock()
    for module in (triton_gradients, triton_optimizer):
        real = module.launch

        def launch(*args: Any, real: Any = real, **options: Any) -> None:
            with lock:
                real(*args, **options)

        monkeypatch.setattr(module, "launch", launch)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The engine's device; plans are those of a machine with a GPU of 1 GiB whose kernels run."""
    if ON_GPU:
        yield "cuda"
        return
    plan_for_a_gpu(monkeypatch, kernels_missing=None)
    yield "cpu"


Run = tuple[list[float], dict[str, Tensor], Any]


def build() -> Net:
    """Large enough for two chunks of 16-bit weights, small enough for an interpreter."""
    return Net(blocks=2, norm=True)


def settings(folder: Path, placement: dict[str, Any], **keys: Any) -> dict[str, Any]:
    optimizer = {"chunk": 2048, "lr": 3e-3, **keys.pop("optimizer", {})}
    keys = {"budget": BUDGET, **keys}
    return config(folder, {**HOST, **placement}, optimizer=optimizer, **keys)


def run(
    folder: Path, placement: dict[str, Any], device: str, *, accumulate: int = 1, **keys: Any
) -> Run:
    given = settings(folder, placement, **keys) | {"device": device}
    model = seeded(build).to(device)
    data = [tokens.to(device) for tokens in batches(STEPS * accumulate)]
    with offload.initialize(model, given) as engine:
        losses = losses_of(engine, data, accumulate)
        states = {name: value.cpu() for name, value in states_of(engine).items()}
        engine.check_integrity()
        report = engine.report()
    for tier in report.tiers.values():
        assert tier.peak_nbytes <= tier.budget_nbytes
    return losses, states, report


@contextmanager
def no_kernels() -> Iterator[None]:
    """Plans are those of a GPU without Triton."""
    real = offload.tiered_model.this_machine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            offload.tiered_model,
            "this_machine",
            lambda *args: dataclasses.replace(real(*args), kernels_missing="the test says so"),
        )
        yield


_REFERENCES: dict[str, Run] = {}


def on_host(folder: Path, device: str, **keys: Any) -> Run:
    """All at home on the host, gradients and optimizer by the CPU's kernels: the reference, which
    many tests share."""
    with no_kernels():
        if (which := repr((device, keys))) not in _REFERENCES:
            _REFERENCES[which] = run(folder, {}, device, **keys)
        return _REFERENCES[which]


def assert_same(actual: Run, expected: Run) -> None:
    assert actual[0] == expected[0]
    assert len(set(expected[0])) == len(expected[0])
    assert_same_bits(actual[1], expected[1])
    assert actual[2].gradient_norm == expected[2].gradient_norm


NUMBERS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "split master": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "no master": {"precision": "bf16", "optimizer": {"master": "none"}},
    "int8 states": {"precision": "bf16", "optimizer": {"states": "int8"}},
    "bf16 states": {"precision": "bf16", "optimizer": {"states": "bf16", "master": "none"}},
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("numbers", list(NUMBERS))
def test_an_optimizer_split_between_device_and_host_changes_no_bit(tmp_path, device, numbers):
    keys = {"clip_grad_norm": 0.5, **NUMBERS[numbers]}
    split = run(tmp_path, {"optimizer": SPLIT}, device, **keys)
    assert_same(split, on_host(tmp_path, device, **keys))
    for tier in ("device", "host"):
        assert split[2].tiers[tier].peak_by_class["optimizer"] > 0


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "placement",
    [
        {"optimizer": "device", "gradients": "device", "parameters": "device"},
        {"optimizer": SPLIT, "gradients": "device", "parameters": "device"},
        {"optimizer": SPLIT, "gradients": "nvme", "parameters": "nvme"},
        {"optimizer": {"device": "30%", "nvme": "70%"}, "parameters": SPLIT,
         "gradients": {"device": "50%", "host": "50%"}},
        {"gradients": "device"},
    ],
    ids=str,
)  # fmt: skip
def test_wherever_the_parts_of_a_chunk_live_the_bits_are_those_of_the_host(
    tmp_path, device, placement
):
    keys: dict[str, Any] = {"precision": "bf16", "optimizer": {"in_backward": True}}
    assert_same(run(tmp_path, placement, device, **keys), on_host(tmp_path, device, **keys))


@pytest.mark.parametrize(("placement", "numbers"), [
    ({"optimizer": SPLIT, "gradients": "nvme", "parameters": "nvme"}, "fp32"),
    ({"optimizer": SPLIT, "gradients": SPLIT, "parameters": "device"}, "no master"),
    ({"optimizer": "device", "gradients": "device", "parameters": "host"}, "int8 states"),
], ids=str)  # fmt: skip
def test_a_matrix_in_chunks_of_the_device_and_the_host_has_the_bits_of_the_host(
    tmp_path, device, monkeypatch, placement, numbers
):
    """The memory of the products holds no numbers before they are written."""
    muon = {"type": "muon", "ns_dtype": "fp32", "chunk": 1024, "lr": 0.02, "adamw_lr": 3e-3}
    keys = {**NUMBERS[numbers], "clip_grad_norm": 0.5}
    keys["optimizer"] = {**keys.get("optimizer", {}), **muon}
    expected = on_host(tmp_path, device, **keys)
    real = TierManager.matrix_work

    def poisoned(tiers: TierManager) -> Any:
        work = real(tiers)
        for memory in (work.memory, work.host):
            memory.fill_(255)
        return work

    monkeypatch.setattr(TierManager, "matrix_work", poisoned)
    assert_same(run(tmp_path, placement, device, **keys), expected)


def drawn(chance: random.Random) -> dict[str, Any]:
    """Shares of all classes, with some on the device."""

    def shares(*tiers: str) -> dict[str, str]:
        cuts = sorted(chance.sample(range(5, 100, 5), len(tiers) - 1))
        ends = zip([0, *cuts], [*cuts, 100], strict=True)
        return {tier: f"{b - a}%" for tier, (a, b) in zip(tiers, ends, strict=True)}

    return {
        "parameters": chance.choice(["host", "device", shares("device", "host", "nvme")]),
        "gradients": chance.choice(["host", shares("device", "host"), shares("device", "nvme")]),
        "optimizer": shares("device", "host"),
    }


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(12))
def test_a_checkpoint_of_drawn_shares_trains_on_with_others_and_bytes_are_as_planned(
    tmp_path, device, seed
):
    chance = random.Random(seed)
    clip = chance.choice([0.5, 1e3])  # where no step clips, updates on the host are speculative
    keys: dict[str, Any] = {"precision": "bf16", "clip_grad_norm": clip, "device": device}
    data = [tokens.to(device) for tokens in batches(4)]

    def trained(placement: dict[str, Any], load: bool) -> tuple[list[float], dict[str, Tensor]]:
        given = settings(tmp_path, placement, **keys)
        with offload.initialize(seeded(build).to(device), given) as engine:
            if load:
                engine.load_checkpoint(tmp_path / "checkpoint")
            losses = losses_of(engine, data[2:] if load else data[:2])
            engine.save_checkpoint(tmp_path / "checkpoint")
            held = engine.report().tiers
            for tier in (Tier.DEVICE, Tier.HOST):
                planned = engine.plan.homes[StateClass.OPTIMIZER].get(tier, 0)
                assert held[str(tier)].peak_by_class.get("optimizer", 0) == planned
            return losses, {name: value.cpu() for name, value in states_of(engine).items()}

    first, _ = trained(drawn(chance), load=False)
    last, states = trained(drawn(chance), load=True)
    with no_kernels():
        assert trained({}, load=False)[0] == first
        expected = trained({}, load=True)
    assert last == expected[0]
    assert_same_bits(states, expected[1])


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "placement",
    [
        {},
        {"parameters": "nvme", "gradients": "device", "optimizer": SPLIT},
        {"parameters": "device", "gradients": "device", "optimizer": "device"},
    ],
    ids=str,
)
def test_an_open_device_budget_is_all_that_a_run_can_use_and_no_more(
    tmp_path, device, placement, accumulate, long
):
    """Also with sums of more passes than were planned for. Nothing is ever copied twice."""
    if accumulate == 1 and placement and not long:
        pytest.skip("as with more passes: --long")
    keys: dict[str, Any] = {"precision": "bf16", "accumulate": accumulate}
    opened = run(tmp_path, placement, device, budget={**BUDGET, "device": "auto"}, **keys)
    assert_same(opened, on_host(tmp_path, device, **keys))
    tier = opened[2].tiers["device"]
    assert tier.peak_nbytes <= tier.budget_nbytes <= 8 << 20
    given = run(tmp_path, placement, device, budget={**BUDGET, "device": "64MiB"}, **keys)
    assert opened[2].bytes_moved["host to device"] == given[2].bytes_moved["host to device"]


@pytest.mark.parametrize("state_class", ["gradients", "optimizer"])
def test_without_kernels_what_needs_them_is_refused_and_says_what_is_missing(
    tmp_path, device, state_class
):
    message = rf"placement.{state_class}: device needs kernels on the GPU, and the test says so"
    with no_kernels(), pytest.raises(UnsupportedError, match=message):
        run(tmp_path, {state_class: "device"}, device)


# ---------------------------------------------------------------- quantized weights
@pytest.mark.sample("nvme")
@pytest.mark.parametrize("parameters", ["nvme", "device"])
def test_codes_cross_the_link_and_are_dequantized_on_the_device(
    parameters: str, tmp_path: Path
) -> None:
    plain = adapted(1)
    round_to(plain, "int4")
    home = {**HOST, "parameters": parameters}
    storage = {"weights": "int4", "group_size": 32}

    def trained(model: Any, keys: dict[str, Any]) -> Any:
        with offload.initialize(model, keys) as engine:
            losses = losses_of(engine, batches(1))
            engine.save_checkpoint(tmp_path / "checkpoint")
            engine.load_checkpoint(tmp_path / "checkpoint")
            losses += losses_of(engine, batches(1, 7))
            engine.check_integrity()
            return losses, states_of(engine), engine.report().bytes_moved["host to device"]

    expected = trained(plain, settings(tmp_path, home))
    stored = trained(adapted(1), settings(tmp_path, home, storage=storage))
    assert stored[0] == expected[0]
    assert_same_bits(stored[1], expected[1])
    if parameters != "device":
        assert stored[2] < expected[2]
