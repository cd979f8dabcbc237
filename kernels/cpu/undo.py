"""Steps of Adam and AdamW that can be undone without a copy of what they overwrite.

From the new m, v and p and the gradient follow the old ones, up to rounding. What is kept is the
difference between that and the true bits, mostly one of a few small integers. With the names of
`kernels.rules`, where m, v and p are the new ones:

    p:  r = fma(-A, m / (sqrt(v) * R + E), p)     K = (1 - D) / D if decoupled
    m:  r = fma(-C1, g, m)                        K = C1 / (1 - C1)
    v:  r = fma(-C2 * g, g, v)                    K = (1 - B2) / B2
        x = fma(r, K, r)                          the old value, nearly
        x = 0                                     if m = C1 * g, v = C2 * g * g: as in a first step
    bits of the old value = bits of x + difference, modulo 2**32

Some difference restores any bits. (`x` is never a NaN that was handed on: of two NaNs, a processor
may take either.) It is escaped where the byte of an element has no number for it: `undo_code` says
what a code holds. If a section gets no slab for escaped values, it ends there, and `undoable_step`
takes back what it did.

An undoable step takes twice the time of a step in cache: benchmarks/records/kernels.md.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial, reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from offload.kernels.cpu import jit
from offload.kernels.cpu.lanes import F32, I8, I16, I32, I64, WIDTH, Lanes, Value, sweep
from offload.kernels.cpu.noise import Noise
from offload.kernels.cpu.optimizer import step_arguments
from offload.kernels.cpu.rule_lanes import RULES
from offload.kernels.cpu.step_loop import NUMEL, load_operands
from offload.kernels.cpu.step_parts import Operands
from offload.kernels.cpu.undo_code import BLOCK, FIELDS, SECTION, SLAB, can_undo, lengths
from offload.kernels.floats import Array, Float, Runner, check_output, serial
from offload.kernels.rules import Scalars, StateFormat
from offload.kernels.variants import Master, Variant

_MAX_WORDS = 4 * BLOCK + WIDTH  # that a block writes: a whole vector behind the last escaped one
_P = 2  # of m, v and p
_DIGEST = jit.digest(
    __file__, "cpu/noise.py", "cpu/rule_lanes.py", "rules.py", "cpu/step_loop.py",
    "cpu/step_parts.py", "cpu/undo_code.py", "variants.py",
)  # fmt: skip


def undoable_step(
    grad: Array | None, weight: Array, states: Sequence[Array], scalars: Scalars, *,
    grad_float: Float, weight_float: Float, code: Array, low: Array | None = None,
    master: Array | None = None, run: Runner = serial,
) -> bool:  # fmt: skip
    """Make the step of `optimizer_step`, with the same bits, and write into `code` what `undo_step`
    needs. If `code` has too little room for that, return False, with all else as it was before.

    The arrays are those of `optimizer_step`, in formats that `can_undo`. `code` is an int32 array
    (undo_code.code_numel(numel),) that may hold anything. It has too little room if old values do
    not follow from new ones: with a beta of 0, say, or if most values are not finite.

    Blocks until `run` has covered everything; it is given a number of sections. Which slabs a
    section gets depends on the runner, but no bit of the result, nor whether there is room.
    ValueError, before anything is written, names the argument that does not fit.
    """
    given = grad, weight, states, scalars, grad_float, weight_float, code, low, master, run
    made = _run(False, *given)
    if not made:
        _run(True, *given)
    return made


def undo_step(
    grad: Array | None, weight: Array, states: Sequence[Array], scalars: Scalars, *,
    grad_float: Float, weight_float: Float, code: Array, low: Array | None = None,
    master: Array | None = None, run: Runner = serial,
) -> None:  # fmt: skip
    """Give the weight, its master and the states the bits that they had before the `undoable_step`
    that returned True with this `code`.

    All arguments but `run` are those of that step, which nothing checks. Blocks and raises as it.
    """
    _run(True, grad, weight, states, scalars, grad_float, weight_float, code, low, master, run)


def _run(
    undo: bool, grad: Array | None, weight: Array, states: Sequence[Array], scalars: Scalars,
    grad_float: Float, weight_float: Float, code: Array, low: Array | None, master: Array | None,
    run: Runner,
) -> bool:  # fmt: skip
    """Step as far as there are slabs, or undo that. Return whether there were enough of them."""
    kind, arguments = step_arguments(
        grad, weight, states, scalars, Noise(0, 0), grad_float=grad_float,
        weight_float=weight_float, state_format=StateFormat.FP32, low=low, master=master,
    )  # fmt: skip
    if not can_undo(variant := Variant.from_code(kind)):
        raise ValueError(f"scalars, weight, states: no step of {variant} can be undone")
    sizes, sections = lengths(weight.shape[0]), -(-weight.shape[0] // SECTION)
    check_output("code", code, np.dtype(np.int32), sum(sizes))
    differences, words, links, taken = np.split(code, np.cumsum(sizes)[:-1])
    if not undo:
        links[:], taken[:] = -1, 0
    parts = differences.view(np.uint8), words, links, taken
    run(partial(_loop(kind, int(undo)), arguments, _numbers(scalars), *parts), sections)
    return int(taken[0]) <= len(words) // SLAB


def _numbers(scalars: Scalars) -> Array:
    """The step's constants, and K of m, v and p."""
    _, c1, b2, _, _, _, d, _ = (float(constant) for constant in scalars.constants)
    kept = 1 - c1, b2, d if scalars.flag else 1.0  # of each old value; if nothing is, K is any
    shares = [(1 - each) / each if abs(each) > 1e-30 else 1.0 for each in kept]
    shares = [share or 2.0**-149 for share in shares]  # 0 would make a NaN of infinity
    return np.array([*scalars.constants, *shares], np.float32)


@cache
def _loop(kind: int, undo: int) -> jit.Kernel:
    """The kernel that makes steps of `Variant.from_code(kind)` with their code, or undoes them.
    `arguments` is that of `step_loop`, then come the parts of a code; lo .. hi are sections."""
    plan = jit.plan(kind, _DIGEST)

    def steps(arguments, numbers, differences, words, links, taken, lo, hi):  # type: ignore[no-untyped-def]
        slabs = len(words) // SLAB
        for section in range(lo, hi):
            start = section * SECTION
            end = min(start + SECTION, arguments[NUMEL])
            word, last, link = 0, 0, section
            while start < end:
                if last - word < _MAX_WORDS:
                    slab = links[link] if undo else _take(taken)
                    if not 0 <= slab < slabs:
                        break
                    links[link] = slab
                    link = len(links) - slabs + slab
                    word = slab * SLAB
                    last = word + SLAB
                stop = min(start + BLOCK, end)
                word = _block(plan, undo, arguments, numbers, differences, words, start, stop, word)
                start = stop

    return jit.compiled(steps)


@intrinsic
def _take(typing, taken):  # type: ignore[no-untyped-def]
    """Ask for one more slab, as other threads may at the same time; its number."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Value:
        (counter,) = jit.pointers(context, builder, signature, args, 0, 1)
        return builder.atomic_rmw("add", counter, I32(1), "monotonic")

    return types.int32(taken), emit


@intrinsic(prefer_literal=True)
def _block(typing, plan, undo, arguments, numbers, differences, words, lo, hi, word):  # type: ignore[no-untyped-def]
    """Step elements lo .. hi, or undo that; return the word behind their escaped values."""
    code, undoing = jit.variant_of(plan), jit.variant_of(undo)
    if code is None:
        return None
    variant = Variant.from_code(code)

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Value:
        packed, numbers, bytes_, words = jit.pointers(context, builder, signature, args, 2, 6)
        lo, hi, word = jit.integers(context, builder, signature, args, 6, 9)
        at = load_operands(builder, variant, packed, numbers)
        first = RULES[variant.rule].constants
        shares = [builder.load(builder.gep(numbers, [I64(first + place)])) for place in range(3)]
        place = cgutils.alloca_once_value(builder, word)
        block = _Block(builder, at, shares, bytes_, words, place)
        sweep(builder, lo, hi, WIDTH, block.restore if undoing else block.record)
        return builder.load(place)

    return types.int64(plan, undo, arguments, numbers, differences, words, lo, hi, word), emit


@dataclass(frozen=True, slots=True)
class _Block:
    """Emits the work on a block; `place` is where the number of the next word is kept."""

    builder: ir.IRBuilder
    at: Operands
    shares: Sequence[Value]
    bytes: Value
    words: Value
    place: Value

    def record(self, vector: Lanes, index: Value) -> Iterator[None]:
        builder, at = self.builder, self.at
        g, before = self._loaded(vector, index)
        yield
        states, way = at.moments(vector, g, before[_P], before[:_P])
        p = at.new_weight(vector, before[_P], at.root(vector, way))
        fields, escaped = list[Value](), list[tuple[Value, Value]]()

        def old(place: int, x: Value) -> Value:
            shift, most = FIELDS[place]
            bits, x = (builder.bitcast(each, vector.of(I32)) for each in (before[place], x))
            code = builder.sub(bits, builder.sub(x, vector.constant(I32, most // 2)))
            code = vector.unsigned_min(code, vector.constant(I32, most))
            values = [bits]
            if place == _P and at.variant.master is Master.FP32:
                weight = builder.zext(vector.load_raw(I16, at.weight, index), vector.of(I32))
                unlike = builder.icmp_unsigned("!=", weight, self._rounded(vector, bits))
                code = builder.select(unlike, vector.constant(I32, most), code)
                values.append(weight)
            fields.append(vector.shift_left(code, shift))
            mask = builder.icmp_unsigned("==", code, vector.constant(I32, most))
            escaped.extend((value, mask) for value in values)
            return bits

        self._inverted(vector, g, [*states, p], old)
        byte = builder.trunc(reduce(builder.or_, fields), vector.of(I8))
        vector.store_raw(byte, self.bytes, index)
        for value, array in zip(states, at.states, strict=True):
            vector.store(Float.FP32, value, array, index)
        at.store_weight(vector, p, index)
        with self._if_any(vector, reduce(builder.or_, [mask for _, mask in escaped])):
            for value, mask in escaped:
                word = self._move_on(vector, mask)
                vector.store_raw(vector.compressed(value, mask), self.words, word)

    def restore(self, vector: Lanes, index: Value) -> Iterator[None]:
        builder, at = self.builder, self.at
        g, after = self._loaded(vector, index)
        byte = vector.load_code(self.bytes, index)
        weights = list[Value]()
        yield

        def old(place: int, x: Value) -> Value:
            shift, most = FIELDS[place]
            code = builder.and_(vector.shift_right(byte, shift), vector.constant(I32, most))
            mask = builder.icmp_unsigned("==", code, vector.constant(I32, most))
            x = builder.bitcast(x, vector.of(I32))
            values = [builder.add(builder.sub(x, vector.constant(I32, most // 2)), code)]
            if place == _P and at.variant.master is Master.FP32:
                values.append(self._rounded(vector, x))
            merged = [cgutils.alloca_once_value(builder, value) for value in values]
            with self._if_any(vector, mask):
                for value, room in zip(values, merged, strict=True):
                    word = self._move_on(vector, mask)
                    builder.store(vector.expanded(value, mask, self.words, word), room)
            bits, *others = (builder.load(room) for room in merged)
            weights.extend(others)
            return bits

        *states, p = self._inverted(vector, g, after, old)
        for bits, array in zip(states, at.states, strict=True):
            vector.store_raw(bits, array, index)
        if at.variant.master is Master.SPLIT:  # the bits of a NaN, too
            high, low = vector.split_bits(p)
            vector.store_raw(high, at.weight, index)
            vector.store_raw(low, at.extra, index)
        else:
            vector.store_raw(p, at.extra, index)  # or the weight, where it has no master
        for bits in weights:
            vector.store_raw(builder.trunc(bits, vector.of(I16)), at.weight, index)

    def _loaded(self, vector: Lanes, index: Value) -> tuple[Value, list[Value]]:
        """The gradient, and m, v and p."""
        states = [vector.load(Float.FP32, array, index) for array in self.at.states]
        return self.at.load_gradient(vector, index), [*states, self.at.load_weight(vector, index)]

    def _inverted(
        self, vector: Lanes, g: Value, new: Sequence[Value], old: Callable[[int, Value], Value]
    ) -> Sequence[Value]:
        """The bits of the old m, v and p, which `old` makes of the place and the x of each."""
        _, c1, _, c2, _, _, decay, rate = c = self.at.constants(vector)
        m, v, p = new
        way = self.at.root(vector, [m, v])
        x = self._before(vector, p, rate, self.at.rule.direction(vector, way), _P)
        x = vector.maximum(x, vector.constant(F32, -np.inf))  # which is no NaN
        p = old(_P, x)
        g = vector.mul(g, c[0])
        if not self.at.variant.flag:  # not decoupled
            g = vector.fma(decay, self.builder.bitcast(p, vector.of(F32)), g)
        moments = []
        for place, (each, factor) in enumerate([(m, c1), (v, vector.mul(c2, g))]):
            x = self._before(vector, each, factor, g, place)
            more = self.builder.fcmp_ordered("!=", each, vector.mul(factor, g))  # and no NaN
            x = self.builder.select(more, x, vector.constant(F32, 0.0))
            moments.append(old(place, x))
        return [*moments, p]

    def _before(self, vector: Lanes, new: Value, a: Value, b: Value, place: int) -> Value:
        """Nearly what `new` was before it was multiplied, and a * b was added."""
        r = vector.fma(vector.neg(a), b, new)
        return vector.fma(r, vector.splat(self.shares[place]), r)

    def _rounded(self, vector: Lanes, p: Value) -> Value:
        """The weight beside an fp32 master; both are bits in i32 lanes."""
        value = self.builder.bitcast(p, vector.of(F32))
        half = self.builder.bitcast(vector.encode(self.at.variant.weight, value), vector.of(I16))
        return self.builder.zext(half, vector.of(I32))

    def _if_any(self, vector: Lanes, mask: Value) -> Any:
        some = self.builder.icmp_unsigned("!=", vector.count(mask), I64(0))
        return self.builder.if_then(some, likely=False)

    def _move_on(self, vector: Lanes, mask: Value) -> Value:
        """The number of the next word; then it is that behind the words of `mask`."""
        word = self.builder.load(self.place)
        self.builder.store(self.builder.add(word, vector.count(mask)), self.place)
        return word
