"""Converts a folder of torch.distributed.checkpoint to a checkpoint of offload, or its weights to a
safetensors file: `offload checkpoint import-dcp`.

    {"app": {"model": ..., "optim": ...}}    and the same without "app", or under another name
    {"offload": ...}                         beside it: what `export-dcp` wrote, taken over whole

Nothing of the folder is run (`checkpoint/foreign/dcp_folder.py`). One parameter at a time is in
memory, with its states.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import ValidationError

from offload.checkpoint.foreign.dcp_folder import DcpFolder
from offload.checkpoint.foreign.exporting import check_new, pending_output
from offload.checkpoint.format.composing import Composer, fields_of
from offload.checkpoint.format.disk import check_room
from offload.checkpoint.format.folder import PendingFolder
from offload.checkpoint.format.manifest import (
    BUFFERS,
    BufferRecord,
    Manifest,
    ParameterRecord,
)
from offload.checkpoint.format.safetensors_file import SafetensorsWriter, TensorInfo, file_nbytes
from offload.display.plain_text import plain
from offload.integrations.dcp_export import (
    ABOUT,
    MANIFEST_KEY,
    OURS,
    state_format_of,
    states_of,
)
from offload.integrations.dcp_foreign import foreign
from offload.integrations.dcp_layout import OTHERWISE, Layout, Plan, grouped
from offload.kernels.variants import Master
from offload.process import bounded_json
from offload.tiers.errors import CheckpointError
from offload.zero.groups.bits import DTYPE_NAMES
from offload.zero.step.records import RecordFormat

_MASTERS = {"none": Master.NONE, "split": Master.SPLIT, "fp32": Master.FP32}


def import_dcp(
    source: Path, out: Path, *, kind: str | None = None, tied: Mapping[str, str] | None = None
) -> Path:
    """Write the content of `folder` to the new checkpoint `out`, or its weights to OUT.safetensors;
    return the path written.

    `kind`: the optimizer, and `tied`: the parameter of each alias, if the folder is not
    of `export-dcp`. Raise CheckpointError or ConfigError, with nothing written, for a folder that
    cannot be read so; the message suggests a remedy.
    """
    with DcpFolder(source) as folder:
        layout = Layout.of(folder)
        if out.suffix == ".safetensors":
            check_new(out)
            _write_weights(folder, layout, out)
            return out
        plan = _ours(folder, layout) or foreign(folder, layout, kind, dict(tied or {}))
        with PendingFolder(out) as pending:
            _write(folder, layout, plan, pending.path, out.name)
            pending.commit()
    return out


# --------------------------------------------------------------------------- ours
def _ours(folder: DcpFolder, layout: Layout) -> Plan | None:
    """Return the plan for a folder that `export-dcp` wrote; None for any other folder."""
    own = {path[1:]: name for name, path in folder.paths.items() if path[0] == OURS}
    if (MANIFEST_KEY,) not in own:
        return None
    text = folder.read_object(own[(MANIFEST_KEY,)])
    try:
        if not isinstance(text, str):
            raise ValueError("it is no text")
        content = bounded_json.parse(text.encode())
        if not isinstance(content, dict) or not set(content) <= set(ABOUT):
            raise ValueError("it has other keys")
        manifest = Manifest.model_validate(
            {**content, "groups": [], "buffers_file": BUFFERS, "files": {}}
        )
        kept = RecordFormat(
            _MASTERS[manifest.optimizer.master], states_of(manifest), state_format_of(manifest)
        )
        if fields_of(kept) != manifest.optimizer.fields:
            raise ValueError("its optimizer has other fields")
    except (ValidationError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder.path}: what {OURS}.{MANIFEST_KEY} says is damaged ({error!s:.200}); export "
            "the checkpoint again"
        ) from None
    run = {str(path[1]): name for path, name in own.items() if path[:1] == ("run",) and path[1:]}
    records = [
        record.model_copy(update={"group": n}) for n, record in enumerate(manifest.parameters)
    ]
    return Plan(grouped(manifest, records), kept, run)


# --------------------------------------------------------------------------- writing
def _write(folder: DcpFolder, layout: Layout, plan: Plan, into: Path, name: str) -> None:
    manifest = plan.manifest
    made = Composer(into, manifest, plan.kept)
    for record in manifest.parameters:
        weight = _value(folder, layout.model, record.names[0], record)
        if record.trainable:
            fields = [*plan.kept.states, *(["master"] if plan.kept.master else [])]
            of = layout.states.get(record.names[0], {})
            values = {field: _value(folder, of, field, record, torch.float32) for field in fields}
            made.add_trained(record, weight, values, values.pop("master", None))
        else:
            made.add_weight(record, weight)
    made.add_buffers(_value(folder, layout.model, r.name, r) for r in manifest.buffers)
    if manifest.run is not None and manifest.run.tensors:
        made.add_run(_value(folder, plan.run, r.name, r) for r in manifest.run.tensors)
    made.finish(name)


def _value(
    folder: DcpFolder, names: Mapping[str, str], name: str,
    record: ParameterRecord | BufferRecord, dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return a tensor, states in `dtype`. Raise CheckpointError unless it fits its record."""
    where = names.get(name)
    found = None if where is None else folder.tensors.get(where)
    fits = found is not None and list(found.shape) == record.shape
    if not fits or (dtype is None and DTYPE_NAMES.get(found.dtype) != record.dtype):  # type: ignore[union-attr]
        raise CheckpointError(
            f"{folder.path}: {plain(name, 200)} should be {record.dtype} {tuple(record.shape)} and "
            f"is {'missing' if found is None else f'{found.dtype} {found.shape}'}; {OTHERWISE}"
        )
    value = folder.read(where or "")
    return value if dtype is None else value.to(dtype)


def _write_weights(folder: DcpFolder, layout: Layout, out: Path) -> None:
    tensors = {name: folder.tensors[where] for name, where in layout.model.items()}
    unknown = [name for name, tensor in tensors.items() if tensor.dtype not in DTYPE_NAMES]
    if unknown:
        raise CheckpointError(
            f"{folder.path}: {plain(unknown[0], 80)} is {tensors[unknown[0]].dtype}, which no file "
            "of safetensors holds"
        )
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # for alignment
    infos = [TensorInfo(n, DTYPE_NAMES[tensors[n].dtype], tensors[n].shape) for n in order]
    metadata, sections = {"format": "pt"}, {"tensors": infos}
    check_room(out.parent, file_nbytes(sections, metadata))
    with pending_output(out) as pending, SafetensorsWriter(pending, sections, metadata) as file:
        for name in order:
            value = folder.read(layout.model[name])
            if value.numel():
                file.append("tensors", value.reshape(-1).view(torch.uint8).numpy().data)
        file.finish()
