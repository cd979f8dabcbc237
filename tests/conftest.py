"""Shared by all tests: no network, stacks on a hang, GPU tests skipped where there is no GPU."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import no_network

no_network.block()

# The models here are tiny: PyTorch's threads would wait for each other longer than they compute,
# ten times as long on a machine that is busy otherwise. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest.register_assert_rewrite("tests.swap.state_conformance")  # a module of tests, though no test_


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="all cases where a sample is the rule")


# Of few tests each, but long: begun last, one of them would leave the other cores idle.
LONG_FILES = (
    "ranks/test_rank_train.py", "ranks/test_rank_parity.py", "ranks/test_rank_failures.py",
    "ranks/test_rank_ways.py", "ranks/test_rank_checkpoints.py", "ranks/test_rank_peers.py",
    "ranks/test_rank_bytes.py", "ranks/test_rank_asks.py", "ranks/test_tensor_parallel.py",
    "ranks/test_rank_experts.py", "ranks/test_rank_programs.py",
    "ranks/test_rank_nonfinite.py",
    "benchmarks/test_gpu_check.py", "benchmarks/test_gpu_check_parts.py",
    "benchmarks/test_gpu_check_sizes.py",
    "offload/test_activations.py", "offload/test_bench.py", "offload/test_memory.py",
    "offload/test_parity.py", "offload/test_gpu.py",
    "offload/test_writes.py", "offload/test_frozen_weights.py", "offload/test_mixture_model.py",
    "offload/test_checkpoint_memory.py",
    "offload/test_checkpoint_crash.py", "offload/test_checkpoint_savers.py",
    "planning/test_activation_trace.py",
    "planning/test_memory_prediction.py",
    "outside/test_offload_trainer.py",
    "outside/test_distributed_checkpoint.py",
    "outside/test_examples.py",
    "kernels/test_generated_code.py",
    "kernels/test_triton_generated_code.py",
    "faults/test_train_kills.py", "faults/test_step_faults.py", "faults/test_checkpoint_faults.py",
    "faults/test_swap_file_faults.py", "ranks/test_elastic_checkpoints.py",
    "ranks/test_rank_run_state.py", "ranks/test_rank_memory.py", "ranks/test_rank_storage.py",
    "deepspeed/test_ranks.py", "offload/test_background_saves.py",
    "offload/test_checkpoint_random.py",
    "offload/test_dispatch_programs.py", "offload/test_gradient_programs.py",
    "offload/test_interrupt_points.py", "planning/test_inference_prediction.py",
    "ranks/test_rank_towers.py", "offload/test_asleep.py", "outside/test_kv_training.py",
)  # fmt: skip


@pytest.fixture(scope="session")
def long(request: pytest.FixtureRequest) -> bool:
    """Whether to take the time for every case."""
    return bool(request.config.getoption("--long"))


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    """A thread that a test leaves behind would fail another test, of those that look for any."""
    before = set(threading.enumerate())
    yield
    until = time.monotonic() + 10  # an engine that was dropped is closed by a thread of its own
    while left := [
        t.name for t in set(threading.enumerate()) - before
        if t.name[:7] == "offload"
    ]:  # fmt: skip
        assert time.monotonic() < until, f"left behind: {left}"
        gc.collect()
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def no_test_asks_another_machine() -> Iterator[None]:
    """Also one that goes on without what it asked for."""
    yield
    calls, no_network.refused[:] = list(no_network.refused), []
    assert calls == []


@pytest.fixture(scope="module", autouse=True)
def earlier_files_are_not_gone_through() -> None:
    """What the files before this one have imported and kept: each full collection would go through
    all of it, a second in the end."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    # `kill -USR1` shows where a test run hangs; pytest's faulthandler_timeout does so by itself
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    # a shell that starts a test run in the background has it ignore Ctrl-C; some tests press it
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        leave_to_long(config, items)
    begin_long_files_first(items)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    # thousands of tests and imported libraries, which each full collection would go through, and
    # each forked child would copy
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries look for what is left at the end


def leave_to_long(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked `slow`, and all cases of one marked `sample` but those it names, or but
    each n-th."""
    numbers: Counter[str] = Counter()
    left: list[pytest.Item] = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        number, numbers[name] = numbers[name], numbers[name] + 1
        sample = item.get_closest_marker("sample")
        stays = item.get_closest_marker("slow") is None
        if sample is not None and isinstance(sample.args[0], int):
            stays &= number % sample.args[0] == 0
        elif sample is not None:
            stays &= item.nodeid[len(name) + 1 : -1] in sample.args
        if not stays:
            left.append(item)
    if left and len(left) < len(items):  # a test that is named alone runs
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [item for item in items if item not in gone]


def begin_long_files_first(items: list[pytest.Item]) -> None:
    """Then the files by their number of tests. Within a file nothing moves."""
    number = Counter(item.path for item in items)
    first = {Path(__file__).parent / name for name in LONG_FILES}
    items.sort(key=lambda item: (item.path not in first, -number[item.path], item.path))
