"""One training loop, run by plain PyTorch and by engines, and what came of it.

A loop is a function of a `Trial`: it trains `trial.model` as people write it and returns the
numbers that it would have logged. It is right where those numbers and all weights are plain
PyTorch's to 1e-6, with the same bits on every placement; else it has to be refused by an
`OffloadError`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import offload
from offload.errors import BudgetError, OffloadError
from tests.offload.engine_cases import DEVICE_BUDGET, HOST, NVME, ON
from tests.offload.engine_states import bits

WIDTH, OUT, BATCH, STEPS, BLOCKS = 32, 8, 6, 6, 4
PLACEMENTS = {"host": HOST, "nvme": NVME}
# On nvme no more than one or two of the five groups fit into memory.
BUDGETS = {"host": {"host": "16MiB"}, "nvme": {"host": "192KiB", "nvme": "64MiB"}}
# An eps near the gradients: with a smaller one rounding of the least of them shows in the weights.
ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-3, "weight_decay": 0.1}
PLAIN = "as plain PyTorch"
Build = Callable[[], nn.Module]
Loop = Callable[["Trial"], Sequence[float]]


def blocks() -> nn.Module:
    """Four blocks and a head."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, OUT))


@dataclass
class Trial:
    """What a loop has. `begin` makes an engine, or plain PyTorch's optimizer, for a model."""

    model: Any
    start: Callable[..., tuple[torch.optim.Optimizer, offload.Engine | None]]
    optimizer: Any = None
    engine: offload.Engine | None = None

    def begin(self) -> None:
        self.optimizer, self.engine = self.start(self.model)

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def data(self, count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(ON)

        return [(drawn(BATCH, WIDTH), drawn(BATCH, OUT)) for _ in range(count)]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = ((self.model(x) - y) ** 2).mean()
        return loss

    def train(self, count: int = STEPS, **parts: Callable[..., Any] | None) -> list[float]:
        """The loop that most rows change in one place: `before` the forward, `loss` of a batch,
        `backward` of the loss, `clip` after it, `step` of the optimizer, `after` it, `zero`;
        `extra` is added to the loss."""
        logged = []
        for x, y in self.data(count):
            _call(parts.get("before"))
            loss = (parts.get("loss") or self.loss)(x, y)
            extra = _call(parts.get("extra"))
            loss = loss if extra is None else loss + extra
            (parts.get("backward") or Tensor.backward)(loss)
            logged += [loss.item(), *_numbers(_call(parts.get("clip")))]
            (parts.get("step") or self.optimizer.step)()
            logged += _numbers(_call(parts.get("after")))
            if "zero" in parts:
                _call(parts["zero"])
            else:
                self.optimizer.zero_grad()
        return logged


def _call(part: Callable[[], Any] | None) -> Any:
    return None if part is None else part()


def _numbers(logged: Any) -> list[float]:
    if isinstance(logged, (float, int)) or (isinstance(logged, Tensor) and logged.numel() == 1):
        return [float(logged)]
    return [float(each) for each in logged] if isinstance(logged, (tuple, list)) else []


@dataclass(frozen=True, kw_only=True)
class Row:
    """A loop, and the words that the page has for it."""

    section: str
    text: str
    loop: Loop
    build: Build = blocks
    prepare: Callable[[Trial], None] | None = None  # before the engine is made
    keys: Mapping[str, Any] = field(default_factory=dict)  # of the configuration

    @property
    def name(self) -> str:
        return self.loop.__name__


@dataclass(frozen=True)
class Outcome:
    """Numbers and weights, or the error."""

    logged: tuple[float, ...] = ()
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    error: Exception | None = None


def plain(row: Row) -> Outcome:
    """A loop by PyTorch alone, with its AdamW."""

    def start(model: nn.Module, groups: Any = None) -> tuple[torch.optim.Optimizer, None]:
        chosen = model.parameters() if groups is None else groups
        return torch.optim.AdamW(chosen, **ADAMW), None

    return _run(row, start, ON)


def offloaded(row: Row, where: str) -> Outcome:
    """A loop by an engine."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as engines:

        def start(
            model: nn.Module, groups: Any = None
        ) -> tuple[torch.optim.Optimizer, offload.Engine]:
            keys = configuration(Path(folder), where, row.keys)
            engine = engines.enter_context(offload.initialize(model, keys, parameters=groups))
            return engine.optimizer, engine

        try:
            return _run(row, start)
        except BudgetError:
            raise  # no answer: the rows are to fit
        except OffloadError as error:
            return Outcome(error=error)


def configuration(folder: Path, where: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    optimizer = {**ADAMW, "betas": list(ADAMW["betas"]), **keys.get("optimizer", {})}
    return {
        "device": ON, "precision": "fp32", "budget": DEVICE_BUDGET | BUDGETS[where],
        "nvme": {"paths": [str(folder)], "backend": "threads"}, "placement": PLACEMENTS[where],
        **keys, "optimizer": optimizer,
    }  # fmt: skip


def _run(row: Row, start: Callable[[nn.Module], Any], device: str = "cpu") -> Outcome:
    torch.manual_seed(0)
    trial = Trial(model=row.build().to(device), start=start)
    if row.prepare is not None:
        row.prepare(trial)
    trial.begin()
    torch.manual_seed(1)
    logged = tuple(row.loop(trial))
    weights = {name: each.detach().clone() for name, each in trial.model.state_dict().items()}
    return Outcome(logged, weights)


def result(row: Row, placements: Iterable[str] = tuple(PLACEMENTS)) -> str:
    """What the page says of a row; AssertionError where the loop trains wrongly in silence."""
    expected = plain(row)
    outcomes = {where: offloaded(row, where) for where in placements}
    for where, outcome in outcomes.items():
        if outcome.error is None:
            _assert_near(f"{row.name} on {where}", expected, outcome)
    errors = {str(where): outcome.error for where, outcome in outcomes.items()}
    if not any(errors.values()):
        one, *others = outcomes.values()
        for other in others:
            _assert_same_bits(row.name, one, other)
        return PLAIN
    texts = {where: _words(error) for where, error in errors.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{where}: {text}" for where, text in texts.items())


def _words(error: Exception | None) -> str:
    if error is None:
        return PLAIN
    return f"`{type(error).__name__}`: {' '.join(str(error).split())}".replace("|", "\\|")


def _assert_near(what: str, expected: Outcome, actual: Outcome) -> None:
    assert len(expected.logged) == len(actual.logged), what
    for number, (a, b) in enumerate(zip(expected.logged, actual.logged, strict=True)):
        assert abs(a - b) <= 1e-6 * max(1.0, abs(a)), f"{what}: number {number}: {b} for {a}"
    assert expected.weights.keys() == actual.weights.keys(), what
    for name, weight in expected.weights.items():
        error = (weight.cpu().double() - actual.weights[name].cpu().double()).abs().max().item()
        assert error <= 1e-6, f"{what}: {name} differs by {error}"


def _assert_same_bits(what: str, one: Outcome, other: Outcome) -> None:
    assert one.logged == other.logged, f"{what}: logged {one.logged} and {other.logged}"
    differ = [name for name in one.weights if bits(one.weights[name]) != bits(other.weights[name])]
    assert not differ, f"{what}: {differ} have other bits on nvme than on host"
