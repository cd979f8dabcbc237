"""The header of a safetensors file: names, shapes and formats, without reading a value.

    8 bytes   length N of the header, little-endian
    N bytes   JSON: name -> dtype, shape, data_offsets; beside it `__metadata__`
    the rest  the tensors, one after the other, without holes

Format: https://github.com/huggingface/safetensors. Everything that a header says is checked before
it is believed: it may be of a stranger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.tiers.errors import ConfigError
from offload.tools.memest.source.config_keys import shown
from offload.tools.memest.source.input_files import (
    file_nbytes,
    parse_json,
    read_json,
    read_range,
    refuse_code,
    status_of,
)

MOST_HEADER_NBYTES = 100_000_000  # as the safetensors library has it
_MOST_NUMEL = 1 << 62
_MOST_DIMENSIONS = 64
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """A tensor as a header describes it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def trainable(self) -> bool:
        """Real floating point of at least 16 bits; the rest is quantised, an index or complex."""
        return self.dtype in ("F16", "BF16", "F32", "F64")


def read_header(path: Path) -> dict[str, HeaderTensor]:
    """The tensors of a file by name. PathError if it cannot be read, ConfigError if it is none."""
    nbytes = file_nbytes(path)
    start = refuse_code(path)
    if len(start) < 8:
        raise ConfigError(f"{path}: is no safetensors file: {nbytes} bytes hold no header")
    length = int.from_bytes(start[:8], "little")
    if length > min(nbytes - 8, MOST_HEADER_NBYTES):
        what = "truncated, or no safetensors file" if start[8:9] == b"{" else "no safetensors file"
        raise ConfigError(
            f"{path}: is {what}: its header would have {length} bytes, the file has {nbytes}"
        )
    where = f"{path}: header"
    entries = parse_json(read_range(path, 8, length), where)
    if not isinstance(entries, dict):
        raise ConfigError(f"{where}: is {shown(entries)}, no names of tensors")
    entries.pop("__metadata__", None)
    found = {name: _tensor(name, entry, where) for name, entry in entries.items()}
    _check_extents(where, [(*found[n], n) for n in found], nbytes - 8 - length)
    return {name: tensor for name, (tensor, _, _) in found.items()}


def read_index(path: Path) -> dict[str, HeaderTensor]:
    """The tensors of all files that a `model.safetensors.index.json` names, beside it.

    ConfigError that names the files which are missing, or lack a tensor of theirs.
    """
    return tensors_of_index(read_json(path), path)


def tensors_of_index(index: Any, path: Path) -> dict[str, HeaderTensor]:
    """As `read_index`, from the parsed file."""
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{path}: is no index of safetensors files: it has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise ConfigError(f"{path}: {name[:80]} is in {shown(file)}, no file beside the index")
    files = sorted(set(weight_map.values()))
    _check_present(path, files)
    tensors: dict[str, HeaderTensor] = {}
    for file in files:
        header = read_header(path.parent / file)
        mine = [name for name, where in weight_map.items() if where == file]
        lacking = [name for name in mine if name not in header]
        if lacking:
            raise ConfigError(f"{path}: {lacking[0][:80]} is not in {file}, where it should be")
        tensors.update((name, header[name]) for name in mine)
    return {name: tensors[name] for name in weight_map}


def read_files(paths: Sequence[Path]) -> dict[str, HeaderTensor]:
    """The tensors of several files without an index. ConfigError for a name that is in two."""
    tensors: dict[str, HeaderTensor] = {}
    for path in paths:
        for name, tensor in read_header(path).items():
            if name in tensors:
                raise ConfigError(f"{path}: {name[:80]} is in another file, too")
            tensors[name] = tensor
    return tensors


def formats_of(tensors: Mapping[str, HeaderTensor]) -> dict[str, int]:
    """Elements of each format, the most first."""
    counts: dict[str, int] = {}
    for tensor in tensors.values():
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _tensor(name: str, entry: Any, where: str) -> tuple[HeaderTensor, int, int]:
    """A tensor and its bytes' start and stop in the data."""
    label = f"{where}: {name[:80]}"
    if not isinstance(entry, dict):
        raise ConfigError(f"{label}: is {shown(entry)}, no tensor")
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ConfigError(f"{label}: the format {shown(dtype)} is unknown")
    if not isinstance(shape, list) or not all(_is_size(size) for size in shape):
        raise ConfigError(f"{label}: the shape {shown(shape)} is no list of sizes")
    if len(shape) > _MOST_DIMENSIONS:
        raise ConfigError(f"{label}: a shape of {len(shape)} dimensions")
    tensor = HeaderTensor(dtype, tuple(shape))
    if tensor.numel > _MOST_NUMEL:
        raise ConfigError(f"{label}: the shape {shown(shape)} is too large")
    extent = entry.get("data_offsets")
    if not isinstance(extent, list) or len(extent) != 2 or not all(_is_size(at) for at in extent):
        raise ConfigError(f"{label}: data_offsets {shown(extent)} are no two positions")
    start, stop = extent
    nbits = tensor.numel * BITS[dtype]
    if nbits % 8 or stop - start != nbits // 8:
        raise ConfigError(
            f"{label}: {stop - start} bytes for {shown(shape)} of {dtype}, which take {nbits // 8}"
        )
    return tensor, start, stop


def _check_extents(
    where: str, extents: list[tuple[HeaderTensor, int, int, str]], data_nbytes: int
) -> None:
    """Tensors lie one after the other and fill the file."""
    end = 0
    for _, start, stop, name in sorted(extents, key=lambda extent: (extent[1], extent[2])):
        if start != end:
            problem = "overlaps another tensor" if start < end else "leaves a hole before it"
            raise ConfigError(f"{where}: {name[:80]} at {start} {problem}, which ends at {end}")
        end = stop
    if end != data_nbytes:
        problem = "the file is truncated" if end > data_nbytes else "the file has more"
        raise ConfigError(f"{where}: the tensors have {end} bytes, {problem}: {data_nbytes}")


def _check_present(path: Path, files: Sequence[str]) -> None:
    missing = [file for file in files if not (path.parent / file).exists()]
    if missing:
        named = ", ".join(file[:80] for file in missing[:4])
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise ConfigError(
            f"{path}: {len(missing)} of {len(files)} files are missing: {named}{more}; "
            "finish the download, or name the config.json instead"
        )
    for file in files:
        status_of(path.parent / file)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_NUMEL
