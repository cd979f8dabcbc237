"""The manifest for a folder of torch.distributed.checkpoint that offload did not write."""

from __future__ import annotations

import math
from typing import Any

import torch

from offload.checkpoint.foreign.dcp_folder import DcpFolder, SavedTensor
from offload.checkpoint.format.composing import fields_of, numbers_of
from offload.checkpoint.format.manifest import (
    BUFFERS,
    BufferRecord,
    LossScaleRecord,
    Manifest,
    MasterName,
    OptimizerRecord,
    ParameterRecord,
    ParamGroupRecord,
)
from offload.config.optimizer import KINDS
from offload.display.plain_text import plain
from offload.integrations.dcp_layout import OTHERWISE, Layout, Plan, grouped
from offload.kernels.rules import StateFormat
from offload.kernels.variants import Master
from offload.tiers.errors import CheckpointError, ConfigError
from offload.zero.groups.bits import DTYPE_NAMES
from offload.zero.step.records import RecordFormat

_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_MASTERS: dict[Master, MasterName] = {
    Master.NONE: "none", Master.SPLIT: "split", Master.FP32: "fp32"
}  # fmt: skip


def foreign(folder: DcpFolder, layout: Layout, kind: str | None, tied: dict[str, str]) -> Plan:
    """Return the plan for any other folder. Missing facts are refused, not guessed."""
    if not layout.states:
        raise CheckpointError(
            f"{folder.path} has no states of an optimizer; OUT.safetensors takes its weights"
        )
    if kind not in KINDS:
        raise ConfigError(
            f"--optimizer {kind or 'TYPE'}: {folder.path} does not say of which rule its states "
            f"are; write one of {', '.join(KINDS)}"
        )
    return _Foreign(folder, layout, kind, tied).plan()


class _Foreign:
    """Derives a manifest from a folder. Raises CheckpointError where the folder is ambiguous."""

    def __init__(self, folder: DcpFolder, layout: Layout, kind: str, tied: dict[str, str]) -> None:
        self._folder = folder
        self._layout = layout
        self._kind = kind
        self._tied = tied

    def plan(self) -> Plan:
        trained, buffers = self._trained(), self._buffers()
        dtype = self._dtype(trained)
        fields = {frozenset(self._layout.states[name]) - {"step"} for name in trained}
        if len(fields) > 1:
            raise self._unclear("its parameters have different states")
        kept = self._kept(set(next(iter(fields))), _PRECISIONS[dtype])
        numbers = self._numbers(trained)
        first = {**KINDS[self._kind].defaults, **numbers[0].numbers}
        if set(kept.states) != set(KINDS[self._kind].scalars.kept_for(first)):
            raise self._unclear(
                f"it has the states {', '.join(kept.states) or 'none'}, which are not those of "
                f"{self._kind}"
            )
        records = [self._record(n, name, dtype) for n, name in enumerate(trained)]
        precision = _PRECISIONS[dtype]
        scale = LossScaleRecord(scale=65536.0, good_steps=0) if precision == "fp16" else None
        manifest = Manifest(
            precision=precision,
            steps_taken=max((record.steps for record in records), default=0),
            steps_skipped=0,
            loss_scale=scale,
            optimizer=OptimizerRecord(
                type=self._kind, master=_MASTERS[kept.master], fields=fields_of(kept),
 param_groups=numbers,
            ),
            groups=[],
            parameters=[],
            buffers=[
                BufferRecord(
                    name=name, dtype=DTYPE_NAMES[self._tensor(name).dtype],
                    shape=list(self._tensor(name).shape),
                )
                for name in buffers
            ],
            buffers_file=BUFFERS,
            files={},
        )  # fmt: skip
        return Plan(grouped(manifest, records), kept, {})

    def _unclear(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._folder.path}: {plain(why, 400)}; {OTHERWISE}")

    def _tensor(self, name: str) -> SavedTensor:
        return self._folder.tensors[self._layout.model[name]]

    def _trained(self) -> list[str]:
        unknown = [name for name in self._layout.states if name not in self._layout.model]
        if unknown:
            raise self._unclear(
                f"states of {unknown[0][:80]!r} and no such parameter (get_state_dict of torch "
                "names them as the model does)"
            )
        return [name for name in self._layout.model if name in self._layout.states]

    def _buffers(self) -> list[str]:
        """Return the names of the buffers: tensors that are not floating point. Any other tensor
        without states may be a frozen parameter, a buffer, or tied, and is refused."""
        known = {*self._layout.states, *self._tied}
        others = [name for name in self._layout.model if name not in known]
        unclear = [name for name in others if self._tensor(name).dtype.is_floating_point]
        if unclear:
            raise self._unclear(
                f"{', '.join(unclear[:3])} have no states: frozen, buffers, or tied (--tied "
                f"{unclear[0]}=NAME)?"
            )
        strange = [n for n, first in self._tied.items() if first not in self._layout.states]
        if strange:
            raise ConfigError(f"--tied {strange[0]}: {self._tied[strange[0]]} has no states")
        return others

    def _dtype(self, trained: list[str]) -> torch.dtype:
        dtypes: set[torch.dtype] = {self._tensor(name).dtype for name in trained}
        if len(dtypes) != 1 or not dtypes <= _PRECISIONS.keys():
            raise self._unclear("its parameters are not all fp32, all bf16 or all fp16")
        return dtypes.pop()

    def _kept(self, fields: set[str], precision: str) -> RecordFormat:
        master = Master.NONE
        if "master" in fields:
            master = {"bf16": Master.SPLIT, "fp16": Master.FP32}.get(precision, Master.NONE)
        if precision == "fp16" and master is Master.NONE:
            raise self._unclear("weights in fp16 without a master are not trained here")
        order = [*KINDS[self._kind].scalars.states]
        names = sorted(fields - {"master"}, key=lambda n: order.index(n) if n in order else -1)
        return RecordFormat(master, tuple(names), StateFormat.FP32)

    def _record(self, number: int, name: str, dtype: torch.dtype) -> ParameterRecord:
        aliases = [other for other, first in self._tied.items() if first == name]
        step = self._layout.states[name].get("step")
        steps = 0.0
        if step is not None:
            if step not in self._folder.tensors or math.prod(self._folder.tensors[step].shape) != 1:
                raise self._unclear(f"{name} has no count of its steps")
            steps = float(self._folder.read(step).reshape(-1)[0])
        if not 0 <= steps < 1 << 53:
            raise self._unclear(f"{name} has been updated {steps} times")
        return ParameterRecord(
            names=[name, *aliases], dtype=DTYPE_NAMES[dtype], shape=list(self._tensor(name).shape),
            trainable=True, steps=int(steps), group=number,
        )  # fmt: skip

    def _numbers(self, trained: list[str]) -> list[ParamGroupRecord]:
        """Return the param groups from a list of groups, or from the numbers of each parameter;
        parameters with the same numbers form a group."""
        found: dict[str, tuple[dict[str, Any], list[str]]] = {}
        for owner, names in self._layout.groups.items():
            values = {
                key: self._folder.read_object(name) if name in self._folder.objects
                else self._folder.read(name)
                for key, name in names.items()
            }  # fmt: skip
            params = values.pop("params", None) if owner.isdecimal() else [owner]
            if not isinstance(params, list) or not all(isinstance(p, str) for p in params):
                raise self._unclear(f"its param group {owner[:80]} does not name its parameters")
            defaults = KINDS[self._kind].defaults.items()
            missing = [key for key, value in defaults if value and key not in values]
            if missing:
                raise self._unclear(f"its param group {owner[:80]} lacks {missing[0]}")
            numbers = numbers_of(self._kind, values)
            key = owner if owner.isdecimal() else repr(sorted(numbers.items()))
            found.setdefault(key, (numbers, []))[1].extend(params)
        listed = sorted(name for _, params in found.values() for name in params)
        if listed != sorted(trained):
            raise self._unclear("its param groups do not have each parameter with states once")
        return [ParamGroupRecord(numbers=numbers, params=p) for numbers, p in found.values()]
