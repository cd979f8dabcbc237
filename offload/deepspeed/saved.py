"""Checkpoints as DeepSpeed's engine saves and loads them:

SAVE_DIR/TAG          a checkpoint of offload, with the loop's state: counters, scheduler, client
SAVE_DIR/latest       the last tag
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.checkpoint.engine.shards import on_all
from offload.checkpoint.format.disk import make_call, storage_errors, write_named
from offload.checkpoint.format.folder import adopt
from offload.checkpoint.format.reader import CheckpointReader
from offload.checkpoint.format.user_state import state_in
from offload.engine import Engine
from offload.tiers.errors import CheckpointError

_log = logging.getLogger("offload")
LATEST = "latest"
_KEY = "deepspeed"  # of a checkpoint's state
_MAX_TAG = 4096


@dataclass(frozen=True)
class LoopState:
    """The state of a loop in a checkpoint, beside its engine."""

    global_steps: int
    global_samples: int
    skipped_steps: int
    lr_scheduler: dict[str, Any]
    client_state: dict[str, Any]

    @classmethod
    def read(cls, entry: Any, where: Path) -> LoopState:
        """Return the state in a checkpoint's entry. Raise CheckpointError unless it is complete."""
        try:
            return cls(
                int(entry["global_steps"]), int(entry["global_samples"]),
                int(entry["skipped_steps"]), dict(entry["lr_scheduler"]),
                dict(entry["client_state"]),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise CheckpointError(
                f"{where} has no complete state of a loop ({error!s:.200}): it is not as the "
                "engine of offload.deepspeed saves it; load another tag, or this one with "
                "engine.offload.load_checkpoint"
            ) from None

    @property
    def entry(self) -> dict[str, Any]:
        """The checkpoint's entry that `read` reads."""
        return {_KEY: vars(self)}


def save_all(
    engine: Engine, folder: Path, tag: str, state: LoopState, *, save_latest: bool, frozen: bool
) -> None:
    """Write a checkpoint with the loop's state; see `EngineModule.save_checkpoint`. Raise
    UnsupportedError for values that a checkpoint cannot keep."""
    path, ranks = folder / tag, engine.ranks
    is_first = ranks is None or ranks.rank == 0
    engine.save_checkpoint(path, state=state.entry if is_first else {}, frozen=frozen)
    with on_all(ranks, f"{folder / LATEST} was not written"):
        if is_first and save_latest:
            write_named(folder / LATEST, tag)


def load_saved(engine: Engine, folder: Path, tag: str | None) -> tuple[Path, LoopState] | None:
    """Load the checkpoint of a tag, or of the last one. Return its folder and the loop's state;
    None, with a warning, if there is no `latest`."""
    tag = last_tag(folder) if tag is None else tag
    if tag is None:
        _log.warning("%s is not there: nothing was loaded; name a tag", folder / LATEST)
        return None
    path = folder / tag
    with on_all(engine.ranks, f"{path} was not loaded"):
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
            return file.read(_MAX_TAG)

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
    adopt(path)
    with storage_errors("looking at", path):
        is_deepspeeds = any(path.glob("*model_states.pt"))
    if is_deepspeeds:
        raise CheckpointError(
            f"{path} was written by DeepSpeed, in pickles; `offload checkpoint import-deepspeed "
            f"{path} OUT --trust` makes a checkpoint of offload of it"
        )
    with CheckpointReader(path) as reader:
        LoopState.read(state_in(reader).get(_KEY), path)
