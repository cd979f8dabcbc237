"""The bytes and operations of one forward and backward pass of a model, without its states.

They are found by running the model's own code without values (`trace`) and kept as plain numbers,
so that predictions need no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.planning.plan.kv_plan import KVHeld


@dataclass(frozen=True, slots=True)
class PassCost:
    """The work of one direction of one pass."""

    flops: int  # of matrix products, convolutions and attention: 2 per multiply-add
    touched_nbytes: int  # read and written by all operations
    operations: int  # calls of kernels
    # of storages that a CPU's C library takes from the system and gives back each time
    fresh_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class HeapFacts:
    """The share of the bytes in `ActivationFacts` that lies in storages of less than 32 MiB. On a
    CPU these are on the C library's heap, which keeps freed memory."""

    saved_nbytes: int = 0
    peak_nbytes: int = 0
    peak_elsewhere_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class ActivationFacts:
    """One forward and backward pass at a given batch size and sequence length. Parameters,
    gradients of parameters at home and the inputs are not counted."""

    saved_nbytes: int  # what autograd holds when forward ends
    peak_nbytes: int  # most bytes of tensors alive at a time, what is saved included
    peak_elsewhere_nbytes: int  # the same where what is saved leaves for another tier
    peak_at: str  # where: `forward of layers.3`, `backward of head`
    forward: PassCost
    backward: PassCost  # recomputation included
    heap: HeapFacts = HeapFacts()
    cache_nbytes: int = 0  # of the peak, what a cache of keys and values holds
    kv: KVHeld | None = None  # what one holds in tiers, which is not in the peak


NO_WORK = PassCost(0, 0, 0)
NOTHING = ActivationFacts(0, 0, 0, "", NO_WORK, NO_WORK)
