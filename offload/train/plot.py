"""One picture of a run: the loss, the bytes in each tier, and the memory of the process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from offload.runs.metrics import StepMetrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 1 << 20


def plot_available() -> bool:
    """Whether matplotlib is installed."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def write_plot(
    path: Path, ours: Sequence[StepMetrics], budgets: Mapping[str, int],
    plain: Sequence[StepMetrics] = (),
) -> None:  # fmt: skip
    """Draw the rows of a run into the PNG at `path`, with those of plain PyTorch if there are any.
    `budgets`: bytes by tier."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="constrained")
    loss, tiers, process = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1.4, 1))
    _draw_loss(loss, ours, plain)
    _draw_tiers(tiers, ours, budgets)
    _draw_process(process, ours, plain)
    process.set_xlabel("step")
    for axes in (loss, tiers, process):
        axes.grid(visible=True, alpha=0.25)
        if axes.lines:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path, dpi=110)


def _draw_loss(axes: Axes, ours: Sequence[StepMetrics], plain: Sequence[StepMetrics]) -> None:
    steps = [row.step for row in ours]
    axes.plot(
        steps, [row.loss for row in ours], label="offload", color="C0", linewidth=4, alpha=0.5
    )
    if plain:  # thin and dashed on top of ours: one sees both where they coincide
        losses = [row.loss for row in plain]
        axes.plot([row.step for row in plain], losses, "k--", label="plain PyTorch", linewidth=1)
        apart = max(abs(a.loss - b.loss) for a, b in zip(ours, plain, strict=False))
        axes.set_title(f"the same training, offloaded and not: losses at most {apart:.1g} apart")
    evaluated = [row for row in ours if row.validation_loss is not None]
    if evaluated:
        losses = [float(row.validation_loss or 0.0) for row in evaluated]
        axes.plot([row.step for row in evaluated], losses, "C1o-", label="validation")
    axes.set_ylabel("loss (nats per byte)")


def _draw_tiers(
    axes: Axes, rows: Sequence[StepMetrics], budgets: Mapping[str, int]
) -> None:  # fmt: skip
    """Each tier's bytes as a line, its budget as a dashed one of the same colour."""
    steps = [row.step for row in rows]
    for number, tier in enumerate(rows[0].tiers if rows else ()):
        held = [row.tiers.get(tier, 0) / _MIB for row in rows]
        color = f"C{number}"
        axes.plot(steps, held, label=f"{tier} holds", color=color, drawstyle="steps-post")
        if budgets.get(tier) and max(held):
            budget = budgets[tier] / _MIB
            axes.axhline(budget, label=f"budget.{tier}", color=color, linestyle="--", linewidth=1)
    axes.set_ylabel("tiers (MiB)")
    axes.set_ylim(bottom=0)


def _draw_process(axes: Axes, ours: Sequence[StepMetrics], plain: Sequence[StepMetrics]) -> None:
    for rows, name, style in ((ours, "offload", "C0-"), (plain, "plain PyTorch", "k--")):
        if rows:
            held = [row.rss_nbytes / _MIB for row in rows]
            axes.plot([row.step for row in rows], held, style, label=name)
    axes.set_ylabel("RAM of the\nprocess (MiB)")
    axes.set_ylim(bottom=0)
