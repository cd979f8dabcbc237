"""What is in a checkpoint: `manifest.json`, written last, with a hash of itself.

Numbers survive exactly: Python writes a float so that it reads back as the same float.
"""

from __future__ import annotations

import json
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from offload.tiers.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "offload checkpoint"
VERSION = 1


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SectionRecord(_Record):
    """A run of a file's bytes, in the file's order, without gaps."""

    name: str
    nbytes: int
    xxh3: str  # XXH3-64, hexadecimal


class FileRecord(_Record):
    nbytes: int
    sections: list[SectionRecord]


class ParameterRecord(_Record):
    """One parameter. `steps`: how often the optimizer updated it."""

    names: list[str]  # tied weights: several; the files have it under the first
    dtype: str
    shape: list[int]
    trainable: bool
    steps: int
    group: int


class GroupRecord(_Record):
    """A group's files, relative to the folder; no `optimizer` where everything is frozen."""

    name: str
    parameters: str
    optimizer: str | None


class BufferRecord(_Record):
    """A tensor of the model that the engine does not move."""

    name: str
    dtype: str
    shape: list[int]


class ParamGroupRecord(_Record):
    """One of the optimizer's param groups."""

    numbers: dict[str, Any]
    params: list[str]


class OptimizerRecord(_Record):
    type: str
    master: str
    states: str = "fp32"
    # Of a trainable parameter: name -> dtype. Per element, those named `*.scale` per block.
    fields: dict[str, str]
    param_groups: list[ParamGroupRecord]


class LossScaleRecord(_Record):
    scale: float
    good_steps: int


class Manifest(_Record):
    """Everything but the tensors."""

    format: str = FORMAT
    version: int = VERSION
    offload: str  # the version that wrote it
    precision: str
    steps_taken: int
    steps_skipped: int
    loss_scale: LossScaleRecord | None
    optimizer: OptimizerRecord
    groups: list[GroupRecord]
    parameters: list[ParameterRecord]
    buffers: list[BufferRecord]
    buffers_file: str
    files: dict[str, FileRecord]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files.values())

    def to_json(self) -> str:
        """Text that `from_json` reads back, ending in its own hash."""
        content = self.model_dump()
        return json.dumps({**content, "xxh3": _digest(content)}, indent=1)

    @classmethod
    def from_json(cls, text: str, what: str) -> Manifest:
        """CheckpointError, naming the file as `what`, if it is damaged, foreign or too new."""
        try:
            content = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"{what} is damaged: {error}; load another checkpoint") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CheckpointError(f"{what} is not the manifest of a checkpoint of offload")
        _check_version(content, what)
        if content.pop("xxh3", None) != _digest(content):
            raise CheckpointError(
                f"{what} is damaged or was edited: its XXH3 does not match; load another checkpoint"
            )
        try:
            manifest = cls.model_validate(content)
            _check_references(manifest)
        except ValidationError as error:
            raise CheckpointError(f"{what} is malformed: {_first(error)}") from None
        except ValueError as error:
            raise CheckpointError(f"{what} is malformed: {error}") from None
        return manifest


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())


def _check_version(content: dict[str, Any], what: str) -> None:
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(
            f"{what} has format version {version} (written by offload {content.get('offload')}), "
            f"this offload reads up to {VERSION}; install a newer offload"
        )


def _check_references(manifest: Manifest) -> None:
    """ValueError unless every file and group that is referred to is there, in the folder."""
    named = {name for g in manifest.groups for name in (g.parameters, g.optimizer) if name}
    for name in (named | {manifest.buffers_file}) - manifest.files.keys():
        raise ValueError(f"no file {name}")
    for name in manifest.files:
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"{name} lies outside of the folder")
    for record in manifest.parameters:
        if not record.names or not 0 <= record.group < len(manifest.groups):
            raise ValueError(f"{record.names} in group {record.group}")
        without = manifest.groups[record.group].optimizer is None
        if record.trainable and without and 0 not in record.shape:
            raise ValueError(f"{record.names[0]} has no optimizer file")


def _first(error: ValidationError) -> str:
    found = error.errors()[0]
    return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"
