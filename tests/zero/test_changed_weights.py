"""Parameters changed in place between their use and backward: an error where torch raises one."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import ModifiedError
from tests.offload.engine_cases import DEVICE, HOST, MARKS, NVME, ON, config, seeded

pytestmark = MARKS

WIDTH = 8
PLACEMENTS = pytest.mark.parametrize(
    "placement", [DEVICE, HOST, NVME], ids=["device", "host", "nvme"]
)


class Net(nn.Module):
    def __init__(self, change: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).tanh())
        self.change(self)
        return y


def _double(get: Callable[[nn.Module], Tensor]) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        with torch.no_grad():
            get(module).mul_(2)

    return change


CHANGES: dict[str, Callable[[Any], Tensor]] = {
    "itself": lambda m: m.second.weight,
    "a row": lambda m: m.second.weight[1:3],
    "a transposed view": lambda m: m.second.weight.t(),
    "detached": lambda m: m.second.weight.detach(),
}


def _x() -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3)).to(ON)


@PLACEMENTS
@pytest.mark.parametrize("through", CHANGES)
def test_a_weight_changed_in_the_forward_after_its_use_is_an_error_as_in_torch(
    tmp_path: Path, placement: Any, through: str
) -> None:
    change = _double(CHANGES[through])
    plain = seeded(lambda: Net(change)).to(ON)
    with pytest.raises(RuntimeError, match="inplace operation"):
        plain(_x()).sum().backward()
    model = seeded(lambda: Net(change))
    with offload.initialize(model, config(tmp_path, placement)):
        loss = model(_x()).sum()
        with pytest.raises(ModifiedError, match=r"inplace operation: second\.weight.* version 1"):
            loss.backward()


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "copy_": lambda p: p.copy_(p * 2), "add_": lambda p: p.add_(1.0),
    "clamp_": lambda p: p.clamp_(-0.1, 0.1), "foreach": lambda p: torch._foreach_mul_([p], 2.0),
}  # fmt: skip


@PLACEMENTS
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("gathers", [True, False], ids=["gathered", "released"])
def test_a_weight_changed_between_forward_and_backward_is_an_error(
    tmp_path: Path, placement: Any, write: Callable[[Tensor], Any], gathers: bool
) -> None:
    model = seeded(lambda: Net(lambda module: None))
    with offload.initialize(model, config(tmp_path, placement)) as engine:
        loss, weight = model(_x()).sum(), model.second.weight
        with engine.gathered(weight) if gathers else nullcontext(), torch.no_grad():
            write(weight)
        with pytest.raises(ModifiedError, match=r"second\.weight|modified by an inplace operation"):
            loss.backward()
        model(_x()).sum().backward()  # the next pass uses what it is now


@PLACEMENTS
def test_a_write_leaves_graphs_alone_that_saved_other_parameters_of_the_group(
    tmp_path: Path, placement: Any
) -> None:
    keys: dict[str, Any] = {"groups": {"blocks": ["Net"]}}
    plain, model = (seeded(lambda: Net(lambda module: None)) for _ in range(2))
    plain = plain.to(ON)
    x, mine = _x().requires_grad_(), _x().requires_grad_()
    plain(x).square().sum().backward()
    with offload.initialize(model, config(tmp_path, placement, **keys)):
        loss = model(mine).square().sum()
        with torch.no_grad():
            model.second.bias.add_(1.0)  # no product saves it
        loss.backward()
        assert x.grad is not None
        assert mine.grad is not None
        assert torch.equal(mine.grad, x.grad)


class Renormed(nn.Module):
    """An embedding that scales its rows before they are used, and a head that uses them too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH, max_norm=0.5)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).tanh())


@PLACEMENTS
def test_an_embedding_that_renorms_trains_as_in_plain_pytorch(
    tmp_path: Path, placement: Any
) -> None:
    x = torch.tensor([1, 3, 3, 5], device=ON)

    def losses(model: nn.Module, backward: Callable[[Tensor], None], optimizer: Any) -> list[float]:
        values = []
        for _ in range(3):
            loss = model(x).square().sum()
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
        return values

    plain = seeded(Renormed).to(ON)
    expected = losses(plain, Tensor.backward, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    model = seeded(Renormed)
    keys = config(tmp_path, placement, optimizer={"lr": 1e-2, "weight_decay": 1e-2})
    with offload.initialize(model, keys) as engine:
        assert losses(model, engine.backward, engine.optimizer) == pytest.approx(expected, rel=1e-6)


@PLACEMENTS
def test_a_renorm_between_two_uses_is_an_error_as_in_torch(tmp_path: Path, placement: Any) -> None:
    x = torch.tensor([1, 3, 3, 5], device=ON)
    plain = seeded(Renormed).to(ON)
    with pytest.raises(RuntimeError, match="inplace operation"):
        (plain(x).sum() + plain(x).sum()).backward()
    model = seeded(Renormed)
    with offload.initialize(model, config(tmp_path, placement)):
        loss = model(x).sum() + model(x).sum()
        with pytest.raises(ModifiedError, match=r"embed\.weight"):
            loss.backward()


@PLACEMENTS
@pytest.mark.parametrize("kind", ["spectral", "weight"])
def test_parametrized_weights_train_as_in_plain_pytorch(
    tmp_path: Path, placement: Any, kind: str
) -> None:
    norm: Any = getattr(nn.utils.parametrizations, f"{kind}_norm")

    def build() -> nn.Module:
        net = Net(lambda module: None)
        norm(net.first)
        norm(net.second)
        return net

    plain = seeded(build).to(ON)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    model = seeded(build)
    keys = config(tmp_path, placement, optimizer={"lr": 1e-2, "weight_decay": 1e-2})
    with offload.initialize(model, keys) as engine:
        for _ in range(3):
            expected, actual = plain(_x()).square().sum(), model(_x()).square().sum()
            expected.backward()
            actual.backward()
            assert actual.item() == pytest.approx(expected.item(), rel=1e-6)
            for each in (optimizer, engine.optimizer):
                each.step()
                each.zero_grad()
