"""What a step reads and writes of experts on nvme, and what a pass of a dispatched model reads, is
what their router's choices ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import offload
from offload.kernels.variants import Master
from offload.memory import tier_manager
from offload.tiered_model import TieredModel
from offload.tiers.units import round_up
from offload.zero.groups import parameter_grouping
from offload.zero.step.records import RecordFormat
from offload.zero.step.update import GroupUpdate, UpdateQueue
from tests.offload.engine_cases import NVME, bits, config, seeded
from tests.outside.expert_cases import EXPERTS, HIDDEN, Routed
from tests.planning.test_step_time import AtOnce

LAYERS, STEPS, PASSES, CHUNK, PAGE = 3, 8, 6, 2048, 4096


def let_all_be_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_manager, "open_backend", lambda name, **options: AtOnce())
    submit = UpdateQueue.submit

    def update_at_once(
        queue: UpdateQueue, updates: Sequence[GroupUpdate], *, first: bool = False
    ) -> None:
        submit(queue, updates, first=first)
        if first:
            for update in updates:
                update.ready.wait()

    monkeypatch.setattr(UpdateQueue, "submit", update_at_once)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """Experts are groups, and every move is over when it was asked for."""
    monkeypatch.setattr(parameter_grouping, "SMALL_TABLE_NUMEL", 0)
    let_all_be_done_at_once(monkeypatch)


@dataclass
class Moved:
    read: int = 0
    written: int = 0

    @classmethod
    def until_now(cls, engine: offload.Engine) -> Moved:
        moved = engine.report().bytes_moved
        return cls(moved["nvme read"], moved["nvme write"])

    def __sub__(self, other: Moved) -> Moved:
        return Moved(self.read - other.read, self.written - other.written)


@dataclass
class Group:
    """Bytes of one group's states, as they lie on nvme: aligned, each chunk in whole pages."""

    weights: int
    gradients: int
    records: int

    @classmethod
    def of(cls, numel: int) -> Group:
        chunks = [min(CHUNK, numel - start) for start in range(0, numel, CHUNK)]
        weights = sum(round_up(4 * n, PAGE) for n in chunks)
        record = RecordFormat(Master.NONE)  # with a gap between its fields
        return cls(weights, weights, sum(round_up(record.nbytes(n), PAGE) for n in chunks))


class Counter:
    """The bytes of steps, from the routing alone."""

    def __init__(self, groups: dict[str, Group], *, packed: bool, stays: bool) -> None:
        """`stays`: memory keeps every copy, else none beyond a forward, a backward or an update."""
        self._groups = groups
        self._packed = packed
        self._stays = stays
        self._behind: set[str] = set()  # experts that have missed steps

    def step(self, routing: Sequence[set[int]]) -> Moved:
        chosen = [
            f"layers.{layer}.experts.{expert}"
            for layer, experts in enumerate(routing) for expert in sorted(experts)
        ]  # fmt: skip
        used = [*chosen, *(name for name in self._groups if "experts" not in name)]
        moved = Moved()
        for name in used:
            group = self._groups[name]
            weights, records = group.weights, group.records
            moved.written += weights + records  # gradients have room until they are used up
            if not self._stays:  # forward, backward, update
                moved.read += weights + weights + (weights + records)
            if name in self._behind:  # in the forward: what it missed
                moved.written += weights + records
                moved.read += 0 if self._stays else records
        if self._packed:
            self._behind = {name for name in self._groups if "experts" in name} - set(chosen)
        return moved


def drawn(tokens: int) -> Iterator[list[torch.Tensor]]:
    """Two experts for each token, by layer."""
    generator = torch.Generator().manual_seed(7)
    while True:
        yield [
            torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(tokens)])
            for _ in range(LAYERS)
        ]


def forget_copies(engine: TieredModel) -> None:
    """As if memory were too small to keep any."""
    pool = engine._tier_manager.pool
    with pool.lock:
        for piece in list(pool._held.values()):
            if piece.can_evict():
                piece.evict()


@pytest.mark.sample(2)
@pytest.mark.parametrize("packed", [False, True], ids=["modules", "packed"])
@pytest.mark.parametrize("stays", [False, True], ids=["nothing stays", "all stays"])
def test_steps_move_what_the_routing_asks_for(tmp_path: Path, packed: bool, stays: bool) -> None:
    model = seeded(lambda: Routed(LAYERS, packed=packed))
    keys = {"optimizer": {"type": "adamw", "chunk": CHUNK}, "prefetch": 2 if stays else 0}
    keys["clip_grad_norm"] = 1e-6  # so that updates are made behind the next forward
    budget = {"host": "64MiB", "nvme": "64MiB"}
    with offload.initialize(model, config(tmp_path, NVME, budget=budget, **keys)) as engine:
        groups = {group.name: Group.of(group.layout.numel) for group in engine.store.groups}
        assert len(groups) == LAYERS * (1 + EXPERTS)
        counter = Counter(groups, packed=packed, stays=stays)
        for number, routing in zip(range(STEPS), drawn(4), strict=False):
            before = Moved.until_now(engine)
            tokens = torch.ones(4, HIDDEN).cumsum(0).requires_grad_()  # backward needs all weights
            for forward in (True, False):
                if not stays:
                    forget_copies(engine)
                if forward:
                    out = engine.module(tokens, routing)
                else:
                    out.square().mean().backward()
            engine._runtime.updates.settle()
            if not stays:
                forget_copies(engine)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            engine._runtime.updates.settle()
            said = counter.step([set(chosen.flatten().tolist()) for chosen in routing])
            assert Moved.until_now(engine) - before == said, number


def read_nbytes(dispatched: offload.Dispatched) -> int:
    return dispatched.report().bytes_moved["nvme read"]


@pytest.mark.sample(4)
@pytest.mark.parametrize("packed", [False, True], ids=["modules", "packed"])
@pytest.mark.parametrize("stays", [False, True], ids=["nothing stays", "all stays"])
def test_a_pass_reads_what_the_routing_asks_for(tmp_path: Path, packed: bool, stays: bool) -> None:
    plain = seeded(lambda: Routed(LAYERS, packed=packed))
    model = seeded(lambda: Routed(LAYERS, packed=packed))
    keys = config(
        tmp_path, {"parameters": "nvme"}, budget={"host": "64MiB", "nvme": "64MiB"},
        prefetch=2 if stays else 0, device="cpu",
    )  # fmt: skip
    tokens = torch.ones(2, HIDDEN).cumsum(0)
    with offload.dispatched(offload.dispatch(model, keys)) as dispatched, torch.no_grad():
        groups = {g.name: round_up(g.state.nbytes, 4096) for g in dispatched.store.groups}
        assert len(groups) == LAYERS * (1 + EXPERTS)
        forget_copies(dispatched)
        known: set[str] = set()
        for _, routing in zip(range(PASSES), drawn(2), strict=False):
            before = read_nbytes(dispatched)
            assert bits(model(tokens, routing)) == bits(plain(tokens, routing))
            used = {name for name in groups if "experts" not in name}
            used |= {
                f"layers.{layer}.experts.{expert}"
                for layer, chosen in enumerate(routing)
                for expert in chosen.unique().tolist()
            }
            read = read_nbytes(dispatched) - before
            assert read == sum(groups[name] for name in used - known)
            if stays:
                known |= used
            else:
                forget_copies(dispatched)
