"""A read between a speculative update and the step returns the states before the update."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.errors import StateError
from offload.integrations.transformers.hub_format import stream_weights
from tests.offload.engine_cases import HOST, NVME, TinyLM, batches, config, plan_for_a_gpu, seeded
from tests.offload.engine_states import assert_same_bits, states_of
from tests.offload.test_threads_and_forks import child_says

TIMEOUT_S = 30.0
DATA = batches(4)
KEYS: dict[str, Any] = {"precision": "bf16", "clip_grad_norm": 1e9, "optimizer": {"lr": 1e-2}}


def backward(engine: offload.Engine, number: int) -> None:
    engine.backward(engine.module.loss(DATA[number]))  # type: ignore[operator]


def step(engine: offload.Engine) -> None:
    engine.optimizer.step()
    engine.optimizer.zero_grad()


@contextmanager
def engine_of(folder: Path, placement: dict[str, Any], **more: Any) -> Iterator[offload.Engine]:
    """After some steps: the one that comes next speculates where it can, and codes suffice."""
    with offload.initialize(seeded(TinyLM), config(folder, placement, **(KEYS | more))) as engine:
        for number in range(10):
            backward(engine, number % 2)
            step(engine)
        engine.settle()
        yield engine


def speculative_groups(engine: offload.Engine) -> list[int]:
    return [g.index for g in engine.store.groups if g.index in engine._runtime.stepper.policy]


def finished(engine: offload.Engine) -> dict[str, torch.Tensor]:
    """The states two steps later."""
    step(engine)
    backward(engine, 3)
    step(engine)
    return states_of(engine)


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, torch.Tensor]:
    with engine_of(tmp_path, HOST) as engine:
        backward(engine, 2)
        return finished(engine)


@pytest.fixture(params=["on nvme", "in host memory, beside a GPU"])
def placement(
    request: pytest.FixtureRequest, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """`expected` is made where nothing is speculative."""
    if request.param == "on nvme":
        return NVME
    plan_for_a_gpu(monkeypatch)
    return HOST


def streamed(engine: offload.Engine) -> list[torch.Tensor]:
    pieces: list[torch.Tensor] = []
    stream_weights(engine, lambda spec, elements, raw: pieces.append(raw.clone()))
    return pieces


def gathered(engine: offload.Engine) -> list[torch.Tensor]:
    with engine.gathered():
        return [param.detach().clone() for param in engine.module.parameters()]


READERS: dict[str, Callable[[offload.Engine], Any]] = {
    "detach": lambda engine: [p.detach().clone() for p in engine.module.parameters()],
    "data": lambda engine: [p.data.clone() for p in engine.module.parameters()],
    "state_dict": lambda engine: {n: v.clone() for n, v in engine.module.state_dict().items()},
    "optimizer.state_dict": lambda engine: engine.optimizer.state_dict()["state"],
    "gathered": gathered,
    "export": streamed,
    "steps": lambda engine: [engine.report().steps, engine.report().gradient_norm],
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", READERS)
def test_a_reader_sees_the_state_before_a_speculative_update(
    tmp_path: Path, how: str, expected: dict[str, torch.Tensor], placement: dict[str, Any]
) -> None:
    with engine_of(tmp_path, placement) as engine:
        before = READERS[how](engine)
        backward(engine, 2)
        assert speculative_groups(engine)
        engine._runtime.updates.settle()  # all of it is made, and at home
        torch.testing.assert_close(READERS[how](engine), before, rtol=0, atol=0)
        assert_same_bits(finished(engine), expected)


def test_a_save_amid_speculative_updates_is_refused_and_ends_none(
    tmp_path: Path, expected: dict[str, torch.Tensor], placement: dict[str, Any]
) -> None:
    with engine_of(tmp_path, placement) as engine:
        engine.save_checkpoint(tmp_path / "saved")
        before = states_of(engine)
        backward(engine, 2)
        begun = speculative_groups(engine)
        with pytest.raises(StateError, match=r"gradients wait for optimizer\.step"):
            engine.save_checkpoint(tmp_path / "saved")
        assert speculative_groups(engine) == begun
        engine.load_checkpoint(tmp_path / "saved")  # the gradients are dropped, and the updates
        assert_same_bits(states_of(engine), before)
        backward(engine, 2)
        assert_same_bits(finished(engine), expected)


def test_a_view_that_is_kept_shows_no_speculative_update(
    tmp_path: Path, placement: dict[str, Any]
) -> None:
    """It is one of the copy in memory, which the update would write to."""
    with engine_of(tmp_path, placement) as engine:
        policy = engine._runtime.stepper.policy
        with engine.gathered():
            norm = engine.module.norm.weight  # type: ignore[union-attr]
            group = engine.store.group_of(norm)[0].index  # type: ignore[arg-type,index]
            kept = norm.detach()  # type: ignore[operator]
        before = kept.clone()
        backward(engine, 2)
        assert speculative_groups(engine)
        assert group not in policy
        engine._runtime.updates.settle()
        assert torch.equal(kept, before)
        del kept
        step(engine)
        backward(engine, 3)
        assert group in policy


def test_another_thread_takes_an_update_back_while_the_step_decides(
    tmp_path: Path, expected: dict[str, torch.Tensor], placement: dict[str, Any]
) -> None:
    """It waits for an update on its way when the model's thread comes to the same group."""
    errors: list[BaseException] = []
    with engine_of(tmp_path, placement) as engine:
        updates = engine._runtime.updates
        go_on, waits, step_here = threading.Event(), threading.Event(), updates._step_here

        def late(chunk: Any) -> Any:
            go_on.wait(TIMEOUT_S)
            return step_here(chunk)

        def withdraw(index: int, real: Callable[[int], None] = updates.withdraw) -> None:
            waits.set()
            real(index)

        def read() -> None:
            try:
                engine.settle()
            except BaseException as error:  # noqa: BLE001 - looked at below
                errors.append(error)

        updates._step_here = late  # type: ignore[method-assign]
        updates.withdraw = withdraw  # type: ignore[method-assign]
        backward(engine, 2)
        assert speculative_groups(engine)
        reader = threading.Thread(target=read)
        reader.start()
        assert waits.wait(TIMEOUT_S)
        threading.Timer(0.1, go_on.set).start()
        engine.optimizer.step()
        reader.join(TIMEOUT_S)
        assert not reader.is_alive()
        assert not errors
        engine.optimizer.zero_grad()
        backward(engine, 3)
        step(engine)
        assert_same_bits(states_of(engine), expected)


@pytest.mark.slow
def test_a_forked_child_is_told_that_the_updates_are_its_parents(
    tmp_path: Path, expected: dict[str, torch.Tensor], placement: dict[str, Any]
) -> None:
    with engine_of(tmp_path, placement) as engine:
        backward(engine, 2)
        begun = speculative_groups(engine)
        assert begun
        for how in ("detach", "optimizer.state_dict", "export"):
            said = child_says(lambda how=how: READERS[how](engine))  # type: ignore[misc]
            assert said.startswith("StateError: this engine belongs to process"), said
        assert speculative_groups(engine) == begun
        assert_same_bits(finished(engine), expected)
