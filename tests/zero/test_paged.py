"""Tensors whose values live elsewhere: read when needed, written through, refused where neither."""

import copy
import gc
import io
import pickle
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import StateError, UnsupportedError
from offload.zero.tensors.paged import PagedTensor
from tests.offload.engine_cases import HOST, MARKS, NVME, ON, config

pytestmark = MARKS

SHAPE = (6, 8)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8), nn.Linear(8, 4))


def passed(model: nn.Module) -> Any:
    """The first weight, after a backward pass."""
    x = torch.arange(24.0, device=ON).view(3, 8) / 24
    model(x).pow(2).sum().backward()
    return next(model.parameters())


@pytest.fixture(params=[HOST, NVME], ids=["host", "nvme"])
def weight(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A parameter with a gradient, of an engine."""
    with offload.initialize(build(), config(tmp_path, request.param)) as engine:
        param = passed(engine.module)
        assert isinstance(param.grad, PagedTensor)
        yield param


READS: dict[str, Callable[[Any], Any]] = {
    "clone": lambda g: g.clone(),
    "index": lambda g: g[1, 2] + g[-1, 0],
    "slice": lambda g: g[1:3, ::2] + 0,
    "fancy index": lambda g: g[[0, 2], 1:4],
    "mask": lambda g: g[g > 0],
    "transpose": lambda g: g.t() @ g,
    "reshaped": lambda g: g.t().reshape(-1).cumsum(0),
    "iteration": lambda g: torch.stack([row.sum() for row in g]),
    "norms": lambda g: torch.stack([g.norm(), g.norm(1), g.norm(float("inf")), g.norm(3)]),
    "norm of rows": lambda g: g.norm(dim=1),
    "norm in double": lambda g: torch.linalg.vector_norm(g, dtype=torch.float64),
    "norm keeps dims": lambda g: g.norm(keepdim=True),
    "where": lambda g: torch.where(g > 0, g, -g),
    "cat": lambda g: torch.cat([g, torch.ones_like(g)]),
    "foreach": lambda g: torch._foreach_add([g, g.t()], 1.0)[1],
    "foreach norm": lambda g: torch._foreach_norm([g, g[0]])[1],
    "into a plain tensor": lambda g: torch.ones(SHAPE, device=ON).add_(g, alpha=0.3),
    "into a slice": lambda g: torch.zeros(2, *SHAPE, device=ON).index_copy_(
        0, torch.tensor([1], device=ON), g[None]
    ),
    "list": lambda g: torch.tensor(g.tolist()),
    "float": lambda g: torch.tensor(float(g[0, 0]) + g[0, 1].item()),
    "format": lambda g: torch.tensor(float(f"{g[0, 0]:.6f}")),
    "to": lambda g: g.to(torch.float64) + g.double() + g.cpu().to(ON) + g.float(),
    "sparse": lambda g: g.to_sparse().to_dense(),
    "deep copy": copy.deepcopy,
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "in a module's graph": lambda g: torch.nn.functional.linear(torch.ones(1, 8, device=ON), g),
    "shape": lambda g: torch.tensor([*g.shape, g.dim(), g.nbytes, *g.stride(), len(g)]),
    "answers": lambda g: torch.tensor([g.is_contiguous(), g.requires_grad]),
}
if ON == "cpu":  # torch makes no arrays of tensors on a GPU, and calls them all shared
    READS |= {
        "numpy": lambda g: torch.from_numpy(np.asarray(g) + g.t().numpy().T),
        "numpy function": lambda g: torch.as_tensor(np.abs(g.numpy()).sum()),
        "shared": lambda g: torch.tensor(g.is_shared()),
    }


@pytest.mark.sample(3)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_gives_what_a_plain_gradient_gives(
    weight: Any, read: Callable[[Any], Tensor]
) -> None:
    actual, expected = read(weight.grad), read(passed(build().to(ON)).grad)
    assert type(actual) is Tensor
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


def _put(g: Any, where: Any, value: Any) -> None:
    g[where] = value


def _set_data(g: Any) -> None:
    g.data = g.data * 3 + 1


WRITES: dict[str, Callable[[Any], Any]] = {
    "scalar": lambda g: g.mul_(0.25),
    "scalars": lambda g: g.mul_(0.5).div_(4).mul_(torch.tensor(2.0)),
    "tensor": lambda g: g.mul_(torch.arange(8.0, device=ON)),
    "add": lambda g: g.add_(torch.ones(8, device=ON), alpha=0.5),
    "itself": lambda g: g.add_(g),
    "zero": lambda g: g.zero_(),
    "zero, then more": lambda g: g.zero_().add_(1).mul_(3),
    "infinity times zero": lambda g: g.zero_().mul_(float("inf")),
    "copy": lambda g: g.copy_(torch.ones(8)),
    "data": _set_data,
    "element": lambda g: _put(g, (1, 2), 7.0),
    "rows": lambda g: _put(g, slice(1, 4), torch.arange(8.0)),
    "mask": lambda g: _put(g, g < 0, 0.0),
    "fancy": lambda g: _put(g, ([0, 3], slice(1, 3)), 5.0),
    "view": lambda g: g.view(-1)[3:9].mul_(2),
    "view of a view": lambda g: g.t()[2:5].diagonal().fill_(3),
    "each row": lambda g: [row.mul_(number) for number, row in enumerate(g.unbind())],
    "parts": lambda g: [part.add_(1) for part in g.split([1, 5])[1:]],
    "one part to another": lambda g: g[1].copy_(g[0]),
    "a view sees a write": lambda g: [g.view(-1), g.add_(1)][0].mul_(2),
    "out": lambda g: torch.mul(g, 2, out=g),
    "random": lambda g: (torch.manual_seed(3), g.normal_()),
    "clamp": lambda g: g.clamp_(-0.1, 0.1),
    "foreach": lambda g: torch._foreach_add_([g, g], [torch.ones(8, device=ON)] * 2),
    "foreach copy": lambda g: torch._foreach_copy_([g], [torch.ones(SHAPE, device=ON)]),
    "foreach factor": lambda g: torch._foreach_mul_([g[0], g], [2.0, 3.0]),
    "masked fill": lambda g: g.masked_fill_(g > 0, 0.0),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_reaches_the_gradient(weight: Any, write: Callable[[Any], Any]) -> None:
    if write is WRITES["foreach factor"] and ON == "cuda":
        pytest.skip("one kernel takes both factors to the row that both tensors have")
    plain = passed(build().to(ON))
    write(weight.grad)
    write(plain.grad)
    torch.testing.assert_close(weight.grad.clone(), plain.grad, rtol=1e-6, atol=0, equal_nan=True)
    norms = weight.grad.norm(), plain.grad.norm()  # kept apart from the values
    torch.testing.assert_close(*norms, rtol=1e-6, atol=0, equal_nan=True)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "data_ptr": lambda g: g.data_ptr(),
    "storage": lambda g: g.untyped_storage(),
    "dlpack": torch.from_dlpack,
    "shared": lambda g: g.share_memory_(),
    "apply": lambda g: g.apply_(lambda value: value),
    "resized": lambda g: g.resize_(3),
    "transposed in place": lambda g: g.t_(),
    "unsqueezed in place": lambda g: g.unsqueeze_(0),
    "of another tensor": lambda g: g.set_(torch.ones(3)),
    "data of another format": lambda g: setattr(g, "data", g.bfloat16()),
    "data of another shape": lambda g: setattr(g, "data", torch.ones(3)),
}


@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED)
def test_what_needs_memory_of_its_own_is_refused(weight: Any, use: Callable[[Any], Any]) -> None:
    before = weight.grad.clone()
    with pytest.raises(UnsupportedError, match=r"0\.weight\.grad.*use \.clone\(\)"):
        use(weight.grad)
    assert torch.equal(weight.grad, before)


def test_an_address_taken_below_python_raises_and_reads_nothing(weight: Any) -> None:
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(weight.grad)


def test_a_saved_gradient_is_a_plain_tensor(weight: Any) -> None:
    file = io.BytesIO()
    torch.save({"gradient": weight.grad, "row": weight.grad[1]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert {type(each) for each in loaded.values()} == {Tensor}
    assert torch.equal(loaded["gradient"], weight.grad)
    assert torch.equal(loaded["row"], weight.grad[1])


@pytest.mark.parametrize("cleared", ["none", "zero_grad", "step"])
def test_a_kept_handle_says_that_its_gradient_was_cleared(cleared: str, tmp_path: Path) -> None:
    with offload.initialize(build(), config(tmp_path, NVME)) as engine:
        param = passed(engine.module)
        kept, row = param.grad, param.grad[1]
        if cleared == "step":
            engine.optimizer.step()
        if cleared == "none":
            param.grad = None
        else:
            engine.optimizer.zero_grad()
        passed(engine.module)
        for each in (kept, row):
            with pytest.raises(StateError, match=r"0\.weight\.grad .*cleared; \.clone\(\) it"):
                each.sum()
        with pytest.raises(StateError, match="cleared"):
            kept.mul_(2)


def test_a_view_of_a_handle_that_is_set_as_grad_accumulates(tmp_path: Path) -> None:
    plain = build().to(ON)
    with offload.initialize(build(), config(tmp_path, NVME)) as engine:
        gradients = []
        for model in (plain, engine.module):
            param = passed(model)
            assert param.grad is not None
            param.grad = param.grad.detach()
            gradients.append(passed(model).grad.clone())  # type: ignore[union-attr]
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=0)


def test_handles_of_a_closed_engine_say_so_or_keep_their_value(tmp_path: Path) -> None:
    engine = offload.initialize(build(), config(tmp_path, NVME))
    param = passed(engine.module)
    kept, current = param.grad, passed(engine.module).grad
    assert kept is current
    value = kept.clone()
    engine.close()
    try:
        copied = kept.clone()
    except StateError:
        return
    assert torch.equal(copied, value)


@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
def test_an_engine_dropped_with_gradients_alive_is_collected(
    placement: dict[str, Any], tmp_path: Path
) -> None:
    engine = offload.initialize(build(), config(tmp_path, placement))
    param = passed(engine.module)
    param.grad.norm()
    gone = weakref.ref(engine), weakref.ref(engine._runtime)
    del engine, param
    ends = time.monotonic() + 30
    while any(reference() for reference in gone) and time.monotonic() < ends:
        gc.collect()  # the first time closes the engine, on a thread of its own
        time.sleep(0.01)
    assert [reference() for reference in gone] == [None, None]


def test_data_of_a_released_parameter_is_written_through(tmp_path: Path) -> None:
    with offload.initialize(build(), config(tmp_path, NVME)) as engine:
        param = next(engine.module.parameters())
        data = param.data
        assert isinstance(data, PagedTensor)
        data[0] = 3.0
        data.view(-1)[8:].mul_(0)
        data.data = data.data + 1
        expected = torch.ones(SHAPE, device=ON)
        expected[0] = 4.0
        assert torch.equal(engine.module.state_dict()["0.weight"], expected)
        with pytest.raises(UnsupportedError, match=r"0\.weight"):
            data.t_()


def test_a_copied_parameter_is_an_ordinary_one(tmp_path: Path) -> None:
    with offload.initialize(build(), config(tmp_path, NVME)) as engine:
        param = next(engine.module.parameters())
        copies = [copy.deepcopy(param), pickle.loads(pickle.dumps(param))]
        assert len({id(each) for each in copy.deepcopy([param, param])}) == 1
        for each in copies:
            assert type(each) is nn.Parameter
            assert each.requires_grad
            assert torch.equal(each, engine.module.state_dict()["0.weight"])
            each.data.zero_()
        assert param.abs().sum() > 0
