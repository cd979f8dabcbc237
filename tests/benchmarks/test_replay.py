"""The planner, with the speeds in a record of real hardware, predicts the steps measured there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import offload.gpt
from benchmarks import gpu_sizes
from benchmarks.gpu_machine import GpuMachine
from benchmarks.gpu_sizes import SHAPES, Shape
from offload.planning.machine.speeds import Speeds
from offload.zero.step.records import RecordFormat

RECORDS = Path(__file__).parents[2] / "benchmarks" / "records"
FILE = RECORDS / "gpu-nvidia-h100-80gb-hbm3-2026-11-23.json"
_RECORD_CHUNK = 1 << 24  # what 16 cores had in memory then
_TIMED_NUMEL, _TIMED_BYTES = 1 << 23, 28  # one call of AdamW in fp32, alone
_BUS_NUMEL, _BUS_BYTES = 1 << 26, 26  # one pass of the bus: bf16 with a split master


@pytest.fixture
def as_then(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The program of that day: logits were whole, chunks those of 16 cores, and no record in host
    memory was updated before the norm was known."""

    def whole(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).flatten(0, 1).float(), targets.flatten())

    real = gpu_sizes._settings

    def settings(*question: Any) -> dict[str, Any]:
        values = real(*question)
        return {**values, "optimizer": {**values["optimizer"], "chunk": _RECORD_CHUNK}}

    monkeypatch.setattr(offload.gpt, "linear_cross_entropy", whole)
    monkeypatch.setattr(gpu_sizes, "_settings", settings)
    monkeypatch.setattr(RecordFormat, "can_undo", lambda *_: False)
    gpu_sizes._facts_of.cache_clear()
    yield
    gpu_sizes._facts_of.cache_clear()


def recorded(record: Mapping[str, Any]) -> GpuMachine:
    """The machine of a record whose speeds were measured otherwise than today, in today's terms.

    The optimizer was timed over 8.4 M elements only, of which a good part are the fixed costs of a
    call; the bus over eight times as many, where they are a small part. The line through both has
    the bus's rate and the cost of a call. The device's memory is taken from the copies among the
    kernels, which are what `memory_rate` measures today.
    """
    details = record["details"]
    values = {name: value for name, value in details["machine"].items() if "touch" not in name}
    known = {field.name for field in fields(Speeds)}
    values["speeds"] = {name: v for name, v in values["speeds"].items() if name in known}
    machine = GpuMachine.from_dict(values)
    timed, bus = _TIMED_BYTES * _TIMED_NUMEL, _BUS_BYTES * _BUS_NUMEL
    timed_s = _TIMED_NUMEL / machine.speeds.optimizer_parameters_per_s["fp32"]
    bus_s = bus / machine.bus_bytes_per_s
    rate = (bus - timed) / (bus_s - timed_s)
    kernels = next(part["result"] for part in details["parts"] if part["name"] == "kernels")
    copied = max(
        row["medians"]["bytes_per_s"] for row in kernels["rows"] if row["name"].startswith("copy")
    )
    speeds = replace(
        machine.speeds, host_bytes_per_s=rate, optimizer_parameters_per_s={},
        update_call_s=timed_s - timed / rate, compute_bytes_per_s=copied, compute_bytes_per_s_in={},
    )  # fmt: skip
    return replace(machine, speeds=speeds)


@pytest.mark.usefixtures("as_then")
def test_the_steps_of_a_record_are_predicted_within_5_per_cent() -> None:
    record = json.loads(FILE.read_text())
    machine = recorded(record)
    rows = {row["name"]: row["medians"]["seconds"] for row in record["rows"]}
    shapes: Mapping[str, Shape] = {
        "ours, 8 B": SHAPES["8 B"], "ours, as large as DeepSpeed, 3.6 B": SHAPES["3.6 B"],
    }  # fmt: skip
    for name, shape in shapes.items():
        step = gpu_sizes._solved(shape, machine, {}, 0).step
        assert step is not None
        assert step.seconds == pytest.approx(rows[name], rel=0.05), name
        busy = {link.name: link.seconds for link in step.links}
        # updates hide forward, and nothing hides backward
        assert max(busy.values()) < step.seconds < busy["compute"] + busy["optimizer"]
