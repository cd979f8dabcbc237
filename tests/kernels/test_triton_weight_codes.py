"""Codes of weights in device memory have the bits of the CPU's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offload.kernels.floats import Array, Float
from offload.kernels.gpu.triton_weight_codes import decode_weights, encode_weights
from offload.kernels.weight_formats import Code, WeightFormat
from offload.zero.groups import weight_codes as group_codes
from offload.zero.groups.coded_layout import lay_out_codes
from offload.zero.groups.layout import ParamShape, lay_out
from offload.zero.groups.weight_codes import WeightCodes
from tests.kernels import reference, triton_device
from tests.kernels.adam_cases import assert_same
from tests.kernels.code_cases import (
    any_codes,
    decoded,
    encoded,
    normal,
    on_grids,
    stored,
    wild,
)
from tests.kernels.triton_device import DEVICE, get, launches, put, zeros

__all__ = ["launches"]
pytestmark = triton_device.MARKS


def on_device(values: Array, weights: WeightFormat, kind: Float) -> tuple[Array, Array]:
    """Words and codes that the device makes of stored values."""
    words = torch.full((values.size // weights.group_size,), 77, dtype=torch.int32, device=DEVICE)
    codes = torch.full((weights.codes_nbytes(values.size),), 77, dtype=torch.uint8, device=DEVICE)
    encode_weights(put(values, kind), words, codes, weights)
    return get(words).view(np.uint32), get(codes)


def test_encoding_has_the_cpus_bits(weights: WeightFormat, kind: Float) -> None:
    for values in (normal(weights), on_grids(weights), wild(weights)):
        given = stored(values, kind)
        words, codes = on_device(given, weights, kind)
        expected_words, expected_codes = encoded(given, weights, kind)
        np.testing.assert_array_equal(words, expected_words)
        np.testing.assert_array_equal(codes, expected_codes)


def test_decoding_anything_has_the_cpus_bits(weights: WeightFormat, kind: Float) -> None:
    words, codes = any_codes(weights)
    found = zeros(words.size * weights.group_size, kind)
    decode_weights(put(words.view(np.int32)), put(codes), found, weights)
    expected = decoded(words, codes, weights, kind)
    assert_same(reference.decode(get(found), kind), reference.decode(expected, kind))


@pytest.mark.parametrize("groups", [0, 1, 31, 32, 33])
def test_nothing_behind_the_last_group_is_written(groups: int) -> None:
    weights = WeightFormat(Code.INT4)
    memory = torch.full((groups * 64 + 64,), 7.0, device=DEVICE)
    words = torch.full((groups + 1,), 0x3F800000, dtype=torch.int32, device=DEVICE)
    codes = torch.zeros(groups * 32 + 32, dtype=torch.uint8, device=DEVICE)
    decode_weights(words[:groups], codes[: groups * 32], memory[: groups * 64], weights)
    assert get(memory)[: groups * 64].any() == 0
    assert (get(memory)[groups * 64 :] == 7).all()
    encode_weights(memory[: groups * 64], words[:groups], codes[: groups * 32], weights)
    assert get(words)[groups] == 0x3F800000


def test_a_bad_argument_is_named() -> None:
    weights = WeightFormat(Code.NF4)
    values, words = zeros(128, Float.BF16), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    codes = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match="values: 100 elements are no whole groups of 64"):
        decode_weights(words, codes, values[:100], weights)
    with pytest.raises(ValueError, match=r"codes: expected shape \(64,\), got \(63,\)"):
        decode_weights(words, codes[:63], values, weights)
    with pytest.raises(ValueError, match="words: expected dtype int32, got float32"):
        encode_weights(values, words.float(), codes, weights)


def test_a_groups_codec_uses_it_where_its_bytes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [ParamShape(("up",), (6, 128), False), ParamShape(("norm",), (100,), False)]
    layout = lay_out(shapes)
    int4 = WeightFormat(Code.INT4)
    coded = lay_out_codes(layout, 2, lambda spec: int4 if spec.shape[1:] else None)
    codec = WeightCodes(coded, Float.BF16)
    values = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0)).bfloat16()
    given = values.view(torch.uint8)
    expected, kept = torch.ones_like(given), torch.ones(coded.stored_nbytes, dtype=torch.uint8)
    codec.encode(given, kept)
    codec.decode(kept, expected)
    stored, found = torch.zeros_like(kept).to(DEVICE), torch.zeros_like(given).to(DEVICE)
    with monkeypatch.context() as patched:
        patched.setattr(group_codes, "is_accelerator", lambda device: True)
        patched.setattr(group_codes, "decode_weights", None)
        codec.encode(given.to(DEVICE), stored)
        codec.decode(stored, found)
    assert torch.equal(stored.cpu(), kept)
    assert torch.equal(found.cpu(), expected)
