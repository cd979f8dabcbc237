"""The engine with `device: cuda` on the null GPU: what it asks of CUDA, and that it waits enough.

`make null-gpu`, before every use of a real GPU. PyTorch, Triton and its compiler are the real ones;
only CUDA is not, so numbers that kernels compute are not tested here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.null_gpu.build import build, missing
from tests.null_gpu.launch import FOLDER, NullGpu

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

ROOT = Path(__file__).parents[2]
PLAIN = NullGpu(zeros_back=True)
LATE = NullGpu(devices=3, late=True, zeros_back=True)
TRUE = NullGpu(devices=2, late=True)  # what went there comes back
# Two of six blocks fit on the device, and a part of the states in host memory.
TIGHT = {"device": "160KiB", "host": "2MiB", "nvme": "64MiB"}

Ask = Callable[..., Any]


@pytest.fixture(scope="session")
def library() -> Path:
    return build(FOLDER)


@pytest.fixture(scope="session")
def start(library: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a module on a null GPU, or, with None, without a GPU."""

    def run(gpu: NullGpu | None, *arguments: str) -> subprocess.CompletedProcess[str]:
        seen = gpu.environment(library) if gpu else {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(
            [sys.executable, "-X", "faulthandler", "-m", *arguments], cwd=ROOT,
            env={**seen, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500,
        )  # fmt: skip

    return run


@pytest.fixture(scope="session")
def ask(start: Callable[..., subprocess.CompletedProcess[str]]) -> Ask:
    """The answer of a function of `programs`."""

    def answer(gpu: NullGpu | None, name: str, **options: Any) -> Any:
        ended = start(gpu, "tests.null_gpu.programs", name, json.dumps(options))
        assert ended.returncode == 0, ended.stderr[-4000:]
        return json.loads(ended.stdout.splitlines()[-1])

    return answer


# ---------------------------------------------------------------- the null GPU itself
def test_a_call_that_it_does_not_have_ends_the_process_and_is_named(start: Any) -> None:
    ended = start(TRUE, "tests.null_gpu.programs", "unknown_call", "{}")
    assert ended.returncode == -signal.SIGABRT
    assert "cudaStreamBeginCapture was called" in ended.stderr


def test_a_cpu_that_reads_device_memory_crashes(start: Any) -> None:
    ended = start(TRUE, "tests.null_gpu.programs", "read_by_the_cpu", "{}")
    assert ended.returncode == -signal.SIGSEGV


def test_copies_really_happen_in_the_order_that_streams_wait_for(ask: Ask) -> None:
    assert ask(TRUE, "copied_and_back") is True


def test_memory_read_before_its_copy_was_awaited_holds_nan(ask: Ask) -> None:
    assert ask(TRUE, "read_too_early") == [True, True]


def test_the_error_of_a_failed_call_is_raised_by_the_next_kernel_and_gone(ask: Ask) -> None:
    found = ask(TRUE, "error_kept")
    assert found == {"status": 2, "said": ["CUDA error: out of memory", None]}


def test_a_kernel_may_not_have_another_devices_memory(ask: Ask) -> None:
    found = ask(TRUE, "other_devices_memory")
    assert found["same"] is None
    assert "Triton Error [CUDA]" in found["other"]


# ---------------------------------------------------------------- streams
def test_streams_are_entered_and_left_as_by_pytorch(ask: Ask) -> None:
    assert ask(TRUE, "current_streams") == []


# ---------------------------------------------------------------- waits
Reference = Callable[..., list[int]]


@pytest.fixture(scope="session")
def on_the_cpu(ask: Ask) -> Reference:
    """What each product reads in a training on the CPU."""

    @cache
    def seen(precision: str = "fp32", updates: bool = True) -> list[int]:
        keys = {"precision": precision, **({} if updates else NO_UPDATES)}
        found: list[int] = ask(None, "values_seen", device="cpu", placement="host", **keys)
        return found

    return seen


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("placement", ["host", "nvme", "host and nvme"])
def test_kernels_read_the_weights_of_their_step_however_late_copies_are(
    placement: str, precision: str, ask: Ask, on_the_cpu: Reference
) -> None:
    options = {"placement": placement, "precision": precision, "budget": TIGHT}
    assert ask(LATE, "values_seen", **options) == on_the_cpu(precision)


ELSEWHERE = [{"index": 2}, {"thread": True}, {"side_stream": True}]


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("where", ELSEWHERE, ids=lambda where: next(iter(where)))
def test_device_2_another_thread_and_a_side_stream_train_to_the_same_bits(
    placement: str, where: dict[str, Any], ask: Ask, on_the_cpu: Reference
) -> None:
    options = {"placement": placement, "budget": TIGHT, **where}
    assert ask(LATE, "values_seen", **options) == on_the_cpu()


# Where the device's kernels compute them, or gradients are what its memory held before.
NO_UPDATES = {"optimizer": {"type": "adamw", "lr": 0.0, "weight_decay": 0.0}}


@pytest.mark.parametrize("placement", ["device", "split"])
def test_updates_on_device_2_are_queued_there(
    placement: str, ask: Ask, on_the_cpu: Reference
) -> None:
    where = {"index": 2, "thread": True, "side_stream": True}
    found = ask(LATE, "values_seen", placement=placement, **where, **NO_UPDATES)
    assert found == on_the_cpu(updates=False)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_backward_reads_the_activations_of_its_forward_however_late_copies_are(
    tier: str, recomputed: bool, ask: Ask, on_the_cpu: Reference
) -> None:
    activations = {"tier": tier, "checkpoint": recomputed}
    found = ask(TRUE, "values_seen", placement="host", activations=activations, **NO_UPDATES)
    assert found == on_the_cpu(updates=False)


def test_memory_that_cannot_be_pinned_is_used_as_it_is(start: Any, on_the_cpu: Reference) -> None:
    options = {"placement": "host", "pinning_fails": True, "budget": TIGHT}
    ended = start(LATE, "tests.null_gpu.programs", "values_seen", json.dumps(options))
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert json.loads(ended.stdout) == on_the_cpu()
    assert "could not be pinned (cudaHostRegister's error 2)" in ended.stderr


# ---------------------------------------------------------------- calls
# The most that one block of a small Llama with nine weights may add to a step. A smaller number is
# progress: lower it here. CUDA's calls that only ask (which device, which context) are left out.
PER_BLOCK = {
    "device": {
        "cuLaunchKernelEx": 12, "cudaMemcpyAsync": 0, "cudaEventRecord": 1,
        "cudaStreamWaitEvent": 1, "cudaEventQuery": 1, "cudaEventSynchronize": 0,
    },
    # copies: the weights to the device, all gradients together back; what waits for each, and for
    # the weights once more when the engine settles, after three steps. Four of the events time the
    # two copies; they are asked for when many have gathered.
    "host": {
        "cuLaunchKernelEx": 9, "cudaMemcpyAsync": 2, "cudaEventRecord": 9,
        "cudaStreamWaitEvent": 4, "cudaEventQuery": 14, "cudaEventSynchronize": 2.4,
    },
}  # fmt: skip
# a group that is updated on trial is submitted alone, after a mark of its own
PER_BLOCK["nvme"] = {**PER_BLOCK["host"], "cudaEventRecord": 10, "cudaStreamWaitEvent": 5}
FEW, MANY = 8, 24  # blocks
# What takes long, or waits for the whole device, and is done once.
ONLY_AT_FIRST = (
    "cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "cudaHostRegister",
    "cudaHostUnregister", "cudaStreamCreateWithPriority", "cuModuleLoadData",
    "cudaDeviceSynchronize", "cudaMemcpy", "cudaMemset",
)  # fmt: skip


@pytest.fixture(scope="session", params=list(PER_BLOCK))
def placement(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def calls(ask: Ask, placement: str) -> dict[int, dict[str, float]]:
    """Per step, by the number of blocks."""
    return {
        blocks: ask(PLAIN, "calls_per_step", placement=placement, blocks=blocks)
        for blocks in (FEW, MANY)
    }


def test_a_step_waits_for_a_stream_once_at_most(calls: dict[int, dict[str, float]]) -> None:
    assert calls[MANY].get("cudaStreamSynchronize", 0) <= 1


def test_only_the_first_steps_take_memory_pin_it_or_wait_for_the_device(
    calls: dict[int, dict[str, float]],
) -> None:
    found = {name: calls[MANY][name] for name in ONLY_AT_FIRST if calls[MANY].get(name)}
    assert found == {}


def test_a_block_adds_a_known_number_of_calls_to_a_step(
    placement: str, calls: dict[int, dict[str, float]]
) -> None:
    few, many = calls[FEW], calls[MANY]
    added = {
        name: (many.get(name, 0) - few.get(name, 0)) / (MANY - FEW) for name in PER_BLOCK[placement]
    }
    over = {name: count for name, count in added.items() if count > PER_BLOCK[placement][name]}
    assert over == {}, f"all: {added}"
    assert many["cuLaunchKernelEx"] > 0  # Triton's kernels ran here at all


# ---------------------------------------------------------------- what users call
FEATURES: dict[str, dict[str, Any]] = {
    "bf16, clipping": {"precision": "bf16", "clip_grad_norm": 1.0},
    "in backward": {"optimizer": {"type": "adamw", "in_backward": True}},
    "int8 states": {"precision": "bf16", "optimizer": {"type": "adamw", "states": "int8"}},
    "fp16": {"precision": "fp16"},
    "lion": {"optimizer": {"type": "lion"}},
}


@pytest.mark.parametrize("keys", FEATURES.values(), ids=FEATURES)
def test_states_are_read_written_and_saved_on_every_placement(
    keys: dict[str, Any], ask: Ask
) -> None:
    cases = [{"placement": name, **keys} for name in ("device", "host", "nvme", "split")]
    assert ask(PLAIN, "features", cases=cases) == [6, 6, 6, 6]


# ---------------------------------------------------------------- gpu-check
def test_gpu_check_writes_its_record(start: Any, tmp_path: Path) -> None:
    options = ["--parts", "first,copies,step", "--keep-going", "--model", "0.01 B"]
    where = ["--out", str(tmp_path / "record"), "--folder", str(tmp_path)]
    ended = start(PLAIN, "benchmarks.gpu_check", *options, *where)
    assert ended.returncode == 1, ended.stderr[-4000:]  # kernels do nothing, and that is seen
    parts = json.loads((tmp_path / "record.json").read_text())["details"]["parts"]
    assert {part["name"]: part["status"] for part in parts} == {
        "first": "failed", "probe": "done", "copies": "done", "step": "done",
        "step:deepspeed": "left out", "step:spill": "done",
    }  # fmt: skip
    page = (tmp_path / "record.md").read_text()
    assert page.startswith("# GPU check: Null GPU")
    assert "| ours | ours, 0.01 B |" in page
    assert "| ours | ours, half of the optimizer's states on nvme, 0.01 B |" in page


def test_gpu_check_ends_after_first_checks_that_fail(start: Any, tmp_path: Path) -> None:
    options = ["--out", str(tmp_path / "record"), "--folder", str(tmp_path)]
    ended = start(TRUE, "benchmarks.gpu_check", *options)
    assert ended.returncode == 1, ended.stderr[-4000:]
    parts = json.loads((tmp_path / "record.json").read_text())["details"]["parts"]
    assert {part["name"]: part["status"] for part in parts} == {
        "first": "failed",
        **dict.fromkeys(("probe", "tests", "kernels", "copies", "step"), "left out"),
    }  # fmt: skip
    wrong = {check["name"]: check["wrong"] for check in parts[0]["result"]["checks"]}
    assert wrong["pin and copy, both ways"] == ""
    for tier in ("device", "host", "nvme"):
        assert "the first loss is" in wrong[f"step: {tier}"]
        assert f"- failed: step: {tier}: the first loss is" in (tmp_path / "record.md").read_text()


@pytest.mark.parametrize("tier", ["device", "host", "nvme"])
def test_the_sanitizer_finds_nothing_in_the_steps_of_gpu_check(tier: str, ask: Ask) -> None:
    assert ask(TRUE, "races", tier=tier, waits=True) == []


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_the_sanitizer_finds_that_products_do_not_wait_for_copies(tier: str, ask: Ask) -> None:
    found = ask(TRUE, "races", tier=tier, waits=False)
    assert any("aten::mm reading from it in stream 0" in race for race in found)
    assert "at swap/device/streams.py:" in found[0]


# ---------------------------------------------------------------- other people's trainers
@pytest.mark.parametrize("keys", [{}, {"bf16": True}, {"fp16": True}], ids=str)
def test_transformers_trainer_leaves_the_model_to_the_engine(
    keys: dict[str, Any], ask: Ask
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    found = ask(PLAIN, "transformers_trainer", **keys)
    assert found["before"] == ["cpu"]
    assert found["on"] == "cuda:0"
    assert found["precision"] == next(iter(keys), "fp32")
    assert found["beside"] < 72 << 20  # cuBLAS's workspaces, of two threads
    assert found["steps"] == 4
