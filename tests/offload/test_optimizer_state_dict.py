"""What `load_state_dict` cannot take over whole is refused, and nothing is changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import StateError, StorageError, UnsupportedError
from offload.optimizers.client import ClientOptimizer
from tests.offload.engine_cases import HOST, MARKS, NVME, ON, TinyLM, batches, config, seeded
from tests.offload.engine_states import assert_same_bits, losses_of, states_of, train_step

pytestmark = MARKS

States = dict[str, Any]


def started(folder: Path, type_: str = "adamw", **keys: Any) -> offload.Engine:
    optimizer = {"type": type_, "lr": 3e-3, **keys}
    engine = offload.initialize(seeded(TinyLM), config(folder, NVME, optimizer=optimizer))
    losses_of(engine, batches(2))
    return engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[offload.Engine]:
    with started(tmp_path_factory.mktemp("swap")) as engine:
        yield engine


def state_dict(type_: str, tmp_path: Path, **keys: Any) -> States:
    with started(tmp_path, type_, **keys) as engine:
        return engine.optimizer.state_dict()


def assert_refused(engine: offload.Engine, states: States, fragment: str) -> None:
    before = states_of(engine)
    numbers = repr(engine.optimizer.param_groups)
    with pytest.raises((ValueError, UnsupportedError)) as caught:
        engine.optimizer.load_state_dict(states)
    assert fragment in str(caught.value)
    assert repr(engine.optimizer.param_groups) == numbers
    assert_same_bits(states_of(engine), before)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("type_", "keys", "fragment"),
    [
        ("sgd", {"momentum": 0.9}, "lacks betas, eps, amsgrad and has dampening, momentum"),
        ("sgd", {}, "it is not of optimizer.type: adamw"),
        ("lion", {}, "lacks eps, amsgrad"),
        ("adagrad", {}, "lacks betas"),
        ("adamw", {"amsgrad": True}, "max_exp_avg_sq"),
    ],
)
def test_states_of_another_kind_of_optimizer_are_refused(
    engine: offload.Engine, tmp_path: Path, type_: str, keys: dict[str, Any], fragment: str
) -> None:
    assert_refused(engine, state_dict(type_, tmp_path, **keys), fragment)


def last(states: States) -> dict[str, Any]:
    """The state of the last parameter: all before it could be loaded."""
    state: dict[str, Any] = states["state"][max(states["state"])]
    return state


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (lambda s: last(s).update(exp_avg=torch.zeros(3)), "exp_avg of norm.bias: expected"),
        (lambda s: last(s).update(exp_avg=torch.zeros(1)), "of shape (32,), found torch.Size([1])"),
        (lambda s: last(s).update(exp_avg=torch.zeros(())), "found torch.Size([])"),
        (lambda s: last(s).update(master=torch.zeros(3)), "master of norm.bias: expected"),
        (lambda s: last(s).update(exp_avg=[0.0] * 32), "found list"),
        (lambda s: last(s).pop("exp_avg_sq"), "of norm.bias lacks exp_avg_sq"),
        (lambda s: last(s).pop("step"), "of norm.bias lacks step"),
        (lambda s: last(s).update(momentum_buffer=torch.zeros(32)), "has momentum_buffer"),
        (lambda s: last(s).update(step=-1), "step of norm.bias is -1"),
        (lambda s: last(s).update(step=1.5), "is 1.5, and no count of steps"),
        (lambda s: last(s).update(step=float("nan")), "is nan"),
        (lambda s: last(s).update(step=torch.zeros(2)), "no count of steps"),
        (lambda s: last(s).update(step="1"), "no count of steps"),
        (lambda s: s["state"].update({max(s["state"]): 3}), "is a int, no dict"),
        (lambda s: s["param_groups"].append({**s["param_groups"][0], "params": []}),
         "a different number of parameter groups"),
        (lambda s: s["param_groups"][0]["params"].pop(), "doesn't match the size"),
        (lambda s: s["param_groups"][0].pop("params"), "doesn't match the size"),
        (lambda s: s["param_groups"][0].update(lr="evil"), "could not convert string"),
        (lambda s: s["param_groups"][0].update(lr=-1.0), "lr: expected 0 or more"),
        (lambda s: s["param_groups"][0].update(lr=torch.zeros(2)), "only one element"),
        (lambda s: s["param_groups"][0].update(betas=(0.9, 2.0)), "beta2: expected 0 <= beta2 < 1"),
        (lambda s: s["param_groups"][0].update(amsgrad=True), "max_exp_avg_sq"),
        (lambda s: s["param_groups"][0].pop("eps"), "lacks eps"),
        (lambda s: s["param_groups"][0].update(decoupled_weight_decay=False), "the opposite"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    engine: offload.Engine, change: Callable[[States], object], fragment: str
) -> None:
    losses_of(engine, batches(1))
    states = copy.deepcopy(engine.optimizer.state_dict())
    losses_of(engine, batches(1))  # what would be half-loaded differs from what is there
    change(states)
    assert_refused(engine, states, fragment)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("type_", "build", "keys"),
    [
        ("adamw", torch.optim.AdamW, {"weight_decay": 0.1}),
        ("adam", torch.optim.Adam, {"weight_decay": 0.1}),
        ("adamw", torch.optim.AdamW, {"amsgrad": True, "weight_decay": 0.0}),
        ("adagrad", torch.optim.Adagrad, {"weight_decay": 0.0}),
        ("sgd", torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.0}),
        ("sgd", torch.optim.SGD, {"weight_decay": 0.0}),
    ],
)
def test_a_state_dict_of_torch_goes_on_as_there(
    tmp_path: Path, type_: str, build: Callable[..., torch.optim.Optimizer], keys: dict[str, Any]
) -> None:
    def trained(model: Any, optimizer: torch.optim.Optimizer, data: list[Tensor]) -> list[float]:
        losses = []
        for tokens in data:
            losses.append(train_step(optimizer, model.loss(tokens)))
        return losses

    model = seeded(TinyLM).to(ON)
    plain = build([p for p in model.parameters() if p.requires_grad], lr=3e-3, **keys)
    trained(model, plain, batches(3))
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(plain.state_dict())
    expected = trained(model, plain, batches(4, seed=2))

    settings = config(tmp_path, HOST, optimizer={"type": type_, "lr": 3e-3, **keys})
    with offload.initialize(seeded(TinyLM, 3), settings) as engine:
        engine.module.load_state_dict(weights)
        engine.optimizer.load_state_dict(states)
        actual = losses_of(engine, batches(4, seed=2))
    assert actual == pytest.approx(expected, rel=1e-5)


def test_after_a_failure_half_way_nothing_trains_until_a_load_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tmp_path) as engine:
        states = engine.optimizer.state_dict()
        engine.save_checkpoint(tmp_path / "saved")
        write = engine.values.write_state
        calls = iter(range(1000))

        def failing(param: nn.Parameter, state: States) -> None:
            if next(calls) == 3:
                raise StorageError("writing failed: EIO")
            write(param, state)

        monkeypatch.setattr(engine.values, "write_state", failing)
        with pytest.raises(StorageError):
            engine.optimizer.load_state_dict(states)
        with pytest.raises(StateError, match="half-way"):
            engine.optimizer.step()
        engine.load_checkpoint(tmp_path / "saved")
        losses_of(engine, batches(1))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_and_pickles_of_the_optimizer_are_refused(
    engine: offload.Engine, copied: Callable[[Any], Any], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=r"state_dict\(\), or engine\.save_checkpoint"):
        copied(engine.optimizer)
    with pytest.raises(UnsupportedError):
        torch.save(engine.optimizer, tmp_path / "optimizer.pt")
    scheduler = torch.optim.lr_scheduler.ConstantLR(engine.optimizer)
    copied(scheduler.state_dict())
    copied(engine.optimizer.state_dict())


def test_an_empty_param_group_stays_and_a_plain_state_with_it_is_taken_over(tmp_path: Path) -> None:
    """LoRA, where all of a group is frozen: a plain run's state dict has that group."""
    model = torch.nn.Linear(3, 2)
    plain = torch.optim.AdamW([{"params": [*model.parameters()]}, {"params": [], "lr": 0.5}])
    train_step(plain, model(torch.ones(1, 3)).sum())
    saved = plain.state_dict()
    client = ClientOptimizer.of(plain)
    keys = {**config(tmp_path, HOST), "optimizer": client.section}
    with offload.initialize(model, keys, parameters=client.groups) as engine:
        client.lend(engine)
        assert [group["lr"] for group in engine.optimizer.param_groups] == [0.001, 0.5]
        engine.optimizer.load_state_dict(saved)
        loaded = engine.optimizer.state_dict()
        assert [group["params"] for group in loaded["param_groups"]] == [[0, 1], []]
        for number, states in saved["state"].items():
            kept = ("exp_avg", "exp_avg_sq")
            assert_same_bits(
                {name: loaded["state"][number][name] for name in kept},
                {name: states[name] for name in kept},
            )
        engine.save_checkpoint(tmp_path / "saved")
        engine.load_checkpoint(tmp_path / "saved")
