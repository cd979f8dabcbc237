"""`make gpu-check`: without a GPU a line; with one, a record of all parts, whatever ends them.

Where only a GPU could run a part, an outcome stands in that its process would have left.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import LIMIT_S, Check, run_all, succeeded
from benchmarks.gpu_machine import GpuMachine
from benchmarks.gpu_parts import Outcome, Status
from benchmarks.gpu_sizes import CALLS, GIB
from offload.bench.record import Kind, Record, Row
from offload.config import OffloadConfig
from tests.benchmarks.gpu_check_cases import H200, MACHINES, planned, solved_once

__all__ = ["solved_once"]

REPOSITORY = Path(__file__).parents[2]


# ---------------------------------------------------------------- without a GPU
def test_without_a_gpu_it_says_so_in_one_line_and_succeeds(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_check.main(["--out", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "sees no GPU" in line
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- the whole, and its record
HARDWARE = {
    "gpu": "NVIDIA H200", "cpu": "A CPU", "cores": 16, "memory_nbytes": 128 * GIB,
}  # fmt: skip
TESTS: dict[str, Any] = {
    "ok": True, "counts": "40 passed", "said": [], "failed": {}, "not_ended": [], "unreached": [],
}  # fmt: skip


def part(name: str) -> dict[str, Any]:
    rows = [Row(name, Kind.LIMIT, {"seconds": [0.1, 0.2], "bytes_per_s": [4e12, 3e12]})]
    return Record("part", {}, rows, machine=HARDWARE).to_dict()


STEP = {
    "losses": [11.0] * 4, "seconds": [5.0, 4.0, 4.5], "built_s": 60.0, "first_step_s": 9.0,
    "moved_nbytes": [{"host to device": 10, "device to host": 10}] * 3, "counted": [{}] * 4,
    "peak_rss_nbytes": 110 * GIB, "peak_device_nbytes": 90 * GIB, "peak_reserved_nbytes": 1,
}  # fmt: skip
GOOD = {
    "probe": {"hardware": HARDWARE}, "tests": TESTS,
    "step": STEP, "inference": part("inference"),
}  # fmt: skip


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[Check, dict[str, Any], str]]:
    """Runs a call whose parts end as they are said to, others well, on a clock of its own; the
    record it left, and what it printed."""

    def run_with(
        call: str | list[str] = "a", *, machine: GpuMachine = H200, seconds: float | None = None,
        limit_s: float = LIMIT_S,
        ends: Mapping[str, Outcome] | None = None,
    ) -> tuple[Check, dict[str, Any], str]:  # fmt: skip
        clock = Clock()

        def part(name: str, options: Mapping[str, Any], limit_s: float, folder: Path) -> Outcome:
            kind = name.split(":")[0]
            wanted = seconds
            if wanted is None:
                wanted = planned(machine, name[5:]).estimated_s(0) if kind == "step" else 30.0
            clock.now += min(wanted, limit_s)
            result = {**GOOD[kind], "given": json.loads(json.dumps(dict(options)))}
            if kind == "probe":
                result["machine"] = dataclasses.asdict(machine)
            ended = (ends or {}).get(name)
            if wanted > limit_s:
                ended = Outcome(name, Status.TIMED_OUT, limit_s, limit_s, "too slow")
            ended = ended or Outcome(name, Status.DONE, wanted, limit_s)
            return ended if ended.result or not ended.ok else dataclasses.replace(
                ended, result=result
            )  # fmt: skip

        monkeypatch.setattr(gpu_check, "run_part", part)
        monkeypatch.setattr(gpu_check, "this_machine", lambda: dict(HARDWARE))
        check = gpu_check.begin(tmp_path / "record.json", tmp_path, "abc", limit_s)
        check.clock = clock
        check.deadline = limit_s
        run_all(check, CALLS[call] if isinstance(call, str) else call)
        assert clock.now <= limit_s
        return check, json.loads(check.out.read_text()), capsys.readouterr().out

    return run_with


def statuses(record: dict[str, Any]) -> dict[str, str]:
    return {part["name"]: part["status"] for part in record["details"]["parts"]}


EIGHT_B = [
    f"step:8 B, {where}{clipping}{passes}"
    for clipping in ("", ", unclipped")
    for passes, own in (("", ""), (", 8 passes", ", a tenth of records on the device"))
    for where in (f"host{own}", "auto", "auto on 80 GB")
]
ORDER = {
    "a": ["probe", "step:0.15 B, host", *EIGHT_B, "step:8 B, host, every step clips"],
    "b": ["probe", "tests", "inference"],
    "c": [
        "probe", "step:8 B, 64 k tokens", "step:8 B, auto on 24 GiB", "step:13 B, three tiers",
        *(f"step:1.6 B, host, chunks of {size} M" for size in (2, 16, 64)),
        "step:3.6 B, host",
        "step:8 B, 128 k tokens, MLPs in tiles",
    ],
}  # fmt: skip


@pytest.mark.sample("a-one H200-estimated", "a-one H100-quick", "b-one H100-slow")
@pytest.mark.parametrize("seconds", [None, 1e9, 1.0], ids=["estimated", "slow", "quick"])
@pytest.mark.parametrize("gpu", ["one H100", "one H200"])
@pytest.mark.parametrize("call", ORDER)
def test_a_call_has_its_parts_in_order_ends_in_time_and_names_what_it_leaves_out(
    run: Any, call: str, gpu: str, seconds: float | None
) -> None:
    check, record, printed = run(call, machine=MACHINES[gpu], seconds=seconds)
    ended = statuses(record)
    assert list(ended) == ORDER[call]
    assert check.limit_s == LIMIT_S <= 540
    for name, status in ended.items():
        assert f"{name}: {status}" in printed
    if seconds == 1.0:
        fitting = {name for name in ended if gpu == "one H200" or "80 GB" not in name}
        assert {name for name, status in ended.items() if status == "done"} == fitting
    if seconds is None and call == "a":
        assert ended["step:8 B, host"] == ended["step:8 B, auto"] == "done"
        assert list(ended.values()).count("done") >= 5


def test_a_record_says_what_was_trained_and_on_what(run: Any) -> None:
    check, record, printed = run()
    assert succeeded(check.outcomes.values())
    assert record["machine"]["gpu"] == "NVIDIA H200"
    assert record["details"]["commit"] == "abc"
    assert record["rows"][:2][1]["name"] == "8 B, host"
    case = record["details"]["cases"]["step:8 B, host"]
    assert {link["name"] for link in case["links"]} >= {"host to device", "compute", "optimizer"}
    part = next(p for p in record["details"]["parts"] if p["name"] == "step:8 B, host")
    given = part["result"]["given"]
    assert (given["program"], given["steps"]) == ("benchmarks.gpu_step:QuickOffload", 4)
    assert OffloadConfig.load(given["config"]).precision == "bf16"
    assert "would take about " in printed


@pytest.mark.parametrize("status", [Status.FAILED, Status.TIMED_OUT])
@pytest.mark.parametrize(
    ("call", "name"),
    [("b", "probe"), ("a", "probe"), ("b", "tests"), ("b", "inference"), ("a", "step:8 B, host")],
)
def test_one_part_that_fails_is_a_line_and_not_the_end(
    run: Any, call: str, name: str, status: Any
) -> None:
    broken = Outcome(name, status, 3.0, 60.0, "the end of its output: CUDA error 999")
    check, record, printed = run(call, seconds=1.0, ends={name: broken})
    assert not succeeded(check.outcomes.values())
    ended = statuses(record)
    assert ended.pop(name) == status
    others = "left out" if (call, name) == ("a", "probe") else "done"
    assert set(ended.values()) == {others}
    assert "CUDA error 999" in printed


def test_a_plan_that_fails_is_a_line_and_not_the_end(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(training: Any, machine: GpuMachine) -> Any:
        raise ZeroDivisionError(training.name)

    monkeypatch.setattr(gpu_check, "case_of", fails)
    _, record, printed = run(["step:8 B, host", "inference"], seconds=1.0)
    assert statuses(record) == {"probe": "done", "step:8 B, host": "failed", "inference": "done"}
    assert "ZeroDivisionError: 8 B, host" in printed


def test_failed_tests_fail_the_check(run: Any) -> None:
    result = {**TESTS, "ok": False, "counts": "1 failed, 40 passed", "failed": {"test_x": "no"}}
    result["unreached"] = ["tests/test_y.py"]
    check, _, printed = run(
        "b", ends={"tests": Outcome("tests", Status.DONE, 9.0, 140.0, "", result)}
    )
    assert check.outcomes["tests"].status is Status.FAILED
    assert not succeeded(check.outcomes.values())
    assert "1 failed, 40 passed\ntest_x" in printed
    assert "tests that were not reached: tests/test_y.py" in printed


def test_a_record_never_overwrites_another(tmp_path: Path) -> None:
    paths = [gpu_check.begin(tmp_path, tmp_path).out for _ in range(3)]
    assert len(set(paths)) == len(list(tmp_path.iterdir())) == 3  # and nothing else comes back
    named = tmp_path / "mine.json"
    assert gpu_check.begin(named, tmp_path).out == named
    assert gpu_check.begin(named, tmp_path).out == tmp_path / "mine-2.json"
