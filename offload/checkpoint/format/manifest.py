"""The contents of a checkpoint: `manifest.json`, written last, with a hash of itself.

Numbers survive exactly: Python writes a float so that it reads back as the same float.
"""

from __future__ import annotations

import json
import re
import secrets
from importlib import import_module
from typing import Annotated, Any, Literal, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from offload.display.plain_text import plain
from offload.process import bounded_json
from offload.tiers.errors import CheckpointError

MANIFEST = "manifest.json"
PARAMETERS, OPTIMIZER, BUFFERS = "parameters", "optimizer", "buffers.safetensors"
RUN = "run.safetensors"
FORMAT = "offload checkpoint"
VERSION = 4
ITEMSIZE = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
MasterName = Literal["none", "split", "fp32"]
_DATA_FILE = re.compile(rf"({PARAMETERS}|{OPTIMIZER})/[0-9]{{3,}}\.safetensors|{BUFFERS}|{RUN}")

T = TypeVar("T")
# Of anyone's millions of wrong entries one is enough: pydantic keeps a kilobyte of each error.
Listed = Annotated[list[T], Field(fail_fast=True)]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Shape = Listed[Count]
Dtype = Annotated[str, Field(pattern=rf"^({'|'.join(ITEMSIZE)})$")]


def is_data_file(name: str) -> bool:
    """Whether a checkpoint may have a file of this name, besides the manifest."""
    return _DATA_FILE.fullmatch(name) is not None


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SectionRecord(_Record):
    """A run of a file's bytes, in the file's order, without gaps."""

    name: str
    nbytes: Count
    xxh3: str  # of its blocks, see `checked_files`


class FileRecord(_Record):
    nbytes: Count
    sections: Listed[SectionRecord]


class ParameterRecord(_Record):
    """One parameter. `steps`: the number of updates by the optimizer."""

    names: Listed[str]  # tied weights: several; the files have it under the first
    dtype: Annotated[str, Field(pattern="^(F32|BF16|F16)$")]
    shape: Shape
    trainable: bool
    steps: Count
    group: Count


class GroupRecord(_Record):
    """A group's files, relative to the folder; no `optimizer` where everything is frozen, and no
    `parameters` either in a checkpoint without its base."""

    name: str
    parameters: str | None
    optimizer: str | None
    fields: dict[str, Dtype] | None = None  # None: those of `OptimizerRecord`


class BufferRecord(_Record):
    """A tensor of the model that the engine does not move."""

    name: str
    dtype: Dtype
    shape: Shape


class ParamGroupRecord(_Record):
    """One of the optimizer's param groups."""

    numbers: dict[str, Any]
    params: Listed[str]


class OptimizerRecord(_Record):
    type: str
    master: MasterName
    states: str = "fp32"
    # Of a trainable parameter: name -> dtype. Per element, those named `*.scale` per block.
    fields: dict[str, Dtype]
    param_groups: Listed[ParamGroupRecord]


class LossScaleRecord(_Record):
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    good_steps: Count


class BaseRecord(_Record):
    """The frozen parameters, which the files lack: XXH3-64 of the bytes of each, by first name."""

    xxh3: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{16}$")]]

    @property
    def name(self) -> str:
        """The hash of all the hashes."""
        return _digest(self.xxh3)


class ModelRecord(_Record):
    """A transformers model, as JSON: the contents of its folder beside the weights.

    `tied`: names that it ties to others itself when it is loaded."""

    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    tied: Listed[str]
    folder: str | None  # that it was loaded from, with its tokenizer


class RunRecord(_Record):
    """The state of a run beside the engine: random numbers, schedules, the user's own state.

    `tensors` are archives in the file `RUN`; their names begin with a section and a slash."""

    config: dict[str, Any] | None = None
    tensors: Listed[BufferRecord] = []

    def named(self, section: str) -> dict[str, BufferRecord]:
        """The records of a section, by the rest of their names."""
        start = f"{section}/"
        return {r.name.removeprefix(start): r for r in self.tensors if r.name.startswith(start)}


class Manifest(_Record):
    """The contents of a checkpoint, except for the tensors."""

    format: str = FORMAT
    version: int = VERSION
    # the version that wrote it
    offload: str = Field(default_factory=lambda: str(import_module("offload").__version__))
    precision: str
    steps_taken: Count
    steps_skipped: Count
    loss_scale: LossScaleRecord | None
    optimizer: OptimizerRecord
    groups: Listed[GroupRecord]
    parameters: Listed[ParameterRecord]
    buffers: Listed[BufferRecord]
    buffers_file: str
    files: dict[str, FileRecord]
    model: ModelRecord | None = None
    generation: str = Field(default_factory=lambda: secrets.token_hex(8), max_length=64)
    run: RunRecord | None = None
    base: BaseRecord | None = None  # None: the frozen parameters are in the files, if there are any

    @property
    def stored(self) -> list[ParameterRecord]:
        """The parameters that are in the files."""
        return [each for each in self.parameters if self.base is None or each.trainable]

    def bound_to(self, file: str) -> str:
        """The text that the hashes of a file's blocks are bound to."""
        return f"{self.generation}/{file}"

    def fields_of(self, record: ParameterRecord) -> dict[str, Dtype]:
        """The optimizer's arrays of a trainable parameter, by name, and their dtypes."""
        own = self.groups[record.group].fields
        return self.optimizer.fields if own is None else own

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files.values())

    def to_json(self) -> str:
        """The text that `from_json` reads back, ending in its own hash."""
        content = self.model_dump(exclude={"base"} if self.base is None else None)
        return json.dumps({**content, "xxh3": _digest(content)}, indent=1)

    @classmethod
    def from_json(cls, raw: bytes | bytearray, what: str) -> Manifest:
        """The manifest in `raw`. CheckpointError, naming `what`, if damaged, foreign or too new."""
        try:
            content = bounded_json.parse(raw)
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                raise CheckpointError(f"{what} is not the manifest of a checkpoint of offload")
            _check_version(content, what)
            if content.pop("xxh3", None) != _digest(content):
                raise CheckpointError(
                    f"{what} is damaged or was edited: its XXH3 does not match; load another "
                    "checkpoint"
                )
        except ValueError as error:
            raise CheckpointError(f"{what} is damaged: {error}; load another checkpoint") from None
        try:
            manifest = cls.model_validate(content)
            _check_references(manifest)
        except ValueError as error:
            problem = str(error)
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise CheckpointError(f"{what} is malformed: {plain(problem, 400)}") from None
        return manifest


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())


def _check_version(content: dict[str, Any], what: str) -> None:
    version = content.get("version")
    if type(version) is not int or version != VERSION:  # a bool is an int
        raise CheckpointError(
            f"{what} has format version {version!r:.40} (written by offload "
            f"{content.get('offload')!s:.40}), this offload reads {VERSION}; load it with that "
            "offload"
        )


def _check_references(manifest: Manifest) -> None:
    """Raise ValueError unless every file lies in the folder, and every byte of it is in a section
    with a hash. A read finds a tensor that is not where the manifest says."""
    named = {name for g in manifest.groups for name in (g.parameters, g.optimizer) if name}
    for name in named - manifest.files.keys():
        raise ValueError(f"no file {name}")
    for name, file in manifest.files.items():
        if not is_data_file(name):
            raise ValueError(f"{name} lies outside of the folder, or is no file of a checkpoint")
        hashed = sum(section.nbytes for section in file.sections)
        if hashed != file.nbytes:
            raise ValueError(f"{name} has {file.nbytes} bytes, and hashes for {hashed}")
    for record in manifest.parameters:
        if not record.names or not record.group < len(manifest.groups):
            raise ValueError(f"{record.names} in group {record.group}")
    frozen = {each.names[0] for each in manifest.parameters if not each.trainable}
    if manifest.base is not None and manifest.base.xxh3.keys() != frozen:
        raise ValueError("base.xxh3 does not have the names of the frozen parameters")
    for group in manifest.optimizer.param_groups:
        if "params" in group.numbers:
            raise ValueError("numbers of a param group hold params")
