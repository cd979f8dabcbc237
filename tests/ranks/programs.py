"""What every rank runs in the tests of several ranks; imported by the ranks' processes."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import offload
import offload.tiered_model
from tests.offload.engine_cases import WIDTH, TinyLM, batches, config, seeded, states_of

BUDGET = {"host": "64MiB", "nvme": "64MiB"}
OPTIMIZER: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "chunk": 2048}


@dataclass(frozen=True)
class Case:
    """One training run, the same on every rank but for the data."""

    stage: int
    placement: dict[str, Any]
    model: Callable[[], nn.Module] = TinyLM
    steps: int = 3
    passes: int = 1  # per step
    local: bool = False  # all passes but the last one under `no_sync`
    idle: tuple[int, ...] = ()  # steps in which the data of the last rank does not count
    mirrored: bool = False  # planned as for a GPU, with host memory in its place
    keys: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    losses: list[float]  # of this rank, per pass
    norms: list[float]  # per step
    states: dict[str, Tensor]
    moved: dict[str, int]


class Choice(nn.Module):
    """One of two branches, by the data: ranks differ."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(13, 7, bias=False) for _ in range(2))

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.branches[number % 2](x)


class Branches(nn.Module):
    """Odd sizes, a tied weight, a branch that some ranks use, one that no rank uses, and a frozen
    layer; smaller than its padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 7)
        self.first = nn.Linear(7, 13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.choice = Choice()
        self.unused = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def loss(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.frozen(self.first(self.embed(tokens[:, :-1]))))
        y = self.choice(x, int(tokens[0, 0]))
        logits = nn.functional.linear(y, self.embed.weight) * self.scale
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.loss(tokens)


class Expert(nn.Module):
    """Of a table that is large enough to move one by one."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner, bias=False)
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class ExpertBlock(nn.Module):
    """Each token goes to one of some experts: few of them have tokens, others on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 12, bias=False)
        self.experts = nn.ModuleList(Expert(100) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            here = chosen == index
            y[here] = weights[here].unsqueeze(-1) * self.experts[index](x[here])
        return x + y


class Experts(TinyLM):
    """The experts of its blocks are groups of their own, below stage 3."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ExpertBlock() for _ in range(2))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens) if isinstance(model, Branches) else model.loss(tokens)  # type: ignore[operator]


def data_of(case: Case, world_size: int) -> list[list[list[Tensor]]]:
    flat = iter(batches(case.steps * case.passes * world_size))
    return [
        [[next(flat) for _ in range(world_size)] for _ in range(case.passes)]
        for _ in range(case.steps)
    ]


def train(case: Case, folder: str) -> Outcome:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    keys = config(
        Path(folder), case.placement, budget=BUDGET, optimizer=OPTIMIZER,
        zero={"stage": case.stage}, clip_grad_norm=0.5,
        gradient_accumulation_steps=case.passes,
    )  # fmt: skip
    keys = {**keys, **case.keys}
    # every rank builds other weights: those of the first one count
    losses, norms = [], []
    with (
        _as_with_a_gpu(case.mirrored),
        offload.initialize(seeded(case.model, seed=rank), keys) as engine,
    ):
        for number, step in enumerate(data_of(case, world_size)):
            for index, per_rank in enumerate(step):
                idle = number in case.idle and rank == world_size - 1
                local = case.local and index + 1 < len(step)
                loss = loss_of(engine.module, per_rank[rank])
                if local:
                    with engine.no_sync():
                        engine.backward(loss / case.passes)
                else:
                    engine.backward(0 * loss if idle else loss / case.passes)
                if not idle:
                    losses.append(loss.item())
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            norms.append(engine.report().gradient_norm or 0.0)
        engine.settle()
        moved = dict(engine.report().bytes_moved)  # before everything is gathered to be read
        states = states_of(engine)
        engine.check_integrity()
        report = engine.report()
        for tier in report.tiers.values():
            assert tier.peak_nbytes <= tier.budget_nbytes
        assert report.waits["ranks"] > 0 or world_size == 1
        return Outcome(losses, norms, states, moved)


@contextmanager
def _as_with_a_gpu(mirrored: bool) -> Iterator[None]:
    real = offload.tiered_model.this_machine
    if mirrored:
        offload.tiered_model.this_machine = lambda *args: dataclasses.replace(
            real(*args), device_nbytes=1 << 30
        )
    try:
        yield
    finally:
        offload.tiered_model.this_machine = real


def assert_near(
    actual: Tensor, expected: Tensor, bound: float = 1e-6, what: Any = "", least: float = 1e-30
) -> None:
    """The distance is at most `bound` of what is expected, or of `least` where that is more."""
    distance = (actual.double() - expected.double()).norm() / expected.double().norm().clamp(least)
    assert distance <= bound, (what, distance.item())


def train_all(cases: Sequence[Case], folder: str) -> list[Outcome]:
    return [train(case, folder) for case in cases]
