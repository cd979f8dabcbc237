"""What many steps leave behind: no descriptors, no threads, no memory."""

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.process.machine import rss_nbytes
from tests.offload.engine_cases import NVME, TinyLM, batches, config, losses_of, seeded

DATA = batches(20)
PER_STEP = 40  # objects in cycles; each read or write that left one would add hundreds


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[offload.Engine]:
    keys: dict[str, Any] = {"optimizer": {"chunk": 1024}, "clip_grad_norm": 1.0}
    budget = {"host": "400KiB", "nvme": "64MiB"}
    with offload.initialize(
        seeded(TinyLM), config(tmp_path, NVME, budget=budget, **keys)
    ) as engine:
        losses_of(engine, DATA)
        yield engine


def held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def test_a_step_leaves_next_to_nothing_to_the_collector(engine: offload.Engine) -> None:
    """What lies in cycles keeps its memory until a full collection, which may be long in coming."""
    gc.collect()  # also of what earlier tests have left, with its descriptors
    before = held()
    gc.disable()
    try:
        losses_of(engine, DATA)
        engine.settle()
        assert gc.collect() < PER_STEP * len(DATA)
    finally:
        gc.enable()
    assert held() == before


@pytest.mark.slow  # five minutes
def test_ten_thousand_steps_hold_what_the_first_ones_did(
    engine: offload.Engine, tmp_path: Path
) -> None:
    for number in range(500):
        losses_of(engine, DATA)
        if number % 50 == 49:  # every thousand steps
            engine.save_checkpoint(tmp_path / "saved")
            engine.load_checkpoint(tmp_path / "saved")
        if number == 49:
            before, base_nbytes = held(), rss_nbytes()
    assert held() == before
    assert rss_nbytes() < 1.01 * base_nbytes
