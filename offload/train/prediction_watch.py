"""Compares a run's prediction with its measurement: one line after the first steps, and advice if
they differ.

The line is printed once, as soon as a few steps have settled; the folder gets prediction.json
before the first step and measured.json after the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from offload.planning.choice.run_check import (
    SETTLING_STEPS,
    Measured,
    Prediction,
    StepTimes,
    compare,
)
from offload.process.machine import OtherPrograms, peak_rss_nbytes
from offload.runs.folder import RunFolder

if TYPE_CHECKING:
    from offload.engine import Engine
    from offload.report import Report, TierReport
    from offload.runs.forecast import Forecast

_STEPS = SETTLING_STEPS + 3  # after which the line is printed


class PredictionWatch:
    """A logger of one run. Without a forecast it only writes the measurement."""

    def __init__(
        self, folder: RunFolder, console: Console, found: Forecast | None, engine: Engine,
        steps: int,
    ) -> None:  # fmt: skip
        """`steps` is the run's total, including those done before it was resumed."""
        self._folder = folder
        self._console = console
        self._forecast = found
        self._engine = engine
        self._steps = steps
        self._prediction: Prediction | None = None
        self._times = StepTimes()
        if found is not None:
            self._prediction = found.prediction()

    def begin(self) -> None:
        """Write prediction.json before the first step."""
        self._others = OtherPrograms()
        if self._prediction is not None:
            self._folder.write_prediction(self._prediction)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Print the line once enough steps have been taken, or at the last one."""
        self._times.note(values["seconds"])
        few = self._times.count < _STEPS
        if self._times.count == _STEPS or (step == self._steps and few):
            self._say(self._engine.report())

    def ended(self, report: Report, *, all_saved: bool | None = None) -> None:
        """Write measured.json after the last step, unless there was none. `all_saved` tells whether
        the steps of an interrupted run are saved."""
        if self._times.count:
            measured = self._measured(report.tiers)
            if all_saved is not None:
                measured = replace(measured, stopped=all_saved, cut_short=not all_saved)
            self._folder.write_measured(measured)

    def _say(self, report: Report) -> None:
        measured = self._measured(report.tiers)
        if self._prediction is None or self._forecast is None:
            return
        self._console.print(compare(self._prediction, measured).line, soft_wrap=True)
        if self._prediction.seconds is not None and self._others.note:
            self._console.print(f"note: {self._others.note}", soft_wrap=True)
        if measured.seconds is None:
            return
        for change in self._forecast.advice(measured.seconds):
            self._console.print(f"advice: {change.text}", soft_wrap=True)

    def _measured(self, tiers: Mapping[str, TierReport]) -> Measured:
        peaks = {name: tier.peak_nbytes for name, tier in tiers.items()}
        return Measured(peaks, peak_rss_nbytes(), self._times.usual_s, self._times.count)
