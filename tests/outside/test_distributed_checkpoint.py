"""torch.distributed.checkpoint saves and loads an engine's states, whole and streamed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import offload
from offload.errors import StateError, UnsupportedError
from offload.integrations.distributed_checkpoint import EngineState
from tests.offload.engine_cases import HOST, NVME, assert_same_bits, config, seeded
from tests.outside.memory import assert_streams

CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "bf16, no master": {"precision": "bf16", "optimizer": {"type": "adamw", "master": "none"}},
    "int8": {"optimizer": {"type": "adamw", "states": "int8"}},
    "sgd": {"optimizer": {"type": "sgd", "lr": 0.1}},
    "momentum": {"optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9}},
    "amsgrad": {"optimizer": {"type": "adam", "amsgrad": True}},
    "in backward": {"optimizer": {"type": "adamw", "in_backward": True}},
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no process group: DCP says that it assumes one process
        yield


class Net(nn.Module):
    """A tied weight, a frozen one, buffers, and a parameter that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(8, 4)
        self.frozen.weight.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(torch.tanh(self.tied(self.norm(self.first(x)))))
        return y


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


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


def model_for(keys: dict[str, Any], kind: Any = Net) -> nn.Module:
    model: nn.Module = seeded(kind)
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return model.to(dtypes.get(keys.get("precision", ""), torch.float32))


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_from_a_streamed_checkpoint_to_the_bit(case: str, tmp_path: Path) -> None:
    keys, where = CASES[case], tmp_path / "saved"
    model = model_for(keys)
    with offload.initialize(model, settings(tmp_path, keys)) as engine:
        train(model, engine.optimizer, 3)
        engine.optimizer.param_groups[0]["lr"] = 0.02
        dcp.save({"app": EngineState(engine)}, checkpoint_id=where)
        rest = train(model, engine.optimizer, 3, seed=1)
        weights = model.state_dict()
    again = model_for(keys)
    with offload.initialize(again, settings(tmp_path, keys, HOST)) as engine:
        train(again, engine.optimizer, 1, seed=5)  # to be forgotten
        dcp.load({"app": EngineState(engine)}, checkpoint_id=where)
        assert engine.optimizer.param_groups[0]["lr"] == 0.02
        engine.check_integrity()
        if case != "fp16":  # the loss scale is no part of a state dict
            assert train(again, engine.optimizer, 3, seed=1) == rest
            assert_same_bits(again.state_dict(), weights)


def test_what_torch_saved_an_engine_loads_and_the_other_way_round(tmp_path: Path) -> None:
    plain = seeded(Flat)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    train(plain, optimizer, 3)
    dcp.save({"app": AppState(plain, optimizer)}, checkpoint_id=tmp_path / "torch")
    model = seeded(Flat)
    with offload.initialize(model, settings(tmp_path, {})) as engine:
        dcp.load({"app": EngineState(engine)}, checkpoint_id=tmp_path / "torch")
        assert_same_bits(model.state_dict(), plain.state_dict())
        assert engine.optimizer.param_groups[0]["lr"] == 1e-2
        found = train(model, engine.optimizer, 3, seed=1)
        dcp.save({"app": EngineState(engine)}, checkpoint_id=tmp_path / "engine")
        weights = model.state_dict()
    torch.testing.assert_close(found, train(plain, optimizer, 3, seed=1), rtol=0, atol=1e-6)
    other = Flat()
    optimizer = torch.optim.AdamW(other.parameters())
    part = dcp.DefaultLoadPlanner(
        allow_partial_load=True
    )  # foreach, fused and the like are not there
    state = {"app": AppState(other, optimizer)}
    dcp.load(state, checkpoint_id=tmp_path / "engine", planner=part)
    assert_same_bits(other.state_dict(), weights)
    assert optimizer.state[other.layers[0].weight]["step"] == 6


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
        dcp.load({"app": EngineState(engine)}, checkpoint_id=tmp_path / "fsdp")
        assert engine.optimizer.param_groups[0]["lr"] == 1e-2
        found = train(model, engine.optimizer, 3, seed=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("case", ["fp32", "bf16"])
def test_the_tutorials_application_state_resumes_to_the_bit(
    case: str, placement: str, tmp_path: Path
) -> None:
    keys = CASES[case]
    where = {"host": HOST, "nvme": NVME}[placement]
    model = model_for(keys, Flat)
    with offload.initialize(model, settings(tmp_path, keys, where)) as engine:
        train(model, engine.optimizer, 3)
        state = AppState(model, engine.optimizer)
        dcp.save({"app": state}, checkpoint_id=tmp_path / "saved")
        rest = train(model, engine.optimizer, 3, seed=1)
    again = model_for(keys, Flat)
    with offload.initialize(again, settings(tmp_path, keys, where)) as engine:
        state = AppState(again, engine.optimizer)
        dcp.load({"app": state}, checkpoint_id=tmp_path / "saved")
        assert train(again, engine.optimizer, 3, seed=1) == rest


def test_a_load_of_parts_of_tensors(tmp_path: Path) -> None:
    """As from a checkpoint that several ranks wrote: each part is copied into a slice."""
    model = seeded(Flat)
    name = "layers.0.weight"
    with offload.initialize(model, settings(tmp_path, {})) as engine:
        train(model, engine.optimizer, 2)
        state = EngineState(engine)
        found = state.state_dict()
        stored = {
            "weight": found["model"][name],
            "moment": found["optim"]["state"][name]["exp_avg"],
        }
        values = {key: torch.randn(16, 8) for key in stored}
        for key, value in values.items():
            stored[key].narrow(0, 0, 5).copy_(value[:5])
            stored[key].narrow(0, 5, 11).narrow(1, 2, 6).copy_(value[5:, 2:])
            stored[key].detach().narrow(0, 5, 11).narrow(1, 0, 2).copy_(value[5:, :2])
        state.load_state_dict(found)
        assert_same_bits({key: each.clone() for key, each in stored.items()}, values)
        assert_same_bits(
            {"": stored["weight"].narrow(0, 3, 2) * 2}, {"": values["weight"][3:5] * 2}
        )
        assert_same_bits({"": model.layers[0].weight.detach().clone()}, {"": values["weight"]})


def test_a_load_that_fails_half_way_leaves_no_engine_to_train_with(tmp_path: Path) -> None:
    class Reader(dcp.FileSystemReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            planner.resolve_tensor(plan.items[0]).detach().copy_(torch.zeros(16, 8))
            raise OSError("gone")

    model = seeded(Flat)
    with offload.initialize(model, settings(tmp_path, {})) as engine:
        state = EngineState(engine)
        dcp.save({"app": state}, checkpoint_id=tmp_path / "saved")
        with pytest.raises(dcp.CheckpointException):
            dcp.load({"app": state}, storage_reader=Reader(tmp_path / "saved"))
        with pytest.raises(StateError, match="failed half-way"):
            train(model, engine.optimizer, 1)
        with pytest.raises(dcp.CheckpointException, match="failed half-way"):
            dcp.save({"app": state}, checkpoint_id=tmp_path / "mixture")
        dcp.load({"app": state}, checkpoint_id=tmp_path / "saved")
        train(model, engine.optimizer, 1)


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    model = seeded(Net)
    with offload.initialize(model, settings(tmp_path, {})) as engine:
        dcp.save({"app": EngineState(engine)}, checkpoint_id=tmp_path / "saved")
    other = seeded(Flat)
    with offload.initialize(other, settings(tmp_path, {})) as engine:
        before = other.state_dict()
        with pytest.raises(dcp.CheckpointException, match="Missing key"):
            dcp.load({"app": EngineState(engine)}, checkpoint_id=tmp_path / "saved")
        assert_same_bits(other.state_dict(), before)
        train(other, engine.optimizer, 1)


def test_extra_state_is_refused(tmp_path: Path) -> None:
    class Extra(Flat):
        def get_extra_state(self) -> Any:
            return {"number": 3}

    model = seeded(Extra)
    refusal = pytest.raises(UnsupportedError, match="_extra_state")
    with offload.initialize(model, settings(tmp_path, {})) as engine, refusal:
        EngineState(engine).state_dict()


def test_saving_and_loading_stream(tmp_path: Path, long: bool) -> None:
    if not long:
        pytest.skip("a quarter of a minute: with --long")
    assert_streams("dcp", tmp_path)
