"""AWQ in its GEMM layout, as AutoAWQ and GPTQModel write it.

    M.qweight  int32 [columns, rows / 8]: 4 bits each; of 8 rows, number 0, 2, 4, 6, 1, 3, 5, 7 from
               the lowest bits up
    M.qzeros   int32 [groups, rows / 8]: zero points in the same order
    M.scales   [groups, rows]

A value is (code - zero point) x scale in the scales' format, rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.quantised.gptq import UNPACK
from offload.quantised.matrix import Matrix, piece_rows, unpacked
from offload.quantised.parts import FLOATS, Parts, groups_in, number
from offload.tiers.errors import UnsupportedError
from offload.weights.tensor_file import Stored

_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # where each of 8 rows is in a word


@dataclass(frozen=True)
class _Interleaved(Matrix):
    qweight: Stored
    qzeros: Stored
    scales: Stored
    group_size: int

    def fill(self, out: Tensor) -> None:
        rows, columns = self.shape
        scales = self.scales.read()
        zeros = _in_order(self.qzeros.read())
        step = piece_rows(rows)
        for start in range(0, columns, step):
            stop = min(start + step, columns)
            codes = _in_order(self.qweight.rows(start, stop))
            group = torch.arange(start, stop) // self.group_size
            values = (codes - zeros[group]) * scales[group]
            out[:, start:stop] = values.t().contiguous()  # four times as fast as without


def _in_order(words: Tensor) -> Tensor:
    return unpacked(words, 4).index_select(-1, _PLACES).flatten(-2).to(torch.int8)


def matrices(settings: Mapping[str, Any], parts: Parts) -> dict[str, Matrix]:
    bits, group_size = number(settings, "bits", 4), number(settings, "group_size", -1)
    kind = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if bits != 4 or kind != "gemm" or settings.get("backend") == "llm-awq":
        raise UnsupportedError(
            f"AWQ weights of {bits} bits in layout {kind:.40} are not read, of 4 in gemm are; "
            f"{UNPACK}"
        )
    return {
        parts.weight_name(module): _matrix(module, group_size, parts)
        for module in parts.modules(".qweight")
    }


def _matrix(module: str, group_size: int, parts: Parts) -> _Interleaved:
    name, ints = f"{module}.weight", (torch.int32,)
    qweight = parts.take(f"{module}.qweight", ints, (None, None), name)
    columns, rows = qweight.shape[0], qweight.shape[1] * 8
    groups = groups_in(columns, group_size, name)
    qzeros = parts.take(f"{module}.qzeros", ints, (groups, rows // 8), name)
    scales = parts.take(f"{module}.scales", FLOATS, (groups, rows), name)
    return _Interleaved(scales.dtype, (rows, columns), qweight, qzeros, scales, columns // groups)
