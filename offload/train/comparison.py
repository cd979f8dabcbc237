"""The comparison of a run with the same run in plain PyTorch, both measured in the same way."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from offload.config import OffloadConfig
from offload.display.console import table
from offload.display.training import Run
from offload.process.child import Child, ChildFailed
from offload.runs.folder import RunFolder
from offload.runs.metrics import MetricsFile, StepMetrics
from offload.tiers.units import format_bytes
from offload.train.summary import display_on

PROGRAM = "offload.train.plain:train"


@dataclass(frozen=True)
class Process:
    """One of the two processes: a row per step, and the most bytes in its RAM and on disk."""

    rows: Sequence[StepMetrics]
    peak_nbytes: int
    disk_nbytes: int = 0


def cannot_compare(config: OffloadConfig, ranks: int, *, resumed: bool) -> str:
    """The reason why plain PyTorch cannot train the same; empty if it can."""
    if resumed:
        return "not of a run that was resumed: plain PyTorch would have to start anew"
    if ranks > 1:
        return "not of several ranks"
    if config.optimizer.type != "adamw" or config.optimizer.amsgrad:
        return "only of optimizer.type: adamw without amsgrad"
    if config.precision == "fp16":
        return "only of precision fp32 or bf16"
    return ""


def compare_with_plain(
    config: OffloadConfig, ours: Process, folder: RunFolder, console: Console, *, ranks: int,
    resumed: bool,
) -> None:  # fmt: skip
    """Train the same in plain PyTorch, and print both side by side, with how closely their losses
    agree; or print the reason why it cannot be trained."""
    why_not = cannot_compare(config, ranks, resumed=resumed)
    if why_not:
        console.print(f"train.compare_plain: {why_not}", soft_wrap=True)
        return
    console.print("\nthe same in plain PyTorch, in a process of its own:", style="bold")
    try:
        plain = run_plain(config, folder.plain_metrics, console)
    except ChildFailed as error:  # it may need more memory than there is; offload has trained
        console.print(f"plain PyTorch {error.brief}", style="yellow", soft_wrap=True)
        return
    console.print()
    console.print(comparison_table(ours, plain))
    console.print(agreement(ours.rows, plain.rows))


def run_plain(config: OffloadConfig, file: MetricsFile, console: Console) -> Process:
    """Train in a separate process, shown on `console`, with its rows in `file`. Blocks until done;
    raises ChildFailed with its output if it fails."""
    steps = config.train.steps
    rows = []
    file.begin(0)
    display = display_on(console, Run(0, steps))
    with tempfile.TemporaryDirectory() as folder, closing(display):
        child = Child("plain PyTorch", PROGRAM, {"config": config.to_dict()}, Path(folder))
        try:
            for _ in range(steps):
                row = StepMetrics(**child.answer())
                rows.append(row)
                for logger in (file, display):
                    logger.log(row.values(), row.step)
            found = child.answer()
            child.close()
        finally:
            child.kill()
    return Process(rows, found["peak_nbytes"])


def comparison_table(ours: Process, plain: Process) -> Table:
    """Return a table of the memory, seconds and loss of both."""
    shown = table("", "offload", "plain PyTorch", numbers=(1, 2), title="beside plain PyTorch")
    texts: dict[str, Callable[[Process], str]] = {
        "peak RAM of the process (RSS)": lambda each: format_bytes(each.peak_nbytes),
        "on disk": lambda each: format_bytes(each.disk_nbytes),
        "seconds per step (median)": lambda each: f"{median(r.seconds for r in each.rows):.3f}",
        "loss of the last step": lambda each: f"{each.rows[-1].loss:.6f}",
    }
    for name, text in texts.items():
        shown.add_row(name, text(ours), text(plain))
    return shown


def agreement(ours: Sequence[StepMetrics], plain: Sequence[StepMetrics]) -> str:
    """A sentence on how closely the losses of both agree, to the bit or to rounding."""
    differences = [abs(a.loss - b.loss) for a, b in zip(ours, plain, strict=True)]
    equal = sum(difference == 0 for difference in differences)
    if equal == len(differences):
        return f"the losses of all {equal} steps are those of plain PyTorch, bit for bit"
    return (
        f"loss against plain PyTorch: equal to the last bit in {equal} of {len(differences)} "
        f"steps, at most {max(differences):.1g} apart in the others (rounding: offload's AdamW "
        "fuses multiply and add; where states live changes no bit)"
    )
