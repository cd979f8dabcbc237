"""Conversions in device memory have the bits of the CPU's and of the optimizer's own encodings."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from offload.kernels.cpu.optimizer import scale_blocks
from offload.kernels.floats import Float
from offload.kernels.gpu.triton_convert import (
    Draw,
    decode,
    decode_int8,
    encode,
    encode_int8,
    join_master,
    round_bf16,
    split_master,
)
from offload.kernels.rules import StateFormat
from offload.kernels.variants import Master
from tests.kernels import reference, triton_device
from tests.kernels.adam_cases import assert_same
from tests.kernels.convert_cases import ALL_16_BITS, SIXTEEN, patterns
from tests.kernels.triton_cases import NOISE, RULES, Case, case
from tests.kernels.triton_device import DEVICE, get, launches, put, zeros

__all__ = ["launches"]
pytestmark = triton_device.MARKS

SIZES = [0, 1, 1023, 1024, 1025, 3000]


def halves(values: NDArray[np.float32]) -> tuple[torch.Tensor, torch.Tensor]:
    high = zeros(values.size, Float.BF16)
    low = torch.zeros(values.size, dtype=torch.int16, device=DEVICE)
    split_master(put(values), high, low)
    return high, low


@pytest.mark.parametrize("kind", SIXTEEN)
def test_decoding_every_pattern_matches_reference(kind: Float) -> None:
    out = zeros(ALL_16_BITS.size, Float.FP32)
    decode(put(ALL_16_BITS, kind), out)
    assert_same(get(out), reference.decode(ALL_16_BITS, kind))


@pytest.mark.parametrize("kind", SIXTEEN)
@pytest.mark.parametrize("numel", SIZES)
def test_encoding_matches_reference(numel: int, kind: Float) -> None:
    values, out = patterns(numel), zeros(numel, kind)
    encode(put(values), out)
    expected = reference.decode(reference.encode(values, kind), kind)
    assert_same(reference.decode(get(out), kind), expected)


@pytest.mark.parametrize("numel", SIZES)
def test_split_master_matches_reference_and_joins_without_loss(numel: int) -> None:
    values, out = patterns(numel), zeros(numel, Float.FP32)
    high, low = halves(values)
    expected_high, expected_low = reference.split_master(values)
    np.testing.assert_array_equal(get(high), expected_high)
    np.testing.assert_array_equal(get(low), expected_low)
    join_master(high, low, out)
    assert_same(get(out), values)


def test_joining_any_halves_matches_reference() -> None:
    rng = np.random.default_rng(0)
    high = rng.integers(0, 1 << 16, 5000).astype(np.uint16)
    low = rng.integers(-(1 << 15), 1 << 15, 5000).astype(np.int16)
    out = zeros(5000, Float.FP32)
    join_master(put(high, Float.BF16), put(low), out)
    assert_same(get(out), reference.join_master(high, low))


def first_step(numel: int, states: StateFormat, *, wild: bool = False) -> Case:
    """Adam's first step of a weight without a master: every moment is the gradient's alone."""
    step = case(RULES["adam"], numel, weight=(Float.BF16, Master.NONE), states=states, wild=wild)
    step.states = [np.zeros_like(state) for state in step.states]
    step.scales = [np.zeros_like(scale) for scale in step.scales]
    return step


@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize(("place", "draw"), [(0, Draw.STATE_0), (1, Draw.STATE_1)])
def test_states_are_encoded_as_the_cpus_optimizer_encodes_them(
    place: int, draw: Draw, wild: bool
) -> None:
    numel, name = 1337, f"state {place}"
    fp32 = put(first_step(numel, StateFormat.FP32, wild=wild).on_cpu()[name])
    rounded = zeros(numel, Float.BF16)
    round_bf16(fp32, rounded, NOISE, draw)
    expected = first_step(numel, StateFormat.BF16, wild=wild).on_cpu()
    assert_same(reference.decode(get(rounded), Float.BF16), expected[name])

    codes = torch.full((numel,), 77, dtype=torch.uint8, device=DEVICE)
    scales = zeros(scale_blocks(numel), Float.FP32)
    encode_int8(fp32, codes, scales, NOISE, draw, signed=place == 0)
    expected = first_step(numel, StateFormat.INT8, wild=wild).on_cpu()
    assert_same(get(codes), expected[name])
    assert_same(get(scales), expected[f"scales {place}"])


def random_bits(key: int, numel: int) -> NDArray[np.uint32]:
    """What `kernels.noise` says."""
    numbers = (NOISE.first + np.arange(numel, dtype=np.uint64)).astype(np.uint32)
    x = numbers * np.uint32(0x9E3779B9) ^ np.uint32(key)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    bits: NDArray[np.uint32] = x ^ (x >> np.uint32(16))
    return bits


def test_a_weight_is_rounded_by_its_own_random_bits() -> None:
    values = np.random.default_rng(0).standard_normal(1337).astype(np.float32)
    rounded = zeros(values.size, Float.BF16)
    round_bf16(put(values), rounded, NOISE, Draw.WEIGHT)
    draw = random_bits(NOISE.weight_key, values.size) >> 16
    np.testing.assert_array_equal(get(rounded), (values.view(np.uint32) + draw) >> 16)


def test_infinities_and_nan_are_rounded_to_themselves() -> None:
    values = np.array([np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0], np.float32).repeat(50)
    rounded = zeros(values.size, Float.BF16)
    round_bf16(put(values), rounded, NOISE, Draw.STATE_0)
    assert_same(reference.decode(get(rounded), Float.BF16), values)


@pytest.mark.parametrize("signed", [False, True])
def test_decoding_every_byte_under_every_scale_matches_its_definition(signed: bool) -> None:
    exponents = np.arange(8, 241, 8, dtype=np.uint32)
    bits = np.concatenate([exponents << 23, np.array([0x7FC00000], np.uint32)])
    codes = np.tile(np.arange(256, dtype=np.uint8), bits.size)
    out, scales = zeros(codes.size, Float.FP32), bits.view(np.float32)
    decode_int8(put(codes), put(scales), out, signed=signed)
    wide = codes.astype(np.uint32)
    grown = bits.repeat(256) + ((wide & (0x7F if signed else 0xFF)) << 20)
    with np.errstate(all="ignore"):
        expected = grown.view(np.float32) - scales.repeat(256)
        if signed:
            expected = np.where(wide & 0x80, -expected, expected)
    assert_same(get(out), expected)


def test_zeroed_memory_reads_as_zeros() -> None:
    out = zeros(300, Float.FP32) + 1
    codes = torch.zeros(300, dtype=torch.uint8, device=DEVICE)
    decode_int8(codes, zeros(2, Float.FP32), out, signed=True)
    assert_same(get(out), np.zeros(300, np.float32))


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("numel", [0, 1, 255, 257, 1025])
def test_what_int8_has_a_code_for_is_kept(numel: int, signed: bool) -> None:
    values = np.abs(np.random.default_rng(0).standard_normal(numel)).astype(np.float32)
    if signed:
        values[::2] *= -1
    codes = torch.zeros(numel, dtype=torch.uint8, device=DEVICE)
    scales, out = zeros(scale_blocks(numel), Float.FP32), zeros(numel, Float.FP32)
    encode_int8(put(values), codes, scales, NOISE, Draw.STATE_0, signed=signed)
    decode_int8(codes, scales, out, signed=signed)
    first = get(out).copy()
    step = (np.abs(values) + get(scales).repeat(256)[:numel]) / 8
    assert (np.abs(first - values) < step).all()
    encode_int8(out, codes, scales, NOISE.at(99), Draw.STATE_1, signed=signed)
    decode_int8(codes, scales, out, signed=signed)
    assert_same(get(out), first)


@pytest.mark.parametrize("signed", [False, True])
def test_a_scale_follows_the_largest_magnitude_of_its_block(signed: bool) -> None:
    largest = [0.0, 1e-45, math.inf, math.nan, *(1.5 * 2.0**k for k in range(-149, 127, 12))]
    largest += [2.0**k * f for k in (-118, -104, -88, 0, 127) for f in (1.0, 1.7499999, 1.75)]
    values = np.array(largest, np.float32).repeat(256)
    values[np.arange(values.size) % 256 != 200] *= np.float32(0.25)
    if signed:
        values[::2] *= -1
    codes = torch.zeros(values.size, dtype=torch.uint8, device=DEVICE)
    scales = zeros(len(largest), Float.FP32)
    encode_int8(put(values), codes, scales, NOISE, Draw.STATE_0, signed=signed)
    bits = np.abs(values.reshape(-1, 256)).view(np.uint32).max(axis=1)
    exponents = np.maximum(((bits + 0x200000) >> 23).astype(int) - (15 if signed else 31), 8)
    expected = np.ldexp(np.float32(1), exponents - 127)
    expected[bits >= 0x7F800000] = np.nan
    assert_same(get(scales), expected.astype(np.float32))
    assert (get(codes).reshape(-1, 256)[np.isnan(expected)] == 0).all()


@pytest.mark.parametrize(("short_of_a_step", "goes_up"), [(4, True), (12, False)])
def test_rounding_to_int8_uses_every_random_bit(short_of_a_step: int, goes_up: bool) -> None:
    # With its 16 bits moved up by 4 and half of what they leave out added, the sum of an element's
    # position in its step and its noise is 4 above, or 4 below, a whole step of 2**20.
    noise = random_bits(NOISE.key, 256).astype(np.int64) >> 16
    place = (1 << 20) - short_of_a_step - (noise << 4)
    steps = np.arange(256) % 8
    grown = ((127 << 23) + (steps << 20) + place).astype(np.uint32)
    values = grown.view(np.float32) - np.float32(1)  # exact; the scale will be 1
    values[0] = 32768
    codes, scales = torch.zeros(256, dtype=torch.uint8, device=DEVICE), zeros(1, Float.FP32)
    encode_int8(put(values), codes, scales, NOISE, Draw.STATE_0, signed=True)
    assert scales.item() == 1
    np.testing.assert_array_equal(get(codes)[1:], (steps + goes_up)[1:])


def test_a_bad_argument_is_named() -> None:
    fp32, codes = zeros(300, Float.FP32), torch.zeros(300, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match="src: expected dtype float32, got uint8"):
        encode(codes, fp32)
    with pytest.raises(ValueError, match="dst: expected dtype float32, bfloat16, float16, got uin"):
        encode(fp32, codes)
    with pytest.raises(ValueError, match="src: expected dtype float32, bfloat16, float16, got uin"):
        decode(codes, fp32)
    with pytest.raises(ValueError, match="high: expected dtype bfloat16, got float16"):
        split_master(fp32, fp32.half(), fp32.short())
    with pytest.raises(ValueError, match=r"out: expected shape \(300,\), got \(299,\)"):
        join_master(fp32.bfloat16(), fp32.short(), fp32[1:])
    with pytest.raises(ValueError, match=r"scales: expected shape \(2,\), got \(300,\)"):
        decode_int8(codes, fp32, fp32, signed=True)
    with pytest.raises(ValueError, match="dst: expected dtype bfloat16, got float16"):
        round_bf16(fp32, fp32.half(), NOISE, Draw.WEIGHT)
