"""`offload bench codec`: weights to and from 8 and 4 bits.

A decoder reads codes and writes values, three to four times as many bytes. The limits are the C
library's memset of as many bytes as the values have, which reads nothing, and its memmove, which
reads as many as it writes. All pass over the same arrays in turn, with the same number of threads.
"""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from offload import machine
from offload.bench.record import Kind, Record
from offload.bench.rounds import Say, Timed, measure, sharing, timed
from offload.bench.table import Column, number
from offload.kernels.floats import Array, Float
from offload.kernels.weight_codes import decode_weights, encode_weights
from offload.kernels.weight_formats import GROUP_SIZES, Code, WeightFormat
from offload.planning.machine.speed_arrays import Arrays, Stream
from offload.swap.worker import ParallelRunner
from offload.tiers.errors import BudgetError, ConfigError
from offload.tiers.units import format_bytes, round_up

DEFAULT_NUMEL = 1 << 26
_LEAST_NUMEL = 1 << 16
_VALUES, _SOURCE = (Stream(name, "uint16") for name in ("values", "source"))
_CODES, _WORDS = Stream("codes", "uint8"), Stream("words", "uint32", elements_each=32)
_MEMSET, _MEMMOVE = "memset of the values", "memmove of the values"

COLUMNS = (
    Column("ms", number("seconds", 1e-3, 1)),
    Column("G weights/s", number("weights_per_s", 1e9)),
    Column("GB/s of values", number("values_bytes_per_s", 1e9, 1)),
    Column("GB/s stored", number("stored_bytes_per_s", 1e9, 1)),
)


@dataclass(frozen=True)
class CodecOptions:
    """`numel` weights in bf16; None takes 64 Mi, or what fits in a quarter of the free memory."""

    numel: int | None = None
    group_size: int = 64
    rounds: int = 7
    threads: int = 1


def run_codec(options: CodecOptions, say: Say) -> Record:
    """Measure. BudgetError if `numel` weights do not fit in memory, ConfigError for other sizes of
    groups."""
    if options.group_size not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise ConfigError(f"--group-size: expected one of {sizes}, got {options.group_size}")
    numel = _numel(options)
    record = Record("codec", {**asdict(options), "numel": numel})
    record.note_rounds(options.rounds)
    arrays = Arrays(numel, [_VALUES, _SOURCE, _CODES, _WORDS])
    with sharing(options.threads) as runner:
        say("filling the arrays")
        measure(record, _systems(arrays, options.group_size, runner), options.rounds, say)
    for code in Code:
        for work, limit in (("decode", _MEMSET), ("decode", _MEMMOVE), ("encode", _MEMMOVE)):
            record.compare(f"{work} {_name(code)}", limit, "weights_per_s")
    record.notes.append(
        f"{numel / 1e6:.4g} M weights in bf16, groups of {options.group_size}, "
        f"{options.threads} thread{'s' if options.threads > 1 else ''}"
    )
    return record


def _numel(options: CodecOptions) -> int:
    each = sum(stream.itemsize / stream.elements_each for stream in (_VALUES, _SOURCE, _CODES))
    available = machine.available_memory_nbytes()
    default = min(DEFAULT_NUMEL, int(available / 4 / each))
    numel = default if options.numel is None else options.numel
    if numel < _LEAST_NUMEL:
        raise BudgetError(f"--numel: {numel} is too few to time; at least {_LEAST_NUMEL}")
    if numel * each > available * 0.8:
        raise BudgetError(
            f"--numel: {numel} weights take {format_bytes(int(numel * each))}, "
            f"{format_bytes(available)} are free; at most {int(available * 0.8 / each)}"
        )
    return round_up(numel, _LEAST_NUMEL)


def _systems(arrays: Arrays, group_size: int, runner: ParallelRunner) -> list[Timed]:
    values, source = arrays.get(_VALUES, _fill), arrays.get(_SOURCE, _fill)
    codes, words = (arrays.get(stream, _clear) for stream in (_CODES, _WORDS))
    nbytes = values.nbytes

    def clear() -> None:
        runner(lambda lo, hi: _memset(values, lo, hi), nbytes)

    def copy() -> None:
        runner(lambda lo, hi: _memmove(values, source, lo, hi), nbytes)

    rates = {"weights_per_s": float(values.size), "values_bytes_per_s": float(nbytes)}
    systems = [
        Timed(_MEMSET, Kind.LIMIT, timed(clear), rates),
        Timed(_MEMMOVE, Kind.LIMIT, timed(copy), rates),
    ]
    for code in Code:
        weights = WeightFormat(code, group_size)
        scales = words[: values.size // group_size]
        there = codes[: weights.codes_nbytes(values.size)]
        encode = partial(encode_weights, source, scales, there, weights, Float.BF16, runner)
        decode = partial(decode_weights, scales, there, values, weights, Float.BF16, runner)
        amounts = rates | {"stored_bytes_per_s": float(weights.stored_nbytes(values.size))}
        for name, work in (("encode", encode), ("decode", decode)):
            systems.append(Timed(f"{name} {_name(code)}", Kind.OURS, timed(work), amounts))
    return systems


def _name(code: Code) -> str:
    return code.name.lower()


def _fill(array: Array) -> None:
    """bf16 values as weights have them."""
    normal = np.random.default_rng(0).standard_normal(_LEAST_NUMEL).astype(np.float32) * 0.02
    array.reshape(-1, _LEAST_NUMEL)[:] = normal.view(np.uint32) >> 16


def _clear(array: Array) -> None:
    array[:] = 0


def _memset(array: Array, lo: int, hi: int) -> None:
    ctypes.memset(array.ctypes.data + lo, 0, hi - lo)


def _memmove(destination: Array, source: Array, lo: int, hi: int) -> None:
    ctypes.memmove(destination.ctypes.data + lo, source.ctypes.data + lo, hi - lo)
