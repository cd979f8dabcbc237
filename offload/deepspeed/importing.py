"""`offload checkpoint import-deepspeed`: a ZeRO checkpoint of DeepSpeed as one of ours.

Masters, states, step counts, param groups, buffers and counters are taken over, one tensor at a
time. The result is what `engine.save_checkpoint` of `offload.deepspeed` writes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload import __version__
from offload.checkpoint.disk import check_room, storage_errors
from offload.checkpoint.folder import PendingFolder
from offload.checkpoint.manifest import (
    BUFFERS,
    MANIFEST,
    OPTIMIZER,
    PARAMETERS,
    BufferRecord,
    FileRecord,
    GroupRecord,
    LossScaleRecord,
    Manifest,
    MasterName,
    OptimizerRecord,
    ParameterRecord,
    ParamGroupRecord,
)
from offload.checkpoint.model import DTYPE_NAMES
from offload.checkpoint.plain_values import packed
from offload.checkpoint.safetensors_file import SafetensorsWriter, TensorInfo, field_info, info_of
from offload.config.optimizer_kinds import KINDS
from offload.deepspeed.migration import migrate
from offload.deepspeed.saved import write_imported
from offload.deepspeed.zero_checkpoint import ZeroCheckpoint
from offload.kernels.convert import split_master
from offload.kernels.rules import StateFormat
from offload.kernels.variants import Master
from offload.tiers.errors import CheckpointError, ConfigError, UnsupportedError
from offload.zero.records import RecordFormat

Sections = Mapping[str, Sequence[TensorInfo]]
_log = logging.getLogger("offload")
_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_MASTERS = {"fp32": Master.NONE, "bf16": Master.SPLIT, "fp16": Master.FP32}
_MASTER_NAMES: dict[str, MasterName] = {"fp32": "none", "bf16": "split", "fp16": "fp32"}
_FIELD_DTYPES = {"float32": "F32", "int16": "I16"}
# Entries that are DeepSpeed's; others are the client's.
_THEIRS = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "ds_config", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "ds_version", "sparse_tensor_module_names", "universal_checkpoint_info",
    "checkpoint_parallel_dimensions", "num_experts", "autoep_layers", "ds_autoep_layers",
})  # fmt: skip


def import_checkpoint(
    source: Path, out: Path, *, kind: str | None = None, tied: Mapping[str, str] | None = None
) -> Path:
    """Write the checkpoint in `source` (a tag's folder, or one with `latest`) to OUT/TAG,
    OUT/TAG.json and OUT/latest; the folder written.

    `kind`: the optimizer, where DeepSpeed's configuration has none. `tied`: other names of
    parameters, by them, where the checkpoint does not say so. CheckpointError or ConfigError, with
    nothing written, for what is no such checkpoint.
    """
    folder = _tag_of(source)
    found = ZeroCheckpoint(folder)
    reader = _Importer(found, kind, dict(tied or {}))
    state = _loop_state(found)
    target = out / folder.name
    out.mkdir(parents=True, exist_ok=True)
    with PendingFolder(target) as pending:
        reader.write(pending.path, target.name)
        pending.commit()
    write_imported(out, folder.name, state)
    return target


def _tag_of(source: Path) -> Path:
    latest = source / "latest"
    if latest.is_file():
        return source / latest.read_text().strip()
    if not source.is_dir():
        raise CheckpointError(f"{source}: there is no such folder")
    return source


@dataclass(frozen=True)
class _Param:
    record: ParameterRecord
    trained: bool


class _Importer:
    """Everything that can be refused is refused when it is made."""

    def __init__(self, found: ZeroCheckpoint, kind: str | None, tied: dict[str, str]) -> None:
        self._found = found
        self._precision = _PRECISIONS[found.dtype]
        self._kind = kind or _kind_of(found)
        if self._kind not in KINDS:
            raise ConfigError(f"--optimizer {self._kind}: write one of {', '.join(KINDS)}")
        self._numbers = [_numbers(self._kind, each) for each in found.numbers]
        if len(self._numbers) != len(found.groups):
            raise CheckpointError(
                f"{found.folder}: {len(found.groups)} groups of parameters, and the numbers of "
                f"{len(self._numbers)}"
            )
        first = {**KINDS[self._kind].defaults, **self._numbers[0]}
        states = tuple(KINDS[self._kind].scalars.kept_for(first))
        if set(states) != found.state_names:
            raise CheckpointError(
                f"{found.folder} has the states {', '.join(sorted(found.state_names)) or 'none'}, "
                f"and {self._kind} keeps {', '.join(states) or 'none'}"
            )
        self._format = RecordFormat(_MASTERS[self._precision], states, StateFormat.FP32)
        self._fields = {f.name: _FIELD_DTYPES[f.dtype.name] for f in self._format.fields}
        self._params = self._listed({**found.shared, **tied})
        self._files: dict[str, FileRecord] = {}
        self._manifest = self._new_manifest()

    def _listed(self, tied: dict[str, str]) -> dict[str, _Param]:
        found, names = self._found, {}
        trained = {name: shape for group in found.groups for name, shape in group.items()}
        for name in (*trained, *found.frozen):
            names[name] = [name, *(other for other, first in tied.items() if first == name)]
        known = {each for several in names.values() for each in several}
        missing = [name for name in found.names if name not in known]
        if missing:
            raise CheckpointError(
                f"{found.folder} does not say what {', '.join(missing[:3])} is tied to: stage 3 "
                f"notes no tied parameters; add --tied {missing[0]}=NAME"
            )
        listed = {}
        for number, (name, several) in enumerate(names.items()):
            is_trained = name in trained
            shape = trained[name] if is_trained else found.frozen[name]
            record = ParameterRecord(
                names=several, dtype=DTYPE_NAMES[found.dtype], shape=list(shape),
                trainable=is_trained, steps=found.steps if is_trained else 0, group=number,
            )  # fmt: skip
            listed[name] = _Param(record, is_trained)
        return listed

    # ---------------------------------------------------------------- writing
    def write(self, folder: Path, name: str) -> None:
        """Every file, the manifest last. A group per parameter: they load into any grouping.
        `name`: that the folder is going to have."""
        numel = sum(int(np.prod(each.record.shape)) for each in self._params.values())
        check_room(folder, 16 * numel)
        with storage_errors("creating", folder):
            (folder / PARAMETERS).mkdir()
            (folder / OPTIMIZER).mkdir()
        fields = {name: self._found.tensors(name) for name in self._format.states}
        for name, master in self._found.tensors("master"):
            states = {}
            for field, values in fields.items():
                other, states[field] = next(values)
                assert other == name, "all fields are in the order of the groups"
            self._write_trained(folder, self._params[name].record, master, states)
        for name in self._found.frozen:
            value = self._found.frozen_value(name).to(self._found.dtype)
            self._write_weights(folder, self._params[name].record, value)
        self._write_buffers(folder)
        manifest = self._manifest.model_copy(update={"files": self._files, "saved_as": name})
        with storage_errors("writing", folder):
            (folder / MANIFEST).write_text(manifest.to_json())

    def _write_trained(
        self, folder: Path, record: ParameterRecord, master: torch.Tensor,
        states: dict[str, torch.Tensor],
    ) -> None:  # fmt: skip
        flat = np.ascontiguousarray(master.reshape(-1).numpy())
        arrays = {name: value.reshape(-1).contiguous().numpy() for name, value in states.items()}
        if self._precision == "bf16":
            weights = np.empty(flat.size, dtype=np.uint16)
            arrays["low"] = np.empty(flat.size, dtype=np.int16)
            split_master(flat, weights, arrays["low"])
            value = torch.from_numpy(weights.view(np.int16)).view(torch.bfloat16)
        else:
            value = torch.from_numpy(flat).to(self._found.dtype)
            if self._precision == "fp16":
                arrays["master"] = flat
        self._write_weights(folder, record, value)
        file = f"{OPTIMIZER}/{record.group:03d}.safetensors"
        sections = {
            field: [field_info(record, field, dtype)]
            for field, dtype in sorted(self._fields.items(), key=lambda item: item[1] == "I16")
        }  # wide fields first, for alignment
        with self._writer(folder, file, sections, {"group": record.names[0]}) as writer:
            for field in sections:
                if arrays[field].size:
                    writer.append(field, arrays[field].view(np.uint8).data)
            self._files[file] = writer.finish()

    def _write_weights(self, folder: Path, record: ParameterRecord, value: torch.Tensor) -> None:
        file = f"{PARAMETERS}/{record.group:03d}.safetensors"
        sections = {"tensors": [info_of(record)]}
        with self._writer(folder, file, sections, {"format": "pt"}) as writer:
            _append(writer, value)
            self._files[file] = writer.finish()

    def _write_buffers(self, folder: Path) -> None:
        sections = {"tensors": [info_of(record) for record in self._buffers()]}
        with self._writer(folder, BUFFERS, sections, {"format": "pt"}) as writer:
            for value in self._found.buffers.values():
                _append(writer, value)
            self._files[BUFFERS] = writer.finish()

    def _writer(
        self, folder: Path, file: str, sections: Sections, metadata: Mapping[str, str]
    ) -> SafetensorsWriter:
        bound_to = self._manifest.bound_to(file)
        return SafetensorsWriter(folder / file, sections, metadata, bound_to)

    def _buffers(self) -> list[BufferRecord]:
        return [
            BufferRecord(name=name, dtype=DTYPE_NAMES[value.dtype], shape=list(value.shape))
            for name, value in self._found.buffers.items()
        ]

    def _new_manifest(self) -> Manifest:
        about = self._found.about
        scale = self._found.loss_scale if self._precision == "fp16" else None
        groups = [
            ParamGroupRecord(numbers=numbers, params=list(shapes))
            for numbers, shapes in zip(self._numbers, self._found.groups, strict=True)
        ]
        return Manifest(
            offload=__version__,
            precision=self._precision,
            steps_taken=int(about["global_steps"]) - int(about["skipped_steps"]),
            steps_skipped=int(about["skipped_steps"]),
            loss_scale=None if scale is None else LossScaleRecord(scale=scale, good_steps=0),
            optimizer=OptimizerRecord(
                type=self._kind, master=_MASTER_NAMES[self._precision], fields=self._fields,
                param_groups=groups,
            ),
            groups=[_group_record(each) for each in self._params.values()],
            parameters=[each.record for each in self._params.values()],
            buffers=self._buffers(),
            buffers_file=BUFFERS,
            files={},
        )  # fmt: skip


def _append(writer: SafetensorsWriter, value: torch.Tensor) -> None:
    if value.numel():
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        writer.append("tensors", flat.numpy().data)


def _group_record(param: _Param) -> GroupRecord:
    file = f"{param.record.group:03d}.safetensors"
    return GroupRecord(
        name=param.record.names[0], parameters=f"{PARAMETERS}/{file}",
        optimizer=f"{OPTIMIZER}/{file}" if param.trained else None,
    )  # fmt: skip


def _kind_of(found: ZeroCheckpoint) -> str:
    """As the configuration that was saved with it says."""
    config = found.about.get("ds_config")
    section = config.get("optimizer") if isinstance(config, dict) else None
    if section:
        alone = {"train_batch_size": 1, "optimizer": section}
        return str(migrate(alone).values["optimizer"]["type"])
    raise ConfigError(
        f"{found.folder} does not say which optimizer its program made; add --optimizer "
        f"{' or '.join(KINDS)}"
    )


def _numbers(kind: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group's numbers that the rule has, and texts and numbers that the program put in."""
    unlike = {"step", "bias_correction", "foreach", "capturable", "differentiable", "fused"}
    found = {}
    for key, value in group.items():
        if key in unlike or key == "decoupled_weight_decay":
            continue
        plain = list(value) if isinstance(value, tuple) else value
        plain = plain.item() if isinstance(plain, torch.Tensor) and plain.numel() == 1 else plain
        if key in KINDS[kind].defaults or isinstance(plain, str | int | float):
            found[key] = plain
    return {**{k: _listed_default(v) for k, v in KINDS[kind].defaults.items()}, **found}


def _listed_default(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _loop_state(found: ZeroCheckpoint) -> dict[str, Any]:
    """What `offload.deepspeed` keeps beside a checkpoint."""
    about = found.about
    scheduler = about.get("lr_scheduler")
    state: dict[str, Any] = {}
    if isinstance(scheduler, dict) and set(scheduler) == {"last_batch_iteration"}:
        count = int(scheduler["last_batch_iteration"]) + 1
        rates = [numbers["lr"] for numbers in found.numbers]
        state = {
            "last_epoch": count, "_step_count": count + 1, "_last_lr": list(map(float, rates)),
            "lr_lambdas": [None] * len(rates),
        }  # fmt: skip
    return {
        "global_steps": int(about["global_steps"]),
        "global_samples": int(about.get("global_samples", 0)),
        "skipped_steps": int(about["skipped_steps"]),
        "lr_scheduler": packed(state, "lr_scheduler"),
        "client_state": dict(_client(about)),
    }


def _client(about: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What the program put in, where nothing has to be pickled for it."""
    for key, value in about.items():
        if key in _THEIRS:
            continue
        try:
            yield key, packed(value, key)
        except UnsupportedError as error:
            _log.warning("left out of the client state: %s", error)
