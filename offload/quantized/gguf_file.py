"""GGUF files of llama.cpp, whose tensors the `gguf` package dequantizes.

    magic, version, number of tensors, number of keys
    key, type, value                    sizes of the model, its tokenizer
    name, dimensions, type, offset      of each tensor; the first dimension is the fastest
    data                                aligned; each row is whole blocks of values

The readers of `gguf` and transformers loop over the counts in a header without a bound, so
`read_header` has to accept a file before they see it.
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)
"""

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload.checkpoint.format.disk import OpenFile, storage_errors
from offload.checkpoint.format.safetensors_file import StoredTensor, TensorInfo
from offload.display.plain_text import plain
from offload.quantized.matrix import Matrix, Stack, piece_rows
from offload.tiers.errors import CheckpointError, ConfigError, UnsupportedError
from offload.tiers.units import round_up
from offload.weights.tensor_file import Stored, open_weights, read_into

_MAX_ITEMS = 1 << 23  # keys, tensors, elements of arrays: readers make Python objects of each
_STRING, _ARRAY = 8, 9
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Blocks(Matrix):
    """A tensor of a GGUF file: the values of `gguf.dequantize`, in fp32. `process` takes
    all of them, and returns a name and what the weight is, of `shape`; None: it is these values."""

    stored: Stored  # uint8 [..., bytes of a row]
    type: Any  # GGMLQuantizationType
    process: Callable[[Array], tuple[Any, Array]] | None = None

    def fill(self, out: Tensor) -> None:
        from gguf import GGML_QUANT_SIZES, dequantize

        *outer, row_nbytes = self.stored.shape
        numel, nbytes = GGML_QUANT_SIZES[self.type]
        columns = row_nbytes // nbytes * numel
        rows, step = math.prod(outer), piece_rows(columns)
        whole = out if self.process is None else torch.empty(*outer, columns)
        for start in range(0, rows, step):
            count = min(step, rows - start)
            codes = self.stored.raw(start * row_nbytes, count * row_nbytes)
            with np.errstate(all="ignore"):  # scales that are not finite
                values = dequantize(codes.numpy().reshape(count, row_nbytes), self.type)
            whole.view(rows, columns)[start : start + count] = torch.from_numpy(values)
        if self.process is not None:
            _, made = self.process(whole.numpy())
            out.copy_(torch.from_numpy(np.ascontiguousarray(made)))

    def experts(self) -> Stack:
        """Return the same values [experts, rows, columns], of which an expert can be read alone."""
        rows = range(self.shape[0])
        return Stack.of(
            [replace(self, shape=self.shape[1:], stored=self.stored.row(i)) for i in rows]
        )


@dataclass(frozen=True)
class Header:
    """What a file says of itself; `fields` has its numbers and strings, without arrays."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, Blocks]

    @property
    def architecture(self) -> str:
        return str(self.fields["general.architecture"])


def read_header(path: Path) -> Header:
    """Raise CheckpointError for a damaged file, UnsupportedError for a part of a model and for
    types of tensors that `gguf` does not dequantize. Nothing of a tensor's size is allocated."""
    try:
        import gguf  # noqa: F401 - the optional package
    except ImportError as error:
        raise ConfigError(f"{path}: pip install 'offload[gguf]' to read GGUF files") from error
    file = open_weights(path)
    try:
        with storage_errors("reading", path), mmap(file.fd, 0, access=ACCESS_READ) as data:
            return _Parser(file, data).header()
    except ValueError as error:  # what is wrong; no UTF-8; an empty file
        raise CheckpointError(f"{path} {error}; it is damaged, get the file again") from error


class _Parser:
    def __init__(self, file: OpenFile, data: mmap) -> None:
        self._file, self._data = file, data
        self._at = self._items = 0

    def header(self) -> Header:
        if self._take(4) != b"GGUF":
            raise ValueError("does not begin with GGUF")
        version = self._number("I")
        if version not in (2, 3):
            raise ValueError(
                f"has version {version}, not 2 or 3 (it is big-endian if this is huge)"
            )
        tensors, keys = self._number("Q"), self._number("Q")
        fields = self._unique((self._string(), self._value()) for _ in self._range(keys, "keys"))
        if not isinstance(fields.get("general.architecture"), str):
            raise ValueError("does not name its architecture (general.architecture)")
        if fields.get("split.count", 1) != 1:
            raise UnsupportedError(
                f"{self._file.path} is one of {fields['split.count']} parts of a model; merge them "
                "(llama-gguf-split --merge) and name the whole file"
            )
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment < 1 << 32 or alignment.bit_count() > 1:
            raise ValueError(f"has the alignment {alignment!s:.40}, which is no power of two")
        entries = self._unique(self._tensor() for _ in self._range(tensors, "tensors"))
        return Header(self._file.path, fields, dict(self._placed(entries, alignment)))

    def _placed(self, entries: dict[str, Any], alignment: int) -> Iterator[tuple[str, Blocks]]:
        """Yield the tensors. Their data is inside the file, and nothing is in two."""
        data = end = round_up(self._at, alignment)
        for name, (shape, kind, row_nbytes, offset) in sorted(
            entries.items(), key=lambda entry: int(entry[1][-1])
        ):
            start, before = data + offset, end
            end = start + math.prod(shape[:-1]) * row_nbytes
            if offset % alignment or start < before or end > len(self._data):
                raise ValueError(
                    f"has {len(self._data)} bytes, and {plain(name, 80)} at {start} to {end}, "
                    "which is outside, not aligned or in another tensor"
                )
            info = TensorInfo(name, "U8", (*shape[:-1], row_nbytes))
            where = StoredTensor(info, self._file.path.name, start)
            stored = Stored(self._file.path, partial(read_into, self._file), where)
            yield name, Blocks(torch.float32, shape, stored, kind)

    def _tensor(self) -> tuple[str, Any]:
        """Return a name, and its shape, type, bytes of a row and offset."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        name, ndim = self._string(), self._number("I")
        shape = tuple(self._number("Q") for _ in range(min(ndim, 5)))[::-1]
        code, offset = self._number("I"), self._number("Q")
        shown = f"{plain(name, 80)} of the shape {shape}"
        if not 1 <= ndim <= 4 or not 0 < math.prod(shape) < 1 << 60:
            raise ValueError(f"has {shown}, in {ndim} dimensions")
        if code not in list(GGMLQuantizationType):
            raise ValueError(f"has {shown} and type {code}, which gguf does not know")
        kind = GGMLQuantizationType(code)
        numel, nbytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % numel:
            raise ValueError(f"has {shown}, and {kind.name} has blocks of {numel}")
        try:
            dequantize(np.zeros((1, nbytes), np.uint8), kind)
        except NotImplementedError as error:
            raise UnsupportedError(f"{self._file.path} has {shown}: {error}") from error
        return name, (shape, kind, shape[-1] // numel * nbytes, offset)

    def _value(self) -> Any:
        """Return a number or a string; None for an array, which is passed over."""
        kind = self._number("I")
        if kind != _ARRAY:
            return self._one(kind)
        of = self._number("I")
        for _ in self._range(self._number("Q"), "elements of an array"):
            self._one(of)
        return None

    def _one(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind not in _SCALARS:
            raise ValueError(f"has a value of the type {kind}, which is not read there")
        return self._number(_SCALARS[kind])

    def _range(self, count: int, of: str) -> range:
        self._items += count
        if self._items > _MAX_ITEMS:
            raise ValueError(f"has {count} {of}, it says; {_MAX_ITEMS} in all are read at most")
        return range(count)

    def _unique(self, entries: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, value in entries:
            if name in made:
                raise ValueError(f"has {plain(name, 80)} twice")
            made[name] = value
        return made

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _string(self) -> str:
        return self._take(self._number("Q")).decode()

    def _take(self, nbytes: int) -> bytes:
        at, left = self._at, len(self._data) - self._at
        if nbytes > left:
            raise ValueError(f"has {len(self._data)} bytes; its header needs {nbytes} at byte {at}")
        self._at += nbytes
        return self._data[at : self._at]
