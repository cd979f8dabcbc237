"""One picture of a run: the loss above, the bytes in each tier below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from offload.runs.metrics import StepMetrics


def plot_available() -> bool:
    """Whether matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def write_plot(path: Path, metrics: Sequence[StepMetrics]) -> None:
    """Draw `metrics` into the PNG at `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    loss_axes, tier_axes = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    steps = [row.step for row in metrics]
    loss_axes.plot(steps, [row.loss for row in metrics], label="training", linewidth=1)
    evaluated = [row for row in metrics if row.validation_loss is not None]
    if evaluated:
        losses = [row.validation_loss for row in evaluated]
        loss_axes.plot([row.step for row in evaluated], losses, "o-", label="validation")
    loss_axes.set_ylabel("loss (nats per byte)")
    loss_axes.legend()
    for tier in metrics[0].tiers if metrics else ():
        held = [row.tiers.get(tier, 0) / (1 << 20) for row in metrics]
        tier_axes.plot(steps, held, label=tier, drawstyle="steps-post")
    tier_axes.set_ylabel("held (MiB)")
    tier_axes.set_xlabel("step")
    tier_axes.set_ylim(bottom=0)
    if tier_axes.lines:
        tier_axes.legend()
    figure.savefig(path, dpi=110)
