"""Shared by all tests: stacks on a hang, GPU tests skipped where there is no GPU."""

from __future__ import annotations

import faulthandler
import os
import signal

import pytest

# The models here are tiny: PyTorch's threads would wait for each other longer than they compute,
# ten times as long on a machine that is busy otherwise. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest.register_assert_rewrite("tests.swap.state_conformance")  # a module of tests, though no test_


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="all cases where a sample is the rule")


@pytest.fixture(scope="session")
def long(request: pytest.FixtureRequest) -> bool:
    """Whether to take the time for every case."""
    return bool(request.config.getoption("--long"))


def pytest_configure(config: pytest.Config) -> None:
    # `kill -USR1` shows where a test run hangs; pytest's faulthandler_timeout does so by itself
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason="no CUDA device"))
