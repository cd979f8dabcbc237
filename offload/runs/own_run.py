"""The run folder of a user's own loop: the files for `memest check`, written by the engine.

`offload.initialize(model, config, run_folder="runs/mine")` predicts the run before anything is
allocated; from then on every optimizer step adds a line to metrics.jsonl, also while
`engine.watch` shows it, and closing the engine writes measured.json. The files are those of
`offload train` (`folder.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from offload.config import OffloadConfig
from offload.loggers import Logger, Values
from offload.memory.tier_manager import compute_device, this_machine
from offload.planning.activations.facts import NOTHING
from offload.planning.activations.trace import trace_activations
from offload.planning.choice.planner import make_plan, resolved_config
from offload.planning.choice.run_check import Measured, Prediction, StepTimes
from offload.planning.machine.baseline import Baseline
from offload.planning.plan.workload import Workload
from offload.planning.step.memory import PlannedMemory
from offload.process.machine import peak_rss_nbytes, rank_here
from offload.runs.folder import RunFolder
from offload.runs.forecast import forecast_of
from offload.runs.step_recorder import StepRecorder
from offload.runs.watch import Watch
from offload.runs.world import FollowersFolder
from offload.tiers.errors import ConfigError, UnsupportedError
from offload.zero.groups.discovery import discover

if TYPE_CHECKING:
    from offload.engine import Engine


class OwnRun:
    """The run of one engine. Make it before the engine, since it inspects the unchanged model."""

    def __init__(self, path: Path, model: nn.Module, config: OffloadConfig) -> None:
        """Raises ConfigError if the folder already holds a run."""
        self._folder = FollowersFolder(path) if rank_here() else RunFolder(path)
        if self._folder.metrics.path.exists():
            raise ConfigError(
                f"run_folder: {path} already holds a run; name another folder, or remove it"
            )
        self._prediction = predicted(model, config)
        self._times = StepTimes()
        self._cut_short = self._stopped = False

    def begin(self, engine: Engine) -> None:
        """Create the folder and its loggers before the first step."""
        self._engine = engine
        self._folder.make()
        self._folder.write_config(engine.config, own_loop=True)
        self._folder.write_prediction(self._prediction)
        self._recorder = StepRecorder(engine, self._folder)
        self.loggers: list[Logger] = [*self._folder.loggers(0), self, self._recorder]
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

    def stop_recording(self) -> None:
        """Write the recording made so far, and stop recording."""
        self._recorder.close()

    def log(self, values: Values, step: int) -> None:
        """Note the seconds of a step."""
        self._times.note(values["seconds"])

    def _end(self) -> None:
        try:
            self._recorder.close()
            if self._times.count:
                peaks = {n: tier.peak_nbytes for n, tier in self._engine.report().tiers.items()}
                measured = Measured(
                    peaks, peak_rss_nbytes(), self._times.usual_s, self._times.count,
                    cut_short=self._cut_short, stopped=self._stopped,
                )  # fmt: skip
                self._folder.write_measured(measured)
        finally:
            self._folder.close()


def predicted(model: nn.Module, config: OffloadConfig) -> Prediction:
    """Predict the plan of `config` in a loop known only by `written_for`, with the reason for each
    figure that cannot be predicted."""
    config = config.settled()
    device = compute_device(config)
    if dist.is_initialized() and dist.get_world_size() > 1:
        return Prediction({}, None, None, None, {}, missing=(_RANKS,))
    discovery = discover(model, config.groups.blocks, experts=config.splits_experts(1))
    shape = discovery.stored(config.stored).shape()
    hardware = this_machine(config.nvme, device)
    plan = make_plan(config, shape, hardware)
    config = resolved_config(config, plan, device.type)
    written_for, why = config.written_for, _NO_BATCH
    if written_for is not None:
        work = Workload(written_for.batch, written_for.sequence, config.gradient_accumulation_steps)
        try:
            facts = trace_activations(model, config, work, device=device.type)
        except UnsupportedError as error:
            why = f"RSS and step: not predicted: {error}"
        else:
            found = forecast_of(config, shape, lambda config: facts, work)
            if found is not None:
                prediction = found.prediction()
                return prediction if found.timed else replace(prediction, missing=(_NO_SPEED,))
    work = Workload(1, 1, config.gradient_accumulation_steps)
    memory = PlannedMemory(plan, config, shape, NOTHING, work, Baseline(0)).estimate()
    tiers = {str(tier): nbytes for tier, nbytes in memory.ledger_peaks.items()}
    if plan.activations is not None:
        why += "; nor what tiers hold of activations"
        tiers = {name: held for name, held in tiers.items() if name == "device"}
    bounds = tuple(sorted(str(tier) for tier in memory.bounds if str(tier) in tiers))
    return Prediction(tiers, None, None, None, {}, bounds, (why,))


_RANKS = "nothing is predicted for one of several ranks in a loop of one's own"
_NO_BATCH = (
    "RSS and step: not predicted: how large a batch is, is not known; a file of "
    "`memest MODEL --write FILE` says it under written_for"
)
_NO_SPEED = (
    "step: not predicted: this machine's speed has not been measured; `memest calibrate` does that"
)
