"""A Ctrl-C at any place of a training loop ends what it interrupts, and the loop goes on with the
bits of one that was never interrupted."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

import offload
from tests.offload.engine_cases import MARKS, TinyLM, batches, config, seeded
from tests.offload.engine_states import assert_same_bits, states_of
from tests.offload.interrupt_points import (
    Interrupted,
    after_us,
    at_point,
    counted_points,
    same_losses,
)
from tests.offload.test_interrupts import BLOCKS, CASES

# Python drops what is raised in a finaliser, or in a callback of a weak reference
pytestmark = [
    *MARKS, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
]  # fmt: skip
SCARCE = BLOCKS | {"budget": {"host": "896KiB", "nvme": "64MiB"}, "prefetch": 2}
ALL = CASES | {"scarce": SCARCE}


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["point", "timer"])
@pytest.mark.parametrize("name", ["blocks", "selective", "scarce"])
def test_training_goes_on_with_the_same_bits(
    tmp_path: Path, name: str, how: str, long: bool
) -> None:
    train_interrupted(tmp_path, ALL[name], how, 150 if long else 8)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["whole", "host", "recomputed"])
def test_training_goes_on_with_the_same_bits_elsewhere(
    tmp_path: Path, name: str, long: bool
) -> None:
    train_interrupted(tmp_path, ALL[name], "point", 150 if long else 4)


def train_interrupted(folder: Path, keys: dict[str, Any], how: str, steps: int) -> None:
    data = [batches(8)[number % 8] for number in range(steps)]
    with offload.initialize(seeded(TinyLM), config(folder, **keys)) as engine:
        loop = Interrupted(engine)
        start = time.perf_counter()
        expected = [loop.step(tokens) for tokens in data]
        step_us = int((time.perf_counter() - start) / steps * 1e6)
        states = states_of(engine)
        with counted_points() as points:
            loop.step(data[0])
    draw = random.Random(f"{keys} {how}")
    timer, span = how == "timer", step_us if how == "timer" else points()
    with offload.initialize(seeded(TinyLM), config(folder, **keys)) as engine:
        loop = Interrupted(engine)
        for tokens in data:
            before = loop.interrupts
            delay = draw.randint(1, span)
            loop.interrupted_step(tokens, after_us(delay) if timer else at_point(delay))
            if timer and loop.interrupts == before:  # the step was over, so it takes less than that
                span = max(1, min(span, delay) // 2)
        assert_same_bits(states_of(engine), states)
        engine.check_integrity()
    assert same_losses(loop.losses, expected)
    print(f"{loop.interrupts} interrupts, {loop.repeated} before their step was decided")
    # some come after the step, or are dropped by Python itself
    assert loop.interrupts > (0 if timer else steps // 3)
