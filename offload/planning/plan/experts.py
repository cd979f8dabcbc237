"""The number of experts that a step touches, and the bytes of them that move.

If a router chooses `k` of `E` experts for each of `T` tokens with equal probability, an expert gets
no token with a probability of (1 - k / E)^T, so that E (1 - (1 - k / E)^T) experts are expected to
be touched. Routers that prefer some experts touch fewer (the sum is concave in the experts'
shares). Only touched experts are fetched, get gradients and are updated.

If experts are spread over `ep_size` ranks, a `ModelShape` has those of one rank, to which the
tokens of all of these ranks are sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.config.fields import AUTO_MICRO_BATCHES
from offload.planning.plan.plan import Plan
from offload.planning.plan.sizes import CLASSES, ExpertClass, GroupBytes
from offload.planning.plan.workload import Workload
from offload.tiers.errors import ConfigError
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier
from offload.zero.groups.model_shape import SMALL_TABLE_NUMEL, ModelShape

if TYPE_CHECKING:
    from offload.config import OffloadConfig

Held = dict[Tier, dict[StateClass, int]]


def touched(experts: int, chosen: int | None, tokens: int) -> float:
    """The expected number of `experts` that `tokens` touch; all of them if the number `chosen` for
    a token is not known."""
    if chosen is None or chosen >= experts:
        return float(experts)
    return experts * -math.expm1(tokens * math.log1p(-chosen / experts))


def touched_whole(experts: int, chosen: int | None, tokens: int, ep_size: int = 1) -> int:
    """The expected number, rounded up, on one of the `ep_size` ranks that share the experts."""
    here = touched(experts, chosen, tokens) / ep_size
    return min(experts // ep_size, math.ceil(here - 1e-9))


@dataclass(frozen=True, slots=True)
class Table:
    """A module of experts."""

    indices: tuple[int, ...]  # the groups of those on this rank
    ep_size: int  # over how many ranks they are spread

    @property
    def experts(self) -> int:
        """The number of experts on all ranks that share them."""
        return len(self.indices) * self.ep_size

    def touched(self, chosen: int | None, tokens: int) -> int:
        """The touched experts of this rank, rounded up. `tokens`: of all ranks that share."""
        return touched_whole(self.experts, chosen, tokens, self.ep_size)


def tables_of(model: ModelShape) -> list[Table]:
    return [Table(t, model.groups[t[0]].ep_size) for t in model.tables.values()]


@dataclass(frozen=True, slots=True)
class ExpertBytes:
    """The bytes of experts that a step moves if no copies are kept."""

    name: str
    touched_nbytes: int  # of the experts that are expected to be touched
    all_nbytes: int  # if all were


@dataclass(frozen=True)
class ExpertEstimate:
    """The experts of a model in one step. Moved bytes are those of one rank."""

    tables: int  # modules of experts
    experts: int  # of all of them, on all ranks
    chosen: int | None  # for a token, of each table; None: not known
    numel: int  # parameters of all experts
    active_numel: int  # parameters of the model that one token is computed with
    tokens: int  # of a pass, of all ranks that the experts are spread over
    touched_pass: float  # share of the experts that a pass is expected to touch
    touched_step: float  # and all passes of a step
    moved: tuple[ExpertBytes, ...]
    ep_size: int = 1  # over how many ranks each table is spread
    sent_nbytes: int | None = None  # tokens to other ranks' experts, and back; None: not known

    @property
    def experts_per_rank(self) -> int:
        return self.experts // self.ep_size

    @property
    def touched_nbytes(self) -> int:
        return sum(each.touched_nbytes for each in self.moved)

    @property
    def all_nbytes(self) -> int:
        return sum(each.all_nbytes for each in self.moved)


def estimate_experts(
    plan: Plan, model: ModelShape, workload: Workload, itemsize: int
) -> ExpertEstimate | None:
    """Estimate the experts of a step; None for a model without experts that move one by one.
    `itemsize` is the bytes per element of the experts' inputs."""
    tables = tables_of(model)
    if not tables:
        return None
    chosen = model.experts_per_token
    experts = sum(table.experts for table in tables)
    ep_size = max(table.ep_size for table in tables)
    per_pass = workload.batch * workload.sequence
    together = per_pass * ep_size
    step_tokens = workload.tokens * plan.sharding.world_size
    numel = sum(_numel(model, table) for table in tables)
    return ExpertEstimate(
        tables=len(tables),
        experts=experts,
        chosen=chosen,
        numel=numel,
        active_numel=active_numel(model),
        tokens=together,
        touched_pass=sum(touched(t.experts, chosen, together) for t in tables) / experts,
        touched_step=sum(touched(t.experts, chosen, step_tokens) for t in tables) / experts,
        moved=tuple(_of_each(plan, tables, chosen, together, step_tokens, workload.passes)),
        ep_size=ep_size,
        sent_nbytes=_sent_nbytes(model, tables, per_pass * workload.passes, itemsize),
    )


def check_spread(model: ModelShape, config: OffloadConfig, ep_size: int) -> None:
    """Raise ConfigError for `--ep-size` if the experts of the whole `model` cannot be spread so."""
    if ep_size < 1:
        raise ConfigError(f"--ep-size {ep_size}: at least 1")
    if ep_size == 1:
        return
    if not model.tables:
        raise ConfigError(
            f"--ep-size {ep_size}: the model has no experts that move one by one: a list of equal "
            "modules called experts, or parameters with a row per expert, with more than "
            f"{SMALL_TABLE_NUMEL:,} parameters per table; leave --ep-size out"
        )
    for name, table in model.tables.items():
        if len(table) % ep_size:
            raise ConfigError(
                f"--ep-size {ep_size} does not divide the {len(table)} experts of {name}: each "
                f"rank has to have as many of them as any other; give a divisor of {len(table)}"
            )
    if config.micro_batches not in (1, AUTO_MICRO_BATCHES):
        raise ConfigError(
            f"--ep-size {ep_size} with micro_batches: {config.micro_batches}: ranks would "
            "exchange tokens piece by piece; set micro_batches: 1, or leave --ep-size out"
        )


def check_ranks(ranks: int, ep_size: int) -> None:
    """Raise ConfigError for `--ep-size` if some experts would be on more ranks than others."""
    if ranks % ep_size:
        raise ConfigError(
            f"--ep-size {ep_size} does not divide the {ranks} ranks: each expert has to be on as "
            f"many of them as any other; give a divisor of {ranks}"
        )


def idle_nbytes(plan: Plan, model: ModelShape, workload: Workload) -> Held:
    """The bytes at home of experts that a step is expected not to touch; 0 if experts have no homes
    of their own, since every tier then has the same share of them."""
    idle: Held = {tier: dict.fromkeys(CLASSES, 0) for tier in Tier}
    if ExpertClass.PARAMETERS not in plan.placements:
        return idle
    tokens = workload.tokens * plan.sharding.world_size
    for table in tables_of(model):
        share = 1 - touched(table.experts, model.experts_per_token, tokens) / table.experts
        for index in table.indices:
            group, records = plan.groups[index], plan.records[index]
            idle[plan.parameters[index]][StateClass.PARAMETERS] += int(share * group.parameters)
            idle[plan.gradients[index]][StateClass.GRADIENTS] += int(share * group.gradients)
            for tier in records[:1]:  # all of an expert are in the same
                idle[tier][StateClass.OPTIMIZER] += int(share * group.optimizer)
    return idle


def active_numel(model: ModelShape) -> int:
    """The parameters that compute one token: of the experts, on all ranks, only the chosen ones."""
    chosen = model.experts_per_token
    idle = 0
    for table in tables_of(model):
        if chosen is not None and chosen < table.experts:
            idle += _numel(model, table) * (table.experts - chosen) // table.experts
    return model.numel_of_all_ranks - idle


def _numel(model: ModelShape, table: Table) -> int:
    """The parameters of a table on all ranks."""
    return table.ep_size * sum(model.groups[index].numel for index in table.indices)


def _sent_nbytes(
    model: ModelShape, tables: Sequence[Table], tokens: int, itemsize: int
) -> int | None:
    """The bytes that a rank sends to others in a step of `tokens` of its own: each token to its
    chosen experts, their results back, and the gradients of both. None if sizes are not known."""
    total, chosen = 0, model.experts_per_token
    for table in tables:
        if table.ep_size == 1:
            continue
        width = _router_width(model, table)
        if width is None or chosen is None:
            return None
        rows = tokens * min(chosen, table.experts)
        total += 4 * rows * width * itemsize * (table.ep_size - 1) // table.ep_size
    return total


def _router_width(model: ModelShape, table: Table) -> int | None:
    """The width of a token, from the router weight [E, D] beside a table if each matrix of an
    expert has the dimension D, too; None if there is no such weight."""
    expert = model.groups[table.indices[0]]
    around = expert.table.rpartition(".")[0]
    matrices = [set(param.shape) for param in expert.params if len(param.shape) == 2]
    widths = {
        param.shape[1]
        for group in model.groups if not group.table
        for param in group.params
        if len(param.shape) == 2 and param.shape[0] == table.experts
        and param.names[0].startswith(f"{around}." if around else "")
        and all(param.shape[1] in each for each in matrices)
    }  # fmt: skip
    return widths.pop() if matrices and len(widths) == 1 else None


def _of_each(
    plan: Plan, tables: Sequence[Table], chosen: int | None, per_pass: int, per_step: int,
    passes: int,
) -> Iterator[ExpertBytes]:  # fmt: skip
    def moved(
        name: str, times: int, tokens: int, nbytes_of: Callable[[GroupBytes], int]
    ) -> ExpertBytes:
        used = everything = 0
        for table in tables:
            whole = sum(nbytes_of(plan.groups[index]) for index in table.indices)
            everything += times * whole
            used += times * (whole * table.touched(chosen, tokens) // len(table.indices))
        return ExpertBytes(name, used, everything)

    if not plan.trains:
        yield moved("weights", 1, per_pass, lambda g: g.parameters)
        return
    yield moved("weights, for forward and backward", 2 * passes, per_pass, lambda g: g.parameters)
    yield moved("gradients", passes, per_pass, lambda g: g.gradients)
    yield moved("optimizer records, read and written", 2, per_step, lambda g: g.optimizer)
    yield moved("updated weights", 1, per_step, lambda g: g.parameters)
