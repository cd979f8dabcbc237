"""compressed-tensors, format `pack-quantized` (llm-compressor writes it, vLLM reads it).

    M.weight_packed      int32 [rows, columns x bits / 32]: codes + 2^(bits-1), lowest bits first
    M.weight_scale       [rows, groups]; strategy channel: [rows, 1]
    M.weight_zero_point  asymmetric: packed along rows, int32 [rows x bits / 32, groups]
    M.weight_shape       [rows, columns]
    M.weight_g_idx       the group of each column, where groups are not consecutive; -1: they are

A value is (code - zero point) x scale in the scales' format: the difference is exact there, and the
product is rounded once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.quantized.matrix import Grouped, Matrix, packed, piece_rows, unpacked
from offload.quantized.parts import FLOATS, Parts, damaged, groups_in, names, number
from offload.tiers.errors import CheckpointError, UnsupportedError
from offload.weights.tensor_file import Stored

FORMAT = "pack-quantized"
EXPERTS = r"re:.*\.experts\.\d+\..*"  # names in files of what transformers computes with packed
_STRATEGIES = ("group", "channel")
_UNPACK = (
    "load the folder once with transformers and compressed-tensors "
    "(CompressedTensorsConfig(dequantize=True)) and save_pretrained it"
)


@dataclass(frozen=True)
class _Scheme:
    """The way the weights of some modules are stored."""

    targets: tuple[str, ...]
    bits: int
    symmetric: bool
    group_size: int


@dataclass(frozen=True)
class _Packed(Matrix):
    words: Stored
    scale: Stored
    zero: Stored | None
    group: Tensor | None  # of each column, where they are not consecutive
    bits: int

    def fill(self, out: Tensor) -> None:
        rows, columns = self.shape
        scale, zero = self.scale.read(), self._zeros()
        step = piece_rows(columns)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            codes = unpacked(self.words.rows(start, stop), self.bits).flatten(1)[:, :columns]
            values = codes.to(self.dtype) - float(1 << (self.bits - 1))
            if zero is not None:
                values -= self._of_columns(zero, start, stop).to(self.dtype)
            values *= self._of_columns(scale, start, stop)
            out[start:stop] = values

    def _zeros(self) -> Tensor | None:
        if self.zero is None:
            return None
        rows, groups = self.shape[0], self.scale.shape[-1]
        codes = unpacked(self.zero.read().t(), self.bits).reshape(groups, -1)[:, :rows]
        return (codes.to(torch.int16) - (1 << (self.bits - 1))).t().to(torch.int8)

    def _of_columns(self, numbers: Tensor, start: int, stop: int) -> Tensor:
        """Expand numbers of groups to the elements of some rows."""
        here = numbers[start:stop]
        if self.group is not None:
            return here[:, self.group]
        return here.repeat_interleave(self.shape[1] // here.shape[1], dim=1)


def matrices(settings: Mapping[str, Any], parts: Parts) -> dict[str, Matrix]:
    schemes = _schemes(settings)
    ignored = names(settings, "ignore")
    weights: dict[str, Matrix] = {}
    for module in parts.modules(".weight_packed"):
        if any(_matches(module, each) for each in ignored):
            raise CheckpointError(
                f"{module} is quantized, and quantization_config in config.json ignores it; get "
                "the folder again"
            )
        weights[parts.weight_name(module)] = _matrix(module, _scheme_of(module, schemes), parts)
    return weights


def _schemes(settings: Mapping[str, Any]) -> list[_Scheme]:
    _refuse(settings)
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError("quantization_config in config.json has no config_groups")
    return [_scheme(name, group, settings) for name, group in groups.items()]


def _refuse(settings: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for settings that would change values and are not implemented here."""
    for key in ("kv_cache_scheme", "transform_config"):
        if settings.get(key):
            raise UnsupportedError(
                f"quantization_config in config.json has {key}, which is not done here: results "
                "would not be the model's own"
            )
    sparsity = settings.get("sparsity_config") or {}
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise UnsupportedError(
            f"weights in the sparse format {sparsity['format']!s:.40} are not read; {_UNPACK}"
        )


def _scheme(name: Any, group: Any, settings: Mapping[str, Any]) -> _Scheme:
    where = f"config_groups.{name} of quantization_config in config.json"
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise UnsupportedError(f"{where} says nothing of weights that is read here; {_UNPACK}")
    stored = group.get("format") or settings.get("format")
    if stored != FORMAT:
        raise UnsupportedError(f"{where} has format {stored!r:.40}, read is {FORMAT}; {_UNPACK}")
    if group.get("input_activations") or group.get("output_activations"):
        raise UnsupportedError(
            f"{where} quantizes activations, which is not done here: results would not be the "
            "model's own"
        )
    kind, bits = str(weights.get("type", "int")).lower(), weights.get("num_bits")
    size = weights.get("group_size")
    strategy = weights.get("strategy") or (
        "tensor" if size is None else "channel" if size == -1 else "group"
    )
    if kind != "int" or bits not in (4, 8) or strategy not in _STRATEGIES:
        raise UnsupportedError(
            f"{where} has weights of type {kind!s:.20}, {bits!s:.20} bits, strategy "
            f"{strategy!s:.20}; read are int, 4 and 8, {', '.join(_STRATEGIES)}; {_UNPACK}"
        )
    return _Scheme(
        tuple(names(group, "targets")), bits, weights.get("symmetric") is not False,
        number(weights, "group_size") if strategy == "group" else -1,
    )  # fmt: skip


def _matches(module: str, target: str) -> bool:
    if not target.startswith("re:"):
        return module == target
    try:
        return re.match(target[3:], module) is not None
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"quantization_config in config.json has the pattern {target!r:.80}, which is none "
            f"({error})"
        ) from None


def _scheme_of(module: str, schemes: list[_Scheme]) -> _Scheme:
    """Return the scheme of a module, looked up by name, by pattern, by class, in the order of
    compressed-tensors. Raise CheckpointError if none or several match."""
    named = [each for each in schemes if module in each.targets]
    if named:
        return named[0]
    patterns = [each for each in schemes if any(_matches(module, t) for t in each.targets)]
    if patterns:
        return patterns[0]
    classes = [
        each for each in schemes if any(t.isidentifier() and t[:1].isupper() for t in each.targets)
    ]
    if len(classes) == 1:
        return classes[0]
    why = "several groups of classes" if classes else "no group"
    raise CheckpointError(
        f"{module} is quantized, and quantization_config in config.json has {why} for it: it is "
        "not known how; name the module in the targets of one"
    )


def _matrix(module: str, scheme: _Scheme, parts: Parts) -> _Packed:
    name = f"{module}.weight"
    words = parts.take(f"{name}_packed", (torch.int32,), (None, None), name)
    rows = words.shape[0]
    described = parts.take(f"{name}_shape", (torch.int64, torch.int32), (2,), name)
    shape = tuple(described.read().tolist())
    columns = shape[1]
    if shape[0] != rows or columns <= 0 or -(-columns * scheme.bits // 32) != words.shape[1]:
        raise damaged(
            described, f"says {shape}, which {words.shape} words of {scheme.bits} bits are not"
        )
    groups = groups_in(columns, scheme.group_size, name)
    scale = parts.take(f"{name}_scale", FLOATS, (rows, groups), name)
    group = parts.groups_of_columns(f"{name}_g_idx", columns, groups, name)
    return _Packed(
        scale.dtype, (rows, columns), words, scale, _zeros(scheme, scale, rows, parts, name),
        group, scheme.bits,
    )  # fmt: skip


def _zeros(scheme: _Scheme, scale: Stored, rows: int, parts: Parts, of: str) -> Stored | None:
    name = f"{of}_zero_point"
    if scheme.symmetric:
        zeros = parts.left.pop(name, None)  # older files have them
        if zeros is not None and not _are_zeros(zeros.read(), scheme.bits, rows):
            raise damaged(zeros, "is not zero, and the weights are said to be symmetric")
        return None
    words = -(-rows * scheme.bits // 32)
    return parts.take(name, (torch.int32,), (words, scale.shape[-1]), of)


def _are_zeros(points: Tensor, bits: int, rows: int) -> bool:
    """Whether the zero points, plain or packed, are all zero."""
    if points.dtype == torch.int32 and points.ndim == 2 and bool(points.any()):
        points = unpacked(points.t(), bits).flatten(1)[:, :rows] != 1 << (bits - 1)
    return not bool(points.any())


def pack(made: Grouped) -> dict[str, Tensor]:
    """Return the parts of a weight, by the ends of their names."""
    parts = {
        "weight_packed": made.words, "weight_shape": torch.tensor(made.shape),
        "weight_scale": made.scale,
    }  # fmt: skip
    if made.zeros is not None:
        rows = made.shape[0]
        padded = torch.nn.functional.pad(made.zeros.t(), (0, -rows % (32 // made.bits)))
        parts["weight_zero_point"] = packed(padded, made.bits).t().contiguous()
    return parts


def configuration(
    bits: int, group_size: int, unquantized: Collection[str], *, symmetric: bool, experts: bool
) -> Mapping[str, Any]:
    """Return `quantization_config` of a folder, for its linear layers. `experts`: also for the
    experts that transformers packs, which it takes to be symmetric, and whose group it finds by a
    pattern."""

    def group(target: str, is_symmetric: bool) -> Mapping[str, Any]:
        stored = {
            "num_bits": bits, "type": "int", "symmetric": is_symmetric, "strategy": "group",
            "group_size": group_size, "dynamic": False,
        }  # fmt: skip
        return {
            "targets": [target], "weights": stored, "input_activations": None,
            "output_activations": None, "format": FORMAT,
        }  # fmt: skip

    groups = {"group_0": group("Linear", symmetric)}
    if experts and not symmetric:
        groups["group_1"] = group(EXPERTS, is_symmetric=True)
    return {
        "quant_method": "compressed-tensors", "format": FORMAT,
        "quantization_status": "compressed", "kv_cache_scheme": None,
        "config_groups": groups, "ignore": list(unquantized),
    }  # fmt: skip
