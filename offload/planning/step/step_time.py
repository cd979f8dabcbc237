"""The bytes and the duration of a step: its program is simulated over links that work side by side.

    nvme read    ├ U0 ┤├ U1 ┤├ U2 ┤      ├ 1 ┤├ 0 ┤
    optimizer         ├ U0 ┤├ U1 ┤├ U2 ┤
    compute                 ├ F0 ┤├ F1 ┤├ F2 ┤├ B2 ┤├ B1 ┤├ B0 ┤
    nvme write             ├ U0 ┤├ U1 ┤├ U2 ┤     ├ g2 ┤├ g1 ┤├ g0 ┤

Each action begins when its link is free and what it waits for is there: a group's update for its
record and gradient, its forward for its update, its backward for its parameters, which were asked
for as many groups ahead as the runtime fetches. Steps are run one after the other until they take
equally long: what is left to do at the end of one is done in the next.

With other ranks a step has no time that is shown: the network between them is not known.

Where the model computes on a CPU, compute and optimizer are one link: both use all cores. What they
lose to I/O beyond that is measured (`Speeds.io_lost_s_per_byte`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from offload.kernels.newton_schulz import products_flops
from offload.kernels.variants import Master
from offload.planning.plan.estimate import LinkTime, StepEstimate
from offload.planning.plan.plan import Plan, speculative_groups
from offload.planning.plan.sizes import ITEMSIZE, GroupBytes, RecordKind, record_kinds
from offload.planning.step.planned_run import MAX_PASSES, PlannedRun
from offload.planning.step.program import Bytes, Move, Verb, total_of, working_groups
from offload.planning.step.representatives import representatives
from offload.tiers.errors import ConfigError
from offload.tiers.tier import Tier
from offload.zero.groups.model_shape import ModelShape
from offload.zero.step.records import RecordFormat

if TYPE_CHECKING:
    from offload.config import OffloadConfig
    from offload.planning.activations.facts import ActivationFacts, PassCost
    from offload.planning.machine.speeds import Speeds
    from offload.planning.plan.estimate import Workload
    from offload.planning.plan.kv_plan import KVPlan

COMPUTE, OPTIMIZER = "compute", "optimizer"
_ON_DEVICE = "optimizer on the device"  # beside the model; its time is the device's
READ, WRITE = "nvme read", "nvme write"
TO_DEVICE, TO_HOST = "host to device", "device to host"

_STEPS = 4  # of which the last one counts
_MAX_GAPS = 16  # of a link that are remembered, the last ones
# What one request takes of the interpreter, which the model's thread has to share: measured where
# chunks are chosen (`chunk_and_prefetch.py`), on two cores of an AMD EPYC.
_REQUEST_CALL_S = 150e-6


def estimate_step(
    plan: Plan, config: OffloadConfig, model: ModelShape, facts: ActivationFacts,
    workload: Workload, speeds: Speeds,
) -> StepEstimate:  # fmt: skip
    """Estimate one step of a long run on hardware with these `speeds`. Takes milliseconds.

    If there are many passes, few are simulated, and the others are like the one between.
    """

    def of(passes: int) -> StepEstimate:
        some = replace(workload, passes=passes)
        run = step_traffic(plan, config, model, facts, some)
        return _Pipeline(plan, config, facts, some, speeds, run).estimate()

    beyond = workload.passes - MAX_PASSES
    if beyond <= 0:
        return of(workload.passes)
    return _longer(of(MAX_PASSES - 1), of(MAX_PASSES), beyond, workload.tokens)


def _longer(shorter: StepEstimate, step: StepEstimate, more: int, tokens: int) -> StepEstimate:
    """Add `more` passes to `step`, each with the difference between `step` and `shorter`."""
    before = {link.name: link for link in shorter.links}
    links = tuple(
        LinkTime(
            link.name,
            link.seconds + more * (link.seconds - before[link.name].seconds),
            link.nbytes + more * (link.nbytes - before[link.name].nbytes),
        )
        for link in step.links
    )
    slowest = max(links, key=lambda link: link.seconds)
    seconds = step.seconds + more * (step.seconds - shorter.seconds)
    return StepEstimate(max(seconds, slowest.seconds), links, slowest.name, tokens)


@dataclass(slots=True)
class _Clock:
    """The time at which a link is free, and how long it has worked."""

    free_s: float = 0.0
    busy_s: float = 0.0

    def take(self, ready_s: float, seconds: float) -> float:
        """Return the end of work that is ready to begin at `ready_s`."""
        self.free_s = max(self.free_s, ready_s) + seconds
        self.busy_s += seconds
        return self.free_s


@dataclass(slots=True)
class _Link(_Clock):
    """A link to or from a device: what is ready sooner than what was asked for before it goes
    first."""

    gaps: list[tuple[float, float]] = field(default_factory=list)

    def take(self, ready_s: float, seconds: float) -> float:
        for index, (start_s, stop_s) in enumerate(self.gaps if ready_s < self.free_s else ()):
            end_s = max(start_s, ready_s) + seconds
            if end_s <= stop_s:
                self.gaps[index : index + 1] = [(start_s, end_s - seconds), (end_s, stop_s)]
                self.busy_s += seconds
                return end_s
        if ready_s > self.free_s:
            self.gaps = [*self.gaps[1 - _MAX_GAPS :], (self.free_s, ready_s)]
        return _Clock.take(self, ready_s, seconds)


class _Pipeline:
    def __init__(
        self, plan: Plan, config: OffloadConfig, facts: ActivationFacts, workload: Workload,
        speeds: Speeds, run: PlannedRun,
    ) -> None:  # fmt: skip
        self._plan, self._config, self._speeds = plan, config, speeds
        self._experts = experts = run.experts
        self._moves, self._total, self._workload = run.moves, total_of(run.moves), workload
        self._speculative = speculative_groups(plan, config)
        self._clocks: dict[str, _Clock] = defaultdict(_Clock)
        self._clocks |= {TO_DEVICE: _Link(), TO_HOST: _Link()}
        # parameters of a group: updated, where it computes, with the other ranks' shards
        self._ready: dict[int, float] = defaultdict(float)
        self._gradient_home: dict[int, float] = defaultdict(float)
        self._arrived: list[float] = []  # when the model's thread reached each use
        self._begun_s = 0.0
        self._waiting: list[tuple[float, Move]] = []  # speculative updates, and since when
        self._cost = self._costs(facts)
        self._update_s, self._update_there_s = (
            {
                group: count * update_s(plan, group, config.precision, speeds, there=there)
                for group, count in experts.updated.items()
            }
            for there in (False, True)
        )
        for group, old in self._speculative.items() if plan.gpu else ():
            if group in experts.updated:  # codes, or weights, are written beside it
                seconds = old.memory / speeds.host_bytes_per_s
                self._update_s[group] += experts.updated[group] * seconds
        self._request_nbytes = _request_nbytes(plan)
        self._disk_overlap = _disk_overlap(speeds)
        self._rates = {
            READ: speeds.nvme_read_bytes_per_s, WRITE: speeds.nvme_write_bytes_per_s,
            TO_DEVICE: speeds.host_to_device_bytes_per_s,
            TO_HOST: speeds.device_to_host_bytes_per_s,
        }  # fmt: skip

    def _costs(self, facts: ActivationFacts) -> dict[tuple[Verb, int], float]:
        """Seconds of each use: those of a pass, divided by parameters among the groups that
        backward needs."""
        precision, speeds, experts = self._config.precision, self._speeds, self._experts
        needed = working_groups(experts.model)
        numels = {
            group: used * experts.model.groups[group].numel if group in needed else 0
            for group, used in experts.used.items()
        }
        read = 0 if experts.model.numel_trainable else sum(numels.values())
        totals = {
            Verb.FORWARD: pass_s(facts.forward, precision, speeds, read),
            Verb.BACKWARD: pass_s(facts.backward, precision, speeds),
        }
        costs: dict[tuple[Verb, int], float] = {}
        for verb, total in totals.items():
            actions = (move.action for move in self._moves if move.action.verb is verb)
            uses = [action.group for action in actions if action.number == 0]
            whole = sum(numels[group] for group in uses)
            for group in uses:
                share = numels[group] / whole if whole else 1 / len(uses)
                read_s = experts.used[group] * weights_s(self._plan, group)
                costs[verb, group] = total * share + read_s
        return costs

    # ---------------------------------------------------------------- running
    def estimate(self) -> StepEstimate:
        ends = [0.0]
        for _ in range(_STEPS):
            for clock in self._clocks.values():
                clock.busy_s = 0.0
            self._arrived, self._begun_s = [], ends[-1]
            for move in self._moves:
                if move.action.verb is Verb.UPDATE:
                    self._update(move)
                elif move.action.verb is Verb.GRADIENT:
                    self._gradient(move)
                else:
                    self._use(move)
            ends.append(self._clocks[COMPUTE].free_s)
        links = self._links()
        slowest = max(links, key=lambda link: link.seconds)
        # nothing waits for writes: where they are the slowest they fall ever further behind
        seconds = max(ends[-1] - ends[-2], slowest.seconds)
        return StepEstimate(seconds, links, slowest.name, self._workload.tokens)

    def _links(self) -> tuple[LinkTime, ...]:
        total = self._total
        nbytes = {
            READ: total.read, WRITE: total.written, TO_DEVICE: total.to_device,
            TO_HOST: total.to_host,
        }  # fmt: skip
        names = [COMPUTE, OPTIMIZER, *(name for name, moved in nbytes.items() if moved)]
        return tuple(
            LinkTime(name, self._clocks[name].busy_s, nbytes.get(name, 0)) for name in names
        )

    def _use(self, move: Move) -> None:
        group, moved = move.action.group, move.nbytes
        arrived_s = self._clocks[COMPUTE].free_s
        self._arrived.append(arrived_s)
        self._make_waiting(arrived_s, {group, *(fetch.group for fetch in move.fetches)})
        # a forward is known to need an expert when its router has chosen
        table = self._experts.model.groups[group].table
        is_chosen = bool(table) and move.action.verb is Verb.FORWARD
        fetched_read = fetched_sent = 0
        for fetch in move.fetches:
            asked_s = arrived_s
            if self._plan.gpu and fetch.group == group and not is_chosen:
                # asked for as soon as it was updated
                asked_s = self._arrived[max(0, len(self._arrived) - 1 - self._plan.prefetch)]
            asked_s = max(asked_s, self._ready[fetch.group])
            read_s = self._carry(READ, asked_s, fetch.read_nbytes)
            self._ready[fetch.group] = self._carry(TO_DEVICE, read_s, fetch.to_device_nbytes)
            fetched_read += fetch.read_nbytes
            fetched_sent += fetch.to_device_nbytes
        # what is left are activations: read ahead by one group, written behind
        before_s = self._arrived[max(0, len(self._arrived) - 2)]
        saved_s = self._carry(READ, before_s, moved.read - fetched_read)
        saved_s = self._carry(TO_DEVICE, saved_s, moved.to_device - fetched_sent)
        seconds = self._cost[move.action.verb, group] + self._lost_s(move)
        seconds += moved.dequantized / self._speeds.compute_bytes_per_s
        end_s = self._clocks[COMPUTE].take(max(self._ready[group], saved_s), seconds)
        self._carry(WRITE, self._carry(TO_HOST, end_s, moved.to_host), moved.written)

    def _gradient(self, move: Move) -> None:
        group, moved, plan = move.action.group, move.nbytes, self._plan
        there_s = self._clocks[COMPUTE].free_s
        numel = self._experts.used[group] * plan.groups[group].layout.shard_trainable
        itemsize = ITEMSIZE[self._config.precision]
        into = 4 if plan.groups[group].summed else itemsize
        # copied into its accumulator in host memory, or added there
        traffic = itemsize + into * (1 if move.action.number == 0 else 2)
        seconds = numel * traffic / self._speeds.host_bytes_per_s
        before_s = self._carry(READ, there_s, moved.read)
        if plan.gpu:
            there_s = self._carry(TO_HOST, there_s, moved.to_host)
            if move.action.number > 0 and not plan.gradients[group].on_device:
                # added there, by the cores and over the bus that the optimizer uses
                there_s = self._clocks[OPTIMIZER].take(there_s, seconds)
        else:
            there_s = self._clocks[COMPUTE].take(before_s, seconds + self._lost_s(move))
        self._gradient_home[group] = self._carry(WRITE, there_s, moved.written)

    def _update(self, move: Move) -> None:
        group = move.action.group
        asked_s = max(self._begun_s, self._gradient_home[group])
        if self._config.optimizer.in_backward is True or group in self._speculative:
            asked_s = max(asked_s, self._clocks[COMPUTE].free_s)
        if self._plan.gpu and group in self._speculative:
            self._make_waiting(asked_s)
            self._waiting.append((asked_s, move))
        else:
            self._make(asked_s, move)

    def _make_waiting(self, until_s: float, needed: Collection[int] = ()) -> None:
        """Make the speculative updates that begin before `until_s`, always that of the group which
        backward came to last, and then those that are `needed`."""
        while self._waiting:
            free_s = self._clocks[OPTIMIZER].free_s
            count = sum(there_s <= free_s for there_s, _ in self._waiting)
            place = max(0, count - 1)
            if max(free_s, self._waiting[place][0]) >= until_s:
                break
            self._make(*self._waiting.pop(place))
        for place in reversed(range(len(self._waiting))):
            if self._waiting[place][1].action.group in needed:
                self._make(*self._waiting.pop(place))

    def _make(self, asked_s: float, move: Move) -> None:
        group, moved, plan = move.action.group, move.nbytes, self._plan
        ready_s = self._carry(READ, asked_s, moved.read)
        seconds, there_s = self._update_s[group], self._update_there_s[group]
        # what is stepped on one side comes from the other, and goes back there
        nbytes = {TO_DEVICE: moved.to_device, TO_HOST: moved.to_host}
        sent, back = nbytes if there_s else reversed(nbytes)
        end_s = self._carry(sent, ready_s, nbytes[sent])
        optimizer, compute = self._clocks[OPTIMIZER], self._clocks[COMPUTE]
        if there_s:  # queued there, while the CPU goes on with the other chunks
            end_s = self._clocks[_ON_DEVICE].take(end_s, there_s)
            compute.busy_s += there_s
        if plan.gpu and seconds:
            end_s = max(end_s, optimizer.take(ready_s if there_s else end_s, seconds))
        elif not plan.gpu:
            busy = seconds + self._lost_s(move)
            end_s = compute.take(ready_s, busy)
            compute.busy_s -= busy
            optimizer.busy_s += busy
        end_s = self._carry(back, end_s, nbytes[back])
        self._ready[group] = end_s
        self._carry(WRITE, end_s, moved.written)

    def _lost_s(self, move: Move) -> float:
        """Seconds that the cores lose to the bytes that an action moves."""
        if self._speeds.gpu:
            return 0.0
        moved = move.nbytes
        bytes_s = (moved.read + moved.written) * self._speeds.io_lost_s_per_byte
        requests = (moved.read + moved.written) / self._request_nbytes
        return bytes_s + requests * _REQUEST_CALL_S

    # ---------------------------------------------------------------- links
    def _carry(self, link: str, ready_s: float, nbytes: int) -> float:
        """The time at which the bytes have crossed the link."""
        rate, on_disk = self._rates[link], link in (READ, WRITE)
        if nbytes and on_disk and rate <= 0:
            raise ConfigError(
                f"placement: states are on nvme, and the speed of a disk of {self._speeds.name} is "
                "not known; measure it (memest calibrate), or name an SSD"
            )
        if not nbytes or rate <= 0:
            return ready_s
        seconds = nbytes / rate
        if on_disk:  # that does not read and write side by side: one takes the other's time
            other = WRITE if link == READ else READ
            self._clocks[other].free_s += (1 - self._disk_overlap) * seconds
        return self._clocks[link].take(ready_s, seconds)


def _request_nbytes(plan: Plan) -> float:
    """About the bytes of one request to nvme: of a chunk's weights, gradients or record."""
    numels = [group.layout.shard_numel for group in plan.groups]
    chunks = sum(-(-numel // plan.chunk_numel) for numel in numels)
    nbytes = sum(group.parameters + group.gradients + group.optimizer for group in plan.groups)
    return max(1, nbytes) / max(1, chunks * (3 if plan.trains else 1))


def _disk_overlap(speeds: Speeds) -> float:
    """The share (0 to 1) of the shorter direction's time that overlaps the longer one's, from equal
    bytes both ways at once; 0 if that was not measured."""
    if not speeds.nvme_mixed_bytes_per_s or not speeds.nvme_read_bytes_per_s:
        return 0.0
    read_s = 1 / speeds.nvme_read_bytes_per_s
    write_s = 1 / speeds.nvme_write_bytes_per_s
    mixed_s = 2 / speeds.nvme_mixed_bytes_per_s
    return min(1.0, max(0.0, (read_s + write_s - mixed_s) / min(read_s, write_s)))


# ---------------------------------------------------------------- bytes
def step_traffic(
    plan: Plan, config: OffloadConfig, model: ModelShape, facts: ActivationFacts | None,
    workload: Workload,
) -> PlannedRun:  # fmt: skip
    """The moves of one step of at most `MAX_PASSES`. Without `facts`, those of states alone."""
    experts = representatives(plan, model, workload)
    run = PlannedRun(plan, config, experts, workload.passes)
    if facts is not None:
        _add_activations(plan, experts.model, facts.saved_nbytes, run.moves)
        if plan.kv is not None and not plan.trains:  # a step's own passes use none
            _add_caches(plan, plan.kv, run, workload)
    return run


def _add_activations(
    plan: Plan, model: ModelShape, saved_nbytes: int, moves: Sequence[Move]
) -> None:
    """Add saved activations, which leave during forward and return during backward.

    On nvme half of the window is never written, and what is still in the window is not read.
    """
    activations = plan.activations
    if activations is None:
        return
    window, across, written, read = activations.window_nbytes, 0, 0, 0
    if activations.tier is Tier.NVME:
        written = min(max(0, saved_nbytes - window // 2), activations.disk_nbytes)
        read = max(0, min(written, saved_nbytes - window))
    if plan.gpu:
        across = saved_nbytes if activations.tier is Tier.NVME else min(saved_nbytes, window)
    _spread(Bytes(written=written, to_host=across), Verb.FORWARD, model, moves)
    _spread(Bytes(read=read, to_device=across), Verb.BACKWARD, model, moves)


def _add_caches(plan: Plan, kv: KVPlan, run: PlannedRun, workload: Workload) -> None:
    """Add the caches that a pass adds its tokens to, and that it reads, with all planned tokens, if
    it is not over a prompt. Pages on nvme have copies in the memory that weights leave."""
    added = workload.batch * workload.sequence * kv.token_nbytes
    used = kv.tokens * kv.token_nbytes if workload.sequence == 1 else 0
    shares = dict(kv.placement.shares)
    on_nvme, away = shares.get(Tier.NVME, 0.0), 1 - shares.get(Tier.DEVICE, 0.0)
    left = run.memory.arena.nbytes - run.memory.account.peak_nbytes
    moved = Bytes(max(0, int(on_nvme * used) - left), int(on_nvme * added))
    if plan.gpu:
        moved.to_device, moved.to_host = int(away * used), int(away * added)
    _spread(moved, Verb.FORWARD, run.experts.model, run.moves)


def _spread(whole: Bytes, verb: Verb, model: ModelShape, moves: Sequence[Move]) -> None:
    """Add `whole` to each pass, in equal parts to the uses of blocks."""
    chosen = [move for move in moves if move.action.verb is verb]
    blocks = {group for unit in model.units if unit.repeated for group in unit.groups}
    inside = [move for move in chosen if move.action.group in blocks] or chosen
    if not inside:
        return
    count = len(inside) // (inside[-1].action.number + 1) or 1
    for index, move in enumerate(inside):
        move.nbytes.add(whole.part(index % count, count))


# ---------------------------------------------------------------- work while nothing else runs
def pass_s(cost: PassCost, precision: str, speeds: Speeds, numel: float = 0.0) -> float:
    """Seconds of one direction of a pass. On a GPU calls are queued ahead of the work, and the
    longer of the two counts; on a CPU each call comes before its work.

    In a forward without gradients few rows take as long as reading weights, of which `numel`
    elements are read, anew for each piece of the batch."""
    weights_nbytes = numel * ITEMSIZE[precision]
    touched = max(0.0, cost.touched_nbytes - weights_nbytes)
    rate = speeds.compute_bytes_per_s_in.get(precision, speeds.compute_bytes_per_s)
    products_s = cost.flops / _matmul_rate(precision, speeds)
    work_s = touched / rate + max(products_s, weights_nbytes / speeds.compute_bytes_per_s)
    calls_s = cost.operations * speeds.operation_s
    return max(work_s, calls_s) if speeds.gpu else work_s + calls_s


def _matmul_rate(precision: str, speeds: Speeds) -> float:
    rate = speeds.matmul_flops_per_s.get(precision)
    if not rate:
        known = ", ".join(name for name, value in speeds.matmul_flops_per_s.items() if value)
        raise ConfigError(
            f"precision: {precision}: nothing is known of its products' speed on {speeds.name} "
            f"({known or 'nothing'} is); measure it there, or choose another precision"
        )
    return rate


def update_s(
    plan: Plan, group: int, precision: str, speeds: Speeds, *, there: bool = False
) -> float:
    """Seconds of the optimizer's arithmetic on one group: the CPU's, or a GPU's with `there`."""
    of, kept = plan.groups[group], plan.record_format.of(matrices=plan.groups[group].matrices)
    products = _products_s(plan, of, speeds) if of.matrices and not there else 0.0
    return products + sum(
        kind.count * _call_s(plan, kind, kept, precision, speeds, summed=of.summed)
        for kind in record_kinds(of, plan.records[group], plan.chunk_numel)
        if there == (plan.gpu and kind.tier is Tier.DEVICE)
    )


def _products_s(plan: Plan, group: GroupBytes, speeds: Speeds) -> float:
    """Seconds of Muon's products for a group, of which each rank of several has its share."""
    precision, iterations = plan.products
    flops = iterations * sum(products_flops(spec.shape) for spec in group.layout.params)
    return flops / group.layout.ranks / _matmul_rate(precision, speeds)


def _call_s(
    plan: Plan, kind: RecordKind, kept: RecordFormat, precision: str, speeds: Speeds, *,
    summed: bool,
) -> float:  # fmt: skip
    """Seconds of one call, which updates a chunk."""
    itemsize = ITEMSIZE[precision]
    nbytes = kind.numel * update_traffic(kept, itemsize, 4 if summed else itemsize)
    if plan.gpu and kind.tier is Tier.DEVICE:
        return nbytes / speeds.compute_bytes_per_s
    rate = kind.tier.bytes_per_s or speeds.host_bytes_per_s
    measured = speeds.optimizer_parameters_per_s.get(kept.state_format.name.lower())
    if measured is not None:  # arithmetic may take longer than the bus
        split = RecordFormat(Master.SPLIT, state_format=kept.state_format)
        rate = min(rate, measured * update_traffic(split, 2, 2))
    return speeds.update_call_s + nbytes / rate


def weights_s(plan: Plan, group: int) -> float:
    """Seconds for which a pass on the CPU waits for a group's weights in slower memory."""
    rate = plan.parameters[group].bytes_per_s
    return plan.groups[group].parameters / rate if rate and not plan.gpu else 0.0


def update_traffic(kept: RecordFormat, itemsize: int, gradient_itemsize: int) -> float:
    """The bytes per parameter of one update: everything but the gradient is read and written."""
    record = sum(field.dtype.itemsize / field.block for field in kept.fields)
    return gradient_itemsize + 2 * (itemsize + record)
