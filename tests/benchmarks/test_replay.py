"""The planner, with the speeds in a record of real hardware, predicts the steps measured there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import offload.gpt
from benchmarks import gpu_sizes
from benchmarks.gpu_machine import GpuMachine
from benchmarks.gpu_sizes import Training
from offload.bench.contenders import all_on
from offload.planning.machine.speeds import Speeds
from offload.zero.step.records import RecordFormat

NAME = "benchmarks/records/gpu-nvidia-h100-80gb-hbm3-2026-11-23.json"
RECORD = json.loads((Path(__file__).parents[2] / NAME).read_text())
SECONDS = {row["name"]: row["medians"]["seconds"] for row in RECORD["rows"]}
_CHUNK = 1 << 24  # of 16 cores then
_TIMED_NUMEL, _TIMED_NBYTES = 1 << 23, 28 << 23  # one call of AdamW in fp32
_BUS_NBYTES = 26 << 26  # one pass of the bus: bf16 with a split master


@pytest.fixture
def as_then(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The program of that day: logits were whole, chunks those of 16 cores, and no record in host
    memory was updated before the norm was known."""

    def whole(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).flatten(0, 1).float(), targets.flatten())

    monkeypatch.setattr(offload.gpt, "linear_cross_entropy", whole)
    monkeypatch.setattr(RecordFormat, "can_undo", lambda *_: False)
    gpu_sizes._facts.cache_clear()
    yield
    gpu_sizes._facts.cache_clear()


def recorded() -> GpuMachine:
    """The machine of the record, whose speeds were measured otherwise, in today's terms.

    The optimizer was timed over 8.4 M elements only, of which a good part are the fixed costs of a
    call; the bus, which AdamW in fp32 is bound by, over eight times as many, where they are a small
    part. The line through both has the bus's rate and the cost of a call. The device's memory is
    taken from the copies among the kernels, which are what `memory_rate` measures today.
    """
    details = RECORD["details"]
    values = {name: value for name, value in details["machine"].items() if "touch" not in name}
    known = {field.name for field in fields(Speeds)}
    values["speeds"] = {name: v for name, v in values["speeds"].items() if name in known}
    machine = GpuMachine.from_dict(values)
    timed_s = _TIMED_NUMEL / machine.speeds.optimizer_parameters_per_s["fp32"]
    bus_s = _BUS_NBYTES / machine.bus_bytes_per_s
    rate = (_BUS_NBYTES - _TIMED_NBYTES) / (bus_s - timed_s)
    rows = next(part["result"]["rows"] for part in details["parts"] if part["name"] == "kernels")
    copied = max(r["medians"]["bytes_per_s"] for r in rows if r["name"].startswith("copy"))
    speeds = replace(
        machine.speeds, host_bytes_per_s=rate, update_call_s=timed_s - _TIMED_NBYTES / rate,
        optimizer_parameters_per_s={}, compute_bytes_per_s=copied, compute_bytes_per_s_in={},
    )  # fmt: skip
    return replace(machine, speeds=speeds)


@pytest.mark.usefixtures("as_then")
@pytest.mark.parametrize(
    ("shape", "name"), [("8 B", "ours, 8 B"), ("3.6 B", "ours, as large as DeepSpeed, 3.6 B")]
)
def test_the_steps_of_a_record_are_predicted_within_5_per_cent(shape: str, name: str) -> None:
    keys = (*all_on("host"), f"optimizer.chunk={_CHUNK}")
    step = gpu_sizes._solved(Training(shape, "then", keys), recorded()).step
    assert step is not None
    assert step.seconds == pytest.approx(SECONDS[name], rel=0.05)


@pytest.mark.parametrize(("passes", "max_s"), [(1, 2.2), (8, 17.0)])
def test_8_b_takes_no_longer_on_that_machine_today(
    monkeypatch: pytest.MonkeyPatch, passes: int, max_s: float
) -> None:
    monkeypatch.setattr(gpu_sizes, "cpu_count", lambda: 16)
    step = gpu_sizes._solved(Training("8 B", "now", passes=passes), recorded()).step
    assert step is not None
    assert step.seconds < max_s
