"""Loops over arrays in LLVM IR: vectors side by side, or one after the other but overlapping.

Both go over all whole vectors first and then over what is left, element by element, with the same
emitting functions: an element's bits are the same wherever it is (`kernels.lanes`).
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from llvmlite import ir
from numba.core import cgutils

from offload.kernels.cpu.lanes import I64, WIDTH, Lanes, Value

# Emits the work on one vector at an index. It yields where the other vectors of the burst should
# catch up: after its loads, and before its stores.
Step = Callable[[Lanes, Value], Iterator[None]]


def sweep(
    builder: ir.IRBuilder, lo: Value, hi: Value, burst: int, step: Step, lanes: type[Lanes] = Lanes,
) -> None:  # fmt: skip
    """Emit loops of `step` over [lo, hi): bursts of several vectors, single vectors, elements.

    `lanes` is the class of the vectors.
    """
    wide, single = lanes(builder, WIDTH), Lanes(builder, 1)
    for span, vector in dict.fromkeys([(burst, wide), (WIDTH, wide), (1, single)]):
        lo = _loop(builder, lo, hi, span, vector, step)


# One part of the work on a vector: takes what the part before it gave, gives what the next takes.
Stage = Callable[[Lanes, Value, Sequence[Value]], Sequence[Value]]


def pipelined(
    builder: ir.IRBuilder, lo: Value, hi: Value, stages: Sequence[Stage],
    lanes: type[Lanes] = Lanes,
) -> None:  # fmt: skip
    """Emit all stages on every vector of [lo, hi), each round of the loop on several vectors.

        stage 0   | 0 | 1 | 2 | 3 | ...
        stage 1       | 0 | 1 | 2 | ...        numbers of vectors; rounds from left to right
        stage 2           | 0 | 1 | ...

    A processor works ahead by a hundred or two operations, about one vector's worth here. What
    takes long (a root, then a division) would keep it waiting if it were all in one round.
    """
    wide, single = lanes(builder, WIDTH), Lanes(builder, 1)
    end = builder.sub(hi, builder.urem(builder.sub(hi, lo), I64(WIDTH)))
    lead = I64((len(stages) - 1) * WIDTH)
    enough = builder.icmp_signed(">=", builder.sub(end, lo), lead)
    with builder.if_else(enough) as (then, otherwise):
        with then:
            _overlapped(builder, lo, end, stages, wide)
        with otherwise, cgutils.for_range_slice(builder, lo, end, I64(WIDTH), I64) as (index, _):
            _in_turn(stages, wide, index)
    with cgutils.for_range_slice(builder, end, hi, I64(1), I64) as (index, _):
        _in_turn(stages, single, index)


def _in_turn(stages: Sequence[Stage], lanes: Lanes, index: Value) -> None:
    carried: Sequence[Value] = ()
    for stage in stages:
        carried = stage(lanes, index, carried)


def _overlapped(
    builder: ir.IRBuilder, lo: Value, end: Value, stages: Sequence[Stage], lanes: Lanes
) -> None:
    """The loop of `pipelined`, filled before and drained after."""
    slots: list[list[Value]] = [[] for _ in stages]  # what each stage takes, kept between rounds

    def round_of(index: Value, first: int, last: int) -> None:
        """Stages last .. first, the latest first: it frees the slots that the one before fills."""
        for number in range(last, first - 1, -1):
            at = builder.sub(index, I64(number * WIDTH))
            given = stages[number](lanes, at, [builder.load(slot) for slot in slots[number]])
            if number + 1 == len(stages):
                continue
            if not slots[number + 1]:
                slots[number + 1] = [cgutils.alloca_once(builder, x.type) for x in given]
            for value, slot in zip(given, slots[number + 1], strict=True):
                builder.store(value, slot)

    final = len(stages) - 1
    for number in range(final):
        round_of(builder.add(lo, I64(number * WIDTH)), 0, number)
    start = builder.add(lo, I64(final * WIDTH))
    with cgutils.for_range_slice(builder, start, end, I64(WIDTH), I64) as (index, _):
        round_of(index, 0, final)
    for number in range(final):
        round_of(builder.add(end, I64(number * WIDTH)), number + 1, final)


def _loop(
    builder: ir.IRBuilder, lo: Value, hi: Value, span: int, lanes: Lanes, step: Step
) -> Value:
    """Emit `step` on every whole `span` of elements in [lo, hi); return where they end."""
    end = builder.sub(hi, builder.urem(builder.sub(hi, lo), I64(span)))
    with cgutils.for_range_slice(builder, lo, end, I64(span), I64) as (index, _):
        starts = [builder.add(index, I64(offset)) for offset in range(0, span, lanes.width)]
        interleave([step(lanes, start) for start in starts])
    return end


def interleave(steps: Sequence[Iterator[None]]) -> None:
    """Run generators side by side, from yield to yield, until all have ended."""
    for _ in zip_longest(*steps):
        pass
