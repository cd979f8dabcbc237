"""The summary that `offload train` shows at the end of a run: a table and lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from torch import nn

from offload.config import OffloadConfig
from offload.display.console import table
from offload.display.words import duration
from offload.gpt import parameter_count
from offload.tiers.tier import TIERS
from offload.tiers.units import format_bytes

if TYPE_CHECKING:
    from offload.report import TierTraffic


def plain_state_nbytes(config: OffloadConfig, parameters: int) -> int:
    """Bytes of parameters, gradients, master weights and optimizer states under plain PyTorch.

    8 per parameter, fp32 4 + 4 or mixed precision 2 + 2 + 4 (master), and 4 for each state.
    """
    return parameters * (8 + 4 * len(config.optimizer.state_names))


def summary_table(
    config: OffloadConfig, report: TierTraffic, baseline_nbytes: int, peak_nbytes: int,
    model: nn.Module | None,
) -> Table:  # fmt: skip
    """Return the peaks per tier against budgets, the peak RSS, of which `baseline_nbytes` were
    there before the model and its tiers, and the bytes that the states of `model` would take under
    plain PyTorch (None: those were measured)."""
    heads = ("tier", "peak", "budget", "used", "holds at the end")
    shown = table(*heads, numbers=range(1, 4), title="memory")
    for name in map(str, TIERS):
        tier = report.tiers[name]
        share = f"{tier.peak_nbytes / tier.budget_nbytes:.0%}" if tier.budget_nbytes else "-"
        budget = format_bytes(tier.budget_nbytes)
        held = _sizes(tier.by_class) or "-"
        shown.add_row(name, format_bytes(tier.peak_nbytes), budget, share, held)
    # without a GPU, `device` is in RAM, too
    names = ("host", "device") if config.device == "cpu" else ("host",)
    in_ram = sum(report.tiers[name].peak_nbytes for name in names)
    rest = format_bytes(max(0, peak_nbytes - in_ram))
    shown.add_row(
        "peak RSS", format_bytes(peak_nbytes), "", "",
        f"{format_bytes(in_ram)} in the tiers above; {rest} are Python, PyTorch "
        f"({format_bytes(baseline_nbytes)} before the model), kernels and activations",
    )  # fmt: skip
    if model is None:
        return shown
    parameters = parameter_count(model)
    plain = plain_state_nbytes(config, parameters)
    shown.add_row(
        "plain PyTorch", format_bytes(plain), "", "",
        f"states alone: {plain // parameters} bytes x {parameters:,} parameters; "
        "libraries and activations come on top as above",
    )  # fmt: skip
    return shown


def loss_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """The losses of the first and last step: `loss: 5.571 -> 2.010 in 40 steps`."""
    losses = [row.get("loss") for row in (rows[0], rows[-1])]  # None where it was not finite
    first, last = (math.nan if loss is None else loss for loss in losses)
    line = f"loss: {first:.3f} -> {last:.3f} in {len(rows)} steps"
    validation = rows[-1].get("validation_loss")
    return line if validation is None else f"{line}, validation {validation:.3f}"


def moved_line(moved: Mapping[str, int]) -> str:
    """The moved bytes: `moved: nvme read 1.2 GiB, nvme write 0.6 GiB`."""
    return f"moved: {_sizes(moved) or 'nothing'}"


def waits_line(waits: Mapping[str, float]) -> str:
    """The waits of the computing thread: `waited: nvme 1.23 s`."""
    parts = [f"{name} {duration(seconds)}" for name, seconds in waits.items() if seconds]
    return f"waited: {', '.join(parts) or 'for nothing'}"


def _sizes(nbytes_of: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(n)}" for name, n in nbytes_of.items() if n)
