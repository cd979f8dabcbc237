"""Ranks that use other modules than each other: a tower that only some batches have images for, or
that a batch calls twice, dropped layers, evaluations of one rank. Against one process with all.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offload
from offload.errors import OffloadError
from offload.zero.ranks.rank_work import SharedWork
from tests.offload.engine_cases import HOST, NVME, assert_same_bits, config, seeded, states_of
from tests.ranks.processes import run_ranks
from tests.ranks.programs import BUDGET

WIDTH = 56  # each of two ranks has a part of every block
OPTIMIZER: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "eps": 0.1}  # rounding stays small
KINDS = ("one skips", "first skips", "one twice", "text only")  # and drawn ones
SEEDS = range(int(os.environ.get("TOWER_SEEDS", "4")))
TIGHT = {"host": "2MiB", "nvme": "64MiB"}
VARIANTS: list[dict[str, Any]] = [  # and whether updates begin ahead of the step
    {"stage": 3}, {"stage": 3, "placement": NVME}, {"stage": 2}, {"stage": 1, "placement": NVME},
    {"stage": 3, "ahead": True}, {"stage": 3, "placement": NVME, "budget": TIGHT, "ahead": True},
]  # fmt: skip
IN_BACKWARD: dict[str, Any] = {"stage": 3, "optimizer": {**OPTIMIZER, "in_backward": True}}
SINGLE = 31  # of a program with one pass in each step


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mlp(self.norm(x)))


class TowerBlock(Block):
    pass


@dataclass(frozen=True)
class Batch:
    tokens: Tensor
    images: tuple[Tensor, ...]  # the tower is called once for each
    dropped: tuple[int, ...]
    recomputes: bool
    evaluations: tuple[int, int]  # of this rank alone, before and after its pass


class SeesImages(nn.Module):
    """A tower and the layers of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(5, WIDTH)
        self.tower = nn.ModuleList(TowerBlock() for _ in range(3))
        self.embed = nn.Embedding(31, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 31)

    def forward(self, batch: Batch) -> Tensor:
        def through(layers: Any, x: Tensor) -> Tensor:
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=False) if batch.recomputes else layer(x)
            return x

        x = self.embed(batch.tokens[:, :-1])
        for image in batch.images:
            x = x + through(self.tower, self.patches(image)).mean(dim=0)
        used = [layer for number, layer in enumerate(self.layers) if number not in batch.dropped]
        logits = self.head(through(used, x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.tokens[:, 1:].flatten())


class Program:
    """By step and pass: a batch for each rank."""

    def __init__(self, seed: int, ranks: int, kind: str) -> None:
        chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)

        def batch(rank: int) -> Batch:
            fixed = {"text only": 0, "one skips": int(rank == 0), "one twice": 1 + (rank == 1)}
            fixed["first skips"] = int(rank == 1)
            images, drawn = fixed.get(kind, chance.choice((0, 0, 1, 1, 2))), kind not in fixed
            return Batch(
                torch.randint(31, (2, 5), generator=generator),
                tuple(torch.randn(3, 5, generator=generator) for _ in range(images)),
                tuple(each for each in range(3) if drawn and chance.random() < 0.15),
                chance.random() < 0.3,
                (drawn * chance.choice((0, 0, 1, 2)), drawn * chance.choice((0, 0, 0, 1))),
            )

        self.steps = [
            [[batch(rank) for rank in range(ranks)] for _ in range(chance.choice((1, 1, 2, 3)))]
            for _ in range(3)
        ]
        self.local = [
            [chance.random() < 0.3 for _ in passes[1:]] + [False] for passes in self.steps
        ]
        self.model = seeded(SeesImages)
        for part in (self.model.patches, self.model.tower) if chance.random() < 0.2 else ():
            part.requires_grad_(False)

    def alone(self) -> dict[str, Tensor]:
        """Run in one process with all ranks' batches, in plain PyTorch."""
        trained = [param for param in self.model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, **OPTIMIZER)
        for batch in (batches for passes in self.steps for batches in (*passes, None)):
            if batch is not None:
                (sum(self.model(each) for each in batch) / len(batch)).backward()
                continue
            optimizer.step()
            optimizer.zero_grad()
        return dict(self.model.state_dict())

    def on_rank(
        self, folder: str, stage: int, ahead: bool = False, loads: bool = False,
        timeout_s: float = 30, **keys: Any,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Run this rank's part; its states in the end. `loads`: first from a checkpoint, and the
        second rank is slow in backward."""
        keys = {"budget": BUDGET, "placement": HOST, "optimizer": OPTIMIZER, **keys}
        keys |= {
            "zero": {"stage": stage, "timeout_s": timeout_s},
            "groups": {"blocks": ["Block", "TowerBlock"]},
        }
        with offload.initialize(self.model, config(Path(folder), **keys)) as engine:
            assert engine._runtime is not None
            policy: Any = engine._runtime.stepper.policy
            if loads:
                engine.save_checkpoint(Path(folder) / "saved")
                engine.load_checkpoint(Path(folder) / "saved")
            if loads and dist.get_rank() == 1:
                self.model.tower[0].register_full_backward_hook(lambda *_: time.sleep(0.5))
            for passes, local in zip(self.steps, self.local, strict=True):
                for number, (batches, unsynchronised) in enumerate(zip(passes, local, strict=True)):
                    if ahead:
                        policy.on, policy.passes = True, number + 1
                    batch = batches[dist.get_rank()]
                    self.evaluate(batch, batch.evaluations[0])
                    with engine.no_sync() if unsynchronised else nullcontext():
                        self.model(batch).backward()
                    self.evaluate(batch, batch.evaluations[1])
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            engine.check_integrity()
            return states_of(engine)

    @torch.no_grad()
    def evaluate(self, batch: Batch, times: int) -> None:
        for _ in range(times):
            self.model(batch)


def on_ranks(calls: Sequence[tuple[int, str, dict[str, Any]]], folder: str) -> list[Any]:
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    return [Program(s, ranks, kind).on_rank(folder, **variant) for s, kind, variant in calls]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_with_other_modules_train_what_one_process_does(ranks: int, tmp_path: Path) -> None:
    programs = [(7, kind) for kind in KINDS] + [(seed, "drawn") for seed in SEEDS]
    calls = [(*each, VARIANTS[n % len(VARIANTS)]) for n, each in enumerate(programs)]
    calls += [(SINGLE, "one twice", {**IN_BACKWARD, "loads": True})]
    calls += [(SINGLE, "one skips", IN_BACKWARD)]
    by_rank = run_ranks(ranks, tmp_path, on_ranks, calls, str(tmp_path), timeout_s=300)
    for number, (seed, kind, variant) in enumerate(calls):
        expected = Program(seed, ranks, kind).alone()
        for states in (answers[number] for answers in by_rank):
            assert_same_bits(states, by_rank[0][number])
            for name, value in expected.items():
                close: Any = {"rtol": 1e-6, "atol": 1e-6 * float(value.abs().max())}
                said = f"{name}: {kind} {seed}, {variant}"
                torch.testing.assert_close(states[name], value, **close, msg=said)


# ------------------------------------------------------------------------- as on GPUs
IMAGE, RAISES, SLEEPS = torch.ones(3, 5), -1, -2
CHANGES: dict[str, dict[str, Any]] = {
    "skips": {"images": ()}, "twice": {"images": (IMAGE, IMAGE)}, "drops": {"dropped": (2,)},
    "evaluates first": {"evaluations": (1, 0)}, "evaluates last": {"evaluations": (0, 1)},
    "raises": {"evaluations": (RAISES, 0)}, "sleeps": {"evaluations": (0, SLEEPS)},
}  # fmt: skip


class Alike(Program):
    """All ranks gather together and call the same modules, but for one change of the last rank."""

    def __init__(self, seed: int, ranks: int, kind: str) -> None:
        super().__init__(seed, ranks, "one image")
        like: dict[str, Any] = {"images": (IMAGE,), "dropped": (), "evaluations": (0, 0)}
        for batches in (each for passes in self.steps for each in passes):
            batches[:] = [replace(b, **like, recomputes=seed % 2 > 0) for b in batches]
        changed = self.steps[seed % len(self.steps)][-1]
        changed[-1] = replace(changed[-1], **CHANGES[kind])

    def evaluate(self, batch: Batch, times: int) -> None:
        if times == RAISES:
            raise ValueError("no more data")
        time.sleep(2.5 if times == SLEEPS else 0)  # longer than what others wait for is in doubt
        super().evaluate(batch, times)


def together(folder: str, seed: int, kind: str) -> Any:
    SharedWork._service = lambda _: None  # type: ignore[assignment,method-assign]
    program = Alike(seed, dist.get_world_size(), kind)
    try:
        return program.on_rank(folder, stage=3, timeout_s=3600)  # an error comes long before
    except (OffloadError, ValueError) as error:
        time.sleep(2.0)  # others get theirs while this process lives on
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(("ranks", "seed", "kind"), [
    (2, 0, "skips"), (2, 1, "twice"), (2, 2, "evaluates last"), (2, 1, "raises"), (2, 2, "sleeps"),
    *(pytest.param(3, n, kind, marks=pytest.mark.slow) for n, kind in enumerate(CHANGES)),
])  # fmt: skip
def test_ranks_that_gather_together_are_told_soon_when_they_part(
    ranks: int, seed: int, kind: str, tmp_path: Path
) -> None:
    by_rank = run_ranks(ranks, tmp_path, together, str(tmp_path), seed, kind)
    if kind == "sleeps":
        for name, value in Alike(seed, ranks, kind).alone().items():
            torch.testing.assert_close(by_rank[-1][name], value, rtol=1e-6, atol=1e-6)
        return
    if kind == "raises":
        assert by_rank.pop() == "ValueError: no more data"
    for said in by_rank:
        assert re.match(f"RankError: .* different ways: .*rank {ranks - 1} has begun ", said), said


class Reads(Program):
    """Reads a block of the tower where others evaluate."""

    @torch.no_grad()
    def evaluate(self, batch: Batch, times: int) -> None:
        self.model.tower[1](torch.ones(3, WIDTH))


def refused(folder: str, program: type[Program], kind: str) -> str:
    try:
        program(SINGLE, 2, kind).on_rank(folder, **IN_BACKWARD)
    except OffloadError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(("program", "kind", "rank", "said"), [
    # the order of gradients is that of the first rank, whose embedding comes before the tower
    (Program, "first skips", 1, "optimizer.in_backward: the gradient of embed.weight came after"),
    # it has updated the tower, and the other rank will do so in the step
    (Reads, "one skips", 0, "tower.1 parameters: other ranks have values of another moment"),
])  # fmt: skip
def test_values_updated_in_backward_on_some_ranks_are_an_error(
    program: type[Program], kind: str, rank: int, said: str, tmp_path: Path
) -> None:
    by_rank = run_ranks(2, tmp_path, refused, str(tmp_path), program, kind)
    assert by_rank[rank].startswith(f"StateError: {said}")
    assert f"rank {rank} has left: StateError: {said}" in by_rank[1 - rank]
