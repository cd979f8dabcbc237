"""`offload checkpoint import-deepspeed`: convert a ZeRO checkpoint of DeepSpeed to one of offload.

Masters, states, step counts, param groups, buffers and counters are taken over, one tensor at a
time. The result is what `engine.save_checkpoint` of `offload.deepspeed` writes.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.checkpoint.format.disk import write_named
from offload.checkpoint.format.folder import PendingFolder
from offload.checkpoint.format.manifest import (
    BUFFERS,
    RUN,
    LossScaleRecord,
    Manifest,
    MasterName,
    OptimizerRecord,
    ParameterRecord,
    ParamGroupRecord,
    RunRecord,
)
from offload.checkpoint.format.safetensors_file import optimizer_sections
from offload.checkpoint.format.user_state import DTYPE_NAMES, STATE, packed, tensor_records
from offload.checkpoint.format.writer import CheckpointWriter, fields_of, group_record
from offload.config.optimizer import KINDS
from offload.deepspeed.migration import migrate
from offload.deepspeed.saved import LATEST, LoopState, last_tag
from offload.deepspeed.zero_checkpoint import ZeroCheckpoint
from offload.display.plain_text import plain
from offload.kernels.cpu.convert import split_master
from offload.kernels.floats import Array
from offload.kernels.rules import StateFormat
from offload.kernels.variants import Master
from offload.tiers.errors import (
    CheckpointError,
    ConfigError,
    NoCheckpointError,
    OffloadError,
    UnsupportedError,
)
from offload.zero.step.records import RecordFormat

_log = logging.getLogger("offload")
_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_MASTERS = {"fp32": Master.NONE, "bf16": Master.SPLIT, "fp16": Master.FP32}
_MASTER_NAMES: dict[str, MasterName] = {"fp32": "none", "bf16": "split", "fp16": "fp32"}
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
    """Write the checkpoint in `source` (a tag's folder, or one with `latest`) to OUT/TAG, and
    OUT/latest; return the folder written.

    `kind`: the optimizer, if DeepSpeed's configuration has none. `tied`: the parameter of each
    further name, if the checkpoint does not say so. Raise CheckpointError or ConfigError, with
    nothing written, if it is no such checkpoint.
    """
    if not source.is_dir():
        raise NoCheckpointError(f"{source}: there is no such folder")
    tag = last_tag(source)
    folder = source if tag is None else source / tag
    with _as_deepspeed_writes(folder):
        saved = ZeroCheckpoint(folder)
        reader = _Importer(saved, kind, dict(tied or {}))
    target = out / folder.name
    with _as_deepspeed_writes(folder), PendingFolder(target) as pending:
        reader.write(pending.path)
        pending.commit()
    write_named(out / LATEST, folder.name)
    return target


@contextmanager
def _as_deepspeed_writes(folder: Path) -> Iterator[None]:
    """Raise errors about values that DeepSpeed would not have written as a CheckpointError."""
    try:
        yield
    except OffloadError as error:
        if str(error).isprintable():
            raise
        raise CheckpointError(plain(str(error), 1000)) from None  # the message quotes the files
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError,
            AssertionError, StopIteration) as error:  # fmt: skip
        raise CheckpointError(
            f"{folder} is no checkpoint as DeepSpeed writes them ({type(error).__name__}: "
            f"{plain(' '.join(str(error)[:400].split()), 200)})"
        ) from error


class _Importer:
    """Converts one checkpoint. Everything that can be refused is refused when it is made."""

    def __init__(self, saved: ZeroCheckpoint, kind: str | None, tied: dict[str, str]) -> None:
        self._saved = saved
        self._precision = _PRECISIONS[saved.dtype]
        self._kind = kind or _kind_of(saved)
        if self._kind not in KINDS:
            raise ConfigError(f"--optimizer {self._kind}: write one of {', '.join(KINDS)}")
        self._numbers = [_numbers_of(self._kind, each) for each in saved.numbers]
        first = {**KINDS[self._kind].defaults, **self._numbers[0]}
        states = tuple(KINDS[self._kind].scalars.kept_for(first))
        if set(states) != saved.state_names:
            raise CheckpointError(
                f"{saved.folder} has the states {', '.join(sorted(saved.state_names)) or 'none'}, "
                f"and {self._kind} keeps {', '.join(states) or 'none'}"
            )
        self._format = RecordFormat(_MASTERS[self._precision], states, StateFormat.FP32)
        self._params = self._listed({**saved.shared, **tied})
        run = {STATE: packed(_loop_state(saved).entry, STATE)}
        self._run, self._run_tensors = RunRecord(tensors=tensor_records(run)), [*run.values()]
        self._manifest = self._new_manifest()

    def _listed(self, tied: dict[str, str]) -> dict[str, ParameterRecord]:
        saved, names = self._saved, {}
        trained = {name: shape for group in saved.groups for name, shape in group.items()}
        for name in (*trained, *saved.frozen):
            names[name] = [name, *(other for other, first in tied.items() if first == name)]
        known = {each for several in names.values() for each in several}
        missing = [name for name in saved.names if name not in known]
        if missing:
            raise CheckpointError(
                f"{saved.folder} does not say what {', '.join(missing[:3])} is tied to: stage 3 "
                f"notes no tied parameters; add --tied {missing[0]}=NAME"
            )
        listed = {}
        for number, (name, several) in enumerate(names.items()):
            is_trained = name in trained
            shape = trained[name] if is_trained else saved.frozen[name]
            listed[name] = ParameterRecord(
                names=several, dtype=DTYPE_NAMES[saved.dtype], shape=list(shape),
                trainable=is_trained, steps=saved.steps if is_trained else 0, group=number,
            )  # fmt: skip
        return listed

    # ---------------------------------------------------------------- writing
    def write(self, folder: Path) -> None:
        """Write every file, the manifest last. Every parameter has a group of its own, which loads
        into any grouping."""
        numel = sum(int(np.prod(record.shape)) for record in self._manifest.parameters)
        files = CheckpointWriter(folder, self._manifest, 16 * numel)
        fields = {field: self._saved.tensors(field) for field in self._format.states}
        for param, master in self._saved.tensors("master"):
            states = {}
            for field, values in fields.items():
                other, states[field] = next(values)
                assert other == param, "all fields are in the order of the groups"
            self._write_trained(files, self._params[param], master, states)
        for param in self._saved.frozen:
            value = self._saved.frozen_value(param).to(self._saved.dtype)
            record = self._params[param]
            name = str(self._manifest.groups[record.group].parameters)
            files.write_tensors(name, [record], [value])
        files.write_tensors(BUFFERS, self._manifest.buffers, self._saved.buffers.values())
        if self._run_tensors:
            files.write_tensors(RUN, self._run.tensors, self._run_tensors)
        files.finish()

    def _write_trained(
        self, files: CheckpointWriter, record: ParameterRecord, master: torch.Tensor,
        states: Mapping[str, torch.Tensor],
    ) -> None:  # fmt: skip
        """Write a parameter, its states and, if the format has one, its master (all in fp32), from
        which a `low` is made, and the weight with it."""
        kept, numel = self._format, master.numel()
        arrays = kept.arrays(torch.zeros(kept.nbytes(numel), dtype=torch.uint8), numel)
        for field in kept.states:
            kept.write_state(arrays, field, slice(0, numel), _flat(states[field]))
        weight = master.reshape(-1).to(self._saved.dtype)
        if "low" in arrays:
            high = np.empty(numel, dtype=np.uint16)
            split_master(_flat(master), high, arrays["low"])
            weight = torch.from_numpy(high.view(np.int16)).view(torch.bfloat16)
        elif "master" in arrays:
            arrays["master"][:] = _flat(master)
        group, fields = self._manifest.groups[record.group], fields_of(kept)
        files.write_tensors(str(group.parameters), [record], [weight])
        name = str(group.optimizer)
        file = files.open(name, optimizer_sections([record], fields), {"group": group.name})
        for field in fields:
            if arrays[field].size:
                file.append(f"{group.name}.{field}", arrays[field].view(np.uint8).data)
        files.close(name, file)

    def _new_manifest(self) -> Manifest:
        about = self._saved.about
        scale = self._saved.loss_scale if self._precision == "fp16" else None
        groups = [
            ParamGroupRecord(numbers=numbers, params=list(shapes))
            for numbers, shapes in zip(self._numbers, self._saved.groups, strict=True)
        ]
        return Manifest(
            precision=self._precision,
            steps_taken=int(about["global_steps"]) - int(about["skipped_steps"]),
            steps_skipped=int(about["skipped_steps"]),
            loss_scale=None if scale is None else LossScaleRecord(scale=scale, good_steps=0),
            optimizer=OptimizerRecord(
                type=self._kind, master=_MASTER_NAMES[self._precision],
                fields=fields_of(self._format),
                param_groups=groups,
            ),
            groups=[
                group_record(each.group, each.names[0], is_trained=each.trainable)
                for each in self._params.values()
            ],
            parameters=list(self._params.values()),
            buffers=tensor_records(self._saved.buffers),
            buffers_file=BUFFERS,
            files={},
            run=self._run,
        )  # fmt: skip


def _flat(value: torch.Tensor) -> Array:
    flat: Array = np.ascontiguousarray(value.detach().float().reshape(-1).numpy())
    return flat


def _numbers_of(kind: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """The param group's numbers that the rule has, and the program's own numbers and texts."""
    unlike = {"step", "bias_correction", "foreach", "capturable", "differentiable", "fused"}
    numbers = {}
    for key, value in group.items():
        if key in unlike or key == "decoupled_weight_decay":
            continue
        plain = list(value) if isinstance(value, tuple) else value
        plain = plain.item() if isinstance(plain, torch.Tensor) and plain.numel() == 1 else plain
        if key in KINDS[kind].defaults or isinstance(plain, str | int | float):
            numbers[key] = plain
    defaults = KINDS[kind].defaults.items()
    return {**{k: list(v) if isinstance(v, tuple) else v for k, v in defaults}, **numbers}


def _kind_of(saved: ZeroCheckpoint) -> str:
    """Return the optimizer's type from the configuration that was saved with the checkpoint. Raise
    ConfigError if it has none."""
    config = saved.about.get("ds_config")
    section = config.get("optimizer") if isinstance(config, dict) else None
    if section:
        alone = {"train_batch_size": 1, "optimizer": section}
        return str(migrate(alone).values["optimizer"]["type"])
    raise ConfigError(
        f"{saved.folder} does not say which optimizer its program made; add --optimizer "
        f"{' or '.join(KINDS)}"
    )


def _loop_state(saved: ZeroCheckpoint) -> LoopState:
    """Return the loop's state that `offload.deepspeed` keeps beside a checkpoint."""
    about = saved.about
    scheduler = about.get("lr_scheduler")
    state: dict[str, Any] = {}
    if isinstance(scheduler, dict) and set(scheduler) == {"last_batch_iteration"}:
        count = int(scheduler["last_batch_iteration"]) + 1
        rates = [numbers["lr"] for numbers in saved.numbers]
        state = {
            "last_epoch": count, "_step_count": count + 1, "_last_lr": list(map(float, rates)),
            "lr_lambdas": [None] * len(rates),
        }  # fmt: skip
    return LoopState(
        int(about["global_steps"]), int(about.get("global_samples", 0)),
        int(about["skipped_steps"]), state, dict(_client(about)),
    )  # fmt: skip


def _client(about: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of the client state that a checkpoint can keep; the others are logged."""
    for key, value in about.items():
        if key in _THEIRS:
            continue
        try:
            packed(value, key)
        except UnsupportedError as error:
            _log.warning("left out of the client state: %s", error)
            continue
        yield key, value
