"""Finds the placement that makes a step fastest within the budgets, for all that is left open.

    1  every class whole in a tier, or with the largest share that fits into the faster ones
       (`placement_search`), laid out by the planner, checked to the byte and ranked by how long
       the slowest link is busy: bytes divided by rates, without the pipeline
    2  where it is known what a step works on, the first of them are predicted (`step_time`), and
       the fastest is taken; elsewhere the rank decides
    3  on a GPU those near the fastest are compared with it, as long as one is faster

Where activations.checkpoint is `auto` and the batch is known, every choice goes through 1, and all
take part in 2. What the configuration names stays as it is. The result
depends on the arguments alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from offload.planning.activations.facts import (
    NOTHING,
    ActivationFacts,
    fragmentation_nbytes,
    holes_nbytes,
)
from offload.planning.choice.placement_search import filled, near, without_files
from offload.planning.machine.baseline import GPU_NBYTES, Baseline
from offload.planning.machine.speeds import NOMINAL, Speeds
from offload.planning.plan.builder import PlanBuilder, reserve_nbytes, resolve, within_gpu_budget
from offload.planning.plan.estimate import Shortfall, StepEstimate, Workload, short_weight
from offload.planning.plan.plan import (
    Hardware,
    Plan,
    ahead_nbytes,
    min_window,
    needed_nbytes,
    ram_nbytes,
)
from offload.planning.plan.shortfalls import lacking_nbytes, shortfalls
from offload.planning.plan.sizes import CLASSES, Placements
from offload.planning.step.step_time import estimate_step
from offload.tiers.ledger import StateClass
from offload.tiers.placement import Placement
from offload.tiers.tier import PAGE_NBYTES, TIERS, Tier
from offload.zero.groups.model_shape import ModelShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig

_AS_FAST = 0.01  # of a step's time: no prediction tells less
_CHECKPOINTS = (False, "selective", True)
# Timed per choice of checkpoint.
_CANDIDATES = 12
_FEW_GROUPS = 1_000
_CANDIDATES_LARGE = 3  # of a model with more: each takes seconds
_NEAR_PERCENTS = (25, 10)  # of a class, between the device and the tier below it
_FAR = 2.0  # times the best one's time of the slowest link: not worth timing
_BESIDE = 0.01  # of links beside the slowest: of plans that are as fast the one that moves less
_WORTH = 5  # per cent of a class: less is no reason for a split
_ROOM = 0.2  # of a GPU, left by an open device tier to a pass that is not known
NO_LIBRARIES = Baseline(0, compiler_nbytes=0)


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run beside the sizes of its states: its work, the machine's speeds, and the
    cost of a pass."""

    workload: Workload
    speeds: Speeds
    facts_of: Callable[[OffloadConfig], ActivationFacts]  # of a settled configuration
    baseline: Baseline = NO_LIBRARIES  # interpreter, libraries, contexts


@dataclass(frozen=True)
class Candidate:
    """A placement that has been laid out, and that may have been timed."""

    config: OffloadConfig  # settled: checkpoint as it was chosen
    plan: Plan
    shortfalls: tuple[Shortfall, ...]  # of budgets and the machine
    # Bytes that tiers, with activations and libraries in the same memory, and reads ahead lack;
    # negative where there is room.
    lacking: Mapping[Tier, int]
    links_s: float  # for which the slowest link is busy in a step
    passing_nbytes: int  # RAM of activations beside the tiers; 0 on a GPU or if it is not known
    beyond_free_nbytes: int  # RAM that it needs with activations and libraries, and others have now
    step: StepEstimate | None = None  # None: not timed, or nothing is known of the work

    @property
    def seconds(self) -> float:
        """The seconds of a step, or of its slowest link alone where it is not timed."""
        return self.links_s if self.step is None else self.step.seconds

    @property
    def short(self) -> int:
        """The missing bytes of all tiers, weighted, without the reads ahead that a run can do
        without."""
        return self._weighted({t: n - ahead_nbytes(self.plan, t) for t, n in self.lacking.items()})

    @property
    def fits(self) -> bool:
        return not (self.shortfalls or self.short)

    @cached_property
    def rank(self) -> tuple[int, float, int]:
        """The key of candidates that are not timed: least missing bytes, then the least time of the
        slowest link, then the fewest parts."""
        return self._weighted(self.lacking), float(f"{self.links_s:.3g}"), self.parts

    @property
    def parts(self) -> int:
        return sum(len(placement.tiers) for placement in self.plan.placements.values())

    def timed_rank(self, fastest_s: float) -> tuple[int, int, int, int, float]:
        """The key of candidates in the end: those that fit, then those that fit into free memory,
        then by time; among equally fast ones the fewest parts, then the least busy links."""
        slower = self.seconds / fastest_s - 1 if fastest_s else 0.0
        busy = self.links_s if self.step is None else sum(link.seconds for link in self.step.links)
        return (
            self.short, self.beyond_free_nbytes, math.floor(max(0.0, slower) / _AS_FAST),
            self.parts, float(f"{busy:.4g}"),
        )  # fmt: skip

    def _weighted(self, lacking: Mapping[Tier, int]) -> int:
        gpu = self.plan.gpu
        return sum(short_weight(tier, gpu=gpu) * max(0, n) for tier, n in lacking.items())


@dataclass(frozen=True)
class Solution:
    """The best candidate, and the other ones after it."""

    best: Candidate
    others: tuple[Candidate, ...]
    open_keys: tuple[str, ...]  # that were left to the solver


def solve(
    config: OffloadConfig, model: ModelShape, hardware: Hardware, run: RunFacts | None = None
) -> Solution:
    """Find the best placement of `model`; if none fits, the one with the least missing bytes.

    Without `run`, an `auto` of activations.checkpoint is settled, and only parameters may be placed
    in device memory, which activations will need.
    """
    hardware = within_gpu_budget(config, hardware)
    search, candidates = None, []
    for settled in _choices(config, run):
        search = _Search(settled, model, hardware, run, search)
        candidates += search.candidates()
    fastest_s = min((c.seconds for c in candidates if c.fits), default=0.0)
    # `sorted` keeps the search's order among equals
    best, *others = sorted(candidates, key=lambda candidate: candidate.timed_rank(fastest_s))
    keys = [f"placement.{name}" for name, home in config.placement.homes().items() if not home]
    if config.placement.activations.checkpoint == "auto":
        keys.append("placement.activations.checkpoint")
    return Solution(best, tuple(others), tuple(keys))


def _choices(config: OffloadConfig, run: RunFacts | None) -> Iterator[OffloadConfig]:
    """Settled configurations to compare, the plainest first."""
    if run is None or config.placement.activations.checkpoint != "auto":
        yield config.settled()
        return
    for checkpoint in _CHECKPOINTS:
        activations = config.placement.activations.model_copy(update={"checkpoint": checkpoint})
        placement = config.placement.model_copy(update={"activations": activations})
        yield config.model_copy(update={"placement": placement})


class _Search:
    """The placements of one model, with activations.checkpoint settled."""

    def __init__(
        self, config: OffloadConfig, model: ModelShape, hardware: Hardware, run: RunFacts | None,
        before: _Search | None,
    ) -> None:  # fmt: skip
        """`before` is a search with other settings, whose records may be dealt out alike."""
        self._model, self._hardware, self._run = model, hardware, run
        self._facts = run.facts_of(config) if run is not None else NOTHING
        gpu, home = hardware.device_nbytes > 0, config.placement.activations.tier
        leaves = min_window(Tier.named(home), gpu) > 0
        peak = self._facts.peak_elsewhere_nbytes if leaves else self._facts.peak_nbytes
        fragmentation = fragmentation_nbytes(self._facts, leaves=leaves)
        self._passing_nbytes = 0 if gpu else peak + fragmentation
        baseline = NO_LIBRARIES if run is None else run.baseline
        libraries = 0 if run is None else baseline.ram_of(config, model.tensors)
        # of the memory that a tier is in, what activations and libraries take
        self._beside = dict.fromkeys(TIERS, libraries + self._passing_nbytes)
        self._beside_on_gpu: dict[str, int] = {}  # what is not the tier's, by name
        if gpu:
            there, limited = hardware.device_nbytes, hardware.gpu_budget_nbytes is not None
            context = GPU_NBYTES if limited and run is None else baseline.gpu_nbytes
            self._beside[Tier.DEVICE] = context + peak
            beside = self._beside_on_gpu = {"pass": peak, "context and workspaces": context}
            if run is not None:
                beside["holes"] = holes_nbytes(there, peak)
            elif resolve(config.budget.device, there, there) > there - context:
                beside["a fifth for the pass"] = int(_ROOM * there)
        # what is left of a GPU is known where the batch is, or where a budget says it
        self._knows_gpu = run is not None or config.budget.device is not None
        self._config = self._with_open_budgets(config, libraries)
        self._builder = PlanBuilder(
            self._config, model, hardware, device_is_open=config.budget.device is None
        )
        if before is not None:
            self._builder.share_with(before._builder)
        self._plans: dict[tuple[Placement | None, ...], Plan] = {}

    def _with_open_budgets(self, config: OffloadConfig, libraries: int) -> OffloadConfig:
        """Set open budgets: the device tier gets what activations and libraries leave of a GPU (if
        budget.gpu is given, at most that), the host tier what they and the reserve leave of RAM."""
        hardware = self._hardware
        limited = hardware.gpu_budget_nbytes is not None
        if hardware.device_nbytes and (limited or self._run is not None):
            left = hardware.device_nbytes - sum(self._beside_on_gpu.values())
            config = _within(config, Tier.DEVICE, left, hardware.device_nbytes if limited else 0)
        if self._run is None:
            return config
        # libraries are loaded already where it is this process that will train
        left = min(hardware.host_nbytes - libraries, hardware.host_free_nbytes)
        left = max(0, left - self._passing_nbytes)
        return _within(config, Tier.HOST, left - reserve_nbytes(left))

    def candidates(self) -> list[Candidate]:
        """The candidates in the order of their rank, timed if it is known how; at least one."""
        named, few = self._builder.explicit, len(self._builder.groups) <= _FEW_GROUPS
        ranked = self._ranked(filled(named, self._open_tiers, self._lacking, _WORTH))
        if ranked[0].rank[0]:
            more = filled(named, self._open_tiers, self._lacking, 1)
            ranked = self._ranked(itertools.chain((c.plan.placements for c in ranked), more))
        far_s = _FAR * ranked[0].links_s
        best = ranked[:2] + [each for each in ranked[2:] if each.links_s <= far_s]
        count = _CANDIDATES if few else _CANDIDATES_LARGE
        candidates = [self._timed(each) for each in best[: count if self._run is not None else 2]]
        return self._with_nearer(candidates) if few and self._builder.gpu else candidates

    def _with_nearer(self, candidates: list[Candidate]) -> list[Candidate]:
        """Add placements near the fastest one that fits, as long as that finds faster ones."""
        tried = {_key(each.plan.placements) for each in candidates}
        for percent in _NEAR_PERCENTS:
            before_s = math.inf
            while fitting := [each for each in candidates if each.fits]:
                fastest = min(fitting, key=lambda each: each.seconds)
                if fastest.seconds >= (1 - _AS_FAST) * before_s or not fastest.links_s:
                    break  # not faster, or nothing has to move
                before_s = fastest.seconds
                around = near(fastest.plan.placements, self._open_tiers, self._lacking, percent)
                others = {_key(each): each for each in around if _key(each) not in tried}
                tried |= others.keys()
                candidates += [self._timed(self._candidate(each)) for each in others.values()]
        return candidates

    def _ranked(self, placements: Iterable[Placements]) -> list[Candidate]:
        different = {_key(each): each for each in placements}
        return sorted(map(self._candidate, different.values()), key=lambda each: each.rank)

    def _candidate(self, placements: Placements) -> Candidate:
        plan, run = self._plan(placements), self._run
        links_s = _slowest_link_s(plan, self._config, NOMINAL if run is None else run.speeds)
        beyond = 0
        if run is not None and not plan.gpu:
            beyond = ram_nbytes(plan) + self._passing_nbytes - self._hardware.host_free_nbytes
        beside = self._beside_on_gpu and {
            **self._beside_on_gpu, "activations that stay": self._staying_nbytes(plan)
        }  # fmt: skip
        return Candidate(
            self._config, plan, shortfalls(plan, self._hardware, beside),
            {tier: self._lacking(placements, tier) for tier in TIERS}, links_s,
            self._passing_nbytes, max(0, beyond),
        )  # fmt: skip

    def _staying_nbytes(self, plan: Plan) -> int:
        """The saved activations for which there is no room elsewhere."""
        if plan.activations is None:
            return 0
        room = plan.activations.window_nbytes + plan.activations.disk_nbytes
        most = self._facts.peak_nbytes - self._facts.peak_elsewhere_nbytes
        return max(0, min(most, self._facts.saved_nbytes - room))

    def _lacking(self, placements: Placements, tier: Tier) -> int:
        return lacking_nbytes(self._plan(placements), tier, self._hardware, self._beside[tier])

    def _plan(self, placements: Placements) -> Plan:
        key = _key(placements)
        if key not in self._plans:
            self._plans[key] = self._builder.build(placements)
        return self._plans[key]

    def _timed(self, candidate: Candidate) -> Candidate:
        if (run := self._run) is None:
            return candidate
        step = estimate_step(
            candidate.plan, self._config, self._model, self._facts, run.workload, run.speeds
        )
        return replace(candidate, step=step)

    @cached_property
    def _open_tiers(self) -> dict[StateClass, tuple[Tier, ...]]:
        """The tiers open to each class that the configuration does not name."""
        config, builder = self._config, self._builder
        there = [tier for tier in TIERS if tier is Tier.HOST or builder.budgets[tier] > 0]
        kernels = builder.gpu and builder.hardware.kernels_missing is None
        tiers: dict[StateClass, tuple[Tier, ...]] = {}
        for state_class in CLASSES:
            if state_class in builder.explicit:
                continue
            first = state_class is StateClass.PARAMETERS or (kernels and self._knows_gpu)
            open_tiers = tuple(tier for tier in there if first or not tier.on_device)
            if state_class is StateClass.GRADIENTS and config.sums_gradients:
                open_tiers = without_files(open_tiers)  # never an fp32 gradient file
            tiers[state_class] = open_tiers
        return tiers


def _key(placements: Placements) -> tuple[Placement | None, ...]:
    return tuple(placements.get(each) for each in CLASSES)


def _within(config: OffloadConfig, tier: Tier, nbytes: int, limit_nbytes: int = 0) -> OffloadConfig:
    """Return `config` with `nbytes`, in whole pages, as the budget of a tier if it is open, or also
    if it is larger, as a percentage of `limit_nbytes`, where that is given."""
    given = config.budget.of(tier)
    if given is not None and not (limit_nbytes and resolve(given, limit_nbytes, 0) > nbytes):
        return config
    pages = max(0, nbytes) // PAGE_NBYTES * PAGE_NBYTES
    budget = config.budget.model_copy(update={tier.name: pages})
    return config.model_copy(update={"budget": budget})


# ---------------------------------------------------------------- the slowest link
def _slowest_link_s(plan: Plan, config: OffloadConfig, speeds: Speeds) -> float:
    """Seconds for which the slowest link of one step is busy. Unknown rates are those of
    `NOMINAL`."""
    passes = config.gradient_accumulation_steps
    links = [_nvme_s(plan, passes, config.optimizer.in_backward is True, speeds)]
    if plan.gpu:
        links += _beside_gpu_s(plan, passes, speeds)
    for tier in TIERS:
        if tier.bytes_per_s:  # its states are read and written in place by a CPU
            weights, gradients, records = _used(plan, tier)
            links.append(2 * (passes * (weights + gradients) + records) / tier.bytes_per_s)
    return max(links) + _BESIDE * sum(links)


def _nvme_s(plan: Plan, passes: int, ahead: bool, speeds: Speeds) -> float:
    """Seconds of nvme. Parameters are read in both directions of a pass, unless spare memory has a
    copy; gradients are written and read back unless updates use them at once (`ahead`)."""
    weights, gradients, records = _used(plan, Tier.NVME)
    states = (passes - ahead) * gradients + records
    spare = _spare(plan, Tier.HOST)
    read = 2 * passes * max(0, weights - spare) + max(0, states - max(0, spare - weights))
    return read / (speeds.nvme_read_bytes_per_s or NOMINAL.nvme_read_bytes_per_s) + (
        weights + states
    ) / (speeds.nvme_write_bytes_per_s or NOMINAL.nvme_write_bytes_per_s)


def _beside_gpu_s(plan: Plan, passes: int, speeds: Speeds) -> list[float]:
    """Seconds of the links to and from the GPU, and of the memory bus for updates on the CPU."""
    below = [_used(plan, tier) for tier in TIERS if not tier.on_device]
    weights, gradients, records = map(sum, zip(*below, strict=True))
    spare = _spare(plan, Tier.DEVICE)
    down = 2 * passes * max(0, weights - spare)
    down_s = down / (speeds.host_to_device_bytes_per_s or NOMINAL.host_to_device_bytes_per_s)
    # with no room for the groups ahead, work waits for copies
    waits = spare < plan.prefetch * max((group.parameters for group in plan.groups), default=0)
    return [
        down_s * (1 + waits),
        passes * gradients
        / (speeds.device_to_host_bytes_per_s or NOMINAL.device_to_host_bytes_per_s),
        2 * records / speeds.host_bytes_per_s,
    ]  # fmt: skip


def _used(plan: Plan, tier: Tier) -> list[int]:
    """The bytes at home in a tier, by class."""
    return [plan.expected[tier].get(each, 0) for each in CLASSES]


def _spare(plan: Plan, tier: Tier) -> int:
    return max(0, plan.budgets[tier] - needed_nbytes(plan, tier))
