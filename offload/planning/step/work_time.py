"""Seconds of work while nothing else runs: a pass of the model, or the update of one group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload.kernels.rules import StateFormat
from offload.planning.plan.plan import Plan
from offload.planning.plan.sizes import ITEMSIZE, record_kinds
from offload.tiers.errors import ConfigError
from offload.tiers.tier import Tier
from offload.zero.step.records import RecordFormat

if TYPE_CHECKING:
    from offload.planning.activations.facts import PassCost
    from offload.planning.machine.speeds import Speeds


def pass_s(cost: PassCost, precision: str, speeds: Speeds) -> float:
    """Seconds of one direction of a pass. On a GPU calls are queued ahead of the work, and the
    longer of the two counts; on a CPU each call comes before its work."""
    work_s = cost.flops / _matmul_rate(precision, speeds)
    rate = speeds.compute_bytes_per_s_in.get(precision, speeds.compute_bytes_per_s)
    work_s += cost.touched_nbytes / rate
    calls_s = cost.operations * speeds.operation_s
    return max(work_s, calls_s) if speeds.gpu else work_s + calls_s


def forward_s(cost: PassCost, numel: float, precision: str, speeds: Speeds) -> float:
    """Seconds of a forward without gradients: few rows take as long as reading weights, of which
    `numel` elements are read, anew for each piece of the batch."""
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


def update_s(plan: Plan, group: int, precision: str, speeds: Speeds) -> float:
    """Seconds of the optimizer's arithmetic on one group, wherever its records are."""
    kinds = record_kinds(plan.groups[group], plan.records[group], plan.chunk_numel)
    summed = plan.groups[group].summed
    return sum(
        kind.count * kind.numel * _parameter_s(plan, kind.tier, precision, speeds, summed=summed)
        for kind in kinds
    )


def _parameter_s(plan: Plan, tier: Tier, precision: str, speeds: Speeds, *, summed: bool) -> float:
    kept = plan.record_format
    traffic = update_traffic(kept, ITEMSIZE[precision], 4 if summed else ITEMSIZE[precision])
    if plan.gpu and tier is Tier.DEVICE:
        return traffic / speeds.compute_bytes_per_s
    bus_s = traffic / (tier.bytes_per_s or speeds.host_bytes_per_s)
    measured = speeds.optimizer_parameters_per_s.get(kept.state_format.name.lower())
    if measured is None or kept.state_format is StateFormat.FP32:
        return bus_s
    return max(bus_s, 1 / measured)  # arithmetic may take longer than the bus


def weights_s(plan: Plan, group: int) -> float:
    """Seconds for which a pass on the CPU waits for a group's weights in slower memory."""
    rate = plan.parameters[group].bytes_per_s
    return plan.groups[group].parameters / rate if rate and not plan.gpu else 0.0


def update_traffic(kept: RecordFormat, itemsize: int, gradient_itemsize: int) -> float:
    """The bytes per parameter of one update: everything but the gradient is read and written."""
    record = sum(field.dtype.itemsize / field.block for field in kept.fields)
    return gradient_itemsize + 2 * (itemsize + record)


def gradient_s(numel: int, precision: str, speeds: Speeds, *, summed: bool, first: bool) -> float:
    """Seconds for copying a gradient into its accumulator in host memory, or adding it there."""
    into = 4 if summed else ITEMSIZE[precision]
    traffic = ITEMSIZE[precision] + into * (1 if first else 2)
    return numel * traffic / speeds.host_bytes_per_s
