"""Drawn programs of what people do to gradients and weights, beside plain PyTorch's."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
import offload.zero.step.update
from tests.offload.engine_cases import HOST, MARKS, NVME, ON
from tests.offload.engine_states import bits
from tests.offload.loop_trial import ADAMW, configuration

MIXED = {"parameters": "nvme", "gradients": "host", "optimizer": {"host": "50%", "nvme": "50%"}}
pytestmark = MARKS
PLACEMENTS = {"host": HOST, "nvme": NVME, "mixed": MIXED}
SECONDS_WORTH, MANY = 15, 1500


class Net(nn.Module):
    """Layers, one of them at times unused, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 10, bias=False)
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(6, 10, bias=False)
        self.out.weight = self.embed.weight
        self.skip = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for number, layer in enumerate(self.layers):
            if number != 1 or not self.skip:
                h = layer(h).tanh() + h
        y: Tensor = nn.functional.linear(h * self.gain, self.out.weight.t())
        return y


class Run:
    """One program's state, of plain PyTorch or of an engine."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.logged: list[float] = []
        self.kept: list[Any] = []

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def one(self, rng: random.Random) -> Any:
        return rng.choice(self.params)

    def with_gradient(self, rng: random.Random) -> list[Any]:
        """One parameter with a gradient, if there is one."""
        with_one = [p for p in self.params if p.grad is not None]
        return [rng.choice(with_one)] if with_one else []


def backward(run: Run, rng: random.Random) -> None:
    run.model.skip = rng.random() < 0.3
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rng.randrange(99))).to(ON)
    loss = run.model(x).pow(2).mean() / rng.choice([1, 1, 4])
    loss.backward()
    run.logged.append(loss.item())


def backward_with_weights(run: Run, rng: random.Random) -> None:
    loss = 0.01 * sum(p.pow(2).sum() for p in rng.sample(run.params, 2))
    loss.backward()  # type: ignore[union-attr]


def differentiate(run: Run, rng: random.Random) -> None:
    run.model.skip = False
    loss = run.model(torch.ones(2, 6, device=ON)).pow(2).mean()
    for p, gradient in zip(run.params, torch.autograd.grad(loss, run.params), strict=True):
        if rng.random() < 0.5:
            p.grad = gradient


def step(run: Run, rng: random.Random) -> None:
    run.optimizer.step()


def zero_grad(run: Run, rng: random.Random) -> None:
    to_none = rng.random() < 0.6
    rng.choice([run.model, run.optimizer]).zero_grad(set_to_none=to_none)


def clear_one(run: Run, rng: random.Random) -> None:
    run.one(rng).grad = None


def zero_one(run: Run, rng: random.Random) -> None:
    for p in run.with_gradient(rng):
        rng.choice([p.grad, p.grad.data, p.grad.detach()]).zero_()


def clip(run: Run, rng: random.Random) -> None:
    params = rng.choice([run.params, run.params[:3]])
    order = rng.choice([2.0, 2.0, math.inf, 1.0])
    foreach = rng.choice([None, True, False])
    norm = nn.utils.clip_grad_norm_(params, rng.choice([0.02, 0.5]), order, foreach=foreach)
    run.logged.append(float(norm))


def clip_values(run: Run, rng: random.Random) -> None:
    if run.with_gradient(rng):  # torch itself fails without any
        nn.utils.clip_grad_value_(run.params, 0.02, foreach=rng.choice([True, False]))


def log_gradients(run: Run, rng: random.Random) -> None:
    for p in run.params:
        g: Any = p.grad
        run.logged += [-1.0] if g is None else [g.norm().item(), g.sum().item(), g.max().item()]


def scale_one(run: Run, rng: random.Random) -> None:
    for p in run.with_gradient(rng):
        factor = rng.choice(
            [2.0, 0.3, -1, torch.tensor(0.5), torch.tensor([1.5] if p.dim() else 1.5, device=ON)]
        )
        rng.choice([p.grad.mul_, p.grad.div_, p.grad.data.mul_])(factor)


def scale_all(run: Run, rng: random.Random) -> None:
    gradients: list[Any] = [p.grad for p in run.params if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, rng.choice([0.5, torch.tensor(0.7)]))


def write_one(run: Run, rng: random.Random) -> None:
    for p in run.with_gradient(rng):
        p.grad.add_(p.detach(), alpha=0.1)
        p.grad.view(-1)[: 1 + p.numel() // 2].mul_(2)


def set_one(run: Run, rng: random.Random) -> None:
    p = run.one(rng)
    rng.choice([
        lambda: setattr(p, "grad", torch.full_like(p, 0.01)),
        lambda: setattr(p, "grad", p.detach() * 0.1),
        lambda: setattr(p, "grad", None if p.grad is None else p.grad * 2),
        lambda: p.grad is not None and setattr(p.grad, "data", p.grad.data * 0.5),
    ])()  # fmt: skip


def keep(run: Run, rng: random.Random) -> None:
    run.kept = [None if p.grad is None else p.grad.clone() for p in run.params]


def put_back(run: Run, rng: random.Random) -> None:
    for p, gradient in zip(run.params, run.kept, strict=False):
        if gradient is not None and rng.random() < 0.5:
            p.grad = gradient
    run.kept = []


def write_weight(run: Run, rng: random.Random) -> None:
    p, kind = run.one(rng), rng.randrange(5)
    with torch.no_grad():
        if kind == 0:
            p.mul_(0.9)
        elif kind == 1:
            p.data = p.data * 0.8
        elif kind == 2:
            p.data.clamp_(-0.2, 0.2)
        elif kind == 3:
            p.view(-1)[0] = 0.1
        elif p.grad is not None:
            p.sub_(p.grad, alpha=0.1)


def read_weights(run: Run, rng: random.Random) -> None:
    run.logged += [p.norm().item() for p in run.params]
    run.logged += [value.sum().item() for value in run.model.state_dict().values()]


def evaluate(run: Run, rng: random.Random) -> None:
    with torch.no_grad():
        run.logged.append(run.model(torch.ones(1, 6, device=ON)).sum().item())


def learning_rate(run: Run, rng: random.Random) -> None:
    run.optimizer.param_groups[0]["lr"] = rng.choice([1e-2, 3e-3])


Action = Callable[[Run, random.Random], None]
ACTIONS: dict[Action, int] = {
    backward: 9, step: 6, zero_grad: 4, clear_one: 2, zero_one: 2, clip: 3, clip_values: 1,
    log_gradients: 3, scale_one: 3, scale_all: 1, write_one: 2, set_one: 3, keep: 1, put_back: 1,
    write_weight: 3, read_weights: 2, evaluate: 1, learning_rate: 1, differentiate: 1,
    backward_with_weights: 1,
}  # fmt: skip


def drawn(seed: int) -> list[tuple[Action, int]]:
    """Actions, each with a seed of its own."""
    rng = random.Random(seed)
    chosen = rng.choices(list(ACTIONS), list(ACTIONS.values()), k=rng.randint(6, 22))
    return [(action, rng.randrange(10**6)) for action in [backward, *chosen, step]]


def play(program: list[tuple[Action, int]], run: Run) -> None:
    for action, seed in program:
        action(run, random.Random(seed))


def build() -> Any:
    torch.manual_seed(0)
    return Net()


def check(seed: int, folder: Path) -> None:
    program = drawn(seed)
    text = f"seed {seed}: {', '.join(action.__name__ for action, _ in program)}"
    plain = build().to(ON)
    expected = Run(plain, torch.optim.AdamW(plain.parameters(), **ADAMW))
    play(program, expected)
    ended = {}
    for where, placement in PLACEMENTS.items():
        budget = "host" if placement is HOST else "nvme"
        keys = configuration(folder, budget, {"placement": placement})
        with offload.initialize(build(), keys) as engine:
            run = Run(engine.module, engine.optimizer)
            play(program, run)
            engine.check_integrity()
            ended[where] = run.logged, engine.module.state_dict()
    weights = plain.state_dict()
    for where, (logged, state) in ended.items():
        assert len(logged) == len(expected.logged), f"{where}, {text}"
        for number, (a, b) in enumerate(zip(expected.logged, logged, strict=True)):
            near = math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-6)
            assert near, f"{where}, number {number}: {b} for {a}, {text}"
        for name, value in weights.items():
            difference = (value.cpu() - state[name].cpu()).abs().max().item()
            assert difference <= 2e-6, f"{where}: {name} differs by {difference}, {text}"
    logged, state = ended.pop("host")
    for where, (other, others) in ended.items():
        assert logged == other, f"{where} and host log different bits, {text}"
        differ = [name for name in state if bits(state[name]) != bits(others[name])]
        assert not differ, f"{where} and host: {differ} have different bits, {text}"


@pytest.mark.sample("0", "3")
@pytest.mark.parametrize("part", range(5))
def test_drawn_programs_train_as_plain_pytorch_does(part: int, long: bool, tmp_path: Path) -> None:
    count = (MANY if long else SECONDS_WORTH) // 5
    for seed in range(part * count, (part + 1) * count):
        check(seed, tmp_path)


def test_a_gradient_that_is_set_does_not_change_what_the_last_step_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = offload.zero.step.update.optimizer_step

    def late(*args: Any, **keys: Any) -> None:
        time.sleep(0.05)  # the model's thread goes on meanwhile
        real(*args, **keys)

    monkeypatch.setattr(offload.zero.step.update, "optimizer_step", late)
    plain = build().to(ON)
    steps_with_set_gradients(plain, torch.optim.AdamW(plain.parameters(), **ADAMW))
    keys = configuration(tmp_path, "nvme", {"placement": MIXED})
    with offload.initialize(build(), keys) as engine:
        steps_with_set_gradients(engine.module, engine.optimizer)
        trained = engine.module.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(trained[name].cpu(), value.cpu(), rtol=0, atol=2e-6)


def steps_with_set_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for size in (1.0, -2.0, 0.5):
        for p in model.parameters():
            p.grad = torch.full(p.shape, size, device=ON)  # `full_like` would wait for the update
        optimizer.step()
