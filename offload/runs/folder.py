"""The folder of one run:

config.resolved.yaml     what ran, every default filled in
metrics.jsonl            one line per step
metrics.csv, tensorboard, wandb    the same, where train.loggers asks for it
plain.jsonl              the same of plain PyTorch, where train.compare_plain asks for it
prediction.json          what memory and a step were expected to take
measured.json            what they took, when the run has ended
trace.json               what happened when in a few of the steps, for ui.perfetto.dev
run.html                 all of it on one page
checkpoints/step-00000100        the engine's
checkpoints/step-00000100.json   the loop's; written last, so its presence says: complete
"""

from __future__ import annotations

import base64
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from offload.checkpoint.locks import OpenFolder, lock_folder, unlock
from offload.checkpoint.steps import step_of
from offload.config import OffloadConfig
from offload.config.fields import AUTO_MICRO_BATCHES
from offload.config.file import dump_yaml
from offload.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from offload.planning.choice.run_check import MEASURED, PREDICTION, Measured, Prediction
from offload.recording import Recorded, trace_json
from offload.runs.metrics import MetricsFile, write_whole
from offload.runs.page import PAGE, write_page
from offload.runs.page_step import TRACE
from offload.tiers.errors import CheckpointError, ConfigError, OffloadError, PathError

KEPT_CHECKPOINTS = 2
_log = logging.getLogger("offload")

# what a resumed run may not change: its data or its arithmetic would be another's
_FIXED_KEYS = (
    "seed", "precision", "gradient_accumulation_steps", "train.model", "train.text",
    "train.validation", "train.batch", "train.sequence",
)  # fmt: skip


@dataclass(frozen=True)
class LoopState:
    """Where the loop stands: the steps done and torch's generator."""

    step: int
    rng_state: bytes
    config: dict[str, Any]

    def to_json(self) -> str:
        """Text for the file beside the engine's checkpoint."""
        rng = base64.b64encode(self.rng_state).decode()
        return json.dumps({"step": self.step, "rng_state": rng, "config": self.config}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> LoopState:
        """The reverse of `to_json`; ValueError, KeyError or TypeError for other text."""
        values = json.loads(text)
        rng = base64.b64decode(values["rng_state"], validate=True)
        return cls(int(values["step"]), rng, dict(values["config"]))


class RunFolder:
    """Reads and writes one run's files; every write is complete or absent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = MetricsFile(path / "metrics.jsonl")
        self.plain_metrics = MetricsFile(path / "plain.jsonl")
        self.page = path / PAGE
        self._lock: OpenFolder | None = None
        self._config: dict[str, Any] = {}

    @classmethod
    def new(cls, path: Path) -> RunFolder:
        """A run to begin; the folder is there after `make`.

        ConfigError when `path` already holds a run, PathError when it cannot be made.
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
        """A run to go on with. ConfigError when there is none."""
        folder = cls(path)
        if not folder.metrics.path.exists():
            raise ConfigError(f"--resume: {path} holds no run; start one without --resume")
        return folder

    def make(self) -> None:
        """Create the folders, where they are missing, and keep other runs out. ConfigError where
        another one is under way."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(self.path)
        except BlockingIOError:
            raise ConfigError(
                f"--run-dir: another run is writing to {self.path}; wait for its end, or name "
                "another folder"
            ) from None
        except OSError as error:
            raise PathError(f"--run-dir: cannot create {self.path}: {error.strerror}") from None

    def close(self) -> None:
        """Write what is still to be written, the page last, and let other runs in."""
        try:
            self.metrics.close()
            self.plain_metrics.close()
            if self._lock is not None:
                self._write_page()
        finally:
            unlock(self._lock)
            self._lock = None

    def _write_page(self) -> None:
        try:
            write_page(self.path)
        except OffloadError as error:  # the run has ended well all the same
            _log.warning("no %s: %s", PAGE, error)

    def write_config(self, config: OffloadConfig, *, own_loop: bool = False) -> None:
        """Write config.resolved.yaml; of a user's `own_loop` without `train`, which it does not
        read."""
        self._config = config.to_dict()
        values = config.resolved().to_dict()
        if own_loop:
            del values["train"]
        write_whole(self.path / "config.resolved.yaml", dump_yaml(values))

    def write_prediction(self, prediction: Prediction) -> None:
        """Write prediction.json; what was measured before the run went on is not of it."""
        (self.path / MEASURED).unlink(missing_ok=True)
        write_whole(self.path / PREDICTION, prediction.to_json())

    def write_measured(self, measured: Measured) -> None:
        """Write measured.json."""
        write_whole(self.path / MEASURED, measured.to_json())

    def write_trace(self, recorded: Recorded) -> None:
        """Write trace.json."""
        write_whole(self.path / TRACE, trace_json(recorded))

    def loggers(self, steps_done: int, names: Sequence[str] = ()) -> list[Logger]:
        """The loggers of the steps that follow, metrics.jsonl first: of an earlier run each keeps
        the first `steps_done`. `names`: of train.loggers. ConfigError where a library is missing.
        """
        self.metrics.begin(steps_done)
        return [self.metrics, *(self._logger(name, steps_done) for name in dict.fromkeys(names))]

    def _logger(self, name: str, steps_done: int) -> Logger:
        if name == "csv":
            table = CSVLogger(self.path / "metrics.csv")
            table.keep(steps_done)
            return table
        if name == "tensorboard":
            return TensorBoardLogger(self.path / "tensorboard", purge_step=steps_done + 1)
        kept = self.path / "wandb-run-id"  # one run there, however often it is resumed
        if not kept.exists():
            write_whole(kept, f"{secrets.token_hex(4)}\n")
        return WandbLogger(
            id=kept.read_text().strip(), name=self.path.name, dir=str(self.path), resume="allow",
            config=self._config,
        )  # fmt: skip

    def checkpoint_path(self, step: int) -> Path:
        """Of the engine's checkpoint of `step`."""
        return self.checkpoints / f"step-{step:08d}"

    def prepare_checkpoint(self, step: int) -> Path:
        """A free path for the engine's checkpoint of `step`."""
        path = self.checkpoint_path(step)
        # left by a run that was killed, or the same step run again after a resume
        path.with_suffix(".json").unlink(missing_ok=True)
        _remove(path)
        return path

    def commit_checkpoint(self, state: LoopState) -> None:
        """Make the checkpoint of `state.step` count, and drop the oldest ones."""
        self.metrics.flush()  # a run that goes on from there finds all steps before it
        path = self.checkpoint_path(state.step)
        write_whole(path.with_suffix(".json"), state.to_json())
        committed = self._committed()
        for old in committed[:-KEPT_CHECKPOINTS]:
            old.with_suffix(".json").unlink()
        oldest = committed[-KEPT_CHECKPOINTS:][0]
        for old in self.checkpoints.glob("step-*"):  # also what a killed run did not get to
            if step_of(old) is not None and old < oldest:
                _remove(old)

    def latest_checkpoint(self) -> tuple[Path, LoopState]:
        """The newest complete checkpoint. CheckpointError when there is none."""
        committed = self._committed()
        if not committed:
            raise CheckpointError(
                f"{self.checkpoints} holds no complete checkpoint; set train.checkpoint_every, "
                "or start again without --resume in another folder"
            )
        path = committed[-1]
        try:
            return path, LoopState.from_json(path.with_suffix(".json").read_text())
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path.with_suffix('.json')} is damaged ({error}); delete it to fall back to "
                "the checkpoint before"
            ) from None

    def _committed(self) -> list[Path]:
        paths = (path.with_suffix("") for path in self.checkpoints.glob("step-*.json"))
        return sorted(path for path in paths if path.exists())


def check_same_run(before: dict[str, Any], now: OffloadConfig) -> None:
    """ConfigError naming each key that a resumed run may not change but does."""
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


def with_choices_of(now: OffloadConfig, before: dict[str, Any]) -> OffloadConfig:
    """`now` with what the run before chose where it was left open, as far as bits depend on it:
    micro-batches, and where states are kept differently per tier, which of them are where."""
    kept: list[str] = []
    if now.micro_batches == AUTO_MICRO_BATCHES:
        kept.append("micro_batches")
    if not now.optimizer.states.uniform:
        kept += [
            f"placement.{name}"
            for name, home in now.placement.homes().items()
            if home is None and name.endswith("optimizer")
        ]
        if now.optimizer.chunk == "auto":
            kept.append("optimizer.chunk")
    values = {key: _at(before, key) for key in kept}
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items() if value]
    return OffloadConfig.load(now, overrides)


def other_numbers(before: dict[str, Any], now: OffloadConfig) -> Iterator[str]:
    """Settings that a resumed run may and does change, although its numbers depend on them."""
    if now.optimizer.states.uniform:
        return
    current = now.to_dict()
    for key in (
        "placement.optimizer", "placement.experts.optimizer", "optimizer.chunk", "optimizer.states",
    ):  # fmt: skip
        was, value = _at(before, key), _at(current, key)
        if was != value:
            yield (
                f"{key}: {value} was {was}: optimizer.states differ by tier, so that the run goes "
                "on with other numbers than it would have had"
            )


def default_path(name: str, parent: Path = Path("runs")) -> Path:
    """A new `runs/NAME-date-time`."""
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates: Iterable[str] = (stem, *(f"{stem}-{count}" for count in range(2, 1000)))
    return next(path for text in candidates if not (path := parent / text).exists())


def _check_can_make(path: Path) -> None:
    """PathError now rather than after the model has been built."""
    whole = path.absolute()
    found = next(folder for folder in (whole, *whole.parents) if os.path.lexists(folder))
    if not os.path.isdir(found):  # Path.is_dir raises where a link leads to no access
        raise PathError(f"--run-dir: cannot create {path}: {found} is not a folder")
    if not os.access(found, os.W_OK | os.X_OK):
        raise PathError(f"--run-dir: cannot create {path}: {found} is not writable")


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
