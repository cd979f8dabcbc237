"""What is put into a model, or taken out, after `offload.initialize`: it trains, or is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import offload
from offload.errors import UnsupportedError
from offload.tiers import accelerator
from tests.offload.engine_cases import HOST, MARKS, NVME, ON, WIDTH, TinyLM, batches, config, seeded
from tests.offload.engine_states import assert_same_bits, gradients_of, losses_of, parameters_of

pytestmark = MARKS


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)
        self.extra = nn.ModuleDict()

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.body, *self.extra.values()]:
            x = torch.relu(layer(x))
        y: Tensor = self.head(x)
        return y


@pytest.fixture(params=["host", "nvme"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[offload.Engine]:
    placement = {"host": HOST, "nvme": NVME}[request.param]
    with offload.initialize(seeded(Model), config(tmp_path, placement)) as engine:
        train(engine)
        yield engine


def train(engine: offload.Engine) -> None:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).to(ON)
    engine.backward(engine.module(x).square().mean())
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def add_module(model: Any) -> None:
    model.extra["new"] = nn.Linear(WIDTH, WIDTH, device=ON)


def replace_parameter(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.randn(4, WIDTH, device=ON))


def replace_layer(model: Any) -> None:
    model.body[1] = nn.Linear(WIDTH, WIDTH, device=ON)


ADDED: dict[str, Callable[[Any], None]] = {
    r"extra\.new\.weight": add_module,
    r"head\.weight": replace_parameter,
    r"body\.1\.weight": replace_layer,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("names", ADDED)
def test_a_trainable_parameter_that_no_update_would_see_is_named_in_the_next_step(
    engine: offload.Engine, names: str
) -> None:
    ADDED[names](engine.module)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=rf"^{names}: .*before offload\.initialize"):
            train(engine)


def test_where_a_module_is_taken_out_the_rest_trains_as_in_plain_pytorch(
    engine: offload.Engine,
) -> None:
    plain: Any = seeded(Model).to(ON)
    with torch.no_grad():
        for name, value in parameters_of(engine).items():
            plain.get_parameter(name).copy_(value)
    offloaded: Any = engine.module
    for model in (plain, offloaded):
        del model.body[1]
    x = torch.ones(2, WIDTH, device=ON)
    for model in (plain, offloaded):
        model(x).square().mean().backward()
    gradients = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert_same_bits(gradients_of(engine), gradients)
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    train(engine)


def test_adapters_that_peft_puts_in_later_are_named(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    with offload.initialize(seeded(Model), config(tmp_path, HOST)) as engine:
        with engine.gathered():
            peft.get_peft_model(engine.module, peft.LoraConfig(target_modules=["head"]))
        with pytest.raises(UnsupportedError, match=r"^head\.lora_A\.default\.weight"):
            train(engine)


@pytest.fixture
def _one_rank(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class FullyShardedDataParallel(nn.Module):
    """As torch's puts itself around a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
@pytest.mark.parametrize("wrapper", [DistributedDataParallel, FullyShardedDataParallel])
def test_what_reduces_gradients_itself_is_refused(
    wrapper: Any, placement: dict[str, Any], tmp_path: Path
) -> None:
    model = seeded(TinyLM)
    keys = config(tmp_path, placement)
    with offload.initialize(model, keys) as engine:
        for part in (model, model.blocks[0]):
            with pytest.raises(UnsupportedError, match=f"{wrapper.__name__} around a model"):
                wrapper(part)
        wrapper(seeded(TinyLM))  # a model without an engine
        losses_of(engine, batches(2))
    for wrapped in (wrapper(seeded(TinyLM)), nn.Sequential(wrapper(seeded(TinyLM)))):
        with pytest.raises(UnsupportedError, match="use the model as it is"):
            offload.initialize(wrapped, keys)


def test_data_parallel_is_refused_where_it_copies_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(TinyLM)
    with offload.initialize(model, config(tmp_path)):
        assert DataParallel(model).module is model  # it calls the model and does no more
        monkeypatch.setattr(accelerator, "device_count", lambda: 2)
        with pytest.raises(UnsupportedError, match="DataParallel around a model"):
            DataParallel(model)
