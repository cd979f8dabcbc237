"""Loops over arrays in LLVM IR, with several vectors side by side.

They go over all whole vectors first and then over what is left, element by element, with the same
emitting functions: an element's bits are the same wherever it is (`kernels.cpu.lanes`).
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from llvmlite import ir
from numba.core import cgutils

from offload.kernels.cpu.lanes import I64, WIDTH, Lanes, Value

# Emits the work on one vector at an index. It yields where the other vectors of the burst should
# catch up: after its loads, and before its stores.
Step = Callable[[Lanes, Value], Iterator[None]]


def sweep(builder: ir.IRBuilder, lo: Value, hi: Value, burst: int, step: Step) -> None:
    """Emit loops of `step` over [lo, hi): bursts of several vectors, single vectors, elements."""
    wide, single = Lanes(builder, WIDTH), Lanes(builder, 1)
    for span, vector in dict.fromkeys([(burst, wide), (WIDTH, wide), (1, single)]):
        end = builder.sub(hi, builder.urem(builder.sub(hi, lo), I64(span)))
        with cgutils.for_range_slice(builder, lo, end, I64(span), I64) as (index, _):
            starts = [builder.add(index, I64(offset)) for offset in range(0, span, vector.width)]
            interleave([step(vector, start) for start in starts])
        lo = end


def interleave(steps: Sequence[Iterator[None]]) -> None:
    """Run generators side by side, from yield to yield, until all have ended."""
    for _ in zip_longest(*steps):
        pass
