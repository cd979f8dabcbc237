"""A lazy tensor is what an ordinary one with the file's values would be, whatever is done to it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import offload
from offload.checkpoint.format.disk import OpenFile
from offload.errors import CheckpointError, UnsupportedError
from offload.weights.lazy_tensors import LazyTensor, LazyWeights, lazy_tensors
from tests.offload.engine_cases import HOST, config
from tests.offload.engine_states import bits

VALUES = {
    "a": torch.randn(6, 4, generator=torch.Generator().manual_seed(0)),
    "b": torch.randn(6, 4, generator=torch.Generator().manual_seed(1)),
    "half": torch.randn(6, 4, generator=torch.Generator().manual_seed(2)).bfloat16(),
    "whole": torch.arange(24).reshape(6, 4),
    "empty": torch.empty(0, 4),
    "one": torch.tensor(3.5),
}


@pytest.fixture
def lazy(tmp_path: Path) -> dict[str, LazyTensor]:
    save_file(VALUES, tmp_path / "file.safetensors")
    return lazy_tensors([tmp_path / "file.safetensors"])


def plain() -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in VALUES.items()}


MOVES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "itself": lambda t: t["a"],
    "of no elements": lambda t: t["empty"],
    "of no dimension": lambda t: t["one"],
    "integers": lambda t: t["whole"],
    "stack": lambda t: torch.stack([t["a"], t["b"]], dim=1),
    "cat of casts": lambda t: torch.cat([t["a"].bfloat16(), t["half"]]),
    "fused": lambda t: torch.cat([torch.stack([t["a"]] * 2), torch.stack([t["b"]] * 2)], dim=1),
    "chunk": lambda t: t["a"].chunk(3)[1].contiguous(),
    "a part": lambda t: t["a"][1:, ::2],
    "transposed": lambda t: t["a"].T.contiguous().reshape(3, 8),
    "interleaved": lambda t: t["a"].reshape(3, 2, 4).transpose(0, 1).reshape(6, 4).contiguous(),
    "flipped": lambda t: t["a"].flip(0),
    "expanded": lambda t: t["a"][None].expand(2, 6, 4),
    "unbound": lambda t: t["a"].unbind(1)[2],
    "rounded and back": lambda t: t["a"].bfloat16().float(),
    "other format": lambda t: t["half"].half(),
    "a parameter": lambda t: nn.Parameter(t["a"]).detach(),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_moves_elements_is_noted_and_done_later(name: str, lazy: dict[str, Any]) -> None:
    actual, expected = MOVES[name](lazy), MOVES[name](plain())
    assert isinstance(actual, LazyTensor)
    assert (actual.shape, actual.dtype, actual.stride()) == (
        expected.shape, expected.dtype, expected.stride(),
    )  # fmt: skip
    assert actual.storage_offset() == expected.storage_offset()
    assert bits(actual.value()) == bits(expected)


ROWS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "stored": lambda t: t["a"],
    "stacked": lambda t: torch.stack([t["a"], t["b"], t["a"]]),
    "stacked in the middle": lambda t: torch.stack([t["a"], t["b"]], dim=1),
    "fused": lambda t: torch.cat([torch.stack([t["a"]] * 2), torch.stack([t["b"]] * 2)], dim=1),
    "end to end": lambda t: torch.cat([t["a"], t["b"], t["half"]]),
    "transposed": lambda t: torch.stack([t["a"], t["b"]]).transpose(1, -1).contiguous(),
    "cast": lambda t: torch.stack([t["half"], t["half"]]).half().float(),
    "in another shape": lambda t: torch.stack([t["a"], t["b"]]).reshape(2, 3, 8),
    "interleaved": lambda t: t["a"].view(6, 2, 2).transpose(1, 2).reshape(6, 4).contiguous(),
    "a part": lambda t: torch.stack([t["a"], t["b"]])[:, 1::2, :3],
    "a chunk": lambda t: torch.stack([t["a"], t["b"]]).chunk(2, dim=-1)[1],
    "halves": lambda t: torch.stack([t["a"], t["b"]]).split([1, 5], dim=1)[1],
}
WHOLE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "flipped": lambda t: t["a"].flip(0),
    "transposed": lambda t: t["a"].T,
    "in another shape": lambda t: t["a"].reshape(3, 8),
    "some": lambda t: t["a"][1:4],
    "a chunk": lambda t: t["a"].chunk(3)[1],
}


@pytest.mark.parametrize("name", [*ROWS, *(f"{each}, of it all" for each in WHOLE)])
def test_a_row_is_read_alone(
    name: str, lazy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_all = name.removesuffix(", of it all")
    make = ROWS[name] if name in ROWS else WHOLE[of_all]
    actual, expected = make(lazy), make(plain())
    read: list[int] = []
    own = OpenFile.read_all

    def read_all(file: OpenFile, buffer: memoryview, offset_bytes: int) -> None:
        read.append(buffer.nbytes)
        own(file, buffer, offset_bytes)

    monkeypatch.setattr(OpenFile, "read_all", read_all)
    for number, row in enumerate(expected):
        made = actual[number]
        assert isinstance(made, LazyTensor)
        assert (made.shape, made.dtype) == (row.shape, row.dtype)
        assert bits(made.value()) == bits(row), number
    if name in ROWS:
        nbytes = sum(read)
        read.clear()
        actual.value()
        assert nbytes == sum(read)  # all rows together: of each byte once
    assert bits(actual[-1].value()) == bits(expected[-1])


READS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a norm": lambda t: t["a"].norm(),
    "arithmetic": lambda t: 2 * t["a"] + t["b"],
    "a product": lambda t: torch.ones(2, 4) @ t["a"].T,
    "an element": lambda t: t["a"][2, 3].item(),
    "a comparison": lambda t: torch.equal(t["a"], t["a"].clone()),
    "a copy into memory": lambda t: torch.zeros(6, 4).copy_(t["a"]),
    "a part of memory": lambda t: torch.zeros(8, 4).index_copy_(0, torch.arange(6), t["a"]),
    "others like it": lambda t: torch.zeros_like(t["a"]),
    "a gradient": lambda t: torch.func.grad(lambda x: (x * x).sum())(t["a"]),
}


@pytest.mark.parametrize("name", READS)
def test_all_else_reads_the_values(name: str, lazy: dict[str, Any]) -> None:
    actual, expected = READS[name](lazy), READS[name](plain())
    assert not isinstance(actual, LazyTensor)
    if isinstance(expected, Tensor):
        assert bits(actual) == bits(expected)
    else:
        assert actual == expected


WRITES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "in place": lambda t: t["a"].mul_(2),
    "in a view": lambda t: t["a"].T[1:3][0].zero_(),
    "by index": lambda t: t["a"].__setitem__(torch.tensor([0, 2]), 7.0),
    "by data": lambda t: t["a"].data.add_(t["b"]),
    "several": lambda t: torch._foreach_mul_([t["a"], t["b"]], 3.0),
    "into": lambda t: torch.add(t["a"], t["b"], out=t["b"]),
}


@pytest.mark.parametrize("name", WRITES)
def test_writing_is_refused(name: str, lazy: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="writing to a weight whose values are still in"):
        WRITES[name](lazy)
    assert bits(lazy["a"].value()) == bits(VALUES["a"])


DATA: dict[str, Callable[[dict[str, Any]], Tensor]] = {
    "ordinary": lambda t: torch.full((2, 2), 3.0),
    "lazy": lambda t: t["b"].T.contiguous(),
    "of another format": lambda t: t["a"].bfloat16(),
}


@pytest.mark.parametrize("name", DATA)
def test_data_may_be_set_to_another_tensor(name: str, lazy: dict[str, Any]) -> None:
    param, expected = nn.Parameter(lazy["a"]), DATA[name](plain())
    param.data = DATA[name](lazy)
    actual = param.detach()
    assert isinstance(param, nn.Parameter)
    assert (isinstance(actual, LazyTensor), actual.dtype) == (name != "ordinary", expected.dtype)
    assert bits(actual.value() if isinstance(actual, LazyTensor) else actual) == bits(expected)


def test_a_copy_is_independent(lazy: dict[str, Any]) -> None:
    module = nn.Linear(4, 6, bias=False)
    module.weight = nn.Parameter(lazy["a"])
    other = copy.deepcopy(module)
    module.weight.data = torch.zeros(6, 4)
    assert isinstance(other.weight, nn.Parameter)
    assert bits(other.weight.detach().value()) == bits(VALUES["a"])  # type: ignore[attr-defined]


def model_of(lazy: dict[str, Any]) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    model[0].weight = nn.Parameter(lazy["a"])
    model.register_buffer("table", lazy["whole"])
    model.register_parameter("numbers", nn.Parameter(lazy["whole"], requires_grad=False))
    return model


def test_references_stay_valid_and_an_error_gives_them_back(lazy: dict[str, Any]) -> None:
    model: Any = model_of(lazy)
    weight = model[0].weight
    weight.note = "mine"

    def fail() -> None:
        with LazyWeights(model) as taken:
            assert weight is model[0].weight
            assert type(weight) is nn.Parameter
            assert weight.is_meta
            assert weight.note == "mine"
            assert weight in taken
            assert model[1].weight not in taken
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert isinstance(weight, LazyTensor)
    assert isinstance(weight, nn.Parameter)
    assert (weight.note, weight.requires_grad) == ("mine", True)
    assert bits(weight.detach().value()) == bits(VALUES["a"])  # type: ignore[attr-defined]


def test_an_engine_reads_them(lazy: dict[str, Any], tmp_path: Path) -> None:
    model: Any = model_of(lazy)
    head = model[1].weight.detach().clone()
    with offload.initialize(model, config(tmp_path, HOST)) as engine, engine.gathered():
        assert bits(model[0].weight.detach()) == bits(VALUES["a"])
        assert bits(model[1].weight.detach()) == bits(head)
        assert bits(model.table) == bits(VALUES["whole"])
        assert bits(model.numbers.detach()) == bits(VALUES["whole"])


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    save_file({"a": torch.ones(64, 64)}, path)
    tensor = lazy_tensors([path])["a"]
    with path.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match=r"file\.safetensors ends at byte 1000"):
        tensor.value()


def test_pickling_is_refused(lazy: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="still in files"):
        torch.save(lazy["a"], tmp_path / "pickle")
