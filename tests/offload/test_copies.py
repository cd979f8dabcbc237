"""`copy.deepcopy` of a model in tiers is an ordinary model with the same values."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import BudgetError, StateError, UnsupportedError
from offload.process import machine
from tests.offload.engine_cases import (
    HOST,
    NVME,
    TinyLM,
    assert_same_bits,
    batches,
    config,
    losses_of,
    on_the_cpu_alone,
    seeded,
)
from tests.offload.test_given_back import PLACED, entries_of

pytestmark = on_the_cpu_alone("copies are on the CPU")
MANY, FEW = 40, 5
SGD = {"type": "sgd", "lr": 0.1, "weight_decay": 0.0}


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train(model: Any, steps: int, seed: int) -> None:
    """In plain PyTorch, with the rule of the engines here."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for tokens in batches(steps, seed):
        model.loss(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


class WithExtras(TinyLM):
    """Buffers, hooks and attributes of the user's."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.register_buffer("calls", torch.zeros(1))
        self.same = self.calls
        self.note = {"seen": [1, 2], "norm": self.norm}
        self.register_forward_hook(count)
        self.blocks[0].register_state_dict_post_hook(noted)
        self.own_weight = [self.embed.weight]


def count(module: Any, args: Any, output: Any) -> None:
    module.calls += 1


def noted(module: Any, entries: Any, prefix: str, metadata: Any) -> None:
    entries[prefix + "noted"] = torch.ones(())


class WithEncoder(TinyLM):
    """Modules that ask of what class their parameters are."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.blocks.append(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


class Frozen(TinyLM):
    """A frozen base, and an adapter."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.requires_grad_(False)
        self.norm = nn.Sequential(self.norm, nn.Linear(32, 32))  # type: ignore[assignment]


WHEN: dict[str, Callable[[Any, Any], Any]] = {
    "at rest": lambda engine, model: copy.deepcopy(model),
    "without gradients": torch.no_grad()(lambda engine, model: copy.deepcopy(model)),
    "in inference mode": torch.inference_mode()(lambda engine, model: copy.deepcopy(model)),
    "while gathered": lambda engine, model: _while_gathered(engine, model),
    "within a list": lambda engine, model: copy.deepcopy([model, {"a": model.norm}])[0],
    "within a module": lambda engine, model: copy.deepcopy(nn.Sequential(model))[0],
    "in evaluation": lambda engine, model: copy.deepcopy(model.eval()).train(bool(model.train())),
}
PLACEMENTS: list[dict[str, Any]] = [
    HOST, NVME, {**NVME, "parameters": "host"}, {**HOST, "parameters": "nvme"},
    {**NVME, "activations": {"checkpoint": True}}, {**HOST, "optimizer": "nvme"},
]  # fmt: skip


def _while_gathered(engine: Any, model: Any) -> Any:
    with engine.gathered():
        return copy.deepcopy(model)


def drawn(seed: int) -> tuple[Any, dict[str, Any], str, int]:
    draw = random.Random(seed)
    kind = draw.choice([TinyLM, WithExtras, WithEncoder, Frozen])
    keys = {"placement": draw.choice(PLACEMENTS), "micro": draw.choice([1, 1, 2])}
    return kind, keys, draw.choice(list(WHEN)), draw.randrange(3)


def test_a_drawn_copy_has_the_bits_of_plain_pytorch_and_both_train_on(
    long: bool, tmp_path: Path
) -> None:
    for seed in range(MANY if long else FEW):
        check_drawn(seed, tmp_path)


def check_drawn(seed: int, tmp_path: Path) -> None:
    kind, keys, when, steps = drawn(seed)
    model, plain = seeded(kind), seeded(kind)
    entries = entries_of(plain)
    more = {} if keys["micro"] == 1 or kind is WithEncoder else {"micro_batches": 2}
    settings = config(tmp_path, keys["placement"], optimizer=SGD, **more)
    with offload.initialize(model, settings) as engine:
        losses_of(engine, batches(steps))
        attached = entries_of(model)
        copied = WHEN[when](engine, model)
        assert entries_of(model) == attached
        assert entries_of(copied) == entries
        expected = values_of(model)
        assert_same_bits(values_of(copied), expected)
        if not steps:
            assert_same_bits(expected, values_of(plain))
        elif kind is not WithExtras:
            train(plain, steps, seed=1)
            assert_close(values_of(copied), values_of(plain))
        given = dict(model.named_parameters(remove_duplicate=False))
        for name, param in copied.named_parameters(remove_duplicate=False):
            assert type(param) is nn.Parameter
            assert param.requires_grad == given[name].requires_grad
            assert param.device.type == "cpu"
            assert param.grad is None
            assert not param.is_inference()
        assert copied.head.weight is copied.embed.weight
        if kind is WithExtras:
            assert copied.same is copied.calls
            assert copied.own_weight[0] is copied.embed.weight
            assert copied.note["norm"] is copied.norm
            assert copied.note["seen"] is not model.note["seen"]
        other = copy.deepcopy(copied)
        train(copied, 2, seed=2)
        assert_same_bits(values_of(model), expected)
        losses_of(engine, batches(2, seed=2))
        with offload.initialize(other, settings) as second:
            losses_of(second, batches(2, seed=2))
            assert_same_bits(values_of(other), values_of(model))


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], msg=name)


# ------------------------------------------------------------------------------- kinds of copies
@PLACED
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_copy_has_the_format_that_was_given_and_the_bits_of_the_masters(
    placement: dict[str, Any], precision: str, tmp_path: Path
) -> None:
    """As `close(keep="host")` gives them back."""
    model = seeded(TinyLM)
    engine = offload.initialize(model, config(tmp_path, placement, precision=precision))
    losses_of(engine, batches(2))
    with engine.gathered(model.norm.weight), torch.no_grad():
        model.norm.weight.mul_(1.5)
        within = copy.deepcopy(model)
    copied = copy.deepcopy(model)
    engine.close("host")
    for each in within, copied:
        assert {p.dtype for p in each.parameters()} == {torch.float32}
        assert_same_bits(values_of(each), values_of(model))


@PLACED
def test_parts_and_lists_of_a_model_are_copied(placement: dict[str, Any], tmp_path: Path) -> None:
    model = seeded(WithEncoder)
    engine = offload.initialize(model, config(tmp_path, placement, optimizer=SGD))
    losses_of(engine, batches(1))
    x = torch.randn(2, 6, 32)
    parts = [model.blocks[0], model.blocks[1].layers[0], model.blocks[1], model.norm, model.embed]
    with torch.no_grad():
        for part in parts:
            given = torch.tensor([[1, 2]]) if part is model.embed else x
            clones = nn.ModuleList(copy.deepcopy(part) for _ in range(2))
            for clone in clones:
                assert torch.equal(clone(given), part(given))
    one, two, head = copy.deepcopy([model.embed.weight, model.embed.weight, model.head])
    assert one is two is head.weight
    assert type(one) is nn.Parameter
    assert torch.equal(one, model.embed.weight.detach())
    losses_of(engine, batches(1))
    engine.close()


@PLACED
def test_a_dispatched_model_is_copied(placement: dict[str, Any], tmp_path: Path) -> None:
    model = seeded(WithEncoder).eval()
    keys = config(tmp_path, {"parameters": placement["parameters"]})
    expected = values_of(model)
    with torch.no_grad():
        logits = model(batches(1)[0][:, :-1])
        offload.dispatch(model, keys)
        copied = copy.deepcopy(model)
        assert offload.engine_of(copied) is None
        assert_same_bits(values_of(copied), expected)
        assert torch.equal(copied(batches(1)[0][:, :-1]), logits)
        offload.dispatch(copied, keys)
        assert torch.equal(copied(batches(1)[0][:, :-1]), logits)
    offload.dispatched(copied).close("host")
    offload.dispatched(model).close("drop")
    train(copied.train(), 1, seed=1)
    with pytest.raises(StateError, match="closed"):
        copy.deepcopy(model)


def test_weights_stored_in_fewer_bits_are_copied_as_the_values_that_are_computed_with(
    tmp_path: Path,
) -> None:
    model = seeded(TinyLM).requires_grad_(False)
    keys = config(tmp_path, {"parameters": "host"}, storage={"weights": "int8", "group_size": 32})
    offload.dispatch(model, keys)
    copied = copy.deepcopy(model)
    assert_same_bits(values_of(copied), values_of(model))
    offload.dispatched(model).close()


@PLACED
def test_a_copy_between_forward_and_backward_changes_neither(
    placement: dict[str, Any], tmp_path: Path
) -> None:
    found = []
    for copies in (False, True):
        model = seeded(TinyLM)
        with offload.initialize(model, config(tmp_path, placement, optimizer=SGD)) as engine:
            for tokens in batches(2):
                loss = model.loss(tokens)
                if copies:
                    copy.deepcopy(model)
                loss.backward()
                if copies:
                    assert all(p.grad is None for p in copy.deepcopy(model).parameters())
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            found.append(values_of(model))
    assert_same_bits(*found)


class LooksInside(nn.Module):
    """Has what the model in it has, as PEFT's models do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class CopiesItself(TinyLM):
    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        vars(made).update({key: copy.deepcopy(v, memo) for key, v in vars(self).items()})
        made.was_copied = True
        return made


class SaysItsState(TinyLM):
    def __getstate__(self) -> dict[str, Any]:
        return vars(self)


@PLACED
@pytest.mark.parametrize(
    ("kind", "around"), [(CopiesItself, False), (SaysItsState, False), (SaysItsState, True)]
)
def test_models_that_copy_themselves_do_so(
    kind: Any, around: bool, placement: dict[str, Any], tmp_path: Path
) -> None:
    inner = seeded(kind)
    model = LooksInside(inner) if around else inner
    entries = entries_of(model)
    with offload.initialize(inner, config(tmp_path, placement, optimizer=SGD)) as engine:
        losses_of(engine, batches(1))
        copied = copy.deepcopy(model)
        assert type(copied) is type(model)
        assert hasattr(copied, "was_copied") is (kind is CopiesItself)
        vars(copied.inner if around else copied).pop("was_copied", None)
        assert entries_of(copied) == entries
        assert_same_bits(values_of(copied), values_of(model))
        train(copied, 1, seed=2)


@PLACED
def test_an_average_of_the_model_follows_it(placement: dict[str, Any], tmp_path: Path) -> None:
    """torch's own, which copies the model first."""
    found = []
    for way in (None, placement):
        model = seeded(TinyLM)
        if way is None:
            engine, step = None, torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            engine = offload.initialize(model, config(tmp_path, way, optimizer=SGD))
            step = engine.optimizer
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        for tokens in batches(3):
            model.loss(tokens).backward()
            step.step()
            step.zero_grad()
            average.update_parameters(model)
        found.append(values_of(average))
        if engine is not None:
            engine.close()
    assert_close(*found)


# ----------------------------------------------------------------------------------- refusals
def test_no_room_for_a_copy_is_an_error_that_says_how_much_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(TinyLM)
    with offload.initialize(model, config(tmp_path)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(machine, "available_memory_nbytes", lambda *_: 1 << 10)
            with pytest.raises(BudgetError, match=r"KiB are missing; .*save_checkpoint"):
                copy.deepcopy(model)
        losses_of(engine, batches(1))


@PLACED
@pytest.mark.parametrize("kind", [TinyLM, WithEncoder])
def test_a_model_in_tiers_is_not_pickled(
    kind: Any, placement: dict[str, Any], tmp_path: Path
) -> None:
    model = seeded(kind)
    with offload.initialize(model, config(tmp_path, placement)):
        for each in (model, *model.blocks, model.norm):
            with pytest.raises(UnsupportedError, match="cannot be pickled"):
                pickle.dumps(each)
        loaded = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert_same_bits(values_of(loaded), values_of(model))


def test_an_engine_is_not_copied_and_says_what_is(tmp_path: Path) -> None:
    model = seeded(TinyLM)
    with offload.initialize(model, config(tmp_path)) as engine:
        model.notes = [engine]
        with pytest.raises(UnsupportedError, match=r"Engine cannot be copied .*deepcopy"):
            copy.deepcopy(model)
        del model.notes
        losses_of(engine, batches(1))
