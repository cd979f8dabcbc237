"""torch.distributed.checkpoint saves and loads what get_state_dict returns of an engine."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import offload
from tests.offload.engine_cases import HOST, NVME, config, seeded

CASES: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"precision": "bf16"}}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no process group: DCP says that it assumes one process
        yield


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class AppState(Stateful):
    """As PyTorch's tutorial writes it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer,
            model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"],
        )  # fmt: skip


def train(model: nn.Module, optimizer: Any, steps: int, seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 8, generator=generator).to(dtype)
        loss = model(x).float().square().mean()
        engine = getattr(optimizer, "engine", None)
        loss.backward() if engine is None else engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def settings(tmp_path: Path, keys: dict[str, Any], placement: Any = NVME) -> dict[str, Any]:
    return config(tmp_path, placement, **keys)


def model_for(keys: dict[str, Any], kind: Any = Flat) -> nn.Module:
    model: nn.Module = seeded(kind)
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return model.to(dtypes.get(keys.get("precision", ""), torch.float32))


def test_what_fsdp2_saved_sharded_an_engine_goes_on_with(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        sharded = seeded(Flat)
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
        train(sharded, optimizer, 3)
        dcp.save({"app": AppState(sharded, optimizer)}, checkpoint_id=tmp_path / "fsdp")
        expected = train(sharded, optimizer, 3, seed=1)
    finally:
        torch.distributed.destroy_process_group()
    model = seeded(Flat)
    with offload.initialize(model, settings(tmp_path, {})) as engine:
        dcp.load({"app": AppState(model, engine.optimizer)}, checkpoint_id=tmp_path / "fsdp")
        assert engine.optimizer.param_groups[0]["lr"] == 1e-2
        actual = train(model, engine.optimizer, 3, seed=1)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("case", ["fp32", "bf16"])
def test_the_tutorials_application_state_resumes_to_the_bit(
    case: str, placement: str, tmp_path: Path
) -> None:
    keys = CASES[case]
    where = {"host": HOST, "nvme": NVME}[placement]
    model = model_for(keys)
    with offload.initialize(model, settings(tmp_path, keys, where)) as engine:
        train(model, engine.optimizer, 3)
        state = AppState(model, engine.optimizer)
        dcp.save({"app": state}, checkpoint_id=tmp_path / "saved")
        rest = train(model, engine.optimizer, 3, seed=1)
    again = model_for(keys)
    with offload.initialize(again, settings(tmp_path, keys, where)) as engine:
        state = AppState(again, engine.optimizer)
        dcp.load({"app": state}, checkpoint_id=tmp_path / "saved")
        assert train(again, engine.optimizer, 3, seed=1) == rest
