"""Checkpoints as DeepSpeed's engine saves and loads them:

SAVE_DIR/TAG          the engine's: a checkpoint of ours
SAVE_DIR/TAG.json     the loop's: counters, scheduler, client state; written last of a tag
SAVE_DIR/latest       the last tag
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offload.checkpoint import bounded_json
from offload.checkpoint.disk import storage_errors
from offload.checkpoint.exporting import export
from offload.checkpoint.plain_values import packed, unpacked
from offload.checkpoint.reader import CheckpointReader
from offload.runs.metrics import write_whole
from offload.tiers.errors import CheckpointError, PathError, UnsupportedError

if TYPE_CHECKING:
    from offload.deepspeed.engine import EngineModule

_log = logging.getLogger("offload")
LATEST = "latest"
_FORMAT = 1
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_MOST_TAG = 4096
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def save_all(
    engine: EngineModule, folder: Path, tag: str, client: dict[str, Any], *, save_latest: bool
) -> None:
    """See `EngineModule.save_checkpoint`."""
    path, beside = _paths(folder, tag)
    text = ""
    with _agreed(engine, f"{path} was not saved"):
        if engine.global_rank == 0:
            text = _text_of(engine, client)
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.unlink(missing_ok=True)  # of an older checkpoint with this tag
    has_loop = engine.lr_scheduler is not None or client  # else a scheduler is left out
    engine.offload.save_checkpoint(path, state={} if has_loop else None)
    with _agreed(engine, f"{path} was not saved"):
        if engine.global_rank == 0:
            write_whole(beside, text)
            if save_latest:
                write_whole(folder / LATEST, tag)


def imported_text(state: dict[str, Any]) -> str:
    """For `write_imported`, of values that are `packed`. UnsupportedError for too much."""
    return _checked({"format": _FORMAT, **state})


def write_imported(folder: Path, tag: str, text: str) -> None:
    """The loop's file, and `latest`, of a checkpoint that is there."""
    write_whole(_paths(folder, tag)[1], text)
    write_whole(folder / LATEST, tag)


def _text_of(engine: EngineModule, client: dict[str, Any]) -> str:
    scheduler: dict[str, Any] = getattr(engine.lr_scheduler, "state_dict", dict)()
    state = {
        "format": _FORMAT,
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "lr_scheduler": packed(scheduler, "lr_scheduler.state_dict()"),
        "client_state": packed(client, "client_state"),
    }
    return _checked(state)


def _checked(state: dict[str, Any]) -> str:
    """As text. UnsupportedError for more than can be read again."""
    text = json.dumps(state, indent=1)
    try:
        bounded_json.check_size(text.encode())
    except ValueError as error:
        raise UnsupportedError(
            f"the scheduler's and client's state could not be read again: {error}; save what is "
            "large in a file of its own"
        ) from None
    return text


def load_saved(
    engine: EngineModule, folder: Path, tag: str | None, *, strict: bool, optimizer: bool,
    scheduler: bool, counters: bool,
) -> tuple[str | None, dict[str, Any] | None]:  # fmt: skip
    """See `EngineModule.load_checkpoint`."""
    tag = last_tag(folder) if tag is None else tag
    if tag is None:
        _log.warning("%s is not there: nothing was loaded; name a tag", folder / LATEST)
        return None, None
    path, beside = _paths(folder, tag)
    state: dict[str, Any] = {}
    with _agreed(engine, f"{path} was not loaded"):
        _refuse_theirs(path)
        state = _read(beside)
    if optimizer:
        engine.offload.load_checkpoint(path)
    else:
        _load_weights(engine, path, strict=strict)
    engine.zero_grad()
    engine.micro_steps = 0
    if scheduler and engine.lr_scheduler is not None and state["lr_scheduler"]:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    if counters:
        for name in _COUNTERS:
            setattr(engine, name, state[name])
    client: dict[str, Any] = state["client_state"]
    return str(path), client


def save_weights(engine: EngineModule, folder: Path, name: str) -> None:
    """Of a checkpoint beside it, which is removed again: bytes are streamed."""
    out = folder / f"{Path(name).stem}.safetensors"
    if out.name != name:
        _log.warning(
            "save_16bit_model: %s holds the weights; nothing is pickled into %s", out, name
        )
    with _agreed(engine, f"{out} was not saved"):
        if engine.global_rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
    pending = folder / f".weights-{engine.global_steps}"
    engine.offload.save_checkpoint(pending, state={})  # of which the weights alone are kept
    with _agreed(engine, f"{out} was not saved"):
        if engine.global_rank == 0:
            made = out.with_name(f".{out.stem}-{secrets.token_hex(4)}.safetensors")
            export(pending, made)
            os.replace(made, out)
            shutil.rmtree(pending)


def folder_of(folder: Path, tag: str | int | None) -> Path:
    """The checkpoint that `tag` names, or the last one. CheckpointError where there is none, or it
    is DeepSpeed's."""
    found = last_tag(folder) if tag is None else str(tag)
    if found is None:
        raise CheckpointError(f"{folder / LATEST} is not there; name a tag")
    _refuse_theirs(folder / found)
    return folder / found


def last_tag(folder: Path) -> str | None:
    """What `latest` names, if there is one. CheckpointError for what lies outside of the folder."""
    latest = folder / LATEST
    if not latest.is_file():
        return None
    with storage_errors("reading", latest), latest.open("rb") as file:
        tag = file.read(_MOST_TAG).decode(errors="replace").strip()
    if not tag or "\0" in tag or os.path.isabs(tag) or ".." in Path(tag).parts:
        raise CheckpointError(
            f"{latest} names {tag[:80]!r}, which is no folder beside it; name a tag"
        )
    return tag


def _paths(folder: Path, tag: str) -> tuple[Path, Path]:
    path = folder / tag
    return path, path.with_name(f"{path.name}.json")


def _read(path: Path) -> dict[str, Any]:
    """Counters, and the states of scheduler and client, unpacked."""
    try:
        state = bounded_json.read(path)
        if state["format"] != _FORMAT:
            raise CheckpointError(f"{path}: format {state['format']!r:.40} is not {_FORMAT}")
        found = {name: unpacked(state[name]) for name in ("lr_scheduler", "client_state")}
        if not all(isinstance(each, dict) for each in found.values()):
            raise TypeError("its states are no objects")
        return {**found, **{name: int(state[name]) for name in _COUNTERS}}
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: there is no such checkpoint, or saving it was cut short; load "
            "another tag"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, OverflowError, RuntimeError) as error:
        # RuntimeError: of too few bytes for a tensor, or nested too deeply
        raise CheckpointError(f"{path} is damaged ({error!s:.200}); load another tag") from None


def _refuse_theirs(path: Path) -> None:
    if path.is_dir() and any(path.glob("*model_states.pt")):
        raise CheckpointError(
            f"{path} was written by DeepSpeed, in pickles; `offload checkpoint import-deepspeed "
            f"{path} OUT --trust` makes one of ours of it"
        )


def _load_weights(engine: EngineModule, path: Path, *, strict: bool) -> None:
    """Parameters and buffers alone: masters become the weights, other states stay as they are."""
    own = dict(engine.module.named_parameters())
    buffers = dict(engine.module.named_buffers())
    with CheckpointReader(path) as reader, torch.no_grad():
        reader.check(contents=True)
        records = {name: r for r in reader.manifest.parameters for name in r.names}
        missing = sorted(own.keys() - records.keys())
        if strict and (missing or records.keys() - _all_names(engine)):
            more = sorted(records.keys() - _all_names(engine))
            raise CheckpointError(
                f"{path}: missing {missing[:3]}, unexpected {more[:3]}; load_module_strict=False "
                "loads what fits"
            )
        for name, param in own.items():
            record = records.get(name)
            if record is None:
                continue
            if tuple(record.shape) != tuple(param.shape):
                raise CheckpointError(
                    f"{path}: {name} has shape {tuple(record.shape)}, the model "
                    f"{tuple(param.shape)}"
                )
            for number, row in enumerate(engine.offload.runtime.store.rows_of(param)):
                value = torch.empty(row.shape, dtype=_DTYPES[record.dtype])
                _read_tensor(reader, reader.parameter(record), value, number)
                with engine.offload.gathered(row):
                    row.copy_(value)
        for buffer in reader.manifest.buffers:
            if buffer.name in buffers:
                value = torch.empty_like(buffers[buffer.name], device="cpu")
                _read_tensor(reader, reader.buffer(buffer), value)
                buffers[buffer.name].copy_(value)


def _all_names(engine: EngineModule) -> set[str]:
    return {name for name, _ in engine.module.named_parameters(remove_duplicate=False)}


def _read_tensor(
    reader: CheckpointReader, stored: Any, value: torch.Tensor, number: int = 0
) -> None:
    """The tensor, or a row of it."""
    if value.numel():
        view = value.reshape(-1).view(torch.uint8).numpy().data
        reader.read_into(stored, number * value.nbytes, view)


@contextmanager
def _agreed(engine: EngineModule, what: str) -> Iterator[None]:
    """An error inside on any rank is raised on every rank; no rank goes on before all have left."""
    ranks = engine.offload.runtime.ranks
    error: Exception | None = None
    try:
        yield
    except OSError as failure:
        error = PathError(f"{what}: {failure.strerror or failure}")
    except Exception as failure:  # noqa: BLE001 - raised below
        error = failure
    told = None if ranks is None else ranks.all_succeeded(error)
    if error is not None:
        raise error
    if told is not None:
        raise CheckpointError(f"{what}; {told}")
