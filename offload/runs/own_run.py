"""The files of a run that its engine fills, for `offload train` and for a user's own loop.

`offload.initialize(model, config, run_folder="runs/mine")` predicts the run before anything is
allocated; from then on every optimizer step adds a line to metrics.jsonl, also while
`engine.watch` shows it, and closing the engine writes measured.json. The files are those of
`offload train` (`folder.py`).
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from offload.config import OffloadConfig
from offload.loggers import Logger, Values
from offload.memory.tier_manager import compute_device, this_machine
from offload.planning.choice.planner import make_plan, resolved_config
from offload.planning.choice.run_check import Measured, Prediction, usual_step_s
from offload.planning.plan.workload import Workload
from offload.process.machine import peak_rss_nbytes, rank_here
from offload.runs.folder import RunFolder
from offload.runs.forecast import forecast
from offload.runs.watch import Watch
from offload.tiers.errors import ConfigError
from offload.zero.groups.discovery import discover

if TYPE_CHECKING:
    from offload.models.trained import Trained


class RunRecord:
    """A logger that measures a run, for measured.json: its peaks and its usual step."""

    def __init__(self, engine: Trained, folder: RunFolder) -> None:
        self.seconds = array("d")  # of each step
        self._engine = engine
        self._folder = folder

    def log(self, values: Values, step: int) -> None:
        """Note the seconds of a step."""
        self.seconds.append(values["seconds"])

    def measured(self) -> Measured:
        """Return the peaks and the usual step so far."""
        peaks = {name: tier.peak_nbytes for name, tier in self._engine.report().tiers.items()}
        usual_s = usual_step_s(self.seconds)
        return Measured(peaks, peak_rss_nbytes(), usual_s, len(self.seconds))

    def write(self, measured: Measured) -> None:
        """Write measured.json unless there was no step."""
        if measured.steps:
            self._folder.write_measured(measured)


class OwnRun:
    """The run of one engine. Make it before the engine, since it inspects the unchanged model."""

    def __init__(self, path: Path, model: nn.Module, config: OffloadConfig) -> None:
        """Raises ConfigError if the folder already holds a run."""
        self._folder = RunFolder(path, writes=rank_here() == 0)
        if self._folder.metrics.path.exists():
            raise ConfigError(
                f"run_folder: {path} already holds a run; name another folder, or remove it"
            )
        self._prediction = predicted(model, config)
        self._cut_short = self._stopped = False

    def begin(self, engine: Trained) -> None:
        """Create the folder and its loggers before the first step."""
        self._engine = engine
        self._folder.make()
        self._folder.write_config(engine.config, own_loop=True)
        self._folder.write_prediction(self._prediction)
        self._record = RunRecord(engine, self._folder)
        self.loggers: list[Logger] = [*self._folder.loggers(0), self._record]
        engine.before_close(self._end)
        self.watch()

    def watch(self) -> None:
        """Log to the folder while no other watch of the engine is active."""
        self._engine.watching = Watch(
            self._engine, show=False, of_folder=self.loggers, waits_for_log=False
        )

    def ended_by(self, kind: type[BaseException], *, all_saved: bool) -> None:
        """Record that an error or an interrupt ends the loop."""
        self._stopped = issubclass(kind, KeyboardInterrupt) and all_saved
        self._cut_short = not self._stopped

    def _end(self) -> None:
        try:
            measured = self._record.measured()
            self._record.write(replace(measured, stopped=self._stopped, cut_short=self._cut_short))
        finally:
            self._folder.close()


def predicted(model: nn.Module, config: OffloadConfig) -> Prediction:
    """Predict the plan that `initialize` makes of `config`, in a loop known only by `written_for`.
    Where that is not possible, the prediction is empty and says why."""
    config = config.settled()
    device, written_for = compute_device(config), config.written_for
    if dist.is_initialized() and dist.get_world_size() > 1:
        return _nothing("nothing is predicted for one of several ranks in a loop of one's own")
    if written_for is None:
        return _nothing(
            "nothing is predicted for a loop whose batch is not known; a file of "
            "`memest MODEL --write FILE` says it under written_for"
        )
    discovery = discover(model, config.groups.blocks, experts=config.splits_experts(1))
    shape = discovery.stored(config.stored).shape()
    plan = make_plan(config, shape, this_machine(config.nvme, device))
    work = Workload(written_for.batch, written_for.sequence, config.gradient_accumulation_steps)
    found = forecast(resolved_config(config, plan, device.type), model, work)
    if found is None:
        return _nothing("nothing is predicted for a model whose passes cannot be traced")
    prediction = found.prediction()
    if found.timed:
        return prediction
    why = "step: not predicted: this machine's speed has not been measured; `memest calibrate` does"
    return replace(prediction, missing=(why,))


def _nothing(why: str) -> Prediction:
    return Prediction({}, None, None, missing=(why,))
