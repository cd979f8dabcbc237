"""Compiled blocks of transformers' models are one graph, for all steps and sequence lengths."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from tests.libraries.rows import Result, adamw, row
from tests.offload.engine_cases import NVME, config
from tests.outside.trainer_cases import (
    BLOCKS,
    NUMBERS,
    VOCABULARY,
    assert_close,
    plain_optimizer,
    tiny_llama,
    values_of,
)

LENGTHS = [*[8] * 3, *range(9, 29), 8, 28]


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def tokens(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(VOCABULARY, (2, length), generator=generator)


def compiled(model: Any, **keys: Any) -> Any:
    for block in model.model.layers:
        block.compile(**{"backend": "eager", "fullgraph": True, **keys})
    return model


def losses(model: Any, optimizer: Any, lengths: Any = LENGTHS, accumulate: int = 1) -> list[float]:
    logged = []
    for number, length in enumerate(lengths, 1):
        loss = model(input_ids=tokens(length), labels=tokens(length)).loss
        loss.backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        logged.append(loss.item())
    return logged


def in_place(backend: str, trains: bool, place: str, folder: Path) -> Result:
    """Losses and weights of a training with the backend's blocks, or logits of a dispatched model;
    no step makes a graph anew."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model, found = tiny_llama(), []
    del model.model.layers[2:]  # inductor takes seconds for each
    if trains:
        with adamw(place, folder, model, {**NUMBERS, "eps": 1e-6}, **BLOCKS) as optimizer:
            compiled(model, backend=backend)
            # the second length comes while there are gradients, and compiles
            found += [losses(model, optimizer, accumulate=2), values_of(model)]
    else:
        if place != "plain":
            offload.dispatch(model, config(folder, {"parameters": place}, **BLOCKS))
        compiled(model, backend=backend)
        with torch.no_grad():
            found += [model(tokens(length), use_cache=False).logits for length in LENGTHS]
        if place != "plain":
            offload.dispatched(model).close("host")
    assert place == "plain" or graphs() == 2  # of the first length, and of all
    return found


ON_INDUCTOR = pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))),
    reason="torch's inductor backend needs a C++ compiler",
)
CASES = [
    pytest.param(
        row("transformers", "a loop, 20 lengths, blocks compiled", "Llama"),
        "eager", True, id="loop"),
    pytest.param(
        row("transformers", "a loop, 20 lengths, blocks compiled by inductor", "Llama"),
        "inductor", True, marks=ON_INDUCTOR, id="loop-inductor"),
    pytest.param(
        row("transformers", "dispatch, 20 lengths, blocks compiled", "Llama", exact=True),
        "eager", False, id="dispatch"),
    pytest.param(
        row("transformers", "dispatch, 20 lengths, blocks compiled by inductor", "Llama",
            exact=True), "inductor", False, marks=ON_INDUCTOR, id="dispatch-inductor"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "backend", "trains"), CASES)
def test_one_graph_for_all_lengths(check: Any, backend: str, trains: bool, tmp_path: Path) -> None:
    check(partial(in_place, backend, trains))(tmp_path)


def checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return compiled(model)


def interrupted(model: Any) -> Any:
    """The first pass ends with an error of a block's."""

    def fail(*_: Any) -> None:
        hook.remove()
        raise ZeroDivisionError

    hook = model.model.layers[1].register_forward_hook(fail)
    compiled(model, fullgraph=False)
    with pytest.raises(ZeroDivisionError):
        model(input_ids=tokens(8))
    return model


def hooked(model: Any) -> Any:
    """A hook of the user's on a module of a block ends graphs there, and is called."""
    for block in model.model.layers:
        block.mlp.register_forward_hook(lambda *_: None)
        block.compile(backend="eager")
    return model


def in_regions(model: Any) -> Any:
    """A copy of the model, with blocks of its own around the model's."""
    regions = pytest.importorskip("accelerate.utils").compile_regions(model, backend="eager")
    assert type(regions.model.layers[0]) is torch._dynamo.OptimizedModule
    return regions


@pytest.mark.parametrize(
    ("change", "when"),
    [(checkpointed, "after"), (interrupted, "after"), (hooked, "before"), (in_regions, "after")],
)
def test_compiled_blocks_train_as_plain_ones(
    change: Callable[[Any], Any], when: str, tmp_path: Path
) -> None:
    plain, model = tiny_llama(), tiny_llama()
    expected = losses(plain, plain_optimizer(plain), [8] * 3)
    if when == "before":
        change(model)
    with offload.initialize(model, config(tmp_path, NVME, optimizer=NUMBERS, **BLOCKS)) as engine:
        if when == "after":
            model = change(model)
        first = losses(model, engine.optimizer, [8])
        count = graphs()
        assert count
        then = losses(model, engine.optimizer, [8] * 2)
        assert graphs() == count
        assert_close(first + then, expected)
        inner = engine.module.model.layers[0].mlp.up_proj
        assert inner(torch.ones(1, 32)).shape == (1, 48)  # its hooks are back
