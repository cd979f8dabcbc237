"""RAM that the C library holds and cannot use: holes between the tensors of a pass on a CPU.

PyTorch asks glibc for aligned blocks. glibc cannot use the hole that such a block leaves for
another one of the same size, so a pass that frees and makes tensors all the time spreads over more
of the heap than is ever alive. Blocks of 32 MiB and more come from the system one by one, unless a
hole is large enough for them. With MALLOC_MMAP_THRESHOLD_=131072 in the environment all do: then
there are no holes, and steps take 5 to 20 % longer for the page faults.

How large the holes get depends on the order of sizes and is not derived: the four numbers were
fitted to the peak RSS of runs of 0.7 M to 300 M parameters (`tests/planning/memory_cases.py`,
`--long`) and the 151 M example at batches of 2 to 32, glibc 2.36. They came to within 7 % of RSS.
"""

from __future__ import annotations

from offload.planning.activations.facts import ActivationFacts
from offload.swap.activations.activation_rules import TRIM_NBYTES

# Of what is saved, freed one by one in backward, and of what else is alive at the peak.
_OF_SAVED, _OF_PASSING = 0.3, 3.6
# Where what is saved leaves: its holes grow until they are given back (TRIM_NBYTES).
_OF_LEFT, _OF_PEAK = 0.55, 1.5
# Larger blocks live in the holes of smaller ones, of which there must be this much.
_LEAST_HEAP_SHARE = 1 / 6


def heap_holes_nbytes(facts: ActivationFacts, *, leaves: bool) -> int:
    """The bytes of holes at the peak of a pass. `leaves`: saved tensors go to another tier."""
    if leaves:
        peak, in_heap = facts.peak_elsewhere_nbytes, facts.heap.peak_elsewhere_nbytes
        holes = _OF_LEFT * min(facts.saved_nbytes, TRIM_NBYTES) + _OF_PEAK * peak
    else:
        peak, in_heap = facts.peak_nbytes - facts.cache_nbytes, facts.heap.peak_nbytes
        holes = _OF_SAVED * facts.saved_nbytes + _OF_PASSING * (peak - facts.saved_nbytes)
    if not peak:
        return 0
    return int(holes * min(1.0, in_heap / peak / _LEAST_HEAP_SHARE))
