"""Conversions of a model in tiers and torch.compile do what they do to any model, or are refused at
the call with the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.errors import StateError, UnsupportedError
from tests.offload.engine_cases import HOST, NVME, TinyLM, batches, config, on_the_cpu_alone, seeded

pytestmark = [
    on_the_cpu_alone("the table is of a model on the CPU, and what is compiled is the same"),
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
    folder: Path, trains: bool, placement: dict[str, Any], model: Any = None, **keys: Any
) -> Iterator[Any]:
    model = seeded(build).eval() if model is None else model
    owner: Any
    if trains:
        owner = offload.initialize(model, config(folder, placement, **keys))
    else:
        parameters = {"parameters": placement["parameters"]}
        owner = offload.dispatched(offload.dispatch(model, config(folder, parameters, **keys)))
    yield model
    owner.close("host")


def layers() -> Any:
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.LSTM(4, 4))


CALLS: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "half": (lambda m: m.half(), r"float16 on cpu, .*float32 on cpu; set precision"),
    "float": (lambda m: m.float(), None),
    "to fp32": (lambda m: m.to(torch.float32), None),
    "to meta": (lambda m: m.to("meta"), r"on meta.*close the engine"),
    "to_empty": (lambda m: m.to_empty(device="cpu"), None),
    "share_memory": (lambda m: m.share_memory(), r"\.share_memory\(\)"),
    "_apply the same": (lambda m: m._apply(lambda t: t.detach().clone()), None),
    "_apply flat": (lambda m: m._apply(lambda t: t.reshape(-1)), "would make .*shape"),
}


@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
@pytest.mark.parametrize("trains", [True, False], ids=["initialize", "dispatch"])
def test_a_conversion_changes_nothing_or_is_refused_at_the_call(
    trains: bool, placement: dict[str, Any], tmp_path: Path
) -> None:
    given = seeded(layers).eval()
    with opened(tmp_path, trains, placement, given) as model, torch.no_grad():
        x, same = torch.ones(3, 4), dict(model.named_parameters())
        expected = model(x)[0]
        for call, refusal in CALLS.values():
            for part in (model, model[0]):
                if refusal is None:
                    assert call(part) is part
                else:
                    with pytest.raises(UnsupportedError, match=refusal):
                        call(part)
            assert all(param is same[name] for name, param in model.named_parameters())
            assert torch.equal(model(x)[0], expected)


def test_a_closed_dispatched_model_is_called_that(tmp_path: Path) -> None:
    keys = config(tmp_path, {"parameters": "nvme"})
    model = offload.dispatch(layers(), keys)
    weight, dispatched = next(model.parameters()), offload.dispatched(model)
    dispatched.close(keep="drop")
    dispatched.close()
    for use, said in (
        (dispatched.report, "closed"),
        (lambda: offload.dispatch(model, keys), "anew"),
    ):
        with pytest.raises(StateError, match=said):
            use()
    for use in (
        lambda: model(torch.ones(2, 4)), weight.sum, model.state_dict, model.half,
        lambda: offload.dispatched(model).report(),
    ):  # fmt: skip
        with pytest.raises(
            StateError, match=r"(this dispatched model's tiers are closed.*|is not )dispatch"
        ):
            use()


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
BLOCKS: dict[str, Any] = {"groups": {"blocks": ["Block"]}}


@pytest.mark.sample("around_a_block")
@pytest.mark.parametrize("way", WAYS)
def test_one_graph_of_several_units_is_refused_by_name_and_a_block_is_one_graph(
    way: Callable[[Any, bool], Any], tmp_path: Path, long: bool
) -> None:
    expected, sample = run(seeded(build).eval()), WAYS.index(way)
    cases = [(trains, placement) for trains in (True, False) for placement in (HOST, NVME)]
    for case in cases if long else cases[sample % 4 :][:1]:
        refused = pytest.raises(RuntimeError, match="leave fullgraph=True")
        is_block = way in (a_block_at_the_call, around_a_block)
        torch.compiler.reset()  # else a graph of the case before is taken, unasked
        with opened(tmp_path, *case, **BLOCKS) as model, nullcontext() if is_block else refused:
            assert torch.equal(run(way(model, True)), expected)
        with opened(tmp_path, *case, **BLOCKS) as model:
            assert torch.equal(run(way(model, False)), expected)


def test_a_model_that_was_compiled_as_one_graph_is_refused_while_it_is_in_tiers(
    tmp_path: Path,
) -> None:
    model = seeded(build).eval()
    expected = run(model)
    model.compile(backend="eager", fullgraph=True)
    with (
        opened(tmp_path, True, NVME, model, **BLOCKS),
        pytest.raises(RuntimeError, match="leave fullgraph=True"),
    ):
        run(model)
    assert torch.equal(run(model), expected)
