"""Conversions agree with torch's and with the reference, and a split master loses nothing."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from offload.kernels.cpu.convert import decode, encode, join_master, split_master
from offload.kernels.floats import Float
from tests.kernels import reference
from tests.kernels.values import ALL_16_BITS, SIXTEEN, patterns

TORCH = {Float.BF16: torch.bfloat16, Float.FP16: torch.float16}


def run_split(values: NDArray[np.float32]) -> tuple[NDArray[np.uint16], NDArray[np.int16]]:
    high, low = np.empty(values.size, np.uint16), np.empty(values.size, np.int16)
    split_master(values, high, low)
    return high, low


@pytest.mark.parametrize("kind", SIXTEEN)
def test_decoding_every_pattern_matches_torch(kind: Float) -> None:
    out = np.empty(ALL_16_BITS.size, np.float32)
    decode(ALL_16_BITS, out, kind)
    expected = torch.from_numpy(ALL_16_BITS.view(np.int16)).view(TORCH[kind]).float().numpy()
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
    number = ~np.isnan(out)
    np.testing.assert_array_equal(out.view(np.uint32)[number], expected.view(np.uint32)[number])


@pytest.mark.parametrize("kind", SIXTEEN)
def test_encoding_matches_torch(kind: Float) -> None:
    rng = np.random.default_rng(0)
    exponents = rng.integers(-30, 20, 100_003)
    values = np.concatenate(
        [patterns(100_003), np.ldexp(rng.standard_normal(100_003), exponents).astype(np.float32)]
    )
    out = np.empty(values.size, np.uint16)
    encode(values, out, kind)
    converted = torch.from_numpy(values).to(TORCH[kind])
    number = ~np.isnan(values)
    expected = converted.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(out[number], expected[number])
    back = np.empty(values.size, np.float32)
    decode(out, back, kind)
    assert np.isnan(back[~number]).all()


@pytest.mark.parametrize("numel", [0, 1, 7, 15, 16, 17, 63, 64, 65, 1000, 65537])
def test_splitting_and_joining_is_lossless(numel: int) -> None:
    values = patterns(numel)
    high, low = run_split(values)
    expected = reference.split_master(values)
    np.testing.assert_array_equal(high, expected[0])
    np.testing.assert_array_equal(low, expected[1])
    joined = np.empty(numel, np.float32)
    join_master(high, low, joined)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(joined.view(np.uint32)[number], values.view(np.uint32)[number])
    assert (joined.view(np.uint32)[~number] == 0x7FC00000).all()
    expected_bits = reference.join_master(high, low).view(np.uint32)
    np.testing.assert_array_equal(joined.view(np.uint32), expected_bits)


@pytest.mark.parametrize("kind", SIXTEEN)
def test_bits_do_not_depend_on_alignment(kind: Float) -> None:
    values = patterns(4097)
    whole, cut = np.empty(4097, np.uint16), np.empty(4100, np.uint16)
    encode(values, whole, kind)
    encode(values, cut[3:], kind)
    np.testing.assert_array_equal(whole, cut[3:])
    number = ~np.isnan(values)
    np.testing.assert_array_equal(whole[number], reference.encode(values, kind)[number])


def test_a_bad_argument_is_named() -> None:
    good = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match=r"dst: expected dtype uint16, got float32"):
        encode(good, good, Float.BF16)
    with pytest.raises(ValueError, match=r"low: expected shape \(4,\), got \(3,\)"):
        split_master(good, np.zeros(4, np.uint16), np.zeros(3, np.int16))
    with pytest.raises(ValueError, match=r"high: expected a contiguous array, got strides \(4,\)"):
        split_master(good, np.zeros(8, np.uint16)[::2], np.zeros(4, np.int16))
