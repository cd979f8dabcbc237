"""Placements laid out under one choice of what depends on the batch, and their predicted steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from offload.planning.activation_facts import ActivationFacts
from offload.planning.activation_plan import least_window
from offload.planning.estimate import Shortfall, StepEstimate
from offload.planning.heap_holes import heap_holes_nbytes
from offload.planning.placement_search import Found, Open, PlacementSearch
from offload.planning.plan import Hardware, Plan, needed_nbytes
from offload.planning.plan_builder import Placements, PlanBuilder, reserve_nbytes
from offload.planning.plan_sizes import CLASSES
from offload.planning.rough_step import NOMINAL, StepWork
from offload.planning.shortfalls import shortfalls
from offload.planning.speeds import Speeds
from offload.planning.splits import neighbours
from offload.planning.step_time import COMPUTE, OPTIMIZER, estimate_step
from offload.planning.work_time import pass_s, update_traffic
from offload.planning.workload import Workload
from offload.tiers.extent import PAGE_NBYTES, TierName
from offload.tiers.ledger import StateClass
from offload.tiers.placement import Placement
from offload.tiers.units import format_bytes
from offload.zero.model_shape import ModelShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig

# Laid out per choice of checkpoint and micro-batches: the search's best, of other kinds each, and
# the best of those that have every class in one tier.
_CANDIDATES, _CORNERS = 8, 8
_FEW_PIECES = 1_000  # of optimizer state
_CANDIDATES_LARGE, _CORNERS_LARGE = 3, 1  # of a model with more: each takes tens of milliseconds
_MOVES = (0.4, 0.2, 0.05)  # shares of a class that are moved to another tier
_MOVES_LARGE = (0.1,)  # and to faster ones alone: the search's grid is fine enough, its times rough
_GAIN = 0.002  # of a step's time, for another move
AS_FAST = 0.01  # of a step's time: no prediction tells less
_MOST_PIECES = 600  # that a step is predicted with
_DEVICE_SHARE = 0.97  # of a GPU: allocators leave holes


@dataclass(frozen=True)
class Known:
    """What is known of a run beside the sizes of its states."""

    workload: Workload
    speeds: Speeds
    facts_of: Callable[[OffloadConfig], ActivationFacts]  # of a settled configuration
    elsewhere_nbytes: int = 0  # RAM of interpreter and libraries
    on_device_nbytes: int = 0  # GPU memory of context and libraries
    more_nbytes_of: Callable[[OffloadConfig], int] = lambda config: 0  # of libraries, by use
    any_fit: bool = False  # the first placement found that fits is enough, and no times are


@dataclass(frozen=True)
class Candidate:
    """A placement laid out."""

    config: OffloadConfig  # settled: checkpoint and micro_batches as they were chosen
    plan: Plan
    seconds: float  # of a step; of the slowest link alone where nothing is known of the work
    step: StepEstimate | None  # None: nothing is known of the work
    shortfalls: tuple[Shortfall, ...]
    beyond_free_nbytes: int  # RAM that it needs with activations and libraries, and others have now
    choice: Choice = field(repr=False, compare=False)

    @property
    def passing_nbytes(self) -> int:
        """RAM of activations beside the tiers; nothing on a GPU, or where nobody knows."""
        return 0 if self.plan.gpu else self.choice.passing_nbytes

    @property
    def fits(self) -> bool:
        return not self.shortfalls

    def elsewhere(self, state_class: StateClass) -> Iterator[Candidate]:
        """The same plan but for one class, which is whole in another tier that is open to it."""
        here = self.plan.placements
        for tier in self.choice.open_tiers.get(state_class, ()):
            moved = Placement.on(tier)
            if moved != here[state_class]:
                yield self.choice.evaluate({**here, state_class: moved})


class Choice:
    """Placements under one choice of what depends on the batch."""

    def __init__(
        self, config: OffloadConfig, model: ModelShape, hardware: Hardware, known: Known | None
    ) -> None:
        self._model = model
        self._hardware = hardware
        self._known = known
        self._facts = known.facts_of(config) if known is not None else None
        self._config = config
        self._config = self._with_open_budgets(config)
        self._builder = PlanBuilder(self._config, model, hardware)

    def _with_open_budgets(self, config: OffloadConfig) -> OffloadConfig:
        """Where they are open, the device tier takes what activations and libraries leave of a GPU,
        the host tier what they and the reserve leave of RAM."""
        known, hardware = self._known, self._hardware
        if known is None:
            return config
        passing = self.passing_nbytes
        if hardware.device_nbytes:
            left = int(_DEVICE_SHARE * hardware.device_nbytes)
            left -= known.on_device_nbytes + self._peak_nbytes(config)
            config, passing = _within(config, TierName.DEVICE, left), 0
        # libraries are loaded already where it is this process that will train
        left = min(hardware.host_nbytes - self._libraries_nbytes, hardware.host_free_nbytes)
        left = max(0, left - passing)
        return _within(config, TierName.HOST, left - reserve_nbytes(left))

    def candidates(self) -> list[Candidate]:
        """Laid out, in the order of the search; at least one."""
        if not self.open_tiers:
            return [self.evaluate(self._builder.explicit)]
        speeds = self._known.speeds if self._known is not None else NOMINAL
        search = PlacementSearch(self._builder, self._room(), self._work(), speeds)
        found = search.best(_CANDIDATES if self.is_small else _CANDIDATES_LARGE)
        if self._known is not None and not self._known.any_fit:
            corners = search.corners(_CORNERS if self.is_small else _CORNERS_LARGE)
            found += [corner for corner in corners if corner not in found]
            return [self.evaluate(each.placements, each) for each in found]
        # by the rough model the order is known: the first that fits to the byte is the best
        laid_out = []
        for each in found:
            laid_out.append(self.evaluate(each.placements, each))
            if laid_out[-1].fits and (len(laid_out) > 1 or self._known is not None):
                break
        return laid_out

    @property
    def is_small(self) -> bool:
        """Whether trying many placements takes no time worth mentioning."""
        return self._pieces <= _FEW_PIECES

    def refined(self, start: Candidate) -> Candidate:
        """`start`, moved class by class as long as predicted steps get shorter."""
        return start if start.step is None else self._plainer(self._moved(start))

    def _moved(self, best: Candidate) -> Candidate:
        for step in _MOVES if self.is_small else _MOVES_LARGE:
            before = None
            while before is not best and self._could_be_shorter(best):
                before = best
                for state_class, tiers in self.open_tiers.items():
                    here = best.plan.placements[state_class]
                    for moved in neighbours(here, tiers, step, up=not self.is_small):
                        tried = self._fitting({**best.plan.placements, state_class: moved})
                        if tried is not None and tried.seconds < best.seconds * (1 - _GAIN):
                            best = tried
        return best

    def _could_be_shorter(self, best: Candidate) -> bool:
        """Not if work that is the same wherever states live takes all of the step: on a CPU the
        model's and the optimizer's where nothing moves, beside a GPU's link the model's alone."""
        if best.step is None:
            return False
        work_s = {link.name: link.seconds for link in best.step.links}
        if len(work_s) > 2 or not self._config.optimizer.states.uniform:
            return True
        least_s = work_s[COMPUTE] + (0.0 if best.plan.gpu else work_s[OPTIMIZER])
        return least_s < best.seconds * (1 - _GAIN)

    def _plainer(self, best: Candidate) -> Candidate:
        """Without splits that bring next to nothing."""
        for state_class in self.open_tiers:
            placement = best.plan.placements[state_class]
            if len(placement.tiers) > 1:
                largest = max(placement.shares, key=lambda share: share[1])[0]
                whole = {**best.plan.placements, state_class: Placement.on(largest)}
                tried = self._fitting(whole)
                if tried is not None and tried.seconds <= best.seconds * (1 + AS_FAST):
                    best = tried
        return best

    def evaluate(self, placements: Placements, found: Found | None = None) -> Candidate:
        """Laid out and timed; by the search's rough time where no step can be predicted."""
        plan = self._builder.build(placements)
        return self._timed(plan, self._missing(plan), found)

    def _fitting(self, placements: Placements) -> Candidate | None:
        """Timed only if it fits: times take longest."""
        plan = self._builder.build(placements)
        missing = self._missing(plan)
        return None if missing else self._timed(plan, missing)

    def _missing(self, plan: Plan) -> tuple[Shortfall, ...]:
        return (*shortfalls(plan, self._hardware), *self._beside(plan))

    def _timed(
        self, plan: Plan, missing: tuple[Shortfall, ...], found: Found | None = None
    ) -> Candidate:
        step = self._predict(plan)
        seconds = step.seconds if step is not None else found.seconds if found is not None else 0.0
        beyond = self._beyond_free_nbytes(plan)
        return Candidate(self._config, plan, seconds, step, missing, beyond, self)

    def _beyond_free_nbytes(self, plan: Plan) -> int:
        if self._known is None or plan.gpu:
            return 0
        held = needed_nbytes(plan, TierName.HOST) + needed_nbytes(plan, TierName.DEVICE)
        return max(0, held + self.passing_nbytes - self._hardware.host_free_nbytes)

    # ---------------------------------------------------------------- what is known
    def _predict(self, plan: Plan) -> StepEstimate | None:
        if self._known is None or self._facts is None or self._known.any_fit:
            return None
        known = self._known
        return estimate_step(
            self._with_few_chunks(plan), self._config, self._model, self._facts, known.workload,
            known.speeds,
        )  # fmt: skip

    def _with_few_chunks(self, plan: Plan) -> Plan:
        """The plan with chunks taken together where there are tens of thousands: which of them are
        in memory is gone through one by one, and hundreds tell the same."""
        builder = self._few_chunks
        if builder is None:
            return plan
        coarse = builder.build(plan.placements)
        return replace(
            coarse, expected=plan.expected, staging_nbytes=plan.staging_nbytes,
            window_nbytes=plan.window_nbytes,
        )  # fmt: skip

    @cached_property
    def _few_chunks(self) -> PlanBuilder | None:
        together = self._pieces // _MOST_PIECES + 1
        if together == 1:
            return None
        chunk = self._builder.sizes.chunk_numel * together
        config = self._builder.config
        optimizer = config.optimizer.model_copy(update={"chunk": chunk})
        config = config.model_copy(update={"optimizer": optimizer})
        return PlanBuilder(config, self._model, self._hardware)

    @cached_property
    def _pieces(self) -> int:
        return sum(len(group.records) for group in self._builder.groups)

    def _work(self) -> StepWork:
        config, groups = self._config, self._builder.groups
        known, facts = self._known, self._facts
        passes = config.gradient_accumulation_steps if known is None else known.workload.passes
        ahead = config.optimizer.in_backward is True
        usual = sorted(group.parameters for group in groups)
        largest = usual[len(usual) // 2] if usual else 0
        away = config.placement.activations.tier == "nvme" and facts is not None
        forward_s, backward_s = self._pass_s()
        hiding_s = backward_s if ahead else forward_s
        return StepWork(
            passes=passes,
            compute_s=passes * (forward_s + backward_s),
            hiding_s=hiding_s if facts is not None else math.inf,
            optimizer_s=self._optimizer_s(TierName.HOST),
            optimizer_on_device_s=self._optimizer_s(TierName.DEVICE),
            gradients_travel=passes - 1 if ahead else passes,
            saved_nbytes=facts.saved_nbytes if away and facts is not None else 0,
            in_flight_nbytes=self._builder.sizes.prefetch * largest,
            gpu=self._builder.gpu,
        )

    def _pass_s(self) -> tuple[float, float]:
        """Forward and backward of one pass."""
        if self._known is None or self._facts is None:
            return 0.0, 0.0
        precision, speeds, facts = self._config.precision, self._known.speeds, self._facts
        return pass_s(facts.forward, precision, speeds), pass_s(facts.backward, precision, speeds)

    def _optimizer_s(self, tier: TierName) -> float:
        """For all parameters, with their records in `tier`."""
        if self._known is None:
            return 0.0
        builder, speeds = self._builder, self._known.speeds
        traffic = update_traffic(
            builder.sizes.record_formats[tier], builder.sizes.itemsize,
            builder.sizes.gradient_itemsize,
        )  # fmt: skip
        rate = speeds.compute_bytes_per_s if tier is TierName.DEVICE else speeds.host_bytes_per_s
        lost = 1.0 if builder.gpu else speeds.optimizer_lost_share
        numel = sum(group.layout.shard_trainable for group in builder.groups)
        return lost * numel * traffic / rate

    # ---------------------------------------------------------------- room
    @cached_property
    def open_tiers(self) -> dict[StateClass, tuple[TierName, ...]]:
        """Where classes may go that the configuration does not name."""
        config, builder = self._config, self._builder
        below = [TierName.HOST]
        if builder.budgets[TierName.NVME] > 0:
            below.append(TierName.NVME)
        kernels = builder.gpu and builder.hardware.kernels_missing is None
        tiers: dict[StateClass, tuple[TierName, ...]] = {}
        for state_class in CLASSES:
            if state_class in builder.explicit:
                continue
            there = list(below)
            if state_class is StateClass.GRADIENTS and config.sums_gradients:
                there = [TierName.HOST]  # never an fp32 gradient file
            first = state_class is StateClass.PARAMETERS or (kernels and self._known is not None)
            if first and builder.budgets[TierName.DEVICE] > 0:
                there.insert(0, TierName.DEVICE)
            tiers[state_class] = tuple(there)
        return tiers

    def _room(self) -> Open:
        known, facts = self._known, self._facts
        if known is None or facts is None:
            return Open(self.open_tiers)
        gpu = self._builder.gpu
        return Open(
            self.open_tiers,
            self._libraries_nbytes + (0 if gpu else self.passing_nbytes),
            known.on_device_nbytes + (self._peak_nbytes(self._config) if gpu else 0),
        )

    @property
    def _libraries_nbytes(self) -> int:
        if self._known is None:
            return 0
        return self._known.elsewhere_nbytes + self._known.more_nbytes_of(self._config)

    @property
    def passing_nbytes(self) -> int:
        """RAM of a pass on a CPU: tensors, and the holes between them."""
        if self._facts is None:
            return 0
        away = self._config.placement.activations.tier == "nvme"
        return self._peak_nbytes(self._config) + heap_holes_nbytes(self._facts, leaves=away)

    def _peak_nbytes(self, config: OffloadConfig) -> int:
        """Activations where the model computes."""
        if self._facts is None:
            return 0
        gpu = self._hardware.device_nbytes > 0
        away = least_window(TierName(config.placement.activations.tier), gpu) > 0
        return self._facts.peak_elsewhere_nbytes if away else self._facts.peak_nbytes

    def _beside(self, plan: Plan) -> Iterator[Shortfall]:
        """What memory the tiers, activations and libraries need together."""
        if self._known is None or self._facts is None:
            return
        room, hardware = self._room(), self._hardware
        if plan.gpu:
            tier, capacity, beside = TierName.DEVICE, hardware.device_nbytes, room.on_device_nbytes
            held = plan.budgets[tier]  # taken in one piece
        else:
            tier, capacity, beside = TierName.HOST, hardware.host_nbytes, room.elsewhere_nbytes
            held = needed_nbytes(plan, tier) + needed_nbytes(plan, TierName.DEVICE)
        if held + beside <= capacity:
            return
        short = held + beside - capacity
        recomputes = self._config.placement.activations.checkpoint is True
        remedy = "" if recomputes else "set placement.activations.checkpoint: true, or "
        yield Shortfall(
            tier, held + beside, capacity, "placement.activations.checkpoint",
            f"activations and libraries need {format_bytes(beside)} beside {format_bytes(held)} of "
            f"states: {format_bytes(short)} more than the {format_bytes(capacity)} there are; "
            f"{remedy}lower the batch, the sequence or budget.{tier}",
        )  # fmt: skip


def _within(config: OffloadConfig, tier: TierName, nbytes: int) -> OffloadConfig:
    """With a budget of `nbytes` for a tier that was left open, in whole pages."""
    if getattr(config.budget, tier) is not None:
        return config
    pages = max(0, nbytes) // PAGE_NBYTES * PAGE_NBYTES
    budget = config.budget.model_copy(update={str(tier): pages})
    return config.model_copy(update={"budget": budget})
