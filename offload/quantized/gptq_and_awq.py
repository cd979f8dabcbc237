"""GPTQ, as AutoGPTQ and GPTQModel write it, and AWQ in its GEMM layout, as AutoAWQ does.

              GPTQ                                   AWQ
    M.qweight int32 [columns x bits / 32, rows]      int32 [columns, rows / 8]
    M.qzeros  int32 [groups, rows x bits / 32]       int32 [groups, rows / 8]
    M.scales  [groups, rows]                         [groups, rows]
    M.g_idx   [columns]: the group of each column    groups are consecutive
              (desc_act); else they are consecutive

GPTQ packs a linear layer's codes by column, from the lowest bits up. Of 8 rows AWQ has number 0, 2,
4, 6, 1, 3, 5, 7 from the lowest bits up. GPTQ's zero points are stored less 1 in format v1
(`gptq`).

A value is (code - zero point) x scale in the scales' format, rounded once. The 1 of v1 is added to
whole words, as GPTQModel does: where the stored zero point is the largest code, the next one takes
the carry, which is what a borrow had left there when it was written.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.quantized.matrix import Matrix, piece_rows, unpacked
from offload.quantized.parts import FLOATS, Parts, groups_in, names, number
from offload.tiers.errors import CheckpointError, UnsupportedError
from offload.weights.tensor_file import Stored

_INTS = (torch.int32,)
_ONES = {4: 0x11111111, 8: 0x01010101}
_FORMATS = {"gptq": 1, "gptq_v2": 2}
_UNPACK = "load the folder once with the library that wrote it, and save it in 16 bits"
_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # where AWQ has each of 8 rows in a word


@dataclass(frozen=True)
class _Columns(Matrix):
    qweight: Stored
    qzeros: Stored
    scales: Stored
    group: Tensor  # of each column
    bits: int
    added: int = 0  # to zero points
    is_awq: bool = False

    def fill(self, out: Tensor) -> None:
        rows, columns = self.shape
        scales = self.scales.read()
        zeros = self._of_rows(self.qzeros.read() + self.added)
        per_word = 1 if self.is_awq else 32 // self.bits
        step = piece_rows(rows, per_word)
        for start in range(0, columns, step):
            stop = min(start + step, columns)
            words = self.qweight.rows(start // per_word, stop // per_word)
            if self.is_awq:
                codes = self._of_rows(words)
            else:
                codes = unpacked(words, self.bits).transpose(1, 2).reshape(stop - start, rows)
            group = self.group[start:stop]
            values = (codes.to(torch.int16) - zeros[group]) * scales[group]
            out[:, start:stop] = values.t().contiguous()  # four times as fast as without

    def _of_rows(self, words: Tensor) -> Tensor:
        """Return codes [..., rows] of words that are packed along the rows."""
        codes = unpacked(words, self.bits)
        if self.is_awq:
            codes = codes.index_select(-1, _PLACES)
        return codes.flatten(-2).to(torch.int16)


def gptq(settings: Mapping[str, Any], parts: Parts) -> dict[str, Matrix]:
    bits, group_size = number(settings, "bits"), number(settings, "group_size", -1)
    kind = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
    if bits not in _ONES or kind not in _FORMATS:
        raise UnsupportedError(
            f"GPTQ weights of {bits} bits in format {kind:.40} are not read, of 4 and 8 in "
            f"{' and '.join(_FORMATS)} are; {_UNPACK}"
        )
    # settings of single modules, except that of leaving one unquantized, which begins with -
    other = [key for key in names(settings, "dynamic") if not key.startswith("-")]
    if other:
        raise UnsupportedError(
            f"quantization_config.dynamic in config.json has settings of its own for "
            f"{other[0]:.60}, which are not read; {_UNPACK}"
        )
    added = _ONES[bits] if _FORMATS[kind] == 1 else 0
    has_order = bool(settings.get("desc_act"))
    return {
        parts.weight_name(module): _gptq_matrix(module, bits, group_size, added, has_order, parts)
        for module in parts.modules(".qweight")
    }


def _gptq_matrix(
    module: str, bits: int, group_size: int, added: int, has_order: bool, parts: Parts
) -> _Columns:
    per_word, name = 32 // bits, f"{module}.weight"
    qweight = parts.take(f"{module}.qweight", _INTS, (None, None), name)
    columns, rows = qweight.shape[0] * per_word, qweight.shape[1]
    groups = groups_in(columns, group_size, name)
    scales = parts.take(f"{module}.scales", FLOATS, (groups, rows), name)
    groups_in(rows, per_word, f"{module}.qzeros")
    qzeros = parts.take(f"{module}.qzeros", _INTS, (groups, rows // per_word), name)
    group = parts.groups_of_columns(f"{module}.g_idx", columns, groups, name)
    if group is None and has_order:
        raise CheckpointError(
            f"{module}.g_idx is not there, and quantization_config in config.json has desc_act: "
            "the order of its columns is not known; get the folder again"
        )
    group = _consecutive(columns, groups) if group is None else group
    return _Columns(scales.dtype, (rows, columns), qweight, qzeros, scales, group, bits, added)


def awq(settings: Mapping[str, Any], parts: Parts) -> dict[str, Matrix]:
    bits, group_size = number(settings, "bits", 4), number(settings, "group_size", -1)
    kind = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if bits != 4 or kind != "gemm" or settings.get("backend") == "llm-awq":
        raise UnsupportedError(
            f"AWQ weights of {bits} bits in layout {kind:.40} are not read, of 4 in gemm are; "
            f"{_UNPACK}"
        )
    return {
        parts.weight_name(module): _awq_matrix(module, group_size, parts)
        for module in parts.modules(".qweight")
    }


def _awq_matrix(module: str, group_size: int, parts: Parts) -> _Columns:
    name = f"{module}.weight"
    qweight = parts.take(f"{module}.qweight", _INTS, (None, None), name)
    columns, rows = qweight.shape[0], qweight.shape[1] * 8
    groups = groups_in(columns, group_size, name)
    qzeros = parts.take(f"{module}.qzeros", _INTS, (groups, rows // 8), name)
    scales = parts.take(f"{module}.scales", FLOATS, (groups, rows), name)
    group = _consecutive(columns, groups)
    return _Columns(scales.dtype, (rows, columns), qweight, qzeros, scales, group, 4, is_awq=True)


def _consecutive(columns: int, groups: int) -> Tensor:
    return torch.arange(columns) // (columns // groups)
