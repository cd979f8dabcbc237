"""What a rank holds under every stage, against the layouts, the plan and the prediction.

A rank's states are exact: parameters, gradients and optimizer records of its shards (or of whole
groups, where the stage keeps them whole), in whole pages. What it needs for the others depends on
the moment: how far reductions are behind backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.planning.activations.facts import ActivationFacts, PassCost
from offload.planning.machine.baseline import Baseline
from offload.planning.plan.estimate import Workload
from offload.planning.plan.sizes import STAGING_BUFFERS, pages
from offload.planning.step.memory import PlannedMemory
from offload.tiers.ledger import StateClass
from offload.zero.groups.layout import SHARD_ALIGN_NUMEL, Layout
from offload.zero.groups.parameter_grouping import group_parameters
from offload.zero.ranks.collectives import Collectives
from offload.zero.ranks.sharding import BUCKETS
from tests.offload.engine_cases import HOST, NVME, TinyLM, batches, config, losses_of, seeded
from tests.ranks.processes import run_ranks

WORLD, BLOCKS, STEPS = 2, 7, 3
ITEMSIZE = 4
CASES = [(stage, where) for stage in range(4) for where in ("host", "nvme")]
_NOTHING = PassCost(0, 0, 0)


@dataclass(frozen=True)
class Held:
    """One rank of one run: peaks of its ledger, what was planned and predicted."""

    rank: int
    stage: int
    peaks: Mapping[str, int]
    by_class: Mapping[str, Mapping[str, int]]
    planned: Mapping[str, Mapping[str, int]]
    predicted: Mapping[str, int]
    layouts: Sequence[Layout]
    staging_nbytes: int  # of the update
    shared_nbytes: int  # planned, for working with other ranks
    gathered: Sequence[int]  # bytes of every all-gather of the last step, in order
    reduced: Sequence[int]

    @property
    def numel(self) -> int:
        return sum(layout.numel for layout in self.layouts)

    @property
    def numel_trainable(self) -> int:
        return sum(layout.numel_trainable for layout in self.layouts)


def build() -> TinyLM:
    return TinyLM(BLOCKS)


def train(folder: str, cases: Sequence[tuple[int, str]]) -> list[Held]:
    return [_train(Path(folder), stage, where) for stage, where in cases]


def _train(folder: Path, stage: int, where: str) -> Held:
    import torch.distributed as dist

    placement = {"host": HOST, "nvme": NVME}[where]
    loaded = offload.OffloadConfig.load(
        config(folder, placement, zero={"stage": stage}, budget={"host": "64MiB", "nvme": "64MiB"})
    )
    model = seeded(build)
    with offload.initialize(model, loaded) as engine:
        for tokens in batches(STEPS - 1):
            losses_of(engine, [tokens])
        engine.settle()
        with Recorded() as recorded:
            losses_of(engine, batches(1))
            engine.settle()
        tiers, plan = engine.report().tiers, engine.plan
        shape = group_parameters(build(), ()).shape()
    facts = ActivationFacts(0, 0, 0, "", _NOTHING, _NOTHING)
    memory = PlannedMemory(plan, loaded, shape, facts, Workload(1, 1), Baseline(0))
    return Held(
        rank=dist.get_rank(),
        stage=stage,
        peaks={str(tier): held.peak_nbytes for tier, held in tiers.items()},
        by_class={str(tier): _words(held.peak_by_class) for tier, held in tiers.items()},
        planned={str(tier): _words(by_class) for tier, by_class in plan.expected.items()},
        predicted={str(t): n for t, n in memory.estimate().ledger_peaks.items()},
        layouts=[group.layout for group in plan.groups],
        staging_nbytes=plan.staging_buffers * plan.staging_nbytes,
        shared_nbytes=plan.shared.total_nbytes if plan.shared is not None else 0,
        gathered=recorded.gathered,
        reduced=recorded.reduced,
    )


def _words(by_class: Mapping[StateClass, int]) -> dict[str, int]:
    return {str(name): nbytes for name, nbytes in by_class.items()}


class Recorded:
    """Lengths of the buffers that are gathered and reduced inside, in order."""

    def __init__(self) -> None:
        self.gathered: list[int] = []
        self.reduced: list[int] = []
        self._gather, self._reduce = Collectives.gather, Collectives.reduce

    def __enter__(self) -> Recorded:
        def gather(collectives: Collectives, whole: Any, *rest: Any) -> None:
            self.gathered.append(whole.numel())
            self._gather(collectives, whole, *rest)

        def reduce(collectives: Collectives, contribution: Any, *rest: Any) -> Any:
            self.reduced.append(contribution.numel() * contribution.element_size())
            return self._reduce(collectives, contribution, *rest)

        Collectives.gather, Collectives.reduce = gather, reduce  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: Any) -> None:
        Collectives.gather, Collectives.reduce = (  # type: ignore[method-assign]
            self._gather, self._reduce,
        )  # fmt: skip


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], list[Held]]:
    folder = tmp_path_factory.mktemp("ranks")
    answers = run_ranks(WORLD, folder / "run", train, str(folder), CASES)
    return {case: [answer[number] for answer in answers] for number, case in enumerate(CASES)}


def shards(stage: int) -> int:
    """Ranks that one copy of the states is cut for."""
    return 1 if stage == 0 else WORLD


@pytest.mark.parametrize(("stage", "where"), CASES)
def test_states_take_their_shards_and_no_more(
    stage: int, where: str, held: dict[tuple[int, str], list[Held]]
) -> None:
    ranks = shards(stage)
    for each in held[stage, where]:
        assert each.numel % (ranks * SHARD_ALIGN_NUMEL) == 0
        whole = 1 if stage < 3 else ranks
        home = each.by_class[where]
        least = {
            "parameters": each.numel * ITEMSIZE // whole,
            "gradients": each.numel_trainable * ITEMSIZE // ranks,
            "optimizer": 2 * each.numel_trainable * ITEMSIZE // ranks,  # two moments, fp32
        }
        for name, nbytes in least.items():
            planned = each.planned[where][name]
            assert nbytes <= planned <= nbytes + len(each.layouts) * pages(1)
            if where == "host":
                assert home[name] == planned
            elif name == "gradients":  # those that find room in memory are never written
                assert home.get(name, 0) <= planned
            else:  # new versions beside the old ones
                assert home[name] >= planned


@pytest.mark.parametrize(("stage", "where"), CASES)
def test_the_ledger_reaches_what_was_predicted(
    stage: int, where: str, held: dict[tuple[int, str], list[Held]]
) -> None:
    for each in held[stage, where]:
        buckets = sorted(pages(layout.numel_trainable * ITEMSIZE) for layout in each.layouts)
        bucket, late = buckets[-1], sum(buckets[:-BUCKETS])
        few = 2 * bucket  # gradients on their way to other ranks: fewer, where they are quick
        if where == "nvme":  # copies of gradients and records meet only where updates are late
            few += max(each.planned["nvme"]["gradients"], STAGING_BUFFERS * bucket)
        predicted = each.predicted["host"]
        assert predicted - few <= each.peaks["host"] <= predicted + late
        assert each.planned["nvme"].get("optimizer", 0) <= each.peaks["nvme"]
        assert each.peaks["nvme"] <= each.predicted["nvme"]


@pytest.mark.parametrize("stage", range(4))
def test_every_group_is_reduced_once_and_gathered_where_it_is_cut(
    stage: int, held: dict[tuple[int, str], list[Held]]
) -> None:
    """Behind its update in stages 1 and 2; for forward and backward in stage 3, as far as its room
    does not keep it from one use to the next."""
    for each in held[stage, "host"]:
        trained = each.numel_trainable * ITEMSIZE
        assert sum(each.reduced) == trained
        if stage < 3:
            assert sum(each.gathered) == (trained if stage else 0)
        else:
            assert trained < sum(each.gathered) < 2 * each.numel * ITEMSIZE
