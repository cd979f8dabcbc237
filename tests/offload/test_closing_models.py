"""What closing gives back: the model is an ordinary one, with the values that it had."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.engine_lookup import engine_for, tiers_of
from offload.errors import BudgetError, ConfigError, StateError
from offload.models import closing
from offload.process import machine
from tests.offload.engine_cases import HOST, NVME, TinyLM, batches, config, on_the_cpu_alone, seeded
from tests.offload.engine_states import assert_same_bits, losses_of

pytestmark = on_the_cpu_alone("what is given back is on the CPU")
PLACED = pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])


def entries_of(model: nn.Module) -> dict[str, Any]:
    """The attributes of each module, with their lengths."""
    return {
        name: {key: len(value) if hasattr(value, "__len__") else None
               for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }  # fmt: skip


@PLACED
@pytest.mark.parametrize("keep", ["host", None])
def test_a_closed_engines_model_is_an_ordinary_one(
    placement: dict[str, Any], keep: Any, tmp_path: Path
) -> None:
    model = seeded(TinyLM)
    params, entries = dict(model.named_parameters()), entries_of(model)
    engine = offload.initialize(model, config(tmp_path, placement))
    losses_of(engine, batches(2))
    engine.backward(model.loss(batches(3)[2]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine.close(keep)
    assert entries_of(model) == entries
    assert {name: id(p) for name, p in model.named_parameters()} == {
        name: id(p) for name, p in params.items()
    }
    assert_same_bits(model.state_dict(), before)
    for param in params.values():
        assert type(param) is nn.Parameter
        assert param.grad is None
        assert param.untyped_storage().nbytes() == param.nbytes
    assert offload.engine_of(model) is None
    file = io.BytesIO()
    torch.save(model, file)
    other = copy.deepcopy(model)
    for each in (model, other):
        optimizer = torch.optim.AdamW([p for p in each.parameters() if p.requires_grad])
        each.loss(batches(1)[0]).backward()
        optimizer.step()
    assert_same_bits(model.state_dict(), other.state_dict())
    assert list(tmp_path.iterdir()) == []


@PLACED
def test_engine_dispatch_engine_is_one_training(placement: dict[str, Any], tmp_path: Path) -> None:
    model, alone = seeded(TinyLM), seeded(TinyLM)
    keys = config(tmp_path, placement)
    for _ in range(2):  # the optimizer begins anew
        with offload.initialize(alone, keys) as engine:
            expected = losses_of(engine, batches(2))
    engine = offload.initialize(model, keys)
    losses_of(engine, batches(2))
    logits = model(batches(1)[0][:, :-1]).detach()
    engine.close("host")
    offload.dispatch(model, keys)
    with torch.no_grad():
        assert torch.equal(model(batches(1)[0][:, :-1]), logits)
    offload.dispatched(model).close("host")
    with offload.initialize(model, keys) as engine:
        assert losses_of(engine, batches(2)) == expected
    assert_same_bits(model.state_dict(), alone.state_dict())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_parameter_comes_back_in_the_format_it_was_given_in(
    precision: str, tmp_path: Path
) -> None:
    model = seeded(TinyLM)
    engine = offload.initialize(model, config(tmp_path, precision=precision))
    losses_of(engine, batches(1))
    masters = {
        name: engine.values.read(p, "master") if precision == "bf16" else p.detach().clone()
        for name, p in model.named_parameters() if p.requires_grad
    }  # fmt: skip
    engine.close()
    named = dict(model.named_parameters())
    assert {p.dtype for p in named.values()} == {torch.float32}
    assert_same_bits({name: named[name].detach() for name in masters}, masters)


def test_more_than_the_budget_is_dropped_unless_it_is_asked_for(tmp_path: Path) -> None:
    def engine() -> Any:
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(64)))
        return offload.initialize(
            model, config(tmp_path, budget={"host": "1500KiB", "nvme": "64MiB"})
        )

    dropped = engine()
    dropped.close()
    with pytest.raises(StateError, match=r"4\.0 MiB of parameters are more than budget\.host"):
        dropped.module(torch.ones(1, 128))
    kept = engine()
    expected = kept.module(torch.ones(1, 128))
    kept.close("host")
    assert torch.equal(kept.module(torch.ones(1, 128)), expected)


def test_no_room_is_an_error_that_leaves_the_engine_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(TinyLM)
    engine = offload.initialize(model, config(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(machine, "available_memory_nbytes", lambda *_: -(1 << 40))
        with pytest.raises(BudgetError, match=r"1024\.0 GiB are missing"):
            engine.close("host")
    with pytest.raises(ConfigError, match="expected one of host, drop"):
        engine.close("ram")  # type: ignore[arg-type]
    assert losses_of(engine, batches(1))
    engine.close()


def test_an_error_amid_closing_closes_and_says_that_values_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(TinyLM)
    engine = offload.initialize(model, config(tmp_path, NVME))
    storage, left = closing._Given.storage, [3]

    def failing(given: Any) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError
        return storage(given)

    monkeypatch.setattr(closing._Given, "storage", failing)
    with pytest.raises(MemoryError):
        engine.close("host")
    assert engine.is_closed
    with pytest.raises(StateError, match="giving them back failed: MemoryError"):
        model.loss(batches(1)[0])
    assert list(tmp_path.iterdir()) == []


def test_a_trainer_takes_the_model_of_another_engine_over(tmp_path: Path) -> None:
    keys = offload.OffloadConfig.load(config(tmp_path))
    model, alone = seeded(TinyLM), seeded(TinyLM)
    expected = []
    for _ in range(2):
        with offload.initialize(alone, keys) as engine:
            expected += losses_of(engine, batches(3))
    first = engine_for(model, keys)
    losses = losses_of(first, batches(3))
    before, saved = first.optimizer, first.optimizer.state_dict()
    second = engine_for(model, keys)
    assert first.is_closed
    assert tiers_of(nn.Sequential(model)) == [second] == tiers_of(model.blocks)
    assert losses + losses_of(second, batches(3)) == expected
    for use in (
        lambda: before.load_state_dict(saved), before.state_dict,
        before.step,
    ):  # fmt: skip
        with pytest.raises(StateError, match="closed"):
            use()
    assert_same_bits(model.state_dict(), alone.state_dict())
    second.close()


def test_a_refused_takeover_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    keys = offload.OffloadConfig.load(config(tmp_path))
    model, alone = seeded(TinyLM), seeded(TinyLM)
    with offload.initialize(alone, keys) as engine:
        expected = losses_of(engine, batches(4))
    engine = engine_for(model, keys)
    losses = losses_of(engine, batches(4)[:2])
    groups = [{"params": [model.embed.weight], "lr": -1.0}]
    with pytest.raises((ConfigError, ValueError), match=r"learning rate|lr"):
        engine_for(model, keys, parameters=groups)
    assert losses + losses_of(engine, batches(4)[2:]) == expected
    engine.close()
