"""torch.compile of a model in tiers: the values of plain PyTorch, or a refusal with the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from tests.offload.engine_cases import HOST, NVME, TinyLM, batches, config, on_the_cpu_alone, seeded

pytestmark = [
    on_the_cpu_alone("what is compiled is the same"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of the compiler
]
TOKENS = batches(1)[0][:, :-1]


def build() -> TinyLM:
    return TinyLM(blocks=1)


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """What was compiled in one test is not found in the next one."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@contextmanager
def opened(
    folder: Path, trains: bool, placement: dict[str, Any], model: Any = None
) -> Iterator[Any]:
    model = seeded(build).eval() if model is None else model
    owner: Any
    if trains:
        owner = offload.initialize(model, config(folder, placement))
    else:
        parameters = {"parameters": placement["parameters"]}
        owner = offload.dispatched(offload.dispatch(model, config(folder, parameters)))
    yield model
    owner.close("host")


def run(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS)
    return logits


def compiled(model: Any, **keys: Any) -> Any:
    return torch.compile(model, backend="eager", **keys)


def at_the_call(model: Any, fullgraph: bool) -> Any:
    model.compile(backend="eager", fullgraph=fullgraph)
    return model


def a_block_at_the_call(model: Any, fullgraph: bool) -> Any:
    model.blocks[0].compile(backend="eager", fullgraph=fullgraph)
    return model


def around(model: Any, fullgraph: bool) -> Any:
    return compiled(model, fullgraph=fullgraph)


def around_a_block(model: Any, fullgraph: bool) -> Any:
    model.blocks[0] = compiled(model.blocks[0], fullgraph=fullgraph)
    return model


def its_forward(model: Any, fullgraph: bool) -> Any:
    model.forward = compiled(model.forward, fullgraph=fullgraph)
    return model


WAYS: list[Callable[[Any, bool], Any]] = [
    at_the_call, a_block_at_the_call, around, around_a_block, its_forward
]  # fmt: skip


@pytest.mark.sample("around_a_block")
@pytest.mark.parametrize("way", WAYS)
def test_one_graph_is_refused_by_name_and_parts_are_compiled(
    way: Callable[[Any, bool], Any], tmp_path: Path, long: bool
) -> None:
    expected, sample = run(seeded(build).eval()), WAYS.index(way)
    cases = [(trains, placement) for trains in (True, False) for placement in (HOST, NVME)]
    for case in cases if long else cases[sample % 4 :][:1]:
        refused = pytest.raises(RuntimeError, match="leave fullgraph=True")
        with opened(tmp_path, *case) as model, refused:
            run(way(model, True))
        with opened(tmp_path, *case) as model:
            assert torch.equal(run(way(model, False)), expected)


def test_a_model_that_was_compiled_as_one_graph_is_refused_while_it_is_in_tiers(
    tmp_path: Path,
) -> None:
    model = seeded(build).eval()
    expected = run(model)
    model.compile(backend="eager", fullgraph=True)
    with (
        opened(tmp_path, True, NVME, model),
        pytest.raises(RuntimeError, match="leave fullgraph=True"),
    ):
        run(model)
    assert torch.equal(run(model), expected)
