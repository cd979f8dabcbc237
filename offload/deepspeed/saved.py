"""Checkpoints as DeepSpeed's engine saves and loads them:

SAVE_DIR/TAG          a checkpoint of ours; with the loop's state: counters, scheduler, client
SAVE_DIR/latest       the last tag

Checkpoints of older versions have the loop's state in SAVE_DIR/TAG.json.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offload.checkpoint.engine.on_all_ranks import on_all
from offload.checkpoint.foreign.exporting import export
from offload.checkpoint.format import bounded_json
from offload.checkpoint.format.disk import entries, is_folder, is_there, storage_errors
from offload.checkpoint.format.folder import adopt, discard
from offload.checkpoint.format.manifest import RunRecord
from offload.checkpoint.format.plain_values import check_plain, unpacked
from offload.checkpoint.format.reader import CheckpointReader
from offload.checkpoint.format.user_state import run_of, state_in
from offload.runs.metrics import write_whole
from offload.swap.io.hands import patiently
from offload.swap.io.maker_marks import marked
from offload.tiers.errors import CheckpointError, PathError
from offload.weights.tensor_file import DTYPES

if TYPE_CHECKING:
    from offload.deepspeed.engine import EngineModule

_log = logging.getLogger("offload")
LATEST = "latest"
_KEY = "deepspeed"  # of a checkpoint's state
_FORMAT = 1
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_STATES = ("lr_scheduler", "client_state")
_MOST_TAG = 4096


def save_all(
    engine: EngineModule, folder: Path, tag: str, client: dict[str, Any], *, save_latest: bool
) -> None:
    """Write a checkpoint with the loop's state; see `EngineModule.save_checkpoint`."""
    path = folder / tag
    state: dict[str, Any] = {}
    with _agreed(engine, f"{path} was not saved"):
        if engine.global_rank == 0:
            state[_KEY] = _loop_state(engine, client)
    if engine.lr_scheduler is None and not client:
        engine.offload.tell_of_scheduler()
    engine.offload.save_checkpoint(path, state=state)
    with _agreed(engine, f"{path} was not saved"):
        if engine.global_rank == 0 and save_latest:
            write_latest(folder, tag)


def write_latest(folder: Path, tag: str) -> None:
    """Write the tag of an existing checkpoint to the file `latest`."""
    write_whole(folder / LATEST, tag)


def imported_run(state: dict[str, Any]) -> tuple[RunRecord, list[torch.Tensor]]:
    """Return the `run` record of a checkpoint that is being composed, and its tensors."""
    return run_of({_KEY: {"format": _FORMAT, **state}})


def _loop_state(engine: EngineModule, client: dict[str, Any]) -> dict[str, Any]:
    """Return the loop's state. Raise UnsupportedError for values that would have to be pickled."""
    scheduler: dict[str, Any] = getattr(engine.lr_scheduler, "state_dict", dict)()
    check_plain(scheduler, "lr_scheduler.state_dict()")
    check_plain(client, "client_state")
    counters = {name: getattr(engine, name) for name in _COUNTERS}
    return {"format": _FORMAT, **counters, "lr_scheduler": scheduler, "client_state": client}


def load_saved(
    engine: EngineModule, folder: Path, tag: str | None, *, strict: bool, optimizer: bool,
    scheduler: bool, counters: bool,
) -> tuple[str | None, dict[str, Any] | None]:  # fmt: skip
    """Load a checkpoint with the loop's state; see `EngineModule.load_checkpoint`."""
    tag = last_tag(folder) if tag is None else tag
    if tag is None:
        _log.warning("%s is not there: nothing was loaded; name a tag", folder / LATEST)
        return None, None
    path = folder / tag
    state: dict[str, Any] = {}
    with _agreed(engine, f"{path} was not loaded"):
        _refuse_theirs(path)
        state = _saved_state(path)
    if optimizer:
        loaded = engine.offload.load_checkpoint(path)
        if _KEY in loaded:  # of another one, if it was saved again just now
            state = _checked(loaded[_KEY], path)
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
    """Write the weights to a safetensors file, streamed from a temporary checkpoint beside it,
    which is removed again."""
    out = folder / f"{Path(name).stem}.safetensors"
    if out.name != name:
        _log.warning(
            "save_16bit_model: %s holds the weights; nothing is pickled into %s", out, name
        )
    pending = folder / marked(".weights")
    kept = engine.offload.last_checkpoint
    engine.offload.save_checkpoint(pending, state={})  # of which the weights alone are kept
    engine.offload.last_checkpoint = kept  # it is none to go on from
    with _agreed(engine, f"{out} was not saved"):
        if engine.global_rank == 0:
            try:
                export(pending, out, replaces=True)
            finally:
                discard(pending)


def folder_of(folder: Path, tag: str | int | None) -> Path:
    """Return the folder of the checkpoint that `tag` names, or of the last one. Raise
    CheckpointError if there is none, or if DeepSpeed wrote it."""
    found = last_tag(folder) if tag is None else str(tag)
    if found is None:
        raise CheckpointError(f"{folder / LATEST} is not there; name a tag")
    _refuse_theirs(folder / found)
    return folder / found


def last_tag(folder: Path) -> str | None:
    """Return the tag in `latest`, or None. Raise CheckpointError for a path outside of the
    folder."""
    latest = folder / LATEST

    def read() -> bytes | None:
        if not latest.is_file():
            return None
        with latest.open("rb") as file:
            return file.read(_MOST_TAG)

    with storage_errors("reading", latest):
        raw = patiently("read", latest, read)
    if raw is None:
        return None
    tag = raw.decode(errors="replace").strip()
    if not tag or "\0" in tag or os.path.isabs(tag) or ".." in Path(tag).parts:
        raise CheckpointError(
            f"{latest} names {tag[:80]!r}, which is no folder beside it; name a tag"
        )
    return tag


def _saved_state(path: Path) -> dict[str, Any]:
    """Return the counters, and the states of scheduler and client."""
    adopt(path)
    with storage_errors("looking at", path):
        is_saved = is_there(path)
    if not is_saved:
        raise CheckpointError(f"{path}: there is no such checkpoint; load another tag")
    with CheckpointReader(path) as reader:
        found = state_in(reader)
    if _KEY in found:
        return _checked(found[_KEY], path)
    try:
        return _read(path.with_name(f"{path.name}.json"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} has no state of a loop: the engine of offload.deepspeed has not saved it (or "
            "an older version has, and was stopped); load another tag, or this one with "
            "engine.offload.load_checkpoint"
        ) from None


def _read(path: Path) -> dict[str, Any]:
    """Read the loop's state that an older version kept beside a checkpoint."""
    try:
        state = patiently("read", path, bounded_json.read, path)
        state |= {name: unpacked(state[name]) for name in _STATES}
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RuntimeError, CheckpointError) as error:
        # RuntimeError: nested too deeply
        raise CheckpointError(f"{path} is damaged ({error!s:.200}); load another tag") from None
    return _checked(state, path)


def _checked(state: Any, where: Path) -> dict[str, Any]:
    """Return a loop's state. Raise CheckpointError unless it is complete."""
    try:
        if state["format"] != _FORMAT:
            raise CheckpointError(f"{where}: format {state['format']!r:.40} is not {_FORMAT}")
        found = {name: state[name] for name in _STATES}
        if not all(isinstance(each, dict) for each in found.values()):
            raise TypeError("its states are no objects")
        return {**found, **{name: int(state[name]) for name in _COUNTERS}}
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{where} is damaged ({error!s:.200}); load another tag") from None


def _refuse_theirs(path: Path) -> None:
    with storage_errors("looking at", path):
        names = [entry.name for entry in entries(path)] if is_folder(path) else []
    if any(name.endswith("model_states.pt") for name in names):
        raise CheckpointError(
            f"{path} was written by DeepSpeed, in pickles; `offload checkpoint import-deepspeed "
            f"{path} OUT --trust` makes one of ours of it"
        )


def _load_weights(engine: EngineModule, path: Path, *, strict: bool) -> None:
    """Load parameters and buffers alone: masters become the weights, other states stay."""
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
                value = torch.empty(row.shape, dtype=DTYPES[record.dtype])
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
    """Read the tensor, or one row of it."""
    if value.numel():
        view = value.reshape(-1).view(torch.uint8).numpy().data
        reader.read_into(stored, number * value.nbytes, view)


@contextmanager
def _agreed(engine: EngineModule, what: str) -> Iterator[None]:
    """Raise any rank's error on every rank; no rank continues before all have left the block."""
    with on_all(engine.offload.runtime.ranks, what):
        try:
            yield
        except OSError as error:
            raise PathError(f"{what}: {error.strerror or error}") from error
