"""Checkpoints as DeepSpeed's engine saves and loads them:

SAVE_DIR/TAG          a checkpoint of offload, with the loop's state: counters, scheduler, client
SAVE_DIR/latest       the last tag
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint.engine.shards import on_all
from offload.checkpoint.format.disk import (
    entries,
    is_folder,
    is_there,
    make_call,
    storage_errors,
)
from offload.checkpoint.format.folder import adopt
from offload.checkpoint.format.manifest import RunRecord
from offload.checkpoint.format.reader import CheckpointReader
from offload.checkpoint.format.user_state import packed, run_of, state_in
from offload.engine import Engine
from offload.runs.metrics import write_whole
from offload.tiers.errors import CheckpointError, PathError

_log = logging.getLogger("offload")
LATEST = "latest"
_KEY = "deepspeed"  # of a checkpoint's state
_FORMAT = 1
_MOST_TAG = 4096


@dataclass(frozen=True)
class LoopState:
    """The state of a loop in a checkpoint, beside its engine."""

    global_steps: int
    global_samples: int
    skipped_steps: int
    lr_scheduler: dict[str, Any]
    client_state: dict[str, Any]

    @classmethod
    def read(cls, found: Any, where: Path) -> LoopState:
        """Return the state in a checkpoint's entry. Raise CheckpointError unless it is complete."""
        try:
            if found["format"] != _FORMAT:
                raise CheckpointError(f"{where}: format {found['format']!r:.40} is not {_FORMAT}")
            scheduler, client = found["lr_scheduler"], found["client_state"]
            if not isinstance(scheduler, dict) or not isinstance(client, dict):
                raise TypeError("its states are no objects")
            return cls(
                int(found["global_steps"]), int(found["global_samples"]),
                int(found["skipped_steps"]), scheduler, client,
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise CheckpointError(
                f"{where} is damaged ({error!s:.200}); load another tag"
            ) from None

    @property
    def entry(self) -> dict[str, Any]:
        """The checkpoint's entry that `read` reads."""
        return {_KEY: {"format": _FORMAT, **vars(self)}}


def save_all(
    engine: Engine, folder: Path, tag: str, state: LoopState, *, save_latest: bool
) -> None:
    """Write a checkpoint with the loop's state; see `EngineModule.save_checkpoint`. Raise
    UnsupportedError for values that a checkpoint cannot keep."""
    path = folder / tag
    with _agreed(engine, f"{path} was not saved"):
        if _is_first_rank(engine):
            packed(state.lr_scheduler, "lr_scheduler.state_dict()")
            packed(state.client_state, "client_state")
    engine.save_checkpoint(path, state=state.entry if _is_first_rank(engine) else {})
    with _agreed(engine, f"{path} was not saved"):
        if _is_first_rank(engine) and save_latest:
            write_latest(folder, tag)


def write_latest(folder: Path, tag: str) -> None:
    """Write the tag of an existing checkpoint to the file `latest`."""
    write_whole(folder / LATEST, tag)


def imported_run(state: LoopState) -> tuple[RunRecord, list[torch.Tensor]]:
    """Return the `run` record of a checkpoint that is being composed, and its tensors."""
    return run_of(state.entry)


def load_saved(engine: Engine, folder: Path, tag: str | None) -> tuple[Path, LoopState] | None:
    """Load the checkpoint of a tag, or of the last one. Return its folder and the loop's state;
    None, with a warning, if there is no `latest`."""
    tag = last_tag(folder) if tag is None else tag
    if tag is None:
        _log.warning("%s is not there: nothing was loaded; name a tag", folder / LATEST)
        return None
    path = folder / tag
    with _agreed(engine, f"{path} was not loaded"):
        _check_is_a_loops(path)
    return path, LoopState.read(engine.load_checkpoint(path).get(_KEY), path)


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
        raw = make_call("read", latest, read)
    if raw is None:
        return None
    tag = raw.decode(errors="replace").strip()
    if not tag or "\0" in tag or os.path.isabs(tag) or ".." in Path(tag).parts:
        raise CheckpointError(
            f"{latest} names {tag[:80]!r}, which is no folder beside it; name a tag"
        )
    return tag


def _check_is_a_loops(path: Path) -> None:
    """Raise CheckpointError unless there is a checkpoint with the complete state of a loop."""
    _refuse_theirs(path)
    adopt(path)
    with storage_errors("looking at", path):
        is_saved = is_there(path)
    if not is_saved:
        raise CheckpointError(f"{path}: there is no such checkpoint; load another tag")
    with CheckpointReader(path) as reader:
        found = state_in(reader)
    if _KEY not in found:
        raise CheckpointError(
            f"{path} has no state of a loop: the engine of offload.deepspeed has not saved it; "
            "load another tag, or this one with engine.offload.load_checkpoint"
        )
    LoopState.read(found[_KEY], path)


def _refuse_theirs(path: Path) -> None:
    with storage_errors("looking at", path):
        names = [entry.name for entry in entries(path)] if is_folder(path) else []
    if any(name.endswith("model_states.pt") for name in names):
        raise CheckpointError(
            f"{path} was written by DeepSpeed, in pickles; `offload checkpoint import-deepspeed "
            f"{path} OUT --trust` makes a checkpoint of offload of it"
        )


@contextmanager
def _agreed(engine: Engine, what: str) -> Iterator[None]:
    """Raise any rank's error on every rank; no rank continues before all have left the block."""
    with on_all(engine.runtime.ranks, what):
        try:
            yield
        except OSError as error:
            raise PathError(f"{what}: {error.strerror or error}") from error


def _is_first_rank(engine: Engine) -> bool:
    return engine.runtime.ranks is None or torch.distributed.get_rank() == 0
