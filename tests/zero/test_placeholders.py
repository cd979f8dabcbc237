"""Released parameters in what reads a tensor below Python: right, or refused by their name."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import UnsupportedError
from offload.zero.tensors.local_tensors import is_dtensor
from tests.offload.engine_cases import HOST, MARKS, NVME, ON, config, seeded

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore")]  # of torch.tensor(p), of nested tensors


def doubled(weight: Tensor) -> Tensor:
    return (weight * 2).sum()


def nested(p: Tensor, **how: Any) -> Tensor:
    return torch.stack(torch.nested.nested_tensor([p, p], **how).unbind())


RIGHT: dict[str, Callable[[Tensor], Any]] = {
    "torch.tensor": lambda p: torch.tensor(p),
    "torch.as_tensor, another format": lambda p: torch.as_tensor(p, dtype=torch.float64),
    "torch.asarray, a copy": lambda p: torch.asarray(p, copy=True),
    "new_tensor": lambda p: torch.zeros(1, device=p.device).new_tensor(p),
    "torch.Tensor": lambda p: torch.Tensor(p.cpu() if p.device.type != "cpu" else p),
    "nested_tensor": nested,
    "nested_tensor, jagged": lambda p: nested(p, layout=torch.jagged),
    "assignment to a slice": lambda p: torch.zeros_like(p).index_put_((torch.arange(4),), p[:4]),
    "vmap": lambda p: torch.vmap(lambda row: row * 2)(p),
    "a list of them": lambda p: torch.utils.data.default_collate([p, p]),
    "an operation without torch's Python": lambda p: torch.ops.aten.mul.Tensor(p, 2),
    "autograd.grad of one that is not used": lambda p: torch.autograd.grad(
        torch.ones((), device=p.device, requires_grad=True) * 1, [p], materialize_grads=True,
        allow_unused=True,
    ),
}  # fmt: skip
TRANSFORMS: dict[str, Callable[[Tensor], Any]] = {
    "vjp": lambda p: torch.func.vjp(doubled, p)[0],
    "grad": lambda p: torch.func.grad(doubled)(p),
    "jacrev": lambda p: torch.func.jacrev(doubled)(p),
    "jvp": lambda p: torch.func.jvp(doubled, (p,), (torch.ones_like(p),)),
}


@pytest.fixture(params=[NVME, HOST], ids=["nvme", "host"])
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    with offload.initialize(seeded(Pair), config(tmp_path, request.param)) as made:
        yield made


class Pair(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))


def released(engine: Any) -> Any:
    return engine.module[0].weight


@pytest.mark.parametrize("name", RIGHT)
def test_what_reads_below_python_has_the_values(engine: Any, name: str) -> None:
    plain = seeded(Pair)[0].weight
    actual = RIGHT[name](released(engine))
    torch.testing.assert_close(actual, RIGHT[name](plain.to(ON)), rtol=0, atol=0)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_a_parameter_are_refused_outside_of_gathered(
    tmp_path: Path, name: str
) -> None:
    with offload.initialize(seeded(Pair), config(tmp_path, NVME)) as engine:
        with pytest.raises(UnsupportedError, match=r"0\.weight.*engine\.gathered"):
            TRANSFORMS[name](released(engine))
        with engine.gathered(engine.module):
            actual = TRANSFORMS[name](released(engine))
        expected = TRANSFORMS[name](seeded(Pair)[0].weight.to(ON))
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("of", ["p", "p.data", "p.grad", "p.data[:2]", "p.detach()"])
def test_a_tensor_that_would_share_its_memory_is_refused(tmp_path: Path, of: str) -> None:
    with offload.initialize(seeded(Pair), config(tmp_path, NVME)) as engine:
        engine.module(torch.ones(2, 4, device=ON)).sum().backward()
        other = torch.zeros(4, 4, device=ON)
        with pytest.raises(UnsupportedError, match=r"0\.weight.*engine\.gathered"):
            other.data = eval(of, {"p": released(engine)})
        assert not other.any()


def test_its_address_is_refused(tmp_path: Path) -> None:
    with offload.initialize(seeded(Pair), config(tmp_path, NVME)) as engine:
        p = released(engine)
        with pytest.raises(UnsupportedError, match=r"data_ptr\(\) of 0\.weight.*engine\.gathered"):
            p.data_ptr()
        with engine.gathered(p):
            assert p.data_ptr()


class Named(torch.Tensor):
    """No plain tensor, so it might be any subclass."""


def test_what_is_no_dtensor_is_told_while_another_thread_imports_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "torch.distributed.tensor"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))  # as it is before its body has run
    assert not is_dtensor(torch.ones(2).as_subclass(Named))
