"""Groups whose parameters are stored in fewer bits: where their codes lie, and what they say."""

from __future__ import annotations

import pytest
import torch

from offload.kernels.floats import Float
from offload.kernels.weight_formats import Code, WeightFormat
from offload.zero.groups.bits import DTYPE_OF
from offload.zero.groups.coded_layout import CodedLayout, lay_out_codes, refusal
from offload.zero.groups.layout import Layout, ParamShape, ParamSpec, lay_out
from offload.zero.groups.weight_codes import WeightCodes

SHAPES = {"q": (64, 128), "norm": (100,), "up": (3, 192), "head": (5, 7), "none": (0, 64)}
BY_CODE = pytest.mark.parametrize("code", Code)
BY_KIND = pytest.mark.parametrize("kind", Float)


def group() -> Layout:
    return lay_out([ParamShape((name,), shape, False) for name, shape in SHAPES.items()])


def coded(kind: Float, code: Code) -> CodedLayout:
    """All that can be, but for one that is named."""
    weights = WeightFormat(code)

    def weights_of(spec: ParamSpec) -> WeightFormat | None:
        return None if spec.name == "head" or refusal(spec.shape, weights) else weights

    return lay_out_codes(group(), kind.nbytes, weights_of)


def values(kind: Float) -> torch.Tensor:
    exact = torch.randn(group().numel, generator=torch.Generator().manual_seed(0))
    return exact.to(DTYPE_OF[kind]).view(torch.uint8)


def stored(codec: WeightCodes, given: torch.Tensor) -> torch.Tensor:
    found = torch.full((codec.stored_nbytes(given.numel()),), 77, dtype=torch.uint8)
    codec.encode(given, found)
    return found


@BY_CODE
@BY_KIND
def test_what_is_not_coded_is_kept_and_what_is_coded_is_close(kind: Float, code: Code) -> None:
    codec, given = WeightCodes(coded(kind, code), kind), values(kind)
    found = torch.full_like(given, 77)
    codec.decode(stored(codec, given), found)
    dtype = DTYPE_OF[kind]
    for part in codec.layout.parts:
        before, after = (each[part.values].view(dtype).float() for each in (given, found))
        if part.weights is None:
            assert torch.equal(before, after)
        elif part.spec.numel:
            assert 0 < float((after - before).abs().max()) < 0.6
    assert {part.spec.name for part in codec.layout.parts if part.weights is None} == {
        "norm", "head",
    }  # fmt: skip


@BY_CODE
def test_stored_bytes_and_padding_follow_from_the_values_alone(code: Code) -> None:
    codec, given = WeightCodes(coded(Float.BF16, code), Float.BF16), values(Float.BF16)
    first = stored(codec, given)
    again = torch.zeros_like(first)
    codec.encode(given, again)
    assert torch.equal(first, again)
    found, twice = torch.full_like(given, 77), torch.zeros_like(given)
    codec.decode(first, found)
    codec.decode(first, twice)
    assert torch.equal(found, twice)
    codec.encode(found, again)
    assert torch.equal(first[_coded(codec)], again[_coded(codec)])


def _coded(codec: WeightCodes) -> slice:
    """Of the first parameter."""
    return codec.layout.parts[0].stored


@BY_CODE
def test_parts_follow_each_other_and_can_be_decoded_one_by_one(code: Code) -> None:
    codec, given = WeightCodes(coded(Float.BF16, code), Float.BF16), values(Float.BF16)
    whole, bits = stored(codec, given), 8 if code is Code.INT8 else 4
    found, alone = torch.zeros_like(given), torch.zeros_like(given)
    codec.decode(whole, found)
    end = 0
    for part in codec.layout.parts:
        assert part.stored.start % 64 == 0
        assert end <= part.stored.start < end + 64
        end = part.stored.stop
        codec.decode_part(part, whole[part.stored], alone[part.values])
    assert torch.equal(found, alone)
    numel = 64 * 128
    first = codec.layout.parts[0].stored
    assert first.stop - first.start == numel * bits // 8 + numel // 64 * 4


def test_a_shape_that_cannot_be_coded_is_refused_with_the_reason() -> None:
    int4, nf4 = WeightFormat(Code.INT4), WeightFormat(Code.NF4)
    assert refusal((4, 64), int4) is refusal((2, 4, 128), int4) is refusal((2, 32), nf4) is None
    assert refusal((64,), int4) == "it has 1 dimensions, and only matrices are stored in fewer bits"
    assert refusal((64, 100), int4) == "its rows of 100 elements are no whole groups of 64"
    assert refusal((3, 32), nf4) == "its 96 elements are no whole groups of 64"
    with pytest.raises(ValueError, match="head cannot be stored as int4: its rows of 7 elements"):
        lay_out_codes(group(), 2, lambda spec: int4 if spec.name == "head" else None)
    codec = WeightCodes(coded(Float.BF16, Code.INT4), Float.BF16)
    with pytest.raises(ValueError, match=r"a group of \d+ bytes, got 100"):
        codec.stored_nbytes(100)
