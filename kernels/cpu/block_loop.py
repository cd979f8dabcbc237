"""The loop over blocks of 8-bit states, two sweeps per block; see `kernels.cpu.step_loop`."""

from collections.abc import Iterator, Sequence

from llvmlite import ir
from numba.core import cgutils

from offload.kernels.cpu.int8 import BLOCK, decode_int8, encode_int8, scale_bits_for
from offload.kernels.cpu.lanes import F32, I8, I32, I64, WIDTH, Lanes, Value
from offload.kernels.cpu.loops import sweep
from offload.kernels.cpu.step_parts import Operands

# Elements per round of the second sweep: the root of one vector hides behind the codes of another.
_BURST = 2 * WIDTH


class Blocks:
    """Emits the loop over blocks, for 8-bit states."""

    def __init__(self, builder: ir.IRBuilder, at: Operands) -> None:
        self.builder, self.at = builder, at
        self.signed = at.variant.signed
        # Per state: the new values of a block (in the order of lanes), and their largest magnitude.
        room = ir.ArrayType(F32, BLOCK)
        self.fresh = [cgutils.alloca_once(builder, room) for _ in at.states]
        self.largest = {
            width: [cgutils.alloca_once(builder, ir.VectorType(I32, width)) for _ in at.states]
            for width in (WIDTH, 1)
        }

    def loop(self, lo: Value, hi: Value) -> None:
        builder = self.builder
        with cgutils.for_range_slice(builder, lo, hi, I64(1), I64) as (number, _):
            start = builder.mul(number, I64(BLOCK))
            limit = builder.add(start, I64(BLOCK))
            numel = self.at.numel
            end = builder.select(builder.icmp_signed("<", limit, numel), limit, numel)
            self._update(number, start, end)
            scales = [self._new_scale(place, number) for place in range(len(self.at.states))]
            self._encode(scales, start, end)

    def _update(self, number: Value, start: Value, end: Value) -> None:
        """First sweep: new states into the buffer, with their largest magnitudes."""
        builder, at = self.builder, self.at
        old = [builder.load(self._scale(place, number)) for place in range(len(at.states))]
        for width, places in self.largest.items():
            for place in places:
                builder.store(Lanes(builder, width).constant(I32, 0), place)

        def step(vector: Lanes, index: Value) -> Iterator[None]:
            g, p = at.load_gradient(vector, index), at.load_weight(vector, index)
            states = [
                decode_int8(vector, array, index, vector.splat(bits), signed)
                for array, bits, signed in zip(at.states, old, self.signed, strict=True)
            ]
            yield
            new, way = at.moments(vector, g, p, states)
            for place, value in enumerate(new):
                vector.store_raw(value, self.fresh[place], builder.sub(index, start))
                self._note_magnitude(vector, place, value)
            if not at.rule.weight_last:
                p = at.new_weight(vector, p, at.root(vector, way))
                at.store_weight(vector, p, index)

        sweep(builder, start, end, WIDTH, step)

    def _encode(self, scales: Sequence[tuple[Value, Value]], start: Value, end: Value) -> None:
        """Second sweep: from the buffer to bytes."""
        builder, at = self.builder, self.at

        def step(vector: Lanes, index: Value) -> Iterator[None]:
            inside = builder.sub(index, start)
            fresh = [vector.load_raw(F32, array, inside) for array in self.fresh]
            way = at.root(vector, fresh) if at.rule.weight_last else ()
            noise = at.random_halves(vector, index, at.key, shift=4)
            yield
            for place, value in enumerate(fresh):
                bits, keep = scales[place]
                code = encode_int8(vector, value, bits, noise[place], self.signed[place])
                vector.store_code(code, keep, at.states[place], index)
            if at.rule.weight_last:
                p = at.new_weight(vector, at.load_weight(vector, index), way)
                at.store_weight(vector, p, index)

        if at.states:
            sweep(builder, start, end, _BURST, step)

    def _note_magnitude(self, vector: Lanes, place: int, value: Value) -> None:
        where = self.largest[vector.width][place]
        # What has no sign needs none taken off; a NaN with one is larger than infinity, too.
        if self.signed[place]:
            magnitude = vector.magnitude_bits(value)
        else:
            magnitude = self.builder.bitcast(value, vector.of(I32))
        seen = vector.unsigned_max(magnitude, self.builder.load(where))
        self.builder.store(seen, where)

    def _new_scale(self, place: int, number: Value) -> tuple[Value, Value]:
        """The bits of the block's new scale, stored; and the bits to keep of its bytes."""
        builder = self.builder
        wide, single = (
            Lanes(builder, width).largest(builder.load(places[place]))
            for width, places in self.largest.items()
        )
        largest = builder.select(builder.icmp_unsigned(">", wide, single), wide, single)
        bits, finite = scale_bits_for(builder, largest, self.signed[place])
        builder.store(bits, self._scale(place, number))
        return bits, builder.sext(finite, I8)

    def _scale(self, place: int, number: Value) -> Value:
        scales = self.builder.bitcast(self.at.scales[place], I32.as_pointer())
        return self.builder.gep(scales, [number])
