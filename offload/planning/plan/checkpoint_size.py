"""The size of a checkpoint's files under a plan, as `checkpoint/engine/saving.py` writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from offload.checkpoint.format.blocks import DIGITS, blocks_in
from offload.checkpoint.format.composing import fields_of
from offload.checkpoint.format.manifest import BUFFERS, OPTIMIZER, PARAMETERS, ParameterRecord
from offload.checkpoint.format.safetensors_file import TensorInfo, file_nbytes, optimizer_sections
from offload.kernels.rules import StateFormat
from offload.tiers.tier import Tier
from offload.zero.groups.model_shape import GroupShape, ModelShape
from offload.zero.step.records import RecordFormat

if TYPE_CHECKING:
    from offload.config import OffloadConfig
    from offload.planning.plan.plan import Plan

_DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
# The manifest is JSON with an indent: what an entry takes beside its names and numbers.
_PARAMETER_NBYTES, _FILE_NBYTES, _SECTION_NBYTES, _MANIFEST_NBYTES = 180, 90, 110, 1200

Sections = Mapping[str, Sequence[TensorInfo]]


def checkpoint_nbytes(plan: Plan, config: OffloadConfig, model: ModelShape) -> int:
    """The bytes of all files of one checkpoint, including all ranks' experts. Two checkpoints exist
    while one replaces another.

    Persistent buffers of the model are not in a `ModelShape` and not counted.
    """
    kept = _saved_format(plan, config)
    total = _MANIFEST_NBYTES + file_nbytes({"tensors": []}, {"format": "pt"})
    for index, group in enumerate(model.groups):
        records = list(_records(group, _DTYPES[config.precision], index))
        one = sum(_PARAMETER_NBYTES + 2 * len(json.dumps(r.names)) for r in records)
        for file, sections, metadata in _files(group, records, kept, index):
            one += file_nbytes(sections, metadata)
            one += _FILE_NBYTES + len(file) + _SECTION_NBYTES * (1 + len(sections))
            for tensors in sections.values():  # beyond the first hash of each
                one += DIGITS * (blocks_in(sum(tensor.nbytes for tensor in tensors)) - 1)
        total += group.ep_size * one
    return total + len(BUFFERS)


def _saved_format(plan: Plan, config: OffloadConfig) -> RecordFormat:
    optimizer = config.optimizer
    kept = plan.record_formats[Tier.HOST]
    uniform = optimizer.states.uniform
    return kept if uniform else RecordFormat(kept.master, kept.states, StateFormat.FP32)


def _records(group: GroupShape, dtype: str, index: int) -> Iterator[ParameterRecord]:
    for spec in group.layout.params:
        yield ParameterRecord(
            names=list(spec.names), dtype=dtype, shape=list(spec.shape), trainable=spec.trainable,
            steps=0, group=index,
        )  # fmt: skip


def _files(
    group: GroupShape, records: Sequence[ParameterRecord], kept: RecordFormat, index: int
) -> Iterator[tuple[str, Sections, Mapping[str, str]]]:
    tied = {alias: record.names[0] for record in records for alias in record.names[1:]}
    metadata = {"format": "pt", "group": group.name}
    if tied:
        metadata["tied"] = json.dumps(tied)
    tensors = [TensorInfo(r.names[0], r.dtype, tuple(r.shape)) for r in records]
    yield f"{PARAMETERS}/{index:03d}.safetensors", {"tensors": tensors}, metadata
    if any(record.trainable for record in records):
        sections = optimizer_sections(records, fields_of(kept))
        yield f"{OPTIMIZER}/{index:03d}.safetensors", sections, {"group": group.name}
