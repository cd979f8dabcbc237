"""compressed-tensors (llm-compressor writes it, vLLM reads it).

`float-quantized`, `int-quantized` and `naive-quantized`, of 8 bits:

    M.weight             float8_e4m3fn or int8 [rows, columns]
    M.weight_scale       of the whole weight, of rows, of groups in rows, or of blocks of both
    M.weight_zero_point  int8, asymmetric: as the scales

`nvfp4-pack-quantized` and `mxfp4-pack-quantized`, FP4 (e2m1):

    M.weight_packed        uint8 [rows, columns / 2]: the low bits first
    M.weight_scale         of groups in rows: float8_e4m3fn, or in mxfp4 exponents, less 127
    M.weight_global_scale  float32 [1], not in mxfp4: the scales are divided by it

The values of these are rounded to bf16.

`pack-quantized`:

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
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.quantized.matrix import Grouped, Matrix, Scaled, e2m1, packed, unpacked
from offload.quantized.parts import (
    FLOAT8,
    Parts,
    damaged,
    groups_in,
    names,
    number,
    pair_of,
    warn_of_activations,
)
from offload.tiers.errors import CheckpointError, UnsupportedError
from offload.weights.tensor_file import Stored

FORMAT = "pack-quantized"
EXPERTS = r"re:.*\.experts\.\d+\..*"  # names in files of what transformers computes with packed
_PLAIN = ("float-quantized", "int-quantized", "naive-quantized")
_STRATEGIES = ("group", "channel", "tensor", "block")
_NVFP4, _MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
# the formats, and how each has the codes of numbers of a type and a number of bits
_FORMATS: dict[str, dict[tuple[str, int], torch.dtype]] = {
    FORMAT: {("int", 4): torch.int32, ("int", 8): torch.int32},
    **{key: {("int", 8): torch.int8, ("float", 8): torch.float8_e4m3fn} for key in _PLAIN},
    **{key: {("float", 4): torch.uint8} for key in (_NVFP4, _MXFP4)},
}
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
    strategy: str
    group_size: int
    block: tuple[int, int] | None
    codes: torch.dtype  # int32 and uint8: packed
    has_global_scale: bool


def matrices(settings: Mapping[str, Any], parts: Parts) -> dict[str, Matrix]:
    schemes = _schemes(settings)
    ignored = names(settings, "ignore")
    weights: dict[str, Matrix] = {}
    for module in dict.fromkeys(
        [*parts.modules(".weight_packed"), *parts.modules(".weight_scale")]
    ):
        if any(_matches(module, each) for each in ignored):
            raise CheckpointError(
                f"{module} is quantized, and quantization_config in config.json ignores it; get "
                "the folder again"
            )
        weights[f"{module}.weight"] = _matrix(module, _scheme_of(module, schemes), parts)
    if any(_quantizes_activations(each) for each in settings["config_groups"].values()):
        parts.drop(
            ".input_global_scale",
            ".input_scale",
            ".input_zero_point",
            ".output_scale",
            ".output_zero_point",
        )
        warn_of_activations()
    return weights


def _quantizes_activations(group: Mapping[str, Any]) -> bool:
    return bool(group.get("input_activations") or group.get("output_activations"))


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
    if not isinstance(stored, str) or stored not in _FORMATS:
        raise UnsupportedError(
            f"{where} has format {stored!r:.40}, read are {', '.join(_FORMATS)}; {_UNPACK}"
        )
    kind, bits = str(weights.get("type", "int")).lower(), weights.get("num_bits")
    size = weights.get("group_size")
    strategy = weights.get("strategy") or (
        "tensor" if size is None else "channel" if size == -1 else "group"
    )
    codes = _FORMATS[stored].get((kind, bits)) if isinstance(bits, int) else None
    strategies = ("group", "tensor_group") if codes == torch.uint8 else _STRATEGIES
    if not isinstance(bits, int) or codes is None or strategy not in strategies:
        raise UnsupportedError(
            f"{where} has weights of type {kind!s:.20}, {bits!s:.20} bits, strategy "
            f"{strategy!s:.20} in {stored}; read are int of 4 and 8 bits, float of 8 and in FP4's "
            f"formats of 4, {', '.join(_STRATEGIES)}; {_UNPACK}"
        )
    return _Scheme(
        tuple(names(group, "targets")), bits, weights.get("symmetric") is not False, strategy,
        number(weights, "group_size") if "group" in strategy else -1,
        pair_of(weights.get("block_structure"), "block_structure") if strategy == "block" else None,
        codes, stored == _NVFP4,
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


def _matrix(module: str, scheme: _Scheme, parts: Parts) -> Matrix:
    name = f"{module}.weight"
    if scheme.codes == torch.uint8:
        return _four_bits(parts.weight_name(module), scheme, parts)
    if scheme.codes != torch.int32:
        codes = parts.take(name, (scheme.codes,), (None, None), name)
        rows, columns = codes.shape
        numbers: Callable[[Tensor], Tensor] = _as_they_are
    else:
        parts.weight_name(module)
        codes, (rows, columns) = _packed_codes(name, scheme.bits, parts)
        numbers = partial(_unpacked, bits=scheme.bits)
    groups = groups_in(columns, scheme.group_size, name)
    block = scheme.block or (rows if scheme.strategy == "tensor" else 1, columns // groups)
    scale = parts.scales(f"{name}_scale", (rows, columns), block, name)
    group = parts.groups_of_columns(f"{name}_g_idx", columns, groups, name)
    zero: Callable[[], Tensor] | None = None
    if scheme.symmetric:  # older files have them
        zeros = parts.left.pop(f"{name}_zero_point", None)
        if zeros is not None and not _are_zeros(zeros.read(), scheme.bits, rows):
            raise damaged(zeros, "is not zero, and the weights are said to be symmetric")
    elif scheme.codes == torch.int32 and block[0] == 1:
        words = (-(-rows * scheme.bits // 32), scale.shape[-1])
        packed_zero = parts.take(f"{name}_zero_point", (torch.int32,), words, name)
        zero = partial(_read_zeros, packed_zero, scheme.bits, rows)
    else:
        plain = parts.scales(f"{name}_zero_point", (rows, columns), block, name, (torch.int8,))
        zero = plain.read
    return Scaled(scale.dtype, (rows, columns), codes, numbers, block, scale.read, zero, group)


def _four_bits(name: str, scheme: _Scheme, parts: Parts) -> Matrix:
    codes = parts.take(f"{name}_packed", (torch.uint8,), (None, None), name)
    rows, columns = codes.shape[0], codes.shape[1] * 2
    block = (1, columns // groups_in(columns, scheme.group_size, name))
    kinds = FLOAT8 if scheme.has_global_scale else (torch.uint8,)
    scale = parts.scales(f"{name}_scale", (rows, columns), block, name, kinds)
    over = None
    if scheme.has_global_scale:
        over = parts.take(f"{name}_global_scale", (torch.float32,), (1,), name)
    read = partial(_read_scales, scale, over)
    return Scaled(torch.bfloat16, (rows, columns), codes, e2m1, block, read)


def _read_scales(scale: Stored, over: Stored | None) -> Tensor:
    if over is not None:
        return scale.read().bfloat16() / over.read()  # in fp32
    return torch.pow(2.0, (scale.read().int() - 127).bfloat16())


def _packed_codes(name: str, bits: int, parts: Parts) -> tuple[Stored, tuple[int, int]]:
    """Take out the words of a weight; return them and its shape."""
    words = parts.take(f"{name}_packed", (torch.int32,), (None, None), name)
    described = parts.take(f"{name}_shape", (torch.int64, torch.int32), (2,), name)
    rows, columns = described.read().tolist()
    if rows != words.shape[0] or columns <= 0 or -(-columns * bits // 32) != words.shape[1]:
        raise damaged(
            described, f"says {rows, columns}, which {words.shape} words of {bits} bits are not"
        )
    return words, (rows, columns)


def _as_they_are(codes: Tensor) -> Tensor:
    return codes


def _unpacked(words: Tensor, bits: int) -> Tensor:
    return unpacked(words, bits).flatten(1).to(torch.int16) - (1 << (bits - 1))


def _read_zeros(zero: Stored, bits: int, rows: int) -> Tensor:
    return _unpacked(zero.read().t(), bits)[:, :rows].t()


def _are_zeros(points: Tensor, bits: int, rows: int) -> bool:
    """Whether the zero points, plain or packed, are all zero."""
    points = points.float() if points.is_floating_point() else points
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
