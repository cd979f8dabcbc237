"""What a checkpoint saves of models and optimizers comes back; `test_run_state.py` trains on."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import offload
from offload.errors import StateError, StorageError
from tests.offload.engine_cases import HOST, MARKS, NVME, TinyLM, batches, config, seeded
from tests.offload.engine_states import assert_same_bits, losses_of, states_of

pytestmark = MARKS


def keys_of(folder: Path, placement: dict[str, Any], **optimizer: Any) -> dict[str, Any]:
    optimizer = {"lr": 3e-3, "weight_decay": 0.1, "chunk": 2048, **optimizer}
    return config(folder, placement, precision="bf16", optimizer=optimizer, clip_grad_norm=0.5)


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": 0.2},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0, "lr": 5e-3},
    ]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "optimizer",
    [
        {"master": "fp32"},
        {"amsgrad": True},
        {"type": "adam"},
        {"type": "lion"},
        {"type": "adagrad"},
        {"type": "sgd"},
        {"type": "sgd", "momentum": 0.9},
        {"states": "bf16"},
        {"states": "int8"},
        {"type": "lion", "states": "int8"},
        {"master": "none"},
    ],
    ids=lambda keys: str(keys),
)
def test_every_kind_of_optimizer_state_survives(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    keys = keys_of(tmp_path, NVME, **optimizer)
    with offload.initialize(seeded(TinyLM), keys) as engine:
        losses_of(engine, batches(3))
        engine.save_checkpoint(tmp_path / "saved")
        saved = states_of(engine)
    with offload.initialize(seeded(TinyLM, 1), keys_of(tmp_path, HOST, **optimizer)) as new:
        new.load_checkpoint(tmp_path / "saved")
        assert_same_bits(states_of(new), saved)


def test_param_groups_keep_their_numbers_exactly(tmp_path: Path) -> None:
    def started() -> tuple[offload.Engine, Any]:
        model = seeded(TinyLM)
        engine = offload.initialize(model, keys_of(tmp_path, HOST), parameters=decay_groups(model))
        optimizer = engine.optimizer
        return engine, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)

    engine, schedule = started()
    with engine:
        for tokens in batches(3):
            losses_of(engine, [tokens])
            schedule.step()
        engine.save_checkpoint(tmp_path / "saved")
        expected = engine.optimizer.param_groups
    engine, _ = started()
    with engine:
        engine.load_checkpoint(tmp_path / "saved")
        for mine, other in zip(engine.optimizer.param_groups, expected, strict=True):
            assert {k: v for k, v in mine.items() if k != "params"} == {
                k: v for k, v in other.items() if k != "params"
            }
            assert isinstance(mine["betas"], tuple)


def test_a_learning_rate_in_a_tensor_stays_in_it(tmp_path: Path) -> None:
    with offload.initialize(seeded(TinyLM), keys_of(tmp_path, HOST)) as engine:
        group = engine.optimizer.param_groups[0]
        group["lr"] = lr = torch.tensor(0.1)
        engine.save_checkpoint(tmp_path / "saved")
        lr.fill_(0.7)
        engine.load_checkpoint(tmp_path / "saved")
        assert group["lr"] is lr
        assert lr.equal(torch.tensor(0.1))


class WithBuffers(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("empty", torch.zeros(0, 2, dtype=torch.bfloat16))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.table = nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False)


def test_persistent_buffers_and_integer_parameters_are_saved_and_others_are_not(
    tmp_path: Path,
) -> None:
    model = seeded(WithBuffers)
    with offload.initialize(model, keys_of(tmp_path, NVME)) as engine:
        model.count.fill_(7)
        model.mask[1] = True
        model.scratch.fill_(5)
        model.table.data.fill_(3)
        engine.save_checkpoint(tmp_path / "saved")
    model = seeded(WithBuffers)
    count = model.count
    with offload.initialize(model, keys_of(tmp_path, NVME)) as engine:
        engine.load_checkpoint(tmp_path / "saved")
    assert model.count is count
    assert model.count.item() == 7
    assert model.mask.tolist() == [False, True, False]
    assert model.scratch.tolist() == [1, 1]
    assert model.table.tolist() == [3, 3, 3, 3]


def test_any_safetensors_reader_loads_the_model(tmp_path: Path) -> None:
    with offload.initialize(seeded(TinyLM), keys_of(tmp_path, NVME)) as engine:
        losses_of(engine, batches(2))
        engine.save_checkpoint(tmp_path / "saved")
        expected = engine.module.state_dict()
    tensors: dict[str, Tensor] = {}
    for file in (tmp_path / "saved" / "parameters").iterdir():
        tensors |= load_file(file)
    tensors["head.weight"] = tensors["embed.weight"]  # tied: recorded once
    assert_same_bits(tensors, expected)
    weights = tmp_path / "saved"
    with offload.initialize(seeded(TinyLM, 3), keys_of(tmp_path, HOST), weights=weights) as engine:
        assert_same_bits(engine.module.state_dict(), expected)


def test_gradients_that_wait_for_a_step_refuse_a_save(tmp_path: Path) -> None:
    with offload.initialize(seeded(TinyLM), keys_of(tmp_path, NVME)) as engine:
        engine.backward(engine.module.loss(batches(1)[0]))  # type: ignore[operator]
        with pytest.raises(StateError, match=r"optimizer\.step"):
            engine.save_checkpoint(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()
        engine.optimizer.step()
        engine.save_checkpoint(tmp_path / "saved")  # before zero_grad: nothing would be lost
        engine.optimizer.zero_grad()


def test_loading_forgets_gradients(tmp_path: Path) -> None:
    with offload.initialize(seeded(TinyLM), keys_of(tmp_path, NVME)) as engine:
        engine.save_checkpoint(tmp_path / "saved")
        engine.backward(engine.module.loss(batches(1)[0]))  # type: ignore[operator]
        engine.load_checkpoint(tmp_path / "saved")
        assert engine.gradient(engine.module.norm.weight) is None  # type: ignore[arg-type]
        engine.save_checkpoint(tmp_path / "saved")


@pytest.mark.sample("nvme")
@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
def test_inside_gathered_neither_saving_nor_loading_works(
    tmp_path: Path, placement: dict[str, Any]
) -> None:
    with offload.initialize(seeded(TinyLM), keys_of(tmp_path, placement)) as engine:
        engine.save_checkpoint(tmp_path / "saved")
        with engine.gathered():
            with pytest.raises(StateError, match="gathered"):
                engine.save_checkpoint(tmp_path / "saved")
            with pytest.raises(StateError, match="gathered"):
                engine.load_checkpoint(tmp_path / "saved")


@pytest.mark.sample("nvme")
@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
def test_after_a_load_that_failed_half_way_nothing_trains_until_one_succeeds(
    tmp_path: Path, placement: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.checkpoint.format.reader import CheckpointReader

    with offload.initialize(seeded(TinyLM), keys_of(tmp_path, placement)) as engine:
        losses_of(engine, batches(2))
        engine.save_checkpoint(tmp_path / "saved")
        expected = losses_of(engine, batches(2, seed=2))

        calls = itertools.count()
        intact = CheckpointReader.read_into

        def failing(*args: Any) -> None:
            if next(calls) == 20:
                raise StorageError("reading failed: EIO")
            intact(*args)

        monkeypatch.setattr(CheckpointReader, "read_into", failing)
        with pytest.raises(StorageError, match="EIO"):
            engine.load_checkpoint(tmp_path / "saved")
        for use in (
            lambda: engine.module(batches(1)[0][:, :-1]),
            engine.optimizer.step,
            lambda: engine.save_checkpoint(tmp_path / "other"),
            engine.module.state_dict,
            lambda: engine.gathered().__enter__(),
        ):
            with pytest.raises(StateError, match=r"half-way.*load a checkpoint again"):
                use()

        monkeypatch.undo()
        engine.load_checkpoint(tmp_path / "saved")
        assert losses_of(engine, batches(2, seed=2)) == expected
