"""The bytes and operations of one forward and backward pass of a model, without its states.

They are found by running the model's own code without values (`trace`) and kept as plain numbers,
so that predictions need no torch.

`fragmentation_nbytes` adds the RAM that the C library holds and cannot use. PyTorch asks glibc for
aligned blocks, and the hole that such a block leaves fits no other one of the same size, so that a
pass spreads over more of the heap than is ever alive. Blocks of 32 MiB and more come from the
system one by one, unless a hole is large enough. With MALLOC_MMAP_THRESHOLD_=131072 in the
environment all do: then there are no holes, and page faults make steps 5 to 20 % longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.swap.activations import TRIM_NBYTES


@dataclass(frozen=True, slots=True)
class PassCost:
    """The work of one direction of one pass."""

    flops: int  # of matrix products and attention: 2 per multiply-add
    touched_nbytes: int  # read and written by all operations
    operations: int  # calls of kernels

    def __add__(self, other: PassCost) -> PassCost:
        return PassCost(
            self.flops + other.flops,
            self.touched_nbytes + other.touched_nbytes,
            self.operations + other.operations,
        )

    def __sub__(self, other: PassCost) -> PassCost:
        return self + other * -1

    def __mul__(self, times: int) -> PassCost:
        return PassCost(self.flops * times, self.touched_nbytes * times, self.operations * times)


@dataclass(frozen=True, slots=True)
class ActivationFacts:
    """One forward and backward pass at a given batch size and sequence length. Parameters,
    gradients of parameters at home and the inputs are not counted."""

    saved_nbytes: int  # what autograd holds when forward ends
    peak_nbytes: int  # most bytes of tensors alive at a time, what is saved included
    peak_elsewhere_nbytes: int  # the same where what is saved leaves for another tier
    forward: PassCost
    backward: PassCost  # recomputation included
    # Of the two peaks, bytes in storages of less than 32 MiB: on a CPU these are on the C library's
    # heap, which keeps freed memory.
    heap_peak_nbytes: int = 0
    heap_peak_elsewhere_nbytes: int = 0
    cache_nbytes: int = 0  # of the peak, what a cache of keys and values holds


NO_WORK = PassCost(0, 0, 0)
NOTHING = ActivationFacts(0, 0, 0, NO_WORK, NO_WORK)

# How large the holes get depends on the order of sizes and is not derived: the four numbers were
# fitted to the peak RSS of runs of 0.7 M to 300 M parameters (`tests/planning/memory_cases.py`,
# `--long`) and the 151 M example at batches of 2 to 32, glibc 2.36. They came to within 7 % of RSS.
# Of what is saved, freed one by one in backward, and of what else is alive at the peak.
_OF_SAVED, _OF_PASSING = 0.3, 3.6
# Where what is saved leaves: its holes grow until they are given back (TRIM_NBYTES).
_OF_LEFT, _OF_PEAK = 0.55, 1.5
# Larger blocks live in the holes of smaller ones, of which there must be this much.
_MIN_HEAP_SHARE = 1 / 6


def holes_nbytes(gpu_nbytes: int, peak_nbytes: int) -> int:
    """The bytes that PyTorch's allocator needs on a GPU of this size beyond the tensors of a pass.
    Passes of 38 MiB to 2.8 GiB did with 40 %, 138 MiB at most, where no more was allowed."""
    return int(0.03 * (gpu_nbytes + peak_nbytes)) + min(int(0.4 * peak_nbytes), 128 << 20)


def fragmentation_nbytes(facts: ActivationFacts, *, leaves: bool) -> int:
    """The bytes of holes at the peak of a pass. `leaves`: saved tensors go to another tier."""
    if leaves:
        peak, in_heap = facts.peak_elsewhere_nbytes, facts.heap_peak_elsewhere_nbytes
        holes = _OF_LEFT * min(facts.saved_nbytes, TRIM_NBYTES) + _OF_PEAK * peak
    else:
        peak, in_heap = facts.peak_nbytes - facts.cache_nbytes, facts.heap_peak_nbytes
        holes = _OF_SAVED * facts.saved_nbytes + _OF_PASSING * (peak - facts.saved_nbytes)
    if not peak:
        return 0
    return int(holes * min(1.0, in_heap / peak / _MIN_HEAP_SHARE))
