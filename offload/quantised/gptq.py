"""GPTQ, as AutoGPTQ and GPTQModel write it.

    M.qweight  int32 [columns x bits / 32, rows]: a linear layer's codes, packed by column
    M.qzeros   int32 [groups, rows x bits / 32]: zero points; less 1 in format v1 (`gptq`)
    M.scales   [groups, rows]
    M.g_idx    [columns]: the group of each column (desc_act); without it groups are consecutive

A value is scale x (code - zero point) in the scales' format, rounded once. The 1 of v1 is added to
whole words, as GPTQModel does: where the stored zero point is the largest code, the next one takes
the carry, which is what a borrow had left there when it was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.quantised.matrix import Matrix, piece_rows, unpacked
from offload.quantised.parts import FLOATS, Parts, group_of, groups_in, names, number
from offload.tiers.errors import CheckpointError, UnsupportedError
from offload.weights.tensor_file import Stored

_ONES = {4: 0x11111111, 8: 0x01010101}
_FORMATS = {"gptq": 1, "gptq_v2": 2}
UNPACK = "load the folder once with the library that wrote it, and save it in 16 bits"


@dataclass(frozen=True)
class _Columns(Matrix):
    qweight: Stored
    qzeros: Stored
    scales: Stored
    group: Tensor  # of each column
    bits: int
    added: int  # to zero points

    def fill(self, out: Tensor) -> None:
        rows, columns = self.shape
        per_word = 32 // self.bits
        scales = self.scales.read()
        words = self.qzeros.read() + self.added
        zeros = unpacked(words, self.bits).reshape(scales.shape).to(torch.int16)
        step = piece_rows(rows, per_word)
        for start in range(0, columns, step):
            stop = min(start + step, columns)
            part = self.qweight.rows(start // per_word, stop // per_word)
            codes = unpacked(part, self.bits).transpose(1, 2).reshape(stop - start, rows)
            group = self.group[start:stop]
            values = scales[group] * (codes.to(torch.int16) - zeros[group])
            out[:, start:stop] = values.t().contiguous()  # four times as fast as without


def matrices(settings: Mapping[str, Any], parts: Parts) -> dict[str, Matrix]:
    bits, group_size = number(settings, "bits"), number(settings, "group_size", -1)
    kind = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
    if bits not in _ONES or kind not in _FORMATS:
        raise UnsupportedError(
            f"GPTQ weights of {bits} bits in format {kind:.40} are not read, of 4 and 8 in "
            f"{' and '.join(_FORMATS)} are; {UNPACK}"
        )
    _refuse_overrides(settings)
    return {
        parts.weight_name(module): _matrix(
            module, bits, group_size, _FORMATS[kind], bool(settings.get("desc_act")), parts
        )
        for module in parts.modules(".qweight")
    }


def _refuse_overrides(settings: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for settings of single modules, except that of leaving one
    unquantised, which begins with -."""
    other = [key for key in names(settings, "dynamic") if not key.startswith("-")]
    if other:
        raise UnsupportedError(
            f"quantization_config.dynamic in config.json has settings of its own for "
            f"{other[0]:.60}, which are not read; {UNPACK}"
        )


def _matrix(
    module: str, bits: int, group_size: int, version: int, desc_act: bool, parts: Parts
) -> _Columns:
    per_word, name = 32 // bits, f"{module}.weight"
    ints = (torch.int32,)
    qweight = parts.take(f"{module}.qweight", ints, (None, None), name)
    columns, rows = qweight.shape[0] * per_word, qweight.shape[1]
    groups = groups_in(columns, group_size, name)
    scales = parts.take(f"{module}.scales", FLOATS, (groups, rows), name)
    groups_in(rows, per_word, f"{module}.qzeros")
    qzeros = parts.take(f"{module}.qzeros", ints, (groups, rows // per_word), name)
    order = parts.take_if(f"{module}.g_idx", (torch.int32, torch.int64), (columns,), name)
    if order is None and desc_act:
        raise CheckpointError(
            f"{module}.g_idx is not there, and quantization_config in config.json has desc_act: "
            "the order of its columns is not known; get the folder again"
        )
    group = torch.arange(columns) // (columns // groups)
    if order is not None:
        group = group_of(order, groups)
    return _Columns(
        scales.dtype, (rows, columns), qweight, qzeros, scales, group, bits,
        _ONES[bits] if version == 1 else 0,
    )  # fmt: skip
