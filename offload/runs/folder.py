"""The folder of one run:

config.resolved.yaml     the configuration, with every default filled in
metrics.jsonl            one line per step
prediction.json          the expected memory and step time
measured.json            the measured memory and step time, once the run has ended
checkpoints/step-000100          checkpoints of the engine, with the loop's state
"""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.checkpoint import latest, prune, step_path
from offload.checkpoint.format.disk import OpenFile, lock_folder, make_folder, unlock, write_named
from offload.checkpoint.format.reader import CheckpointReader
from offload.checkpoint.format.user_state import state_in
from offload.config import OffloadConfig
from offload.config.file import dump_yaml
from offload.loggers import Logger, Values
from offload.process.machine import peak_rss_nbytes
from offload.runs.metrics import (
    MEASURED,
    PREDICTION,
    Measured,
    MetricsFile,
    Prediction,
    usual_step_s,
)
from offload.tiers.errors import CheckpointError, ConfigError, PathError

if TYPE_CHECKING:
    from offload.models.trained import Trained

# what a resumed run may not change: its data or its arithmetic would be another's
_FIXED_KEYS = (
    "seed", "precision", "gradient_accumulation_steps", "train.model", "train.text",
    "train.validation", "train.batch", "train.sequence",
)  # fmt: skip


@dataclass(frozen=True)
class SavedRun:
    """The point from which a run can resume: its last checkpoint, steps done and configuration."""

    path: Path
    step: int
    config: dict[str, Any]


def _saved_run(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration and the `state=` of a checkpoint. CheckpointError if it has no run of its
    own."""
    with CheckpointReader(path) as reader:
        record = reader.manifest.run
        if record is None or record.config is None:
            raise CheckpointError(f"{path} has no state of a run: no engine has saved it")
        return record.config, state_in(reader)


class RunFolder:
    """Reads and writes the files of one run; every write is complete or absent. Of several ranks
    the first one writes; with `writes=False` nothing is changed."""

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path = path
        self._writes = writes
        self.checkpoints = path / "checkpoints"
        self.metrics = MetricsFile(path / "metrics.jsonl")
        self._lock: OpenFile | None = None

    @classmethod
    def new(cls, path: Path) -> RunFolder:
        """Return the folder of a new run; it exists after `make`.

        Raises ConfigError if `path` already holds a run, PathError if it cannot be made.
        """
        folder = cls(path)
        if folder.metrics.path.exists():
            raise ConfigError(
                f"--run-dir: {path} already holds a run; add --resume to go on with it, "
                "or name another folder"
            )
        _check_can_make(path)
        return folder

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """Return the folder of a run to resume. Raise ConfigError if there is none."""
        folder = cls(path)
        if not folder.metrics.path.exists():
            raise ConfigError(f"--resume: {path} holds no run; start one without --resume")
        return folder

    def make(self) -> None:
        """Create missing folders and lock out other runs. Raise ConfigError if another run is under
        way."""
        if not self._writes:
            return
        try:
            make_folder(self.checkpoints, parents=True)
            self._lock = lock_folder(self.path)
        except BlockingIOError:
            raise ConfigError(
                f"--run-dir: another run is writing to {self.path}; wait for its end, or name "
                "another folder"
            ) from None
        except OSError as error:
            raise PathError(f"--run-dir: cannot create {self.path}: {error.strerror}") from None

    def close(self) -> None:
        """Write pending output, and release the lock."""
        try:
            self.metrics.close()
        finally:
            unlock(self._lock)
            self._lock = None

    def write_config(self, config: OffloadConfig) -> None:
        """Write config.resolved.yaml."""
        self._write("config.resolved.yaml", dump_yaml(config.resolved().to_dict()))

    def write_prediction(self, prediction: Prediction) -> None:
        """Write prediction.json, and remove the measurement of the run before it was resumed."""
        if self._writes:
            (self.path / MEASURED).unlink(missing_ok=True)
        self._write(PREDICTION, prediction.to_json())

    def write_measured(self, measured: Measured) -> None:
        """Write measured.json unless there was no step."""
        if measured.steps:
            self._write(MEASURED, measured.to_json())

    def _write(self, name: str, text: str) -> None:
        if self._writes:
            write_named(self.path / name, text)

    def loggers(self, steps_done: int) -> list[Logger]:
        """Return the loggers of the following steps: metrics.jsonl, of which `steps_done` steps of
        an earlier run are kept."""
        if not self._writes:
            return []
        self.metrics.begin(steps_done)
        return [self.metrics]

    def checkpoint_path(self, step: int) -> Path:
        """The path of the checkpoint of `step`."""
        return step_path(self.checkpoints, step)

    def keep(self, keep_last: int, keep_every: int | None) -> None:
        """Remove old checkpoints, see `prune`."""
        if self._writes:
            prune(self.checkpoints, keep_last, keep_every)

    def latest_checkpoint(self) -> SavedRun:
        """Return the newest complete checkpoint. Raise CheckpointError if there is none."""
        path = latest(self.checkpoints)
        if path is None:
            raise CheckpointError(
                f"{self.checkpoints} holds no complete checkpoint; set train.checkpoint_every, "
                "or start again without --resume in another folder"
            )
        config, state = _saved_run(path)
        if not isinstance(state.get("step"), int):
            raise CheckpointError(f"{path} is none of `offload train`; name its run folder")
        return SavedRun(path, state["step"], config)


class RunRecord:
    """A logger that measures a run, for measured.json: its peaks and its usual step."""

    def __init__(self, engine: Trained) -> None:
        self.seconds = array("d")  # of each step
        self._engine = engine

    def log(self, values: Values, step: int) -> None:
        """Note the seconds of a step."""
        self.seconds.append(values["seconds"])

    def measured(self) -> Measured:
        """Return the peaks and the usual step so far."""
        peaks = {name: tier.peak_nbytes for name, tier in self._engine.report().tiers.items()}
        usual_s = usual_step_s(self.seconds)
        return Measured(peaks, peak_rss_nbytes(), usual_s, len(self.seconds))


def check_same_run(before: dict[str, Any], now: OffloadConfig) -> None:
    """Raise ConfigError naming each key that differs although a resumed run may not change it."""
    current = now.to_dict()
    changed = [
        f"{key}: {_at(current, key)} was {_at(before, key)}"
        for key in _FIXED_KEYS
        if _at(current, key) != _at(before, key)
    ]
    if changed:
        raise ConfigError(
            "--resume: the checkpoint is of another run; restore these keys, or start anew:\n"
            + "\n".join(changed)
        )


def _at(values: Any, key: str) -> Any:
    """Return the value of `section.key`; None if there is none."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def default_path(name: str) -> Path:
    """Return a new path `runs/NAME-date-time`."""
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = (stem, *(f"{stem}-{count}" for count in range(2, 1000)))
    return next(path for text in candidates if not (path := Path("runs") / text).exists())


def _check_can_make(path: Path) -> None:
    """Raise PathError early if the folder cannot be made, rather than after building the model."""
    whole = path.absolute()
    existing = next(folder for folder in (whole, *whole.parents) if os.path.lexists(folder))
    if not os.path.isdir(existing):  # Path.is_dir raises where a link leads to no access
        raise PathError(f"--run-dir: cannot create {path}: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PathError(f"--run-dir: cannot create {path}: {existing} is not writable")
