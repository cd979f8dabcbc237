"""Predicts peaks of memory and disk from a plan: those of the ledger, and those of the process and
its files.

    ledger    device   homes there, mirrors (GPU), buffers of kernels (GPU)
              host     homes there, staging buffers, gradient sums, window of activations, copies of
                       what lives on nvme (`traffic`)
              nvme     at most: homes there, new versions beside the old ones (`nvme_upper_bound`),
                       activations
              where the model computes, with other ranks: whole parameters of the last groups used,
                       gradients on their way to their owners
    RAM       the part of the host tier that is ever touched, and of the device tier on a CPU
              + tensors of one forward and backward (`ActivationFacts`)
              + interpreter, libraries and kernels (`Baseline`)

All arenas are touched to their peaks by the end of the second step and pages are not given back, so
that from then on every peak of the activations coincides with all of the states. The only other
candidate is the loading of the largest group, whose first values are there in fp32 beside its home.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from offload.kernels.rules import StateFormat
from offload.planning.activations.facts import fragmentation_nbytes
from offload.planning.plan.estimate import MemoryClass, MemoryEstimate, PlaceEstimate
from offload.planning.plan.plan import Plan, needed_nbytes, spare_nbytes, tried_groups
from offload.planning.plan.sizes import ITEMSIZE, own_numel, pages, record_kinds, stored_nbytes
from offload.planning.plan.upper_bounds import nvme_upper_bound
from offload.planning.step.traffic import find_copies
from offload.tiers.ledger import StateClass
from offload.tiers.pinning import EXTENT_NBYTES
from offload.tiers.tier import Tier
from offload.tiers.units import round_up
from offload.zero.ranks.sharding import BUCKETS
from offload.zero.step.records import RecordFormat

if TYPE_CHECKING:
    from offload.config import OffloadConfig
    from offload.planning.activations.facts import ActivationFacts
    from offload.planning.machine.baseline import Baseline
    from offload.planning.plan.workload import Workload
    from offload.zero.groups.model_shape import ModelShape

_FILE_GROWTH_NBYTES = 256 << 20  # as `swap/io/block_store.py` lengthens a file
# Beside a parameter's values: its entry in the manifest, and one in the header of each file.
_NAMED_NBYTES, _TENSOR_NBYTES = 230, 120
_MOST_LATE = 3  # groups whose update within backward is still to come
ByClass = dict[MemoryClass, int]


@dataclass(frozen=True)
class _Homes:
    """The states with their home in one tier, by class, and the padding to pages and blocks."""

    by_class: ByClass
    padding_nbytes: int

    @property
    def nbytes(self) -> int:
        return sum(self.by_class.values()) + self.padding_nbytes


class PlannedMemory:
    """The peaks of a run of `plan` in bytes, computed without reading the machine.

    `config` has `optimizer.in_backward` as the training loop sets it
    (`OffloadConfig.owning_the_loop` for `offload train`). Capacities are the tiers' budgets (for
    RAM: host's and, on a CPU, device's, plus the baseline and the activations); a caller that knows
    the machine replaces them.
    """

    def __init__(
        self, plan: Plan, config: OffloadConfig, model: ModelShape, facts: ActivationFacts,
        workload: Workload, baseline: Baseline,
    ) -> None:  # fmt: skip
        self._planned = plan
        self._plan = _with_sums(plan, config, workload.passes)
        self._config = config
        self._model = model
        self._facts = facts
        self._baseline = baseline
        self._passes = workload.passes
        self._in_backward = config.optimizer.in_backward is True
        self._itemsize = ITEMSIZE[config.precision]
        self._homes = self._all_homes()
        self._window = plan.activations.window_nbytes if plan.activations is not None else 0
        kv = self._kv_in(Tier.HOST)
        self._beside = self._homes[Tier.HOST].nbytes + self._staging + self._window + kv
        room = plan.budgets[Tier.HOST] - self._beside
        self._copies = find_copies(self._plan, config, model, workload.passes, room, facts.kv)

    def _kv_in(self, tier: Tier) -> int:
        """The bytes of KV caches at home in a tier, and of those that are computed with there."""
        held = self._facts.kv
        if held is None:
            return 0
        computes = Tier.DEVICE if self._plan.gpu else Tier.HOST
        return held.pages.get(tier, 0) + (held.computing if tier is computes else 0)

    def estimate(self) -> MemoryEstimate:
        places = {Tier.HOST: self._ram()}
        if self._plan.gpu:
            places[Tier.DEVICE] = self._gpu()
        if self._plan.opens_files:
            places[Tier.NVME] = self._disk()
        return MemoryEstimate(
            places=places,
            ledger_peaks={
                Tier.DEVICE: self._device_peak(),
                Tier.HOST: self._beside + self._copies.nbytes,
                Tier.NVME: sum(self._on_nvme().values()),
            },
            checkpoint_nbytes=checkpoint_nbytes(self._plan, self._config, self._model),
            bounds=frozenset({Tier.NVME} if self.nvme_is_bound else ()),
        )

    # ---------------------------------------------------------------- homes
    def _all_homes(self) -> dict[Tier, _Homes]:
        plan = self._plan
        exact = {tier: _no_bytes() for tier in Tier}
        whole = dict.fromkeys(Tier, 0)
        for index, (group, shape) in enumerate(zip(plan.groups, self._model.groups, strict=True)):
            sharding = shape.sharding(plan.sharding)
            trainable, frozen = own_numel(group.layout, sharding.rank)
            numel = trainable + frozen if sharding.parameters else shape.numel
            home = plan.parameters[index]
            stored = stored_nbytes(group.layout, self._itemsize) if group.decoded else None
            exact[home][MemoryClass.PARAMETERS] += (
                numel * self._itemsize if stored is None else stored
            )
            whole[home] += group.parameters
            home = plan.gradients[index]
            itemsize = 4 if group.summed else self._itemsize
            is_kept = shape.ep_size > 1 and sharding.world_size > 1  # whole, until the step
            before = sum(group.trained_numels) if is_kept else 0
            exact[home][MemoryClass.GRADIENTS] += (trainable + before) * itemsize
            whole[home] += group.gradients
            # gaps between parameters are spread over the chunks
            share = trainable / max(1, group.layout.shard_trainable)
            for kind in record_kinds(group, plan.records[index], plan.chunk_numel):
                kept = plan.record_formats[kind.tier]
                master, states = _record_split(kept, int(kind.numel * share))
                exact[kind.tier][MemoryClass.MASTER] += master * kind.count
                exact[kind.tier][MemoryClass.OPTIMIZER] += states * kind.count
                whole[kind.tier] += kind.nbytes * kind.count
        return {tier: _Homes(exact[tier], whole[tier] - sum(exact[tier].values())) for tier in Tier}

    @property
    def _staging(self) -> int:
        """The staging bytes of the host ledger: update buffers and, on a CPU, of computing."""
        return self._update_buffers + self._where_it_computes * (not self._plan.gpu)

    @property
    def _update_buffers(self) -> int:
        return self._plan.staging_buffers * self._plan.staging_nbytes

    @property
    def _where_it_computes(self) -> int:
        """The bytes of micro-batch sums, and of buffers for working with other ranks."""
        return self._plan.sums_nbytes + self._with_ranks

    # ---------------------------------------------------------------- other ranks
    @cached_property
    def _with_ranks(self) -> int:
        """The bytes for working with other ranks where the model computes, as long as reductions
        keep up with backward."""
        shared = self._plan.shared
        if shared is None:
            return 0
        whole = [
            pages(group.layout.numel * self._itemsize) for group in self._plan.groups
            if not (group.decoded or group.table)
        ]  # fmt: skip
        gathered = min(shared.gather_nbytes, sum(whole))
        return gathered + sum(self._buckets[:BUCKETS]) + shared.workspace_nbytes

    @cached_property
    def _buckets(self) -> list[int]:
        """The bytes of groups' whole gradients on their way to their owners, the largest first."""
        numels = (group.layout.numel_trainable for group in self._plan.groups)
        return sorted((pages(n * self._itemsize) for n in numels if n), reverse=True)

    @property
    def _late_buckets(self) -> int:
        """The bytes of further buckets when reductions fall behind backward."""
        return sum(self._buckets[BUCKETS:]) if self._plan.shared is not None else 0

    # ---------------------------------------------------------------- device
    def _device_peak(self) -> int:
        """The ledger's peak of the device tier, on a GPU with mirrors of other parameters."""
        plan = self._plan
        homes = self._homes[Tier.DEVICE].nbytes + self._kv_in(Tier.DEVICE)
        if not plan.gpu:
            return homes
        return min(plan.budgets[Tier.DEVICE], homes + self._kernel_buffers + self._mirrors)

    @property
    def _kernel_buffers(self) -> int:
        device = self._plan.device
        return self._where_it_computes + (device.total_nbytes if device is not None else 0)

    @property
    def _mirrors(self) -> int:
        pairs = zip(self._plan.groups, self._plan.parameters, strict=True)
        codes = sum(group.parameters for group, tier in pairs if tier is not Tier.DEVICE)
        return codes + sum(group.decoded for group in self._plan.groups)

    def _gpu(self) -> PlaceEstimate:
        """The estimate of GPU memory: the tier, one block, beside activations and the context."""
        budget, homes = self._plan.budgets[Tier.DEVICE], self._homes[Tier.DEVICE]
        by_class = dict(homes.by_class)
        kv = self._kv_in(Tier.DEVICE)
        mirrors = self._device_peak() - homes.nbytes - self._kernel_buffers - kv
        by_class[MemoryClass.CACHE] = kv
        by_class[MemoryClass.STAGING] = self._kernel_buffers + max(0, mirrors)
        by_class[MemoryClass.FRAGMENTATION] = budget - sum(by_class.values())
        by_class[MemoryClass.ACTIVATIONS] = self._tensors - self._facts.cache_nbytes
        by_class[MemoryClass.CACHE] += self._facts.cache_nbytes
        by_class[MemoryClass.FRAMEWORK] = self._baseline.gpu_nbytes
        capacity = budget + self._tensors + self._baseline.gpu_nbytes
        return PlaceEstimate(capacity, _without_zeros(by_class))

    # ---------------------------------------------------------------- RAM
    @property
    def _tensors(self) -> int:
        """The bytes of tensors where the model computes, at the peak of a forward and backward
        pass; includes saved tensors for which the window and the disk have no room."""
        if self._plan.activations is None:
            return self._facts.peak_nbytes
        stayed = self._facts.saved_nbytes - self._parked
        return min(self._facts.peak_nbytes, self._facts.peak_elsewhere_nbytes + stayed)

    @property
    def _fragmentation(self) -> int:
        """The bytes of holes in the C library's heap, if the model computes on a CPU."""
        if self._plan.gpu:
            return 0
        return fragmentation_nbytes(self._facts, leaves=self._plan.activations is not None)

    @property
    def _parked(self) -> int:
        """The bytes that forward saves and another tier takes."""
        activations = self._plan.activations
        room = self._window + activations.disk_nbytes if activations is not None else 0
        return min(self._facts.saved_nbytes, room)

    @property
    def nvme_is_bound(self) -> bool:
        """Whether the ledger's peak of nvme depends on the speed of moves, so that the prediction
        is an upper bound."""
        by_class = self._on_nvme()
        moving = by_class[MemoryClass.STAGING] + by_class[MemoryClass.ACTIVATIONS]
        return moving > 0 or (self._in_backward and by_class[MemoryClass.GRADIENTS] > 0)

    @property
    def host_slack_nbytes(self) -> int:
        """The amount by which the host ledger's peak may vary: gradients that an update within
        backward has not returned yet, or other ranks have not taken yet, if there is room. It is
        one group's on a quiet machine, and more on a busy one."""
        late = 0 if self._plan.gpu else self._late_buckets
        if self._in_backward:
            pairs = zip(self._plan.groups, self._plan.gradients, strict=True)
            gradients = sorted(group.gradients for group, tier in pairs if tier is Tier.NVME)
            late += sum(gradients[-_MOST_LATE:])
        left = self._plan.budgets[Tier.HOST] - self._beside - self._copies.nbytes
        return min(late, max(0, left))

    @property
    def _activations_on_disk(self) -> int:
        """The bytes of activations that may be on disk; 0 if they fit in half of the window, which
        is not written."""
        activations = self._plan.activations
        if activations is None or self._parked <= self._window // 2:
            return 0
        return min(activations.disk_nbytes, self._parked)

    @property
    def _framework(self) -> int:
        return self._baseline.ram_of(self._config, self._model.tensors)

    def _ram(self) -> PlaceEstimate:
        states = self._states_in_ram()
        tensors, cache = (self._tensors, self._facts.cache_nbytes) if not self._plan.gpu else (0, 0)
        held = sum(states.values())
        steps = {
            **states,
            MemoryClass.ACTIVATIONS: min(self._window, self._parked) + tensors - cache,
            MemoryClass.CACHE: states[MemoryClass.CACHE] + cache,
            MemoryClass.FRAMEWORK: self._framework,
        }
        steps[MemoryClass.FRAGMENTATION] += self._fragmentation
        loading = {
            **states,
            MemoryClass.GRADIENTS: 0,
            MemoryClass.CACHE: 0,
            MemoryClass.STAGING: sum(self._copies.by_class.values())
            - self._copies.by_class.get(StateClass.GRADIENTS, 0)
            + self._largest_values,
            MemoryClass.FRAMEWORK: self._framework,
        }
        by_class = max((steps, loading), key=lambda moment: sum(moment.values()))
        capacity = self._plan.budgets[Tier.HOST] + sum(by_class.values()) - held
        if not self._plan.gpu:
            capacity += self._plan.budgets[Tier.DEVICE]
        return PlaceEstimate(capacity, _without_zeros(by_class))

    def _states_in_ram(self) -> ByClass:
        """The bytes of the arenas that have been touched after some steps."""
        tiers = [Tier.HOST] if self._plan.gpu else [Tier.HOST, Tier.DEVICE]
        by_class = _no_bytes()
        for tier in tiers:
            for name, nbytes in self._homes[tier].by_class.items():
                by_class[name] += nbytes
            by_class[MemoryClass.FRAGMENTATION] += self._homes[tier].padding_nbytes
            by_class[MemoryClass.CACHE] += self._kv_in(tier)
        copies, used = self._copies, self._copies.staged or self._plan.gpu
        by_class[MemoryClass.STAGING] += copies.nbytes + self._staging
        by_class[MemoryClass.STAGING] -= 0 if used else self._update_buffers
        by_class[MemoryClass.FRAGMENTATION] += copies.touched_nbytes - copies.nbytes
        if self._plan.gpu:
            left = max(0, self._plan.budgets[Tier.HOST] - sum(by_class.values()))
            by_class[MemoryClass.FRAGMENTATION] += min(left, self._ends_of_pinned)
        return by_class

    @property
    def _ends_of_pinned(self) -> int:
        """The unused ends of pinned memory, which is pinned in whole extents: one extent at the end
        of the used part, and two more for the unused part of the window for activations."""
        return EXTENT_NBYTES * (3 if self._window else 1)

    @property
    def _largest_values(self) -> int:
        """The bytes for loading the largest group: its values and a chunk of them in fp32. Without
        training, values are read from files, one parameter at a time."""
        if not self._plan.trains:
            params = (param.numel for group in self._model.groups for param in group.params)
            return self._itemsize * max(params, default=0)
        largest = max((group.numel for group in self._model.groups), default=0)
        return 4 * (largest + min(largest, self._plan.chunk_numel))

    # ---------------------------------------------------------------- nvme
    def _on_nvme(self) -> ByClass:
        """The upper bound of the nvme ledger by class."""
        by_class = _no_bytes()
        tried = tried_groups(self._planned, self._config)
        old = sum(each.files for each in tried.values())
        kept = spare_nbytes(self._planned).files if self._saves_beside else 0
        most = nvme_upper_bound(self._planned, self._activations_on_disk, old, kept)
        for state_class, nbytes in most.items():
            by_class[MemoryClass(str(state_class))] += nbytes
        by_class[MemoryClass.CACHE] += self._kv_in(Tier.NVME)
        return by_class

    @property
    def _saves_beside(self) -> bool:
        """Whether `offload train` saves while it trains (`checkpoint/engine/background.py`)."""
        plan = self._plan
        on_device = {Tier.DEVICE} & {*plan.parameters, *chain.from_iterable(plan.records)}
        return (
            self._config.train.checkpoint_every > 0 and plan.sharding.world_size == 1
            and not (plan.gpu and on_device)
        )  # fmt: skip

    def _disk(self) -> PlaceEstimate:
        """The estimate of disk space: files are reserved, or extended by 256 MiB at a time."""
        by_class = self._on_nvme()
        homes = self._homes[Tier.NVME]
        total, optimizer = sum(by_class.values()), by_class[MemoryClass.OPTIMIZER]
        states = homes.by_class[MemoryClass.OPTIMIZER] + homes.by_class[MemoryClass.MASTER]
        if states:
            by_class[MemoryClass.MASTER] = optimizer * homes.by_class[MemoryClass.MASTER] // states
            by_class[MemoryClass.OPTIMIZER] -= by_class[MemoryClass.MASTER]
        reserved = needed_nbytes(self._plan, Tier.NVME)
        if total > reserved:
            reserved = max(reserved, round_up(total, _FILE_GROWTH_NBYTES))
        budget = self._plan.budgets[Tier.NVME]
        by_class[MemoryClass.FRAGMENTATION] = max(0, min(reserved, budget) - total)
        return PlaceEstimate(budget, _without_zeros(by_class))


def _with_sums(plan: Plan, config: OffloadConfig, passes: int) -> Plan:
    """Return the plan with the actual gradients: those of several passes are fp32 sums, planned or
    not; unplanned sums are on host where the plan has nvme."""
    if config.precision == "fp32" or max(passes, config.gradient_accumulation_steps) == 1:
        return plan
    groups = tuple(
        replace(group, gradients=pages(group.layout.shard_trainable * 4), summed=True)
        for group in plan.groups
    )
    gradients = tuple(Tier.HOST if tier is Tier.NVME else tier for tier in plan.gradients)
    return replace(plan, groups=groups, gradients=gradients)


def _record_split(kept: RecordFormat, numel: int) -> tuple[int, int]:
    """The bytes of a record's master and of its states, with scales and without gaps."""
    master = states = 0
    for field in kept.fields:
        nbytes = field.numel(numel) * field.dtype.itemsize
        if field.name in ("low", "master"):
            master += nbytes
        else:
            states += nbytes
    return master, states


def checkpoint_nbytes(plan: Plan, config: OffloadConfig, model: ModelShape) -> int:
    """The bytes of the files of one checkpoint, with all ranks' experts: the states without padding
    and about what their names take. The model's persistent buffers, which are not in a
    `ModelShape`, are left out. Two checkpoints exist while one replaces another."""
    kept, total = plan.record_formats[Tier.HOST], 0
    if not config.optimizer.states.uniform:
        kept = RecordFormat(kept.master, kept.states, StateFormat.FP32)
    for group in model.groups:
        for spec in group.layout.params:
            states = sum(_record_split(kept, spec.numel)) if spec.trainable else 0
            saved = 1 + (len(kept.fields) if spec.trainable else 0)
            named = _NAMED_NBYTES + saved * (_TENSOR_NBYTES + len(spec.names[0]))
            total += group.ep_size * (spec.numel * ITEMSIZE[config.precision] + states + named)
    return total


def _no_bytes() -> ByClass:
    return dict.fromkeys(MemoryClass, 0)


def _without_zeros(by_class: Mapping[MemoryClass, int]) -> ByClass:
    return {name: nbytes for name, nbytes in by_class.items() if nbytes}
