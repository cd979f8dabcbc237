"""The header of safetensors files: names, shapes and formats, without reading a value.

The library checks a header before it is believed: that tensors lie one after the other, without
holes, and fill the file. https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.tiers.errors import ConfigError
from offload.tools.memest.source.input_files import one_line, refuse_code, shown


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
        """Whether it is real floating point of at least 16 bits; other tensors are quantised, an
        index or complex."""
        return self.dtype in ("F16", "BF16", "F32", "F64")


def read_header(path: Path) -> dict[str, HeaderTensor]:
    """Return a file's tensors by name. Raise PathError if unreadable, ConfigError if damaged."""
    refuse_code(path)
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {n: HeaderTensor(s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: is no whole safetensors file: {one_line(error)}") from None


def read_index(index: Any, path: Path) -> dict[str, HeaderTensor]:
    """Return the tensors of the files beside `path` that a parsed `model.safetensors.index.json`
    names.

    Raise ConfigError, naming it, for a file that is missing or lacks a tensor.
    """
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{path}: is no index of safetensors files: it has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise ConfigError(f"{path}: {name[:80]} is in {shown(file)}, no file beside the index")
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (path.parent / file).exists()]
    if missing:
        named = ", ".join(file[:80] for file in missing[:4])
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise ConfigError(
            f"{path}: {len(missing)} of {len(files)} files are missing: {named}{more}; "
            "finish the download, or name the config.json instead"
        )
    headers = {file: read_header(path.parent / file) for file in files}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise ConfigError(f"{path}: {name[:80]} is not in {file}, where it should be")
    return {name: headers[file][name] for name, file in weight_map.items()}


def read_files(paths: Sequence[Path]) -> dict[str, HeaderTensor]:
    """Return the tensors of files without an index. Raise ConfigError for a name in two files."""
    tensors: dict[str, HeaderTensor] = {}
    for path in paths:
        for name, tensor in read_header(path).items():
            if name in tensors:
                raise ConfigError(f"{path}: {name[:80]} is in another file, too")
            tensors[name] = tensor
    return tensors
