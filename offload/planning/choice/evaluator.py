"""Lays out, checks and times placements, with checkpoint and micro_batches settled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from offload.planning.activations.facts import NOTHING, ActivationFacts, fragmentation_nbytes
from offload.planning.choice.link_time import slowest_link_s
from offload.planning.choice.placement_search import corners, filled
from offload.planning.machine.baseline import Baseline
from offload.planning.machine.speeds import NOMINAL, Speeds
from offload.planning.plan.builder import PlanBuilder, placed_classes, reserve_nbytes
from offload.planning.plan.estimate import Shortfall, StepEstimate, short_weights
from offload.planning.plan.experts import Held, idle_nbytes
from offload.planning.plan.plan import (
    Hardware,
    Plan,
    ahead_nbytes,
    least_window,
    ram_nbytes,
)
from offload.planning.plan.shortfalls import lacking_nbytes, shortfalls
from offload.planning.plan.sizes import PLACED, PlacedClass, Placements, class_of
from offload.planning.plan.workload import Workload
from offload.planning.step.step_time import estimate_step
from offload.tiers.ledger import StateClass
from offload.tiers.placement import Placement
from offload.tiers.tier import PAGE_NBYTES, Tier
from offload.zero.groups.model_shape import ModelShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig

# Timed per choice of checkpoint and micro-batches.
_CANDIDATES = 12
_FEW_PIECES = 1_000  # of optimizer state
_CANDIDATES_LARGE = 3  # of a model with more: each takes tens of milliseconds
_FAR = 2.0  # times the best one's time of the slowest link: not worth timing
_WORTH = 5  # per cent of a class: less is no reason for a split
_DEVICE_SHARE = 0.97  # of a GPU: allocators leave holes
_Key = tuple[Placement | None, ...]
NO_LIBRARIES = Baseline(0, compiler_nbytes=0)


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run beside the sizes of its states: its work, the machine's speeds, and the
    cost of a pass."""

    workload: Workload
    speeds: Speeds
    facts_of: Callable[[OffloadConfig], ActivationFacts]  # of a settled configuration
    baseline: Baseline = NO_LIBRARIES  # interpreter, libraries, contexts
    any_fit: bool = False  # the first placement found that fits is enough, and no times are


@dataclass(frozen=True)
class Candidate:
    """A placement that has been laid out and evaluated."""

    config: OffloadConfig  # settled: checkpoint and micro_batches as they were chosen
    plan: Plan
    seconds: float  # of a step; of the slowest link alone where nothing is known of the work
    step: StepEstimate | None  # None: nothing is known of the work
    shortfalls: tuple[Shortfall, ...]  # of budgets and the machine
    short: int  # missing bytes of tiers and, with activations and libraries, of memory; weighted
    beyond_free_nbytes: int  # RAM that it needs with activations and libraries, and others have now
    passing_nbytes: int  # RAM of activations beside the tiers; 0 on a GPU or if it is not known

    @property
    def fits(self) -> bool:
        return not (self.shortfalls or self.short)


class PlacementEvaluator:
    """Lays out and times placements of one model, with activations.checkpoint and micro_batches
    settled."""

    def __init__(
        self, config: OffloadConfig, model: ModelShape, hardware: Hardware, run: RunFacts | None,
        before: PlacementEvaluator | None = None,
    ) -> None:  # fmt: skip
        self._model = model
        self._hardware = hardware
        self._run = run
        self._facts = run.facts_of(config) if run is not None else NOTHING
        self._config = config
        self._config = self._with_open_budgets(config)
        self._builder = PlanBuilder(
            self._config, model, hardware, device_is_open=config.budget.device is None
        )
        if before is not None:
            self._builder.share_with(before._builder)
        self._plans: dict[_Key, Plan] = {}
        self._candidates: dict[_Key, Candidate] = {}
        self._idle: dict[_Key, Held] = {}

    def _with_open_budgets(self, config: OffloadConfig) -> OffloadConfig:
        """Set open budgets: the device tier gets what activations and libraries leave of a GPU, the
        host tier what they and the reserve leave of RAM."""
        run, hardware = self._run, self._hardware
        if run is None:
            return config
        passing = self._passing_nbytes
        if hardware.device_nbytes:
            left = int(_DEVICE_SHARE * hardware.device_nbytes)
            left -= run.baseline.gpu_nbytes + self._peak_nbytes(config)
            config, passing = _within(config, Tier.DEVICE, left), 0
        # libraries are loaded already where it is this process that will train
        left = min(hardware.host_nbytes - self._libraries_nbytes, hardware.host_free_nbytes)
        left = max(0, left - passing)
        return _within(config, Tier.HOST, left - reserve_nbytes(left))

    def candidates(self) -> list[Candidate]:
        """The evaluated candidates in the order of their rank; at least one."""
        named, lacks = self._builder.explicit, self._lacking
        found = list(corners(named, self.open_tiers))
        plans = self._ranked(found)
        for least in (_WORTH, 1):
            if self._short(plans[0]) or (least == _WORTH and not self._any_fit):
                found += filled(named, self.open_tiers, lacks, least)
                plans = self._ranked(found)
        most_s = _FAR * self._links_s(plans[0])
        near = plans[:2] + [plan for plan in plans[2:] if self._links_s(plan) <= most_s]
        return [self.evaluate(plan.placements) for plan in near[: self._count]]

    def _ranked(self, found: Iterable[Placements]) -> list[Plan]:
        plans = {_key(placements): self._plan(placements) for placements in found}
        return sorted(plans.values(), key=self._rank)

    @property
    def _any_fit(self) -> bool:
        return self._run is not None and self._run.any_fit

    @property
    def _count(self) -> int:
        """The number of placements to evaluate."""
        if self._run is None:
            return 2
        if self._any_fit:
            return 1
        pieces = sum(len(group.records) for group in self._builder.groups)
        return _CANDIDATES if pieces <= _FEW_PIECES else _CANDIDATES_LARGE

    def _rank(self, plan: Plan) -> tuple[int, float, int]:
        """The sort key of plans: least missing bytes, then the least time of the slowest link, then
        the fewest parts. `sorted` keeps the order of the search among equals."""
        parts = sum(len(placement.tiers) for placement in plan.placements.values())
        return self._short(plan), float(f"{self._links_s(plan):.3g}"), parts

    def _short(self, plan: Plan) -> int:
        """The missing bytes of all tiers, weighted, reads ahead included."""
        weights = short_weights(gpu=plan.gpu)
        return sum(weights[tier] * max(0, self._lacks(plan, tier)) for tier in Tier)

    def _needed(self, plan: Plan) -> int:
        """The same without reads ahead, which a run can do without."""
        weights = short_weights(gpu=plan.gpu)
        lacks = {tier: self._lacks(plan, tier) - ahead_nbytes(plan, tier) for tier in Tier}
        return sum(weights[tier] * max(0, lacks[tier]) for tier in Tier)

    def _links_s(self, plan: Plan) -> float:
        run, key = self._run, _key(plan.placements)
        if run is None:
            return slowest_link_s(plan, self._config, NOMINAL)
        if key not in self._idle:
            self._idle[key] = idle_nbytes(plan, self._model, run.workload)
        return slowest_link_s(plan, self._config, run.speeds, self._idle[key])

    def _lacking(self, placements: Placements, tier: Tier) -> int:
        return self._lacks(self._plan(placements), tier)

    def _lacks(self, plan: Plan, tier: Tier) -> int:
        """Bytes by which a tier exceeds its budget or, with activations and libraries, the machine;
        negative if there is room."""
        if tier is Tier.DEVICE and plan.gpu and self._run is not None:
            beside = self._run.baseline.gpu_nbytes + self._peak_nbytes(self._config)
        else:
            beside = self._elsewhere_nbytes
        return lacking_nbytes(plan, tier, self._hardware, beside)

    def _plan(self, placements: Placements) -> Plan:
        key = _key(placements)
        if key not in self._plans:
            self._plans[key] = self._builder.build(placements)
        return self._plans[key]

    def evaluate(self, placements: Placements) -> Candidate:
        """Lay out and time a placement, by its links alone where no step can be predicted."""
        key = _key(placements)
        if key not in self._candidates:
            plan = self._plan(placements)
            step = self._predict(plan)
            seconds = step.seconds if step is not None else self._links_s(plan)
            self._candidates[key] = Candidate(
                self._config, plan, seconds, step,
                shortfalls(plan, self._hardware), self._needed(plan),
                self._beyond_free_nbytes(plan), 0 if plan.gpu else self._passing_nbytes,
            )  # fmt: skip
        return self._candidates[key]

    def _beyond_free_nbytes(self, plan: Plan) -> int:
        if self._run is None or plan.gpu:
            return 0
        return max(0, ram_nbytes(plan) + self._passing_nbytes - self._hardware.host_free_nbytes)

    # ---------------------------------------------------------------- what is known
    def _predict(self, plan: Plan) -> StepEstimate | None:
        run = self._run
        if run is None or run.any_fit:
            return None
        return estimate_step(
            plan, self._config, self._model, self._facts, run.workload, run.speeds
        )  # fmt: skip

    # ---------------------------------------------------------------- room
    @cached_property
    def open_tiers(self) -> dict[PlacedClass, tuple[Tier, ...]]:
        """The tiers open to each class that the configuration does not name."""
        config, builder = self._config, self._builder
        below = [Tier.HOST]
        if builder.budgets[Tier.NVME] > 0:
            below.append(Tier.NVME)
        kernels = builder.gpu and builder.hardware.kernels_missing is None
        # what is left of a GPU is known where the batch is, or where a budget says it
        known = self._run is not None or config.budget.device is not None
        tiers: dict[PlacedClass, tuple[Tier, ...]] = {}
        for placed in placed_classes(config):
            if placed in builder.explicit:
                continue
            state_class = class_of(placed)
            there = list(below)
            if state_class is StateClass.GRADIENTS and config.sums_gradients:
                there = [Tier.HOST]  # never an fp32 gradient file
            first = state_class is StateClass.PARAMETERS or (kernels and known)
            if first and builder.budgets[Tier.DEVICE] > 0:
                there.insert(0, Tier.DEVICE)
            tiers[placed] = tuple(there)
        return tiers

    @property
    def _elsewhere_nbytes(self) -> int:
        """RAM needed beside the tiers: by libraries and, on a CPU, by activations."""
        return self._libraries_nbytes + (0 if self._builder.gpu else self._passing_nbytes)

    @property
    def _libraries_nbytes(self) -> int:
        if self._run is None:
            return 0
        return self._run.baseline.ram_of(self._config, self._model.tensors)

    @property
    def _passing_nbytes(self) -> int:
        """RAM of a pass on a CPU: tensors and the holes between them."""
        away = self._config.placement.activations.tier == "nvme"
        return self._peak_nbytes(self._config) + fragmentation_nbytes(self._facts, leaves=away)

    def _peak_nbytes(self, config: OffloadConfig) -> int:
        """The peak of activations where the model computes."""
        gpu = self._hardware.device_nbytes > 0
        away = least_window(Tier(config.placement.activations.tier), gpu) > 0
        return self._facts.peak_elsewhere_nbytes if away else self._facts.peak_nbytes


def _key(placements: Placements) -> _Key:
    return tuple(placements.get(placed) for placed in PLACED)


def _within(config: OffloadConfig, tier: Tier, nbytes: int) -> OffloadConfig:
    """Return `config` with `nbytes`, in whole pages, as the budget of a tier if it is open."""
    if getattr(config.budget, tier) is not None:
        return config
    pages = max(0, nbytes) // PAGE_NBYTES * PAGE_NBYTES
    budget = config.budget.model_copy(update={str(tier): pages})
    return config.model_copy(update={"budget": budget})
