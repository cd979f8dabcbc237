"""Predicts peaks of memory and disk from a plan: those of the ledger, and those of the process and
its files.

    ledger    device   what the plan expects there, and mirrors (GPU)
              host     what the plan expects there, and copies of what lives on nvme, as the
                       runtime's own scheduler keeps them (`planned_run`)
              nvme     at most: homes there, new versions beside the old ones, activations
    RAM       the part of the host tier that is ever touched, and of the device tier on a CPU
              + tensors of one forward and backward (`ActivationFacts`)
              + interpreter, libraries and kernels (`Baseline`)

The ledger's peaks are exact, but for those that depend on when moves end (`MemoryEstimate.bounds`):
of these the most is predicted that can come. That is the budget where copies found no room, since
the order of sizes then decides what fits; and where updates in backward use up gradients whose home
is nvme, all of these at once.

All arenas are touched to their peaks by the end of the second step and pages are not given back, so
that from then on every peak of the activations coincides with all of the states. The only other
candidate is the loading of the largest group, whose first values are there in fp32 beside its home.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.planning.activations.facts import fragmentation_nbytes
from offload.planning.plan.estimate import MemoryClass, MemoryEstimate, PlaceEstimate
from offload.planning.plan.plan import (
    Plan,
    mirrors_nbytes,
    needed_nbytes,
    spare_nbytes,
    speculative_groups,
)
from offload.planning.plan.sizes import CLASSES, ITEMSIZE
from offload.planning.step.planned_run import PlannedRun
from offload.planning.step.representatives import representatives
from offload.tiers.ledger import StateClass
from offload.tiers.pinning import EXTENT_NBYTES
from offload.tiers.tier import TIERS, Tier
from offload.tiers.units import round_up

if TYPE_CHECKING:
    from offload.config import OffloadConfig
    from offload.planning.activations.facts import ActivationFacts
    from offload.planning.machine.baseline import Baseline
    from offload.planning.plan.estimate import Workload
    from offload.zero.groups.model_shape import ModelShape

_MAX_CHUNKS_HELD = 1000  # whose copies are looked at one by one, as no bytes are asked for
_MAX_COPIED = 2048  # groups whose copies are looked at one by one
_FILE_GROWTH_NBYTES = 256 << 20  # as `swap/io/block_store.py` lengthens a file
ByClass = dict[MemoryClass, int]
_SHOWN_AS = {
    each: MemoryClass.CACHE if each is StateClass.KV else MemoryClass(str(each))
    for each in StateClass
}


@dataclass(frozen=True)
class PeakCopies:
    """The host tier's copies of states on nvme or quantized, at their peak."""

    nbytes: int
    gradients_nbytes: int  # most of them
    written_nbytes: int  # most bytes of gradients on nvme: those that find room never go there
    touched_nbytes: int  # of host memory that copies have ever lain in
    staged: bool  # whether chunks pass through the staging buffers
    lacked_room: bool  # whether some had to go, or did not come


def find_copies(plan: Plan, config: OffloadConfig, model: ModelShape, passes: int) -> PeakCopies:
    """Find the copies beside the homes in host memory, in steps of `passes`. In a long run every
    expert is touched and leaves copies, and so do pages of caches on nvme as far as there is room.
    """
    if not plan.copies_on_host:
        old = sum(each.memory for each in speculative_groups(plan, config).values())
        return PeakCopies(old, 0, 0, old, staged=False, lacked_room=False)
    experts = representatives(plan, model, None, _MAX_COPIED)
    run = PlannedRun(plan, config, experts, passes, max_chunks=_MAX_CHUNKS_HELD)
    account, arena = run.memory.account, run.memory.arena
    on_nvme = plan.expected[Tier.NVME].get(StateClass.KV, 0)
    pages = min(arena.nbytes - account.peak_nbytes, on_nvme)
    return PeakCopies(
        account.peak_nbytes + pages, account.peak_by_class[StateClass.GRADIENTS],
        run.files.peak_nbytes,
        min(arena.nbytes, arena.high_water_nbytes + pages), run.stages,
        run.memory.lacked_room or pages < on_nvme,
    )  # fmt: skip


class PlannedMemory:
    """The peaks of a run of `plan` in bytes, computed without reading the machine.

    `config` has `optimizer.in_backward` as the training loop sets it
    (`OffloadConfig.owning_the_loop` for `offload train`).
    """

    def __init__(
        self, plan: Plan, config: OffloadConfig, model: ModelShape, facts: ActivationFacts,
        workload: Workload, baseline: Baseline,
    ) -> None:  # fmt: skip
        self._plan, self._config, self._model = plan, config, model
        self._facts, self._baseline = facts, baseline
        saved, disk = plan.activations, 0
        self._window = 0  # that activations leave through, or for
        if saved is not None:
            self._window, disk = saved.window_nbytes, saved.disk_nbytes
        # the bytes that forward saves and another tier takes
        self._parked = min(facts.saved_nbytes, self._window + disk)
        # ... and the peak of tensors where the model computes, with those that neither has room for
        stayed = facts.peak_elsewhere_nbytes + facts.saved_nbytes - self._parked
        self._tensors = facts.peak_nbytes if saved is None else min(facts.peak_nbytes, stayed)
        # those of them that may be on disk; what fits in half of the window is not written
        self._on_disk = min(disk, self._parked) if self._parked > self._window // 2 else 0
        self._copies = find_copies(plan, config, model, workload.passes)
        # gradients whose update within backward is late come on top
        late = plan.expected[Tier.NVME].get(StateClass.GRADIENTS, 0)
        self._late_nbytes = late if config.optimizer.in_backward is True else 0
        self._copies_are_exact = not (self._copies.lacked_room or self._late_nbytes)
        # the bytes on a GPU of copies of parameters that live elsewhere
        left = plan.budgets[Tier.DEVICE] - plan.total(Tier.DEVICE)
        self._mirrors = min(left, mirrors_nbytes(plan)) if plan.gpu else 0

    def estimate(self, capacities: Mapping[Tier, int] | None = None) -> MemoryEstimate:
        """The peaks, against the bytes that there are of each place (by default the budgets)."""
        plan, there = self._plan, capacities or self._plan.budgets
        held, on_nvme = {Tier.HOST: self._ram()}, self._on_nvme()
        if plan.gpu:
            held[Tier.DEVICE] = self._gpu()
        if plan.opens_files:
            held[Tier.NVME] = self._disk(on_nvme)
        for tier in TIERS:
            if tier.capacity_nbytes and plan.total(tier):
                held[tier] = {**self._expected(tier), MemoryClass.ACTIVATIONS: self._waiting(tier)}
        host = plan.total(Tier.HOST) + self._copies.nbytes + self._late_nbytes
        if self._copies.lacked_room:
            host = plan.budgets[Tier.HOST]
        moves = on_nvme[MemoryClass.STAGING] + on_nvme[MemoryClass.ACTIVATIONS] > 0
        is_bound = {
            Tier.DEVICE: plan.gpu and self._mirrors < mirrors_nbytes(plan),
            Tier.HOST: not self._copies_are_exact,
            Tier.NVME: moves or (on_nvme[MemoryClass.GRADIENTS] > 0 and not self._copies_are_exact),
        }
        return MemoryEstimate(
            places={tier: self._place(there[tier], by_class) for tier, by_class in held.items()},
            ledger_peaks={
                **{tier: plan.total(tier) for tier in TIERS},
                Tier.DEVICE: plan.total(Tier.DEVICE) + self._mirrors,
                Tier.HOST: min(plan.budgets[Tier.HOST], host),
                Tier.NVME: sum(on_nvme.values()),
            },
            bounds=frozenset(tier for tier, bound in is_bound.items() if bound),
        )

    def _expected(self, tier: Tier) -> ByClass:
        """Return the bytes that the plan expects in a tier, without the window of activations."""
        by_class = dict.fromkeys(MemoryClass, 0)
        for name, nbytes in self._plan.expected[tier].items():
            if name is not StateClass.ACTIVATIONS:
                by_class[_SHOWN_AS[name]] += nbytes
        return by_class

    def _place(self, capacity_nbytes: int, by_class: ByClass) -> PlaceEstimate:
        """The place that holds `by_class`, with master weights apart from the optimizer's states.
        Classes of no bytes are left out, and the excess over the budget of a tier that is full."""
        master = whole = 0
        for group in self._plan.groups:
            kept = self._plan.record_format.of(matrices=group.matrices)
            for field in kept.fields:  # with scales and without gaps
                nbytes = field.numel(group.layout.shard_trainable) * field.dtype.itemsize
                whole += nbytes
                master += nbytes if field.name in ("low", "master") else 0
        of_records = by_class[MemoryClass.OPTIMIZER]
        by_class[MemoryClass.MASTER] = of_records * master // max(1, whole)
        by_class[MemoryClass.OPTIMIZER] -= by_class[MemoryClass.MASTER]
        return PlaceEstimate(capacity_nbytes, {name: n for name, n in by_class.items() if n > 0})

    # ---------------------------------------------------------------- device
    def _gpu(self) -> ByClass:
        """GPU memory: the tier, one block, beside activations and the context."""
        budget, cache = self._plan.budgets[Tier.DEVICE], self._facts.cache_nbytes
        by_class = self._expected(Tier.DEVICE)
        by_class[MemoryClass.STAGING] += max(0, self._mirrors)
        by_class[MemoryClass.FRAGMENTATION] = budget - sum(by_class.values())
        by_class[MemoryClass.ACTIVATIONS] = self._tensors - cache
        by_class[MemoryClass.CACHE] += cache
        by_class[MemoryClass.FRAMEWORK] = self._baseline.gpu_nbytes
        return by_class

    # ---------------------------------------------------------------- RAM
    def _waiting(self, tier: Tier) -> int:
        """The bytes of the window that activations fill; 0 if it is not in `tier`."""
        there = self._plan.activations is not None and self._plan.activations.window_tier is tier
        return min(self._window, self._parked) if there else 0

    def _ram(self) -> ByClass:
        plan, facts, copies = self._plan, self._facts, self._copies
        states = self._states_in_ram()
        steps = dict(states)
        steps[MemoryClass.ACTIVATIONS] += self._waiting(Tier.HOST)
        if not plan.gpu:
            steps[MemoryClass.ACTIVATIONS] += self._tensors - facts.cache_nbytes
            steps[MemoryClass.CACHE] += facts.cache_nbytes
            leaves = plan.activations is not None
            steps[MemoryClass.FRAGMENTATION] += fragmentation_nbytes(facts, leaves=leaves)
        loading = {**states, MemoryClass.GRADIENTS: 0, MemoryClass.CACHE: 0}
        staged = self._largest_values + copies.nbytes - copies.gradients_nbytes
        loading[MemoryClass.STAGING] = staged
        by_class = max((steps, loading), key=lambda moment: sum(moment.values()))
        by_class[MemoryClass.FRAMEWORK] = self._baseline.ram_of(self._config, self._model.tensors)
        return by_class

    def _states_in_ram(self) -> ByClass:
        """The bytes of the arenas that have been touched after some steps."""
        plan, copies, by_class = self._plan, self._copies, self._expected(Tier.HOST)
        for name, nbytes in ({} if plan.gpu else self._expected(Tier.DEVICE)).items():
            by_class[name] += nbytes
        by_class[MemoryClass.STAGING] += copies.nbytes
        if not (copies.staged or plan.gpu):  # nothing passes through the update's buffers
            by_class[MemoryClass.STAGING] -= plan.staging_buffers * plan.staging_nbytes
        by_class[MemoryClass.FRAGMENTATION] += copies.touched_nbytes - copies.nbytes
        if plan.gpu:  # memory is pinned in whole extents: the last one, and two of the window
            left = max(0, plan.budgets[Tier.HOST] - sum(by_class.values()))
            ends = EXTENT_NBYTES * (3 if self._window else 1)
            by_class[MemoryClass.FRAGMENTATION] += min(left, ends)
        return by_class

    @property
    def _largest_values(self) -> int:
        """The bytes for loading the largest group: its values and a chunk of them in fp32. Without
        training, values are read from files, one parameter at a time."""
        if not self._plan.trains:
            params = (param.numel for group in self._model.groups for param in group.params)
            return ITEMSIZE[self._config.precision] * max(params, default=0)
        largest = max((group.numel for group in self._model.groups), default=0)
        return 4 * (largest + min(largest, self._plan.chunk_numel))

    # ---------------------------------------------------------------- nvme
    def _on_nvme(self) -> ByClass:
        """The most that the nvme ledger has of each class, however slow writes are.

        A piece has one valid version there, and at most one more: a new one while it is written, or
        an old one that is still read, or kept until a speculative update is accepted; a save beside
        training keeps another one. No more is on its way than host memory has room for, beside the
        homes there. Gradients have one version: an old sum is freed before the next one is written;
        those that stay in memory never come. Moves without room wait.
        """
        plan, by_class = self._plan, self._expected(Tier.NVME)
        left = max(0, plan.budgets[Tier.NVME] - sum(by_class.values()))
        replaced = by_class[MemoryClass.PARAMETERS] + by_class[MemoryClass.OPTIMIZER]
        # old versions of saves beside training and of speculative updates share the room
        if self._config.train.checkpoint_every > 0:
            versions, kept = 2, spare_nbytes(plan).files
        else:
            versions = 1
            kept = sum(old.files for old in speculative_groups(plan, self._config).values())
        # from the host memory beside what stays there, and on a CPU what it computes in
        homes = plan.expected[Tier.HOST]
        held = sum(homes.get(each, 0) for each in (*CLASSES, StateClass.ACTIVATIONS))
        held += plan.shared.workspace_nbytes if plan.shared and not plan.gpu else 0
        movable = max(0, plan.budgets[Tier.HOST] - held) + kept
        moving = min(versions * replaced, movable, left) if plan.trains else 0
        by_class[MemoryClass.STAGING] += moving
        by_class[MemoryClass.ACTIVATIONS] = min(self._on_disk, left - moving)
        if self._copies_are_exact and plan.sharding.world_size == 1:
            by_class[MemoryClass.GRADIENTS] = self._copies.written_nbytes
        return by_class

    def _disk(self, by_class: ByClass) -> ByClass:
        """Disk space: files are reserved, or extended by 256 MiB at a time."""
        total, reserved = sum(by_class.values()), needed_nbytes(self._plan, Tier.NVME)
        if total > reserved:
            reserved = max(reserved, round_up(total, _FILE_GROWTH_NBYTES))
        left = max(0, min(reserved, self._plan.budgets[Tier.NVME]) - total)
        return {**by_class, MemoryClass.FRAGMENTATION: left}
