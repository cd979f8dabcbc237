"""Gradients that land in device memory have the bits, and the partials, of those on the CPU."""

import numpy as np
import pytest
import torch

from offload.kernels.floats import NORM_BLOCK, Array, Float, norm_blocks
from offload.kernels.gpu.triton_gradients import add_gradient, copy_gradient
from tests.kernels import reference, triton_device
from tests.kernels.test_gradients import gradient
from tests.kernels.triton_device import DEVICE, get, launches, put, zeros
from tests.kernels.values import SPECIAL, assert_same

__all__ = ["launches"]
pytestmark = [pytest.mark.sample(3), *triton_device.MARKS]

SIZES = [0, 1, 33, 1025]
PAIRS = [(dst, src) for dst in Float for src in Float]


def special(kind: Float, seed: int = 0) -> Array:
    return reference.encode(np.random.default_rng(seed).choice(SPECIAL, 700), kind)


def partials_for(numel: int) -> torch.Tensor:
    return torch.full((norm_blocks(numel),), -1.0, dtype=torch.float64, device=DEVICE)


def check_values(got: torch.Tensor, expected: Array, kind: Float) -> None:
    assert_same(reference.decode(get(got), kind), reference.decode(expected, kind))


def check_copy(src: Array, dst_float: Float, src_float: Float) -> None:
    dst, partials = zeros(src.size, dst_float), partials_for(src.size)
    copy_gradient(dst, put(src, src_float), partials)
    expected = reference.encode(reference.decode(src, src_float), dst_float)
    check_values(dst, expected, dst_float)
    assert_same(get(partials), reference.partials(reference.decode(expected, dst_float)))


@pytest.mark.parametrize(("dst_float", "src_float"), PAIRS)
@pytest.mark.parametrize("numel", [17, 1025])
def test_copy_matches_reference(numel: int, dst_float: Float, src_float: Float) -> None:
    check_copy(gradient(numel, src_float), dst_float, src_float)


@pytest.mark.parametrize(("dst_float", "src_float"), PAIRS)
def test_copying_every_kind_of_value_matches_reference(dst_float: Float, src_float: Float) -> None:
    check_copy(special(src_float), dst_float, src_float)
    finite = special(src_float)
    finite = finite[np.isfinite(reference.decode(finite, src_float))]
    check_copy(finite, dst_float, src_float)


@pytest.mark.slow
def test_whole_blocks_have_the_sums_of_the_reference() -> None:
    check_copy(gradient(NORM_BLOCK + 1001, Float.BF16), Float.BF16, Float.BF16)


@pytest.mark.parametrize("src_float", list(Float))
@pytest.mark.parametrize("numel", SIZES)
def test_add_matches_reference(numel: int, src_float: Float) -> None:
    src, old = gradient(numel, src_float), gradient(numel, Float.FP32, seed=1)
    dst, partials = put(old), partials_for(numel)
    add_gradient(dst, put(src, src_float), partials)
    expected = old + reference.decode(src, src_float)
    assert_same(get(dst), expected)
    assert_same(get(partials), reference.partials(expected))


def test_a_bad_argument_is_named() -> None:
    dst, partials = zeros(10, Float.FP32), partials_for(10)
    copy_gradient(dst, zeros(10, Float.BF16), partials)  # right once, which is remembered
    with pytest.raises(ValueError, match=r"src: expected shape \(10,\), got \(9,\)"):
        copy_gradient(dst, zeros(9, Float.BF16), partials)
    with pytest.raises(ValueError, match=r"partials: expected shape \(1,\), got \(2,\)"):
        copy_gradient(dst, zeros(10, Float.BF16), partials.repeat(2))
    with pytest.raises(ValueError, match=r"src: expected shape \(10,\), got \(9,\)"):
        add_gradient(dst, zeros(9, Float.BF16), partials)
    with pytest.raises(ValueError, match=r"partials: expected shape \(1,\), got \(2,\)"):
        add_gradient(dst, zeros(10, Float.BF16), partials.repeat(2))
    with pytest.raises(ValueError, match="partials: expected dtype float64, got float32"):
        copy_gradient(dst, dst.clone(), partials.float())
    with pytest.raises(ValueError, match=r"dst: expected a 1-D tensor, got shape \(2, 5\)"):
        add_gradient(dst.view(2, 5), dst, partials)
    with pytest.raises(ValueError, match="dst: expected dtype float32, got bfloat16"):
        add_gradient(dst.bfloat16(), dst, partials)
    with pytest.raises(ValueError, match="src: expected dtype float32, bfloat16, float16, got int"):
        copy_gradient(dst, dst.int(), partials)
    with pytest.raises(ValueError, match=r"src: expected a contiguous tensor, got strides \(2,\)"):
        add_gradient(dst, zeros(20, Float.FP32)[::2], partials)
