"""A model on a cluster that is not here, from one GPU to thousands: `memest scale`.

For every world size the planner that trains plans one rank, every shard of every rank is checked,
the collectives of a step are written down in order, and the step is run over links whose speeds are
those of the cluster's parts. Nothing is measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from offload.planning.machine.network import Network
from offload.planning.plan.estimate import Estimate, StepEstimate
from offload.planning.plan.sizes import ITEMSIZE
from offload.planning.step.collective_sequence import (
    Among,
    Collective,
    CollectiveSequence,
    collective_sequence,
)
from offload.planning.step.step_time import COMPUTE, NETWORK
from offload.tiers.errors import ConfigError, StateError
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier
from offload.tools.memest.estimate.case import Case
from offload.tools.memest.estimate.estimator import Estimator
from offload.tools.memest.hardware.profiles import with_gpus
from offload.zero.layout import SHARD_ALIGN_NUMEL, Layout
from offload.zero.model_shape import ModelShape
from offload.zero.sharding import Part, Sharding

MOST_RANKS = 4096


@dataclass(frozen=True)
class Call:
    """One collective of a step."""

    name: str
    group: int  # of the plan
    nbytes: int
    seconds: float  # of the network


@dataclass(frozen=True)
class Total:
    """Collectives of one kind in a step, one after the other."""

    name: str
    count: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Point:
    """One world size. Bytes and seconds are of one rank."""

    sharding: Sharding
    shards: Shards
    calls: tuple[Call, ...]  # in order
    times_model: float  # bytes of all collectives' buffers, in sizes of the model's parameters
    found: Estimate
    step: StepEstimate

    @property
    def ranks(self) -> int:
        return self.sharding.world_size

    def held_nbytes(self, state_class: StateClass) -> int:
        """At home, in all tiers."""
        expected = self.found.plan.expected
        return sum(expected[tier].get(state_class, 0) for tier in Tier)

    @property
    def shared_nbytes(self) -> int:
        """For working with the other ranks: gathered parameters, gradients on their way."""
        shared = self.found.plan.shared
        return shared.total_nbytes if shared is not None else 0

    @property
    def network_s(self) -> float:
        """That the network is busy in a step."""
        return _busy_s(self.step, NETWORK)

    @property
    def efficiency(self) -> float:
        """Of a step, the share in which the model computes."""
        return _busy_s(self.step, COMPUTE) / self.step.seconds

    @property
    def totals(self) -> list[Total]:
        """The collectives by kind, in the order in which kinds first come."""
        by_name: dict[str, list[Call]] = {}
        for call in self.calls:
            by_name.setdefault(call.name, []).append(call)
        return [
            Total(name, len(calls), sum(c.nbytes for c in calls), sum(c.seconds for c in calls))
            for name, calls in by_name.items()
        ]


@dataclass(frozen=True)
class Series:
    """World sizes under one way of sharding."""

    name: str
    points: tuple[Point, ...]


def scaling(
    case: Case, most_ranks: int = MOST_RANKS, estimator: Estimator | None = None
) -> list[Series]:
    """What is asked for, and where it leaves that open, shard groups of one machine as well.

    `case.profile` is of one machine. ConfigError where the times of this hardware cannot be told.
    """
    _check(case)
    estimator = estimator or Estimator()
    zero = case.config.zero
    series = [_series(case, estimator, most_ranks)]
    machine = case.profile.ranks_per_node
    if zero.stage > 0 and zero.shard_group is None and 1 < machine < most_ranks:
        hybrid = zero.model_copy(update={"shard_group": machine})
        config = case.config.model_copy(update={"zero": hybrid})
        series.append(_series(replace(case, config=config), estimator, most_ranks))
    return series


def _calls(sequence: CollectiveSequence, network: Network, sharding: Sharding) -> Iterator[Call]:
    """As the step's actions ask for them."""
    by_action: dict[object, list[tuple[str, Collective]]] = {}
    for each in sequence.gathers:
        name = f"all-gather of shards in {each.action.verb.value}"
        by_action.setdefault(each.action, []).append((name, each))
    for each in sequence.reductions:
        by_action.setdefault(each.action, []).extend(_reductions(each))
    for action in dict.fromkeys(sequence.program.actions):
        for name, each in by_action.get(action, ()):
            seconds = sum(network.seconds(exchange, sharding) for exchange in each.exchanges)
            yield Call(name, each.group, each.nbytes, seconds)


def _reductions(asked: Collective) -> Iterator[tuple[str, Collective]]:
    """A sum for the owner of each shard, then one of those among its replicas: in hybrids both."""
    names = {Among.SHARDS: "reduce-scatter of shards", Among.REPLICAS: "all-reduce among replicas"}
    for among, name in names.items():
        exchanges = tuple(each for each in asked.exchanges if each.among is among)
        if exchanges:
            yield f"{name} in backward", replace(asked, exchanges=exchanges)


def _check(case: Case) -> None:
    if not case.source.has_graph:
        raise ConfigError(
            f"scale: {case.source.name}: weights alone do not say what a step works on; name the "
            "config.json, or give --layers and --hidden"
        )
    if case.config.device == "cpu":
        raise ConfigError(
            "scale: device: cpu has no GPUs, and a size here is a number of GPUs; set device: cuda"
        )
    network = case.profile.network()
    if case.speeds is None or network is None or not network.between_bytes_per_s:
        raise ConfigError(
            f"scale: nothing is known of the network between machines like {case.profile.name}; "
            "name one with a network: --profile 'DGX H100' (`memest profiles` lists them)"
        )


def _series(case: Case, estimator: Estimator, most_ranks: int) -> Series:
    zero = case.config.zero
    name = f"ZeRO stage {zero.stage}"
    if zero.stage and zero.shard_group:
        name += f", shard groups of {zero.shard_group}"
    group = zero.shard_group or 1
    sizes = _sizes(case.profile.ranks_per_node, most_ranks)
    points: list[Point] = []
    for ranks in sizes:
        if ranks % case.ep_size == 0 and (zero.stage == 0 or ranks % group == 0):
            points.append(_point(_as_before(case, points), estimator, ranks))
            if not points[-1].found.fits:  # what fitted before does not: all is open again
                points[-1] = _point(case, estimator, ranks)
    if not points:
        tried = ", ".join(f"{ranks:,}" for ranks in sizes)
        if not any(ranks % case.ep_size == 0 for ranks in sizes):
            raise ConfigError(
                f"--ep-size {case.ep_size} divides none of the numbers of ranks that are gone "
                f"through ({tried}); give a divisor of one of them, or more --nodes"
            )
        raise ConfigError(
            f"zero.shard_group: {group} divides none of the numbers of ranks that are gone through "
            f"({tried}); set it to a divisor of one of them"
        )
    return Series(name, tuple(points))


def _as_before(case: Case, points: Sequence[Point]) -> Case:
    """With the plan of fewer ranks, where that has all states where the model computes: shards get
    no larger, so there is nothing better to be found."""
    if not points or not points[-1].found.fits or points[-1].ranks == 1:
        return case
    found = points[-1].found
    placements = found.plan.placements.values()
    if any(set(placement.tiers) != {Tier.DEVICE} for placement in placements):
        return case
    update = {"placement": found.config.placement, "micro_batches": found.config.micro_batches}
    return replace(case, config=case.config.model_copy(update=update))


def _sizes(per_machine: int, most_ranks: int) -> Sequence[int]:
    """1, 2, 4 ... ranks of one machine, 1, 2, 4 ... whole machines, and the most that there are."""
    powers = [1 << power for power in range(most_ranks.bit_length())]
    within = {ranks for ranks in powers if ranks < per_machine}
    machines = {per_machine * count for count in powers if per_machine * count <= most_ranks}
    largest = most_ranks - most_ranks % min(per_machine, most_ranks)
    return sorted(within | machines | {largest})


def _point(case: Case, estimator: Estimator, ranks: int) -> Point:
    machine = case.profile.ranks_per_node
    profile = case.profile
    if ranks < machine:
        profile = with_gpus(profile, ranks)
    profile = replace(profile, nodes=max(1, ranks // machine))
    case = replace(case, profile=profile, speeds=profile.speeds())
    found, network = estimator(case), profile.network()
    assert network is not None, "checked before"
    assert found.step is not None, "speeds, network and work are known"
    shape, sharding = case.shape, case.sharding
    sequence = collective_sequence(found.config, shape, sharding, case.workload.passes)
    shards = check_shards(shape, sharding)
    times_model = sequence.nbytes / (shape.numel_of_all_ranks * ITEMSIZE[found.config.precision])
    calls = tuple(_calls(sequence, network, sharding))
    return Point(sharding, shards, calls, times_model, found, found.step)


def _busy_s(step: StepEstimate, name: str) -> float:
    return sum(link.seconds for link in step.links if link.name == name)


@dataclass(frozen=True)
class Shards:
    """What was found of a model's shards. Elements of one copy of the model."""

    numel: int  # of parameters
    padded_numel: int  # of all groups' buffers
    parts: int  # parts of parameters that were gone through, over all ranks

    @property
    def padding(self) -> float:
        """Of the buffers, the share that is no parameter."""
        return 1 - self.numel / self.padded_numel if self.padded_numel else 0.0


def check_shards(model: ModelShape, sharding: Sharding) -> Shards:
    """Every shard of every group of a rank, from the layouts that training uses: nothing left out,
    nothing twice. Groups that are laid out alike (a model's blocks) are gone through once.

    StateError, naming the group and the rank, where the shards do not make up the whole.
    """
    found: dict[object, int] = {}
    padded = parts = 0
    for group in model.sharded(sharding.ranks, sharding.replicas).groups:
        key = group.ep_size, tuple((param.shape, param.trainable) for param in group.params)
        if key not in found:
            its = sharding.of_experts(group.ep_size)
            found[key] = _check_group(group.name, group.layout, its)
        parts += found[key]
        padded += group.layout.numel
    return Shards(model.numel, padded, parts)


def _check_group(name: str, layout: Layout, sharding: Sharding) -> int:
    """Parts of parameters in this group, over all ranks."""
    if layout.ranks != sharding.ranks:
        raise StateError(f"{name}: laid out for {layout.ranks} ranks, not {sharding.ranks}")
    trainable, frozen, count = 0, layout.numel_trainable, 0
    covered: dict[int, int] = defaultdict(int)
    for rank in range(sharding.ranks):
        part = Part.of(layout, rank)
        if part.trainable.start != trainable or part.frozen.start != frozen:
            raise StateError(f"{name}: the shard of rank {rank} does not follow the one before it")
        trainable, frozen = part.trainable.stop, part.frozen.stop
        for each in part.trained():
            spec = layout.params[each.index]
            if each.start != covered[each.index] or each.spec.stop > len(part.trainable):
                raise StateError(f"{spec.name}: rank {rank} has another part than is its turn")
            covered[each.index] += each.spec.numel
            count += 1
    if trainable != layout.numel_trainable or frozen != layout.numel:
        raise StateError(f"{name}: the shards of {sharding.ranks} ranks do not end with the buffer")
    for index, spec in enumerate(layout.params):
        if spec.trainable and covered[index] != spec.numel:
            raise StateError(f"{spec.name}: {covered[index]} of {spec.numel} elements are owned")
    if sharding.world_size > 1 and layout.shard_numel % (SHARD_ALIGN_NUMEL * sharding.replicas):
        raise StateError(f"{name}: a shard is not whole pages for each of its replicas")
    return count
