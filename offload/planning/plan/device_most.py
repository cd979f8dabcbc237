"""The most that GPU memory can hold under a plan, however much there is.

    homes        states that live there
    mirrors      of parameters that live elsewhere: all of them at a time; and the values of those
                 that are stored in codes
    sums         of gradients there, in fp32: of more passes per step than were planned for; one
                 that begins has its first, 16-bit gradient beside it
    buffers      of kernels, of micro-batches and for other ranks, as planned
    one unit     once more: where copies come and go, the holes that they leave do not always fit

The device tier is taken in one piece, so where its budget is open it is this, not all that is left
of the GPU: that is then there for activations, and for other programs.
"""

from __future__ import annotations

from dataclasses import replace

from offload.planning.plan.plan import Plan, gathered_nbytes
from offload.planning.plan.sizes import GroupBytes, pages
from offload.tiers.tier import Tier
from offload.tiers.units import round_up

_BLOCK_NBYTES = 2 << 20  # what PyTorch's allocator takes of a GPU at a time, for large tensors


def within_use(plan: Plan) -> Plan:
    """Return `plan` with its GPU budget limited to what it can use."""
    room = plan.budgets[Tier.DEVICE]
    budgets = {**plan.budgets, Tier.DEVICE: min(room, device_most(plan))}
    return replace(plan, budgets=budgets, device_room_nbytes=room)


def device_most(plan: Plan) -> int:
    """The most bytes of GPU memory in use, rounded up to PyTorch's allocation size; never less than
    is needed."""
    elsewhere = [
        group.parameters
        for group, tier in zip(plan.groups, plan.parameters, strict=True)
        if tier is not Tier.DEVICE
    ]
    sums = [
        _sum_nbytes(group)
        for group, tier in zip(plan.groups, plan.gradients, strict=True)
        if tier is Tier.DEVICE
    ]
    decoded = sum(group.decoded for group in plan.groups)
    most = plan.total(Tier.DEVICE) + sum(elsewhere) + decoded + sum(sums) + gathered_nbytes(plan)
    return round_up(most, _BLOCK_NBYTES)


def _sum_nbytes(group: GroupBytes) -> int:
    """The bytes of an fp32 sum beside the planned gradient; 0 if that is already such a sum."""
    nbytes = pages(group.layout.shard_trainable * 4)
    return nbytes if nbytes > group.gradients else 0
