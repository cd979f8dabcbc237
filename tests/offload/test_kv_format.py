"""Pages of keys and values: what is read is what was written, or what 8 bits make of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offload.kernels.bits import FLOAT_OF, flat_array
from offload.kernels.cpu.quantization import dequantize_weights, quantize_weights
from offload.kernels.weight_formats import QuantType, WeightFormat
from offload.kv.page_format import KVShape, PageFormat, dequantize_int8, quantize_int8
from offload.tiers.cached_layer import CachedLayer

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BATCH, TOKENS = 3, 5


def filled(
    int8: bool, dim: int, dtype: torch.dtype
) -> tuple[PageFormat, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A page that was written in two parts, and what was written."""
    torch.manual_seed(dim)
    keys = torch.randn(BATCH, 2, TOKENS, dim).to(dtype)
    values = (100 * torch.randn(BATCH, 1, TOKENS, 2 * dim)).to(dtype)
    page = PageFormat(KVShape.of(keys, dtype), KVShape.of(values, dtype), BATCH, TOKENS, int8)
    flat = torch.full((page.nbytes,), 0xA5, dtype=torch.uint8)
    page.write(flat, 0, keys[:, :, :2], values[:, :, :2])
    page.write(flat, 2, keys[:, :, 2:], values[:, :, 2:])
    return page, flat, keys, values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 8, 33, 64, 128, 192])
@pytest.mark.parametrize("int8", [False, True])
def test_any_part_of_any_rows_is_read(int8: bool, dim: int, dtype: torch.dtype) -> None:
    page, flat, keys, values = filled(int8, dim, dtype)
    expected = [torch.empty_like(each) for each in (keys, values)]
    for each, rounded in zip((keys, values), expected, strict=True):
        page.rounded(each, rounded)
        assert int8 != torch.equal(each, rounded) or dim == 1
    for span in (slice(0, TOKENS), slice(1, 4)):
        for rows in (None, torch.tensor([2, 0, 0, 1])):
            wanted = [each[slice(None) if rows is None else rows, :, span] for each in expected]
            actual = [torch.empty_like(each, memory_format=torch.contiguous_format)
                     for each in wanted]  # fmt: skip
            page.read(flat, span, rows, *actual)
            assert all(map(torch.equal, actual, wanted))


@pytest.mark.parametrize("int8", [False, True])
def test_stored_tokens_are_copied_as_they_are(int8: bool) -> None:
    page, flat, _, _ = filled(int8, 40, torch.bfloat16)
    rows = torch.tensor([2, 2, 0])
    into = torch.zeros(page.nbytes, dtype=torch.uint8)
    page.copy(flat, slice(3), rows, into)
    wanted, copied = (
        [torch.empty(3, 2, 3, 40).bfloat16(), torch.empty(3, 1, 3, 80).bfloat16()] for _ in "ab"
    )
    page.read(flat, slice(3), rows, *wanted)
    page.read(into, slice(3), None, *copied)
    assert all(map(torch.equal, copied, wanted))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_8_bits_are_half_a_step_off_at_most(dtype: torch.dtype) -> None:
    page, flat, keys, _ = filled(True, 128, dtype)
    actual = torch.empty_like(keys)
    page.read(flat, slice(TOKENS), None, actual, None)
    largest = keys.float().abs().amax(dim=-1, keepdim=True)
    error = (actual.float() - keys.float()).abs()
    rounding = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert (error <= largest / 127 / 2 * 1.0001 + rounding * largest).all()
    assert error.max() > largest.min() / 127 / 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operations_of_torch_have_the_bits_of_the_kernels_for_weights(dtype: torch.dtype) -> None:
    states = torch.randn(80, 64) * 2.0 ** torch.randint(-40, 15, (80, 1))
    states[0, 0], states[1, 5], states[2] = torch.inf, torch.nan, 0
    states = states.to(dtype)
    words, codes = torch.empty(80, 1, dtype=torch.int32), torch.empty(80, 64, dtype=torch.uint8)
    quantize_int8(states, words, codes)
    kind, weights = FLOAT_OF[dtype], WeightFormat(QuantType.INT8, 64)
    wanted_words, wanted_codes = np.empty(80, np.uint32), np.empty(80 * 64, np.uint8)
    quantize_weights(flat_array(states), wanted_words, wanted_codes, weights, kind)
    assert np.array_equal(words.view(-1).numpy().view(np.uint32), wanted_words)
    assert np.array_equal(codes.view(-1).numpy(), wanted_codes)
    actual, wanted = torch.empty_like(states), torch.empty_like(states)
    dequantize_int8(words, codes, actual)
    dequantize_weights(wanted_words, wanted_codes, flat_array(wanted), weights, kind)
    assert torch.equal(actual.nan_to_num(-1.0), wanted.nan_to_num(-1.0))  # NaNs of any payload
    assert wanted[:2].isnan().all()
    assert not wanted[2].any()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dim", [8, 64, 80, 128])
def test_sizes_are_known_beforehand(dim: int, int8: bool) -> None:
    shape = KVShape(4, dim, torch.bfloat16)
    planned = 6 * CachedLayer(4, dim, dim).token_nbytes(2, int8=int8)
    page = PageFormat(shape, shape, 6, 64, int8)
    assert page.token_nbytes == planned
    assert planned * 64 <= page.nbytes <= planned * 64 + 128
