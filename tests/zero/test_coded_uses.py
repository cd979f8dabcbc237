"""Linear layers straight from codes: close to decoding first, and when that is worth it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from offload.kernels.floats import Float
from offload.kernels.weight_formats import Code, WeightFormat
from offload.swap.threads.worker import ParallelRunner
from offload.zero.groups.bits import DTYPE_OF
from offload.zero.groups.coded_layout import CodedPart, lay_out_codes
from offload.zero.groups.layout import ParamShape, lay_out
from offload.zero.groups.weight_codes import WeightCodes
from offload.zero.hooks.coded_uses import linear, multiplies


def coded(code: Code, kind: Float) -> tuple[CodedPart, torch.Tensor, torch.Tensor]:
    """A weight (24, 128): its place, its codes, what they decode to."""
    layout = lay_out([ParamShape(("up",), (24, 128), False)])
    codec = WeightCodes(lay_out_codes(layout, kind.nbytes, lambda spec: WeightFormat(code)), kind)
    (part,) = codec.layout.parts
    torch.manual_seed(0)
    values = torch.randn(layout.numel).to(DTYPE_OF[kind])
    stored = torch.empty(codec.layout.stored_nbytes, dtype=torch.uint8)
    codec.encode(values.view(torch.uint8), stored)
    codec.decode(stored, values.view(torch.uint8))
    return part, stored[part.stored], values[: part.spec.numel].view(part.spec.shape)


@pytest.mark.parametrize("code", Code)
@pytest.mark.parametrize("kind", Float)
def test_it_is_the_product_with_what_the_codes_decode_to(code: Code, kind: Float) -> None:
    part, stored, weight = coded(code, kind)
    x, bias = (torch.randn(shape).to(weight.dtype) for shape in ((2, 1, 128), (24,)))
    found = linear(x, stored, part, bias)
    expected = functional.linear(x.double(), weight.double(), bias.double())
    assert found.shape == (2, 1, 24)
    assert found.dtype is x.dtype
    size = {Float.FP32: 1e-6, Float.BF16: 2.0**-8, Float.FP16: 2.0**-11}[kind]
    assert float((found - expected).abs().max()) < 1.5 * size * float(expected.abs().max())
    runner = ParallelRunner(2, min_share=1)
    assert torch.equal(found, linear(x, stored, part, bias, runner))
    runner.close()


def test_few_rows_of_x_are_multiplied_straight_from_codes() -> None:
    part, stored, _ = coded(Code.INT4, Float.BF16)
    assert multiplies(torch.zeros(1, 1, 128), part)
    assert multiplies(torch.zeros(128), part)
    assert not multiplies(torch.zeros(1, 100, 128), part)
    assert not multiplies(torch.zeros(0, 128), part)
    with pytest.raises(ValueError, match="up: x has 64 features, expected 128"):
        linear(torch.zeros(1, 64), stored, part)
