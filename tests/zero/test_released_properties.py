"""Whatever code may ask of a released parameter or a gradient: plain PyTorch's answer, or a typed
error. And what is made after them, and written to them."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import UnsupportedError
from tests.offload.engine_cases import MARKS, NVME, ON, config, seeded

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore")]

MODES = {
    "grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode
}  # fmt: skip
# Their memory: UnsupportedError, as values may be anywhere.
MEMORY = {
    "data_ptr", "const_data_ptr", "untyped_storage", "storage", "_typed_storage", "storage_type",
}  # fmt: skip
# Of the object, not of the tensor; or an argument is missing, in other words.
OTHERS = {
    "__hash__", "_cdata", "__iter__", "__doc__", "__torch_function__", "__deepcopy__",
    "as_subclass", "__dir__", "_post_accumulate_grad_hooks", "__init_subclass__",
    "__subclasshook__", "__new__", "__class__", "__init__", "__dict__", "__weakref__",
    "__module__", "backward",
    "dequantize",  # PyTorch takes the parameter itself for the result, which is no leaf any more
}  # fmt: skip
# Documented: docs/behaviour.md. Views in a graph are copies, without gaps.
LENIENT = {
    "diagonal",
    "unbind",
    "numpy",
    "__array__",
    "__dlpack__",
    "values",
    "_indices",
    "_values",
}
PRIVATE = {"_lazy_clone"}


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Conv2d(2, 3, 3))

    def loss(self) -> Tensor:
        x, image = torch.ones(2, 4, device=ON), torch.ones(1, 2, 5, 5, device=ON)
        return self[0](x).sum() + self[1](image).square().sum()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    plain, offloaded = seeded(Net).to(ON), seeded(Net)
    with offload.initialize(offloaded, config(tmp_path_factory.mktemp("swap"), NVME)):
        for model in plain, offloaded:
            model.loss().backward()
        yield plain, offloaded


def described(value: Any) -> Any:
    """Without the class, which is a subclass of torch.Tensor in both."""
    if isinstance(value, Tensor):
        values = value.detach().clone().flatten().tolist()
        values = [None if isinstance(each, float) and math.isnan(each) else each for each in values]
        meta = value.requires_grad, value.is_leaf, value.is_inference(), value.storage_offset()
        return tuple(value.shape), value.stride(), value.dtype, value.device, meta, values
    if isinstance(value, (list, tuple)):
        return [described(each) for each in value]
    return repr(value)


def asked(tensor: Tensor, question: Callable[[Tensor], Any], mode: str) -> Any:
    torch.manual_seed(3)
    try:
        with MODES[mode]():
            return described(question(tensor))
    except Exception as error:  # noqa: BLE001 - whatever PyTorch raises
        return type(error).__name__


def attribute(name: str) -> Callable[[Tensor], Any]:
    def question(tensor: Tensor) -> Any:
        value = getattr(tensor, name)
        return value() if callable(value) else value

    return question


@pytest.mark.sample("grad")
@pytest.mark.parametrize("mode", MODES)
def test_every_attribute_of_a_released_parameter_is_plain_pytorchs(
    pair: tuple[Any, Any], mode: str
) -> None:
    plain, offloaded = (model[1].weight for model in pair)
    names = {n for n in dir(Tensor) if not n.endswith("_") or n.endswith("__")} - OTHERS - PRIVATE
    assert len(names) > 400
    wrong = []
    for name in sorted(names - LENIENT):
        expected, answer = (asked(tensor, attribute(name), mode) for tensor in (plain, offloaded))
        if answer != ("UnsupportedError" if name in MEMORY else expected):
            wrong.append(f"{name}: {answer}, not {expected}")
    assert not wrong, "\n".join(wrong)


INITIALISERS = [n for n in dir(nn.init) if n.endswith("_") and not n.startswith("_")]
VALUES = {"constant_": (2.0,), "sparse_": (0.5,)}


@pytest.mark.parametrize("of", ["[0].weight", "[0].bias", "[1].weight", "[1].weight.grad"])
def test_initialisers_write_through_to_released_parameters(pair: tuple[Any, Any], of: str) -> None:
    for name in INITIALISERS:
        results = []
        for model in pair:
            tensor: Tensor = eval(f"model{of}", {"model": model})
            torch.manual_seed(3)
            try:
                returned = getattr(nn.init, name)(tensor, *VALUES.get(name, ()))
                results.append((returned is tensor, described(tensor.detach())))
            except (ValueError, RuntimeError) as error:  # of one dimension too few
                results.append(type(error).__name__)
        assert results[0] == results[1], name


def test_memory_is_refused_in_and_out_of_graphs_and_ties_are_found_by_the_object(
    tmp_path: Path,
) -> None:
    """A storage that all parameters of a group shared would look like a tie of all of them."""
    with offload.initialize(seeded(Net), config(tmp_path, NVME)) as engine:
        weight, bias = engine.module[0].weight, engine.module[0].bias
        for mode in MODES.values():
            with mode(), pytest.raises(UnsupportedError, match=r"untyped_storage\(\) of 0\.weight"):
                weight.untyped_storage()
        assert weight.is_set_to(weight)
        with torch.no_grad():
            assert not weight.is_set_to(bias)
        stored = {
            value.untyped_storage().data_ptr() for value in engine.module.state_dict().values()
        }
        assert len(stored) == 4


@pytest.mark.parametrize("begin", [offload.initialize, offload.dispatch])
def test_a_lazy_module_that_was_never_called_is_named(tmp_path: Path, begin: Any) -> None:
    keys = config(tmp_path, {"parameters": "nvme"})
    with pytest.raises(UnsupportedError, match=r"1\.weight has no shape yet.*call the model once"):
        begin(nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(4)), keys)
