"""Gradients land as the reference has them, and partials tell the norm and what is not finite."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from offload.kernels.cpu.gradients import add_gradient, copy_gradient
from offload.kernels.floats import NORM_BLOCK, Array, Float, Runner, norm_blocks, serial
from tests.kernels import reference

SIZES = [0, 1, 7, 15, 16, 17, 31, 32, 33, 127, 1000, NORM_BLOCK, NORM_BLOCK + 1, 150_000]
PAIRS = [(dst, src) for dst in Float for src in Float]


def gradient(numel: int, kind: Float, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    values = np.ldexp(rng.standard_normal(numel), rng.integers(-20, 10, numel))
    return reference.encode(values.astype(np.float32), kind)


def partials_for(numel: int) -> NDArray[np.float64]:
    return np.full(norm_blocks(numel), -1.0)


def same_bits(got: Array, expected: Array) -> None:
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize(("dst_float", "src_float"), PAIRS)
@pytest.mark.parametrize("numel", [0, 17, 1000, NORM_BLOCK + 33])
def test_copy_matches_reference(numel: int, dst_float: Float, src_float: Float) -> None:
    src, dst = gradient(numel, src_float), np.zeros(numel, dst_float.storage)
    partials = partials_for(numel)
    copy_gradient(dst, src, dst_float, src_float, partials)
    expected = reference.encode(reference.decode(src, src_float), dst_float)
    same_bits(dst, expected)
    same_bits(partials, reference.partials(reference.decode(expected, dst_float)))


@pytest.mark.parametrize("src_float", list(Float))
@pytest.mark.parametrize("numel", SIZES)
def test_add_matches_reference(numel: int, src_float: Float) -> None:
    src, dst = gradient(numel, src_float), gradient(numel, Float.FP32, seed=1)
    expected = dst + reference.decode(src, src_float)
    partials = partials_for(numel)
    add_gradient(dst, src, src_float, partials)
    same_bits(dst, expected)
    same_bits(partials, reference.partials(expected))


@pytest.mark.parametrize("kind", list(Float))
def test_partials_add_up_to_the_norm(kind: Float) -> None:
    src = gradient(5 * NORM_BLOCK + 13, kind)
    partials = partials_for(src.size)
    copy_gradient(np.empty_like(src), src, kind, kind, partials)
    wide = reference.decode(src, kind).astype(np.float64)
    exact = math.fsum((wide * wide).tolist())
    assert math.fsum(partials) == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize("kind", list(Float))
def test_partials_do_not_depend_on_threads_or_alignment(kind: Float, threads: Runner) -> None:
    numel = 4 * NORM_BLOCK + 29
    src = gradient(numel, kind)
    shifted = np.empty(numel + 1, kind.storage)[1:]
    shifted[:] = src
    seen = []
    for source, run in [(src, serial), (shifted, serial), (src, threads), (shifted, threads)]:
        partials, dst = partials_for(numel), np.empty(numel + 3, np.float32)[3:]
        copy_gradient(dst, source, Float.FP32, kind, partials, run)
        seen.append((dst.tobytes(), partials.tobytes()))
    assert len(set(seen)) == 1


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", list(Float))
@pytest.mark.parametrize("place", [0, 31, NORM_BLOCK - 1, NORM_BLOCK, 2 * NORM_BLOCK + 4])
def test_one_bad_element_shows_in_its_block_only(bad: float, kind: Float, place: int) -> None:
    numel = 2 * NORM_BLOCK + 5
    src = gradient(numel, kind)
    src[place] = reference.encode(np.array([bad], np.float32), kind)[0]
    partials = partials_for(numel)
    copy_gradient(np.empty_like(src), src, kind, kind, partials)
    finite = np.isfinite(partials)
    assert not finite[place // NORM_BLOCK]
    assert finite.sum() == 2


def test_a_same_format_copy_keeps_nan_payloads() -> None:
    src = np.full(40, 0x7F81, np.uint16)
    dst, partials = np.zeros(40, np.uint16), partials_for(40)
    copy_gradient(dst, src, Float.BF16, Float.BF16, partials)
    same_bits(dst, src)


def test_a_bad_argument_is_named() -> None:
    dst, partials = np.zeros(10, np.float32), partials_for(10)
    with pytest.raises(ValueError, match=r"src: expected shape \(10,\), got \(9,\)"):
        add_gradient(dst, np.zeros(9, np.uint16), Float.BF16, partials)
    with pytest.raises(ValueError, match=r"partials: expected shape \(1,\), got \(2,\)"):
        add_gradient(dst, np.zeros(10, np.uint16), Float.BF16, np.zeros(2))
    dst.flags.writeable = False
    with pytest.raises(ValueError, match=r"dst: expected a writable array"):
        add_gradient(dst, np.zeros(10, np.uint16), Float.BF16, partials)
    with pytest.raises(ValueError, match=r"dst: expected a 1-D array, got shape \(2, 5\)"):
        add_gradient(np.zeros((2, 5), np.float32), dst, Float.FP32, partials)
