"""Several threads take turns or are refused; a forked child is refused, and its parent goes on."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

import offload
from offload.errors import StateError
from tests.offload.engine_cases import (
    HOST,
    MARKS,
    NVME,
    ON,
    TinyLM,
    batches,
    config,
    on_the_cpu_alone,
    seeded,
)
from tests.offload.engine_states import assert_same_bits, losses_of, states_of

pytestmark = MARKS

BLOCKS = {"groups": {"blocks": ["Block"]}}


@pytest.fixture(params=[NVME, HOST], ids=["nvme", "host"])
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[offload.Engine]:
    keys = config(tmp_path, request.param, **BLOCKS)
    with offload.initialize(seeded(TinyLM), keys) as engine:
        yield engine


def in_thread(work: Callable[[], Any], name: str = "other") -> list[Any]:
    """What `work` returned or raised in a thread of its own."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:  # noqa: BLE001 - looked at by the test
            outcome.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    return outcome


def amid_a_forward(engine: offload.Engine, work: Callable[[], Any]) -> tuple[Any, Tensor]:
    """What `work` gives in another thread while a block of this thread's forward runs."""
    outcome: list[Any] = []
    hook = engine.module.blocks[1].mlp.register_forward_pre_hook(  # type: ignore[union-attr,index]
        lambda *_: outcome.extend(in_thread(work)) if not outcome else None
    )
    logits = engine.module(batches(1)[0][:, :-1])
    hook.remove()
    return outcome[0], logits


@pytest.mark.parametrize("what", ["forward", "block", "step", "zero_grad"])
def test_a_thread_that_calls_amid_anothers_forward_is_refused(
    engine: offload.Engine, what: str
) -> None:
    tokens = batches(1)[0][:, :-1]
    model: Any = engine.module
    works: dict[str, Callable[[], Any]] = {
        "forward": lambda: model(tokens),
        "block": lambda: model.blocks[0](torch.zeros(1, 6, 32, device=ON)),
        "step": engine.optimizer.step,
        "zero_grad": engine.optimizer.zero_grad,
    }
    error, logits = amid_a_forward(engine, works[what])
    assert isinstance(error, StateError)
    assert "'other'" in str(error)
    assert "'MainThread'" in str(error)
    assert torch.equal(logits, seeded(TinyLM).to(ON)(tokens))
    losses_of(engine, batches(1))


def test_threads_that_call_at_once_get_what_is_right_or_an_error(engine: offload.Engine) -> None:
    tokens = batches(1)[0][:, :-1]
    expected = seeded(TinyLM).to(ON)(tokens)
    outcomes: list[Any] = []

    def call() -> None:
        for _ in range(10):
            try:
                with torch.no_grad():
                    outcomes.append(engine.module(tokens))
            except StateError as error:
                outcomes.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    right = [each for each in outcomes if isinstance(each, Tensor)]
    assert len(outcomes) == 40
    assert right
    assert all(torch.equal(each, expected) for each in right)
    assert torch.equal(engine.module(tokens), expected)


def test_threads_that_take_turns_train_as_one(engine: offload.Engine, tmp_path: Path) -> None:
    data = batches(4)
    keys = config(tmp_path, **BLOCKS)
    with offload.initialize(seeded(TinyLM), keys) as alone:
        expected, states = losses_of(alone, data), states_of(alone)
    turn, losses = threading.Lock(), []

    def evaluate() -> None:
        for tokens in data:
            with turn, torch.no_grad():
                engine.module(tokens[:, :-1])

    thread = threading.Thread(target=evaluate)
    thread.start()
    for tokens in data:
        with turn:
            losses += in_thread(lambda tokens=tokens: losses_of(engine, [tokens]))[0]  # type: ignore[misc]
    thread.join()
    assert losses == expected
    assert_same_bits(states_of(engine), states)


def child_says(work: Callable[[], Any], timeout_s: int = 60) -> str:
    """What `work` returned or raised in a forked child that then ends as a program does."""
    read, write = os.pipe()
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking with threads: that is what is tested
        child = os.fork()
    if child == 0:
        os.close(read)
        threading.Timer(timeout_s, os._exit, [3]).start()
        try:
            said = repr(work())
        except BaseException as error:  # noqa: BLE001 - told to the parent
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return said


@pytest.mark.sample("host")
def test_a_forked_child_is_told_that_the_engine_is_its_parents(
    engine: offload.Engine, tmp_path: Path
) -> None:
    data, model = batches(3), engine.module
    losses = losses_of(engine, data[:1])
    tokens = data[0][:, :-1]
    works: list[Callable[[], Any]] = [
        lambda: model(tokens),
        lambda: model.blocks[0](torch.zeros(1, 6, 32)),  # type: ignore[index,operator]
        engine.optimizer.step,
        engine.optimizer.zero_grad,
        engine.optimizer.state_dict,
        model.state_dict,
        engine.gathered().__enter__,
        lambda: engine.gradient(model.head.weight),  # type: ignore[union-attr,arg-type]
        engine.report,
        engine.settle,
        lambda: engine.save_checkpoint(tmp_path / "saved"),
    ]
    for work in works:
        losses_of(engine, data[2:])  # an update is pending when the child is forked
        said = child_says(work)
        assert said.startswith("StateError: this engine belongs to process"), said
    loss = model.loss(data[1])  # type: ignore[operator]
    # on a GPU backward has threads of its own, which a child lacks
    refusal = "StateError: this engine belongs to process" if ON == "cpu" else (
        "RuntimeError: Unable to handle autograd's threading"
    )  # fmt: skip
    assert child_says(loss.backward).startswith(refusal)
    assert child_says(engine.close) == "None"
    assert losses_of(engine, data[2:]) != losses
    engine.check_integrity()


def a_weight(model: Any) -> float:
    return float(model.blocks[1].mlp[0].weight.detach().double().sum())


READS: dict[str, Callable[[Any], Any]] = {
    "sum": a_weight,
    "numpy": lambda model: model.norm.weight.detach().numpy().tolist(),
    "item": lambda model: model.blocks[0].norm.bias[3].item(),
    "vector": lambda model: float(parameters_to_vector(model.parameters()).detach().sum()),
    "values in a state dict": lambda model: float(model.state_dict()["head.weight"].sum()),
    "gradient": lambda model: model.norm.weight.grad.tolist(),
    "norm of a gradient": lambda model: float(model.head.weight.grad.norm()),
    "scaled gradient": lambda model: float(model.position.grad.mul_(0.5).sum()),
}


@pytest.mark.sample(2)
@on_the_cpu_alone("a forked child cannot use CUDA at all")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("placement", [NVME, HOST], ids=["nvme", "host"])
def test_a_forked_child_reads_what_was_there_or_is_told_why_not(
    tmp_path: Path, placement: dict[str, Any], precision: str
) -> None:
    keys = config(tmp_path, placement, precision=precision, **BLOCKS)
    with offload.initialize(seeded(TinyLM), keys) as engine:
        losses_of(engine, batches(2))
        kept = engine.module.head.weight.detach().clone()  # type: ignore[union-attr,operator]
        engine.backward(engine.module.loss(batches(1)[0]))  # type: ignore[operator]
        said = {name: child_says(lambda read=read: read(engine.module))  # type: ignore[misc]
                for name, read in READS.items()}  # fmt: skip
        for name, text in said.items():
            if "StateError" not in text:
                assert text == repr(READS[name](engine.module)), name
            else:
                assert text.startswith("StateError: this engine belongs to process"), name
        assert "StateError" in said["gradient"]
        assert child_says(lambda: kept.sum().item()) == repr(kept.sum().item())
        losses_of(engine, batches(2))
