"""Every optimizer and format of states, through the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import UnsupportedError
from tests.offload.engine_cases import HOST, MARKS, NVME, ON, TinyLM, batches, config, seeded
from tests.offload.engine_states import assert_same_bits, losses_of, parameters_of, states_of

pytestmark = MARKS

STEPS = 6
TIGHT = {"budget": {"host": "700KiB", "nvme": "64MiB"}}
Run = tuple[list[float], dict[str, Tensor]]


def run(folder: Path, placement: dict[str, Any], **keys: Any) -> Run:
    with offload.initialize(seeded(TinyLM), config(folder, placement, **keys)) as engine:
        losses = losses_of(engine, batches(STEPS))
        engine.check_integrity()
        return losses, states_of(engine)


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of "Symbolic discovery of optimization algorithms", as written there."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                c = beta1 * m + (1 - beta1) * p.grad
                p.sub_(group["lr"] * (c.sign() + group["weight_decay"] * p))
                m.copy_(beta2 * m + (1 - beta2) * p.grad)


KINDS: list[tuple[str, dict[str, Any], Callable[..., torch.optim.Optimizer]]] = [
    ("adamw", {"lr": 3e-3, "weight_decay": 0.1}, torch.optim.AdamW),
    ("adam", {"lr": 3e-3, "weight_decay": 0.1}, torch.optim.Adam),
    ("adam", {"lr": 3e-3, "amsgrad": True, "weight_decay": 0.0}, torch.optim.Adam),
    ("adagrad", {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.01}, torch.optim.Adagrad),
    ("sgd", {"lr": 1e-2}, torch.optim.SGD),
    ("sgd", {"lr": 1e-2, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}, torch.optim.SGD),
    ("sgd", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}, torch.optim.SGD),
    (
        "lion",
        {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1},
        lambda params, **numbers: Lion(params, numbers),
    ),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "numbers", "build"), KINDS, ids=lambda case: "" if callable(case) else str(case)[:40]
)
def test_it_trains_as_the_same_optimizer_of_torch_does(
    tmp_path: Path, name: str, numbers: dict[str, Any], build: Any
) -> None:
    model = seeded(TinyLM).to(ON)
    optimizer = build(model.parameters(), **numbers)
    expected = []
    for tokens in batches(STEPS):
        loss = model.loss(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    keys = config(tmp_path, NVME, optimizer={"type": name, "chunk": 2048, **numbers})
    with offload.initialize(seeded(TinyLM), keys) as engine:
        losses = losses_of(engine, batches(STEPS))
        weights = parameters_of(engine)
    assert losses == pytest.approx(expected, rel=1e-5)
    for key, value in model.named_parameters():
        torch.testing.assert_close(weights[key], value.detach(), rtol=1e-4, atol=1e-5)


FORMATS: list[dict[str, Any]] = [
    {"precision": "fp32", "optimizer": {"states": "bf16"}},
    {"precision": "fp32", "optimizer": {"states": "int8"}},
    {"precision": "bf16", "optimizer": {"states": "bf16"}},
    {"precision": "bf16", "optimizer": {"states": "int8"}},
    {"precision": "bf16", "optimizer": {"states": "int8", "master": "none"}},
    {"precision": "bf16", "optimizer": {"states": "fp32", "master": "none"}},
    {"precision": "bf16", "optimizer": {"type": "lion", "states": "int8", "master": "fp32"}},
    {"precision": "fp16", "optimizer": {"type": "sgd", "momentum": 0.9, "states": "bf16"}},
    {"precision": "bf16", "optimizer": {"type": "adagrad"}},
    {"precision": "bf16", "optimizer": {"type": "sgd"}},
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("keys", FORMATS, ids=str)
def test_no_placement_or_chunk_size_changes_a_bit(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Stochastic rounding depends on an element's place in its group, and on nothing else."""

    def trained(placement: dict[str, Any], chunk: int, **more: Any) -> Run:
        optimizer = {"lr": 3e-3, "chunk": chunk, **keys["optimizer"]}
        return run(tmp_path, placement, **{**keys, "optimizer": optimizer, **more})

    losses, states = trained(NVME, 2048, **TIGHT)
    expected_losses, expected = trained(HOST, 4096)
    assert losses == expected_losses
    assert_same_bits(states, expected)
    assert len(set(losses)) == STEPS


def test_the_seed_decides_how_states_are_rounded(tmp_path: Path) -> None:
    optimizer = {"states": "bf16"}
    _, one = run(tmp_path, HOST, optimizer=optimizer)
    _, same = run(tmp_path, HOST, optimizer=optimizer)
    _, other = run(tmp_path, HOST, optimizer=optimizer, seed=1)
    assert_same_bits(one, same)
    assert any(not torch.equal(one[name], other[name]) for name in one if "exp_avg" in name)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("optimizer", "changed", "error"),
    [
        ({"type": "sgd", "lr": 0.1}, {"momentum": 0.9}, "momentum_buffer .* keeps none; set"),
        ({"type": "adamw"}, {"amsgrad": True}, "max_exp_avg_sq"),
        ({"type": "adamw", "amsgrad": True}, {"amsgrad": False}, "keeps .*max_exp_avg_sq"),
        ({"type": "adamw"}, {"lr": float("nan")}, "lr: expected a finite number, got nan"),
        ({"type": "adamw"}, {"lr": float("inf")}, "lr: expected a finite number"),
        ({"type": "adamw"}, {"betas": (0.9, 1.0)}, "beta2: expected 0 <= beta2 < 1"),
    ],
)
@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
def test_numbers_that_cannot_work_are_refused_before_anything_is_updated(
    tmp_path: Path, placement: dict[str, Any], optimizer: dict[str, Any],
    changed: dict[str, Any], error: str,
) -> None:  # fmt: skip
    """A number that a scheduler or the program set is refused by `step`; training can go on."""
    keys = config(tmp_path, placement, optimizer={"chunk": 2048, **optimizer})
    model = seeded(TinyLM)
    with offload.initialize(model, keys) as engine:
        losses_of(engine, batches(1))
        before, (group,) = parameters_of(engine), engine.optimizer.param_groups
        kept = {name: group[name] for name in changed}
        model.loss(batches(1)[0]).backward()
        group.update(changed)
        with pytest.raises((UnsupportedError, ValueError), match=error):
            engine.optimizer.step()
        assert_same_bits(parameters_of(engine), before)
        group.update(kept)
        engine.optimizer.step()
        assert any(not torch.equal(a, b) for a, b in zip(
            parameters_of(engine).values(), before.values(), strict=True))  # fmt: skip
        engine.check_integrity()


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("precision", "master"),
    [("bf16", "split"), ("bf16", "fp32"), ("bf16", "none"), ("fp32", "none")],
)
@pytest.mark.parametrize("model_first", [True, False], ids=["model first", "optimizer first"])
@pytest.mark.parametrize(("steps", "there"), [(0, HOST), (3, NVME)], ids=["at first", "later"])
def test_state_dicts_keep_what_the_master_has_and_continue_a_run_in_another_engine(
    tmp_path: Path, precision: str, master: str, model_first: bool, steps: int, there: Any
) -> None:
    """Before any update the master was split from fp32 values: more bits than the weight's 16."""
    keys: dict[str, Any] = {"precision": precision, "optimizer": {"master": master}}
    with offload.initialize(seeded(TinyLM), config(tmp_path, HOST, **keys)) as engine:
        losses_of(engine, batches(steps, seed=5))
        weights, states = engine.module.state_dict(), engine.optimizer.state_dict()
        expected = losses_of(engine, batches(2))
        expected_states = states_of(engine)
    with offload.initialize(seeded(TinyLM, 1), config(tmp_path, there, **keys)) as engine:
        losses_of(engine, batches(steps // 3, seed=7))
        loads = [
            lambda: engine.module.load_state_dict(weights),
            lambda: engine.optimizer.load_state_dict(states),
        ]
        for load in loads if model_first else reversed(loads):
            load()
        assert losses_of(engine, batches(2)) == expected
        assert_same_bits(states_of(engine), expected_states)


class Weights(nn.Module):
    """The gradient of each weight is what the forward is given for it."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.weights, given, strict=True)
        return torch.stack([(weight * each).sum() for weight, each in pairs]).sum()


@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
def test_weights_are_no_farther_from_float64s_than_torchs(
    tmp_path: Path, placement: dict[str, str], long: bool
) -> None:
    torch.manual_seed(0)
    start = torch.randn(64, 128) * 0.02
    keys = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    steps = 200 if long else 25

    def gradient(step: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(step)
        return torch.randn(start.shape, generator=draw) * torch.randn(1, generator=draw).exp()

    def plain(dtype: torch.dtype) -> torch.Tensor:
        weight = nn.Parameter(start.to(dtype))
        optimizer = torch.optim.AdamW([weight], **keys)
        for step in range(steps):
            weight.grad = gradient(step).to(dtype)
            optimizer.step()
        return weight.detach().double()

    model = Weights(start.shape)
    with torch.no_grad():
        model.weights[0].copy_(start)
    rule = {"type": "adamw", **keys, "betas": list(keys["betas"])}
    with offload.initialize(model, config(tmp_path, placement, optimizer=rule)) as engine:
        for step in range(steps):
            model([gradient(step)]).backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        with engine.gathered(model.weights[0]):
            trained = model.weights[0].detach().double().clone()
    exact, torchs = plain(torch.float64), plain(torch.float32)
    distance = float((torchs - exact).norm())
    assert float((trained - exact).norm()) <= 1.1 * distance
    assert distance < 1e-5 * float(exact.norm())
