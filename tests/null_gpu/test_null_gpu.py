"""The engine with `device: cuda` on the null GPU: what it asks of CUDA, and that it waits enough.

`make null-gpu`, before every use of a real GPU. PyTorch, Triton and its compiler are the real ones;
only CUDA is not, so numbers that kernels compute are not tested here.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from offload.tiers.units import parse_bytes
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
    def answer(gpu: NullGpu | None, name: str, **options: Any) -> Any:
        ended = start(gpu, "tests.null_gpu.programs", name, json.dumps(options))
        assert ended.returncode == 0, ended.stderr[-4000:]
        return json.loads(ended.stdout.splitlines()[-1])

    return answer


# ---------------------------------------------------------------- the null GPU itself
def test_copies_really_happen_in_the_order_that_streams_wait_for(ask: Ask) -> None:
    assert ask(TRUE, "copied_and_back") is True


def test_memory_read_before_its_copy_was_awaited_holds_nan(ask: Ask) -> None:
    assert ask(TRUE, "read_too_early") == [True, True]


def test_the_error_of_a_failed_call_is_raised_by_the_next_kernel_and_gone(ask: Ask) -> None:
    answer = ask(TRUE, "error_kept")
    assert answer == {"status": 2, "said": ["CUDA error: out of memory", None]}


# ---------------------------------------------------------------- waits
Reference = Callable[..., list[int]]


@pytest.fixture(scope="session")
def on_the_cpu(ask: Ask) -> Reference:
    """What each product reads in a training on the CPU."""

    @cache
    def seen(precision: str = "fp32", updates: bool = True) -> list[int]:
        keys = {"precision": precision, **({} if updates else NO_UPDATES)}
        return ask(None, "values_seen", device="cpu", placement="host", **keys)

    return seen


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("placement", ["host", "nvme", "host and nvme"])
def test_kernels_read_the_weights_of_their_step_however_late_copies_are(
    placement: str, precision: str, ask: Ask, on_the_cpu: Reference
) -> None:
    options = {"placement": placement, "precision": precision, "budget": TIGHT}
    assert ask(LATE, "values_seen", **options) == on_the_cpu(precision)


@pytest.mark.parametrize(
    ("placement", "precision"), [("host", "fp32"), ("host", "bf16"), ("nvme", "fp32")]
)
def test_no_backward_waits_for_gradients_that_are_accumulated(
    placement: str, precision: str, ask: Ask
) -> None:
    counts = {
        planned: ask(
            LATE, "blocking_calls", placement=placement, passes=3, planned=planned,
            precision=precision,
        )
        for planned in (True, False)
    }  # fmt: skip
    assert counts[True] == [0, 0, 0]
    assert min(counts[False][1:]) > 0  # nothing was reserved for them, and waits are seen


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
    values = ask(LATE, "values_seen", placement=placement, **where, **NO_UPDATES)
    assert values == on_the_cpu(updates=False)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_backward_reads_the_activations_of_its_forward_however_late_copies_are(
    tier: str, recomputed: bool, ask: Ask, on_the_cpu: Reference
) -> None:
    activations = {"tier": tier, "checkpoint": recomputed}
    values = ask(TRUE, "values_seen", placement="host", activations=activations, **NO_UPDATES)
    assert values == on_the_cpu(updates=False)


def test_memory_that_cannot_be_pinned_is_used_as_it_is(start: Any, on_the_cpu: Reference) -> None:
    options = {"placement": "host", "pinning_fails": True, "budget": TIGHT}
    ended = start(LATE, "tests.null_gpu.programs", "values_seen", json.dumps(options))
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert json.loads(ended.stdout) == on_the_cpu()
    assert "could not be pinned (cudaHostRegister's error 2)" in ended.stderr


@pytest.mark.parametrize(("placement", "host"), [("device", False), ("split", True)])
def test_nothing_but_the_context_is_held_asleep_and_values_are_those_of_a_run_awake(
    placement: str, host: bool, ask: Ask, on_the_cpu: Reference
) -> None:
    values = ask(TRUE, "values_seen", placement=placement, sleeps={"host": host}, **NO_UPDATES)
    assert values == on_the_cpu(updates=False)


def test_a_hundred_sleeps_leave_nothing_behind(ask: Ask) -> None:
    held, descriptors, rss = ask(TRUE, "sleeps_often", cycles=100)
    assert len(set(held)) == 1
    assert min(descriptors[:40]) == min(descriptors[40:])  # other threads open some for a moment
    assert max(rss) - min(rss) < 8 << 20


# ---------------------------------------------------------------- all of a GPU's memory
@pytest.mark.parametrize("gpu", ["1100MiB", "1500MiB", "2GiB"])
def test_a_run_takes_no_more_than_budget_gpu_and_what_was_planned(gpu: str, ask: Ask) -> None:
    """By PyTorch's own allocator, holes included, which is held to it."""
    mib = ask(PLAIN, "within_gpu_budget", total=gpu)
    assert mib["tensors"] <= 1.005 * mib["planned"]  # inputs and rounding are not counted
    assert mib["tensors"] <= mib["taken"] <= mib["total"] == parse_bytes(gpu) / (1 << 20)


def test_memory_beyond_budget_gpu_is_an_error_that_names_its_parts(start: Any) -> None:
    ended = start(PLAIN, "tests.null_gpu.programs", "beyond_gpu_budget", "{}")
    assert ended.returncode == 0, ended.stderr[-4000:]
    answer, whole, context = json.loads(ended.stdout.splitlines()[-1]), 8192, 612
    assert answer["said"].startswith("CUDA out of memory")
    assert "offload: GPU 2.0 GiB: device tier " in ended.stderr  # as it is planned
    assert "budget.gpu is full. GPU 2.0 GiB: device tier " in ended.stderr
    # of two engines the lower limit holds until it ends; a limit of the program stays
    wide, tight = 3072 - context, 2048 - context
    assert answer["mib"] == [wide, tight, tight, whole, 2048, 2048]
    assert answer["steps"] == 3
    assert answer["below"] is None


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
