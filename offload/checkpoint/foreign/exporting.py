"""A checkpoint's weights as ordinary safetensors files, for other programs to load.

    OUT.safetensors    one file
    OUT                a folder in Hugging Face's layout: safetensors files of up to 5 GB, their
                       index if there are several and, for a model of transformers, its
                       configuration and its tokenizer's files: `from_pretrained` opens it

Streams: one piece of one parameter is in memory at a time.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.checkpoint.foreign.model_files import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    SINGLE,
    carry,
    read_json,
)
from offload.checkpoint.format.disk import (
    check_new,
    check_room,
    make_folder,
    pending_output,
    replace_text,
    storage_errors,
    write_text,
)
from offload.checkpoint.format.manifest import ModelRecord, ParameterRecord
from offload.checkpoint.format.reader import CheckpointReader
from offload.checkpoint.format.safetensors_file import SafetensorsWriter, StoredTensor, TensorInfo
from offload.checkpoint.format.user_state import DTYPE_NAMES
from offload.checkpoint.format.user_state import DTYPES as TORCH_DTYPES
from offload.kernels.cpu.convert import decode, encode, join_master
from offload.kernels.floats import Array, Float
from offload.tiers.errors import CheckpointError, PathError
from offload.tiers.units import parse_bytes

SHARD = "5GB"
Write = Callable[[str, torch.Tensor], None]  # a tensor's name, and its next bytes (1D uint8)
_METADATA = {"format": "pt"}
_PIECE_NUMEL = 1 << 20
_FLOATS = {"F32": Float.FP32, "BF16": Float.BF16, "F16": Float.FP16}
DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_SPELT = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def export(
    path: Path, out: Path, dtype: str | None = None, source: Path | None = None
) -> list[Path]:  # fmt: skip
    """Write the model of checkpoint `path` to `out`; return the files written.

    `dtype` fp32 gives full-precision (master) weights, bf16 and fp16 16-bit ones, None those that
    the model computed with. Tensors have the names and shapes that they have in memory. Every name
    is there, but those that transformers ties itself; persistent buffers keep their own dtype.
    `source` is a folder with the files of the tokenizer and, if the checkpoint does not know it, of
    the configuration; by default the one that the model came from, where that is there still. What
    is read is compared with its hashes. `out` is complete or absent, and must not exist
    (PathError). Of a checkpoint without its frozen base the trained parameters are written, and the
    buffers, to one file: CheckpointError for a folder, which programs would take for the model.
    """
    check_new(out)
    if source is not None and not source.is_dir():
        raise PathError(f"{source} is no folder; name the model's, with config.json in it")
    with CheckpointReader(path) as reader:
        reader.check(contents=False)
        if reader.manifest.base is not None and out.suffix != ".safetensors":
            raise CheckpointError(
                f"{path} was saved with frozen=False: {out} would be a model without its "
                "frozen parameters; name a file OUT.safetensors for the trained ones, or load it "
                "with engine.load_checkpoint and save the model"
            )
        with pending_output(out) as pending:
            names = _write(reader, dtype, out, pending, source)
    return [out / name for name in names] or [out]


def _write(
    reader: CheckpointReader, dtype: str | None, out: Path, pending: Path, source: Path | None
) -> list[str]:
    if out.suffix == ".safetensors":
        whole = _Weights(reader, dtype)
        with new_files(pending.parent, {pending.name: [*whole.tensors]}, whole.tensors) as write:
            whole.write(write)
        return []
    with storage_errors("creating", pending):
        make_folder(pending)
    model = reader.manifest.model
    weights = _Weights(reader, dtype, () if model is None else model.tied)
    names = write_shards(weights.tensors, weights.write, pending, SHARD)
    return [*names, *write_others(model, source, {"dtype": weights.dtype_name}, pending)]


def write_others(
    model: ModelRecord | None, source: Path | None, config: Mapping[str, Any], pending: Path
) -> list[str]:
    """Write the files of a transformers folder beside the weights, whose format `config` describes.
    Returns their names."""
    if source is None and model is not None and model.folder is not None:
        source = Path(model.folder)
    written = []
    for name in (CONFIG, GENERATION_CONFIG):
        content = _content(model, source, name)
        if content is None:
            continue
        if name == CONFIG:
            content.pop("torch_dtype", None)  # its older name
            content.update(config)
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        write_text(pending / name, text)
        written.append(name)
    return written + (carry(source, pending) if source is not None else [])


def _content(model: ModelRecord | None, source: Path | None, name: str) -> dict[str, Any] | None:
    if model is not None:
        return dict(model.config) if name == CONFIG else model.generation_config
    if source is None or not (source / name).is_file():
        return None
    return read_json(source / name)


class _Weights:
    """The tensors of a checkpoint in another precision, for `write_shards`."""

    def __init__(
        self, reader: CheckpointReader, dtype: str | None, without: Collection[str] = ()
    ) -> None:
        """Has every tensor under each of its names, but those `without` that have another one."""
        self._reader = reader
        self._manifest = reader.manifest
        dtype = DTYPES[dtype] if dtype is not None else None
        self.dtype_name = _SPELT[dtype or DTYPES[reader.manifest.precision]]  # for transformers
        self.tensors: dict[str, torch.Tensor] = {}
        self._pieces: dict[str, Callable[[], Iterator[memoryview]]] = {}
        for record in sorted(self._manifest.stored, key=lambda each: each.group):
            stored, target = reader.parameter(record), dtype or record.dtype
            pieces = partial(self._raw, stored)
            if target != record.dtype:
                pieces = partial(self._converted, record, stored, _FLOATS[target])
            kept = [name for name in record.names if name not in without]
            for name in kept or record.names[:1]:
                self._add(name, target, record.shape, pieces)
        for buffer in self._manifest.buffers:
            pieces = partial(self._raw, reader.buffer(buffer))
            self._add(buffer.name, buffer.dtype, buffer.shape, pieces)

    def _add(
        self, name: str, dtype: str, shape: Sequence[int],
        pieces: Callable[[], Iterator[memoryview]],
    ) -> None:  # fmt: skip
        self.tensors[name] = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="meta")
        self._pieces[name] = pieces

    def write(self, write: Write) -> None:
        for name, pieces in self._pieces.items():
            for piece in pieces():
                write(name, torch.frombuffer(piece, dtype=torch.uint8))

    # ---------------------------------------------------------------- pieces
    def _raw(self, stored: StoredTensor) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(4 * _PIECE_NUMEL, stored.info.nbytes)))
        for start in range(0, stored.info.nbytes, max(1, len(buffer))):
            piece = buffer[: min(len(buffer), stored.info.nbytes - start)]
            self._reader.read_into(stored, start, piece)
            yield piece

    def _converted(
        self, record: ParameterRecord, stored: StoredTensor, target: Float
    ) -> Iterator[memoryview]:
        numel = stored.info.nbytes // _FLOATS[record.dtype].nbytes
        for start in range(0, numel, _PIECE_NUMEL):
            span = slice(start, min(start + _PIECE_NUMEL, numel))
            full = self._full(record, stored, span)
            if target is not Float.FP32:
                rounded = np.empty(full.size, dtype=target.storage)
                encode(full, rounded, target)
                full = rounded
            yield full.view(np.uint8).data

    def _full(self, record: ParameterRecord, stored: StoredTensor, span: slice) -> Array:
        """A piece of a parameter in fp32, from its master if it has one."""
        own = _FLOATS[record.dtype]
        fields = self._manifest.optimizer.fields if record.trainable else {}
        if "master" in fields:
            return self._read(self._reader.field(record, "master"), np.dtype(np.float32), span)
        weights = self._read(stored, own.storage, span)
        full = np.empty(weights.size, dtype=np.float32)
        if "low" in fields:
            low = self._read(self._reader.field(record, "low"), np.dtype(np.int16), span)
            join_master(weights, low, full)
        else:
            decode(weights, full, own)
        return full

    def _read(self, stored: StoredTensor, dtype: np.dtype[np.generic], span: slice) -> Array:
        array: Array = np.empty(span.stop - span.start, dtype=dtype)
        view = array.view(np.uint8).data
        self._reader.read_into(stored, span.start * dtype.itemsize, view)
        return array


# --------------------------------------------------------------------------- files of weights
def write_shards(
    tensors: Mapping[str, torch.Tensor], write_all: Callable[[Write], None], folder: Path,
    max_shard_size: int | str, *, variant: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> list[str]:  # fmt: skip
    """Write files of at most `max_shard_size`, and their index if there are several, with
    `metadata` in it; return their names. Existing files in `folder` are replaced when the new ones
    are complete. `tensors` are on the meta device, by name; `write_all` writes the bytes of each,
    in any order of tensors."""
    # tensors of one storage by the first of them: huggingface_hub keeps them in one file
    by_storage: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    groups = {names[0]: names for names in by_storage.values()}
    sizes = {first: tensors[first].untyped_storage().nbytes() for first in groups}
    cuts = cut(sizes, parse_bytes(max_shard_size), named(SINGLE, variant))
    files = {
        file: [each for first in held for each in groups[first]] for file, held in cuts.items()
    }
    with new_files(folder, files, tensors) as write:
        write_all(write)
    if len(files) > 1:
        index = {
            "metadata": {**(metadata or {}), "total_size": sum(sizes.values())},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        replace_text(
            folder / named(INDEX, variant), json.dumps(index, indent=2, sort_keys=True) + "\n"
        )
        return [*files, named(INDEX, variant)]
    return list(files)


def cut(sizes: Mapping[str, int], max_nbytes: int, name: str = SINGLE) -> dict[str, list[str]]:
    """File name -> tensors, of `sizes` (name -> bytes): in their order, and cut like
    huggingface_hub does. A tensor that is larger than a shard has a shard of its own. `name`: that
    of a file without others."""
    shards: list[list[str]] = []
    held: list[str] = []
    held_nbytes = 0
    for tensor, nbytes in sizes.items():
        if nbytes > max_nbytes:
            shards.append([tensor])
            continue
        if held_nbytes + nbytes > max_nbytes:
            shards.append(held)
            held, held_nbytes = [], 0
        held.append(tensor)
        held_nbytes += nbytes
    if held:
        shards.append(held)
    stem, count = name.removesuffix(".safetensors"), len(shards)
    names = [f"{stem}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    return dict(zip(names if count > 1 else [name], shards, strict=False))  # none: no file


def named(name: str, variant: str | None) -> str:
    stem, _, ending = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{ending}"


@contextmanager
def new_files(
    folder: Path, names: Mapping[str, Sequence[str]], tensors: Mapping[str, torch.Tensor]
) -> Iterator[Write]:
    """A function that appends bytes to a tensor. The files, which are filled in parallel, get their
    names when all are complete."""
    sections = {file: _tensors(held, tensors) for file, held in names.items()}
    check_room(folder, sum(tensor.nbytes for tensor in tensors.values()))
    file_of: dict[str, SafetensorsWriter] = {}
    with ExitStack() as stack:
        pending = {
            file: stack.enter_context(pending_output(folder / file, replaces=True))
            for file in sections
        }
        for file, each in sections.items():
            writer = SafetensorsWriter(pending[file], each, _METADATA)
            file_of.update(dict.fromkeys(names[file], writer))
        yield lambda name, raw: file_of[name].append(name, raw.numpy().data)
        for writer in dict.fromkeys(file_of.values()):
            writer.finish()
            writer.sync()


def _tensors(names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> list[list[TensorInfo]]:
    """Return one section per tensor. Wide dtypes come first, so that each is aligned."""
    ordered = sorted(names, key=lambda name: (-tensors[name].itemsize, name))
    return [
        [TensorInfo(name, DTYPE_NAMES[tensors[name].dtype], tuple(tensors[name].shape))]
        for name in ordered
    ]
