"""The most that nvme and a GPU can hold at a time under a plan.

On nvme, however slow its writes are: a piece has one valid version there. An extent beyond that is
a new version while it is written, or an old one while it is still read (`swap/io/block_store.py`),
and each of these moves has memory of its own until it ends: the piece's copy in a slot, or a buffer
of the update. Slots and buffers are the host tier's, so no more is on its way than its budget
leaves beside the homes there and, with one write of a piece at a time, than lives on nvme.

Where nothing is trained nothing is written anew. Gradients have no second version: an old sum is
never read again, so it is freed before the next one is written. A save in the background, or an
update on trial, keeps old versions beyond that, in the room of `spare_nbytes`.

On a GPU: the states at home there, and beside them

    mirrors      of parameters that live elsewhere: all of them at a time; and the values of those
                 that are stored in codes
    sums         of gradients there, in fp32: of more passes per step than were planned for; one
                 that begins has its first, 16-bit gradient beside it
    one unit     once more: where copies come and go, the holes that they leave do not always fit

The device tier is taken in one piece, so where its budget is open it is this, not all that is left
of the GPU: the rest is then there for activations, and for other programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from offload.planning.plan.plan import Plan, gathered_nbytes, mirrors_nbytes
from offload.planning.plan.sizes import CLASSES, pages
from offload.tiers.ledger import StateClass
from offload.tiers.tier import Tier
from offload.tiers.units import round_up

_REPLACED = (StateClass.PARAMETERS, StateClass.OPTIMIZER)  # while the old version is still valid
_BLOCK_NBYTES = 2 << 20  # what PyTorch's allocator takes of a GPU at a time, for large tensors


def nvme_upper_bound(
    plan: Plan, saved_nbytes: int, old_nbytes: int = 0, versions: int = 1
) -> Mapping[StateClass, int]:
    """The most bytes by class, with versions on their way as STAGING, within the budget: moves
    without room wait. `saved_nbytes` are of activations, as far as they go there, `old_nbytes` of
    old versions that are kept; a piece has at most so many `versions` beside its home."""
    homes = plan.expected[Tier.NVME]
    most = {state_class: homes.get(state_class, 0) for state_class in CLASSES}
    replaced = sum(most[state_class] for state_class in _REPLACED) if plan.trains else 0
    left = max(0, plan.budgets[Tier.NVME] - sum(most.values()))
    moving = _sources_nbytes(plan) + old_nbytes
    most[StateClass.STAGING] = min(versions * replaced, moving, left)
    most[StateClass.ACTIVATIONS] = min(saved_nbytes, left - most[StateClass.STAGING])
    return most


def _sources_nbytes(plan: Plan) -> int:
    """The host memory from which something on nvme can be written."""
    host = plan.expected[Tier.HOST]
    kept = sum(host.get(each, 0) for each in (*CLASSES, StateClass.ACTIVATIONS))
    if not plan.gpu:  # it computes there
        kept += plan.sums_nbytes + (plan.shared.workspace_nbytes if plan.shared else 0)
    return max(0, plan.budgets[Tier.HOST] - kept)


def within_use(plan: Plan) -> Plan:
    """Return `plan` with its GPU budget limited to what it can use."""
    room = plan.budgets[Tier.DEVICE]
    budgets = {**plan.budgets, Tier.DEVICE: min(room, device_upper_bound(plan))}
    return replace(plan, budgets=budgets, device_room_nbytes=room)


def device_upper_bound(plan: Plan) -> int:
    """The most bytes of GPU memory in use, rounded up to PyTorch's allocation size; never less than
    is needed."""
    pairs = zip(plan.groups, plan.gradients, strict=True)
    there = ((g.gradients, pages(g.layout.shard_trainable * 4)) for g, t in pairs if t.on_device)
    sums = sum(summed for planned, summed in there if summed > planned)  # not sums already
    most = plan.total(Tier.DEVICE) + mirrors_nbytes(plan) + sums + gathered_nbytes(plan)
    return round_up(most, _BLOCK_NBYTES)
