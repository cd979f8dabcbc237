"""`make gpu-check`: without a GPU a line; with one, a record of all parts, whatever ends them.

Where only a GPU could run a part, an outcome stands in that its process would have left.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import PARTS, Check, run_all, succeeded
from benchmarks.gpu_parts import Outcome, Status
from benchmarks.gpu_sizes import GIB, STEPS
from offload.config import OffloadConfig
from tests.benchmarks.gpu_check_cases import H200, solved_once

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


@pytest.mark.slow
def test_make_uses_a_named_interpreter_as_it_is() -> None:
    inherited = {name: os.environ[name] for name in os.environ if not name.startswith("MAKE")}
    environment = {**inherited, "CUDA_VISIBLE_DEVICES": ""}
    command = ["make", "--no-print-directory", "gpu-check", f"PYTHON={sys.executable}"]
    shown = subprocess.run(
        [*command, "--dry-run"], cwd=REPOSITORY, env=environment, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    (only,) = shown.stdout.splitlines()
    assert only.startswith(f"{sys.executable} -m benchmarks.gpu_check")
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True
    )
    assert "sees no GPU" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--parts", "tests,lunch"], "'lunch' is unknown; choose from tests, kernels"),
    ],
)
def test_options_that_cannot_be_are_refused(
    arguments: list[str], fragment: str, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as caught:
        gpu_check.main(arguments)
    assert caught.value.code == 2
    assert fragment in capsys.readouterr().err


# ---------------------------------------------------------------- the whole, and its record
HARDWARE = {
    "gpu": "NVIDIA H200", "gpu_memory_nbytes": 139 * GIB, "cpu": "A CPU", "cores": 16,
    "memory_nbytes": 128 * GIB, "python": "3.12.3", "torch": "2.11.0", "cuda": "13.0",
    "triton": "3.6.0", "kernel": "6.1",
}  # fmt: skip
TESTS = {
    "ok": True, "counts": "40 passed, 2 skipped", "said": ["SKIPPED [2] no int4"], "processes": 8,
}  # fmt: skip


def row(name: str, kind: str, speeds: list[float]) -> dict[str, Any]:
    measures = {"seconds": [1e9 / speed for speed in speeds], "bytes_per_s": speeds}
    medians = {measure: sorted(values)[1] for measure, values in measures.items()}
    common = {"name": name, "kind": kind, "note": "", "facts": {}}
    return {**common, "measures": measures, "medians": medians}


COMMON: dict[str, Any] = {"bench": "part", "options": {}, "details": {}, "machine": HARDWARE}
KERNELS = {
    **COMMON,
    "rows": [row("adamw | split", "offload", [3e12, 4e12, 5e12]), row("copy", "limit", [4e12] * 3)],
    "ratios": [
        {"of": "adamw | split", "to": "copy", "measure": "bytes_per_s",
         "rounds": [0.75, 1.0, 1.25], "median": 1.0},
    ],
    "notes": ["134217728 elements"],
}  # fmt: skip
COPIES = {
    **COMMON,
    "rows": [
        row("raw, host to device", "limit", [50e9, 51e9, 52e9]),
        row("raw, device to host", "limit", [49e9, 50e9, 51e9]),
    ],
    "ratios": [], "notes": ["1.0 GiB per copy"],
}  # fmt: skip
STEP = {
    "losses": [11.0] * 4, "seconds": [5.0, 4.0, 4.5], "built_s": 60.0, "first_step_s": 9.0,
    "moved_nbytes": [{"host to device": 10, "device to host": 10}] * 3, "tokens": 1,
    "peak_rss_nbytes": 110 * GIB, "peak_device_nbytes": 90 * GIB,
}  # fmt: skip
GOOD = {
    "probe": {"machine": dataclasses.asdict(H200), "hardware": HARDWARE}, "tests": TESTS,
    "kernels": KERNELS, "copies": COPIES, "step": STEP, "deepspeed": {"compiled_s": 60.0},
}  # fmt: skip


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[Check, dict[str, Any], str]]:
    """Runs a check whose parts end as they are said to, others well; the record it left, and what
    it printed."""

    def run_with(
        parts: Sequence[str] = PARTS, *, peer: bool = False, **ends: Outcome
    ) -> tuple[Check, dict[str, Any], str]:
        def part(name: str, options: Mapping[str, Any], limit_s: float, folder: Path) -> Outcome:
            assert 0 < limit_s <= gpu_check.TOTAL_S
            kind = name.split(":")[0]
            result = {**GOOD[kind], "given": json.loads(json.dumps(dict(options)))}
            ended = ends.get(name.replace(":", "_"), Outcome(name, Status.DONE, 1.0, limit_s))
            return ended if ended.result or not ended.ok else dataclasses.replace(
                ended, result=result
            )  # fmt: skip

        monkeypatch.setattr(gpu_check, "run_part", part)
        find_spec = gpu_check.importlib.util.find_spec
        monkeypatch.setattr(
            gpu_check.importlib.util, "find_spec",
            lambda name: (object() if peer else None) if name == "deepspeed" else find_spec(name),
        )  # fmt: skip
        check = gpu_check.begin(tmp_path / "record.json", tmp_path)
        run_all(check, parts)
        record = json.loads((tmp_path / "record.json").read_text())
        return check, record, capsys.readouterr().out

    return run_with


@pytest.mark.slow
def test_all_parts_end_in_one_record_that_names_the_hardware(run: Any) -> None:
    check, record, printed = run()
    assert [part["name"] for part in record["details"]["parts"]] == [
        "probe", "tests", "kernels", "copies", "step:0.15 B", "step:3.6 B", "step:deepspeed",
        "step:8 B", "step:spill", "step:13 B",
    ]  # fmt: skip
    assert succeeded(check.outcomes.values())
    assert record["machine"]["gpu"] == "NVIDIA H200"
    assert record["details"]["cases"]["step:8 B"]["shape"]["name"] == "8 B"
    assert [row["name"] for row in record["rows"]] == [
        "offload, 0.15 B", "offload, 3.6 B", "offload, 8 B",
        "offload, half of the optimizer's states on nvme, 3.6 B",
    ]  # fmt: skip
    given = next(part for part in record["details"]["parts"] if part["name"] == "step:8 B")[
        "result"
    ]["given"]
    assert (given["program"], given["steps"]) == ("benchmarks.gpu_step:QuickOffload", STEPS)
    assert OffloadConfig.load(given["config"]).precision == "bf16"
    assert "offload bench part: NVIDIA H200" in printed
    assert "pip install 'offload[bench]'" in printed


@pytest.mark.parametrize("status", [Status.FAILED, Status.TIMED_OUT])
@pytest.mark.parametrize("name", ["probe", "tests", "kernels", "copies", "step:8 B"])
def test_one_part_that_fails_is_a_line_and_not_the_end(run: Any, name: str, status: Any) -> None:
    broken = Outcome(name, status, 3.0, 60.0, "the end of its output: CUDA error 999")
    check, record, printed = run(**{name.replace(":", "_"): broken})
    assert not succeeded(check.outcomes.values())
    ended = {part["name"]: part["status"] for part in record["details"]["parts"]}
    assert ended.pop(name) == status
    assert set(ended.values()) <= {"done", "left out"}
    assert {"tests", "kernels", "copies"} <= {*ended, name}
    assert "CUDA error 999" in printed
    if name == "probe":
        assert ended["step"] == "left out"


def test_failed_tests_fail_the_check(run: Any) -> None:
    result = {"ok": False, "counts": "1 failed, 40 passed", "said": ["FAILED test_x: not equal"]}
    check, _, printed = run(tests=Outcome("tests", Status.DONE, 9.0, 140.0, "", result))
    assert check.outcomes["tests"].status is Status.FAILED
    assert not succeeded(check.outcomes.values())
    assert "1 failed, 40 passed\nFAILED test_x: not equal" in printed


def test_a_peer_trains_the_case_that_offload_trains(run: Any) -> None:
    check, record, _ = run(peer=True)
    assert record["details"]["cases"]["step:deepspeed"]["shape"]["name"] == "3.6 B"
    (ratio,) = record["ratios"]
    assert (ratio["measure"], ratio["median"]) == ("tokens_per_s", 1.0)
    assert (ratio["of"], ratio["to"]) == ("offload, 3.6 B", "DeepSpeed ZeRO-3, all on cpu, 3.6 B")
    assert succeeded(check.outcomes.values())


def test_a_peer_that_fails_does_not_fail_the_check(run: Any) -> None:
    broken = Outcome("step:deepspeed", Status.FAILED, 3.0, 60.0, "out of memory")
    check, record, printed = run(peer=True, step_deepspeed=broken)
    assert succeeded(check.outcomes.values())
    assert record["ratios"] == []
    assert "out of memory" in printed


def test_a_step_that_would_take_longer_than_there_is_time_is_left_out(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "TOTAL_S", 60.0)
    check, record, printed = run(parts=("step",))
    parts = {part["name"]: part["status"] for part in record["details"]["parts"]}
    assert parts.keys() == {"probe", *gpu_check.TRAININGS}
    assert parts["step:8 B"] == "left out"
    assert "step:8 B: left out, 0 s: would take about " in printed
    assert succeeded(check.outcomes.values())
