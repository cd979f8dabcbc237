"""Weights that are dequantized in device memory have the bits of the CPU's."""

import numpy as np
import pytest
import torch

from offload.kernels.floats import Float
from offload.kernels.gpu.triton_dequantize import dequantize_weights
from offload.kernels.weight_formats import QuantType, WeightFormat
from offload.zero.groups import weight_quantizer
from offload.zero.groups.layout import ParamShape, lay_out, lay_out_quantized
from offload.zero.groups.weight_quantizer import WeightQuantizer
from tests.kernels import reference, triton_device
from tests.kernels.quantization_cases import any_codes, dequantized
from tests.kernels.triton_device import DEVICE, get, launches, put, zeros
from tests.kernels.values import assert_same

__all__ = ["launches"]
pytestmark = triton_device.MARKS


def test_dequantizing_anything_has_the_cpus_bits(weights: WeightFormat, kind: Float) -> None:
    words, codes = any_codes(weights)
    actual = zeros(words.size * weights.group_size, kind)
    dequantize_weights(put(words.view(np.int32)), put(codes), actual, weights)
    expected = dequantized(words, codes, weights, kind)
    assert_same(reference.decode(get(actual), kind), reference.decode(expected, kind))


def test_a_bad_argument_is_named() -> None:
    weights = WeightFormat(QuantType.NF4)
    values, words = zeros(128, Float.BF16), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    codes = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match="values: 100 elements are no whole groups of 64"):
        dequantize_weights(words, codes, values[:100], weights)
    with pytest.raises(ValueError, match=r"codes: expected shape \(64,\), got \(63,\)"):
        dequantize_weights(words, codes[:63], values, weights)
    with pytest.raises(ValueError, match="words: expected dtype int32, got float32"):
        dequantize_weights(words.float(), codes, values, weights)


def test_a_groups_quantizer_uses_it_where_its_bytes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = ParamShape(("up",), (6, 128), False, WeightFormat(QuantType.INT4))
    layout = lay_out([stored, ParamShape(("norm",), (100,), False)])
    quantized = lay_out_quantized(layout, 2)
    quantizer = WeightQuantizer(quantized, Float.BF16)
    values = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0)).bfloat16()
    given = values.view(torch.uint8)
    expected, kept = torch.ones_like(given), torch.ones(quantized.stored_nbytes, dtype=torch.uint8)
    quantizer.quantize(given, kept)
    quantizer.dequantize(kept, expected)
    actual = torch.zeros_like(given).to(DEVICE)
    with monkeypatch.context() as patched:
        patched.setattr(weight_quantizer, "is_accelerator", lambda device: True)
        patched.setattr(weight_quantizer, "dequantize_weights", None)
        quantizer.dequantize(kept.to(DEVICE), actual)
    assert torch.equal(actual.cpu(), expected)
