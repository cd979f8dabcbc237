"""`memest calibrate`: what this machine does."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from offload.display.console import PlainConsole, table
from offload.display.words import counted, duration
from offload.planning.machine.baseline import machine_baseline
from offload.planning.machine.calibration import machine_speeds
from offload.planning.machine.speeds import Speeds
from offload.tiers.errors import PathError
from offload.tiers.units import format_bytes


def measure_again(paths: Sequence[Path]) -> None:
    """Measure and print. Raise PathError, before measuring, if a folder cannot be used."""
    for path in paths:
        _check_folder(path.expanduser())
    print("measuring this machine; close what else is busy ...", file=sys.stderr)
    shown = to_table(machine_speeds(paths, remeasure=True))
    for precision in ("fp32", "bf16", "fp16"):
        baseline = machine_baseline(precision, remeasure=True)
        shown.add_row(f"interpreter and libraries, {precision}", format_bytes(baseline.ram_nbytes))
    PlainConsole().print(shown)


def _check_folder(path: Path) -> None:
    """Raise PathError unless files can be created in the folder."""
    if not path.exists():
        raise PathError(f"{path} does not exist; name a folder on the disk to be measured")
    if not path.is_dir():
        raise PathError(f"{path} is not a folder; name one on the disk to be measured")
    if not os.access(path, os.W_OK | os.X_OK):
        raise PathError(f"{path} cannot be written; name a folder for swap files")


def to_table(speeds: Speeds) -> Table:
    """Return a table with one line per rate."""
    shown = table("", "", numbers={1})
    shown.show_header = False
    for precision, rate in speeds.matmul_flops_per_s.items():
        shown.add_row(f"matrix products in {precision}", f"{rate / 1e12:,.3g} TFLOP/s")
    for states, rate in speeds.optimizer_parameters_per_s.items():
        shown.add_row(f"optimizer with {states} states", f"{counted(rate)} parameters/s")
    links = {
        "memory of the computing device": speeds.compute_bytes_per_s,
        "optimizer over the memory bus": speeds.host_bytes_per_s,
        "nvme read": speeds.nvme_read_bytes_per_s,
        "nvme write": speeds.nvme_write_bytes_per_s,
        "nvme, both at once": speeds.nvme_mixed_bytes_per_s,
        "host to device": speeds.host_to_device_bytes_per_s,
        "device to host": speeds.device_to_host_bytes_per_s,
    }
    for name, rate in links.items():
        if rate:
            shown.add_row(name, f"{rate / 1e9:,.3g} GB/s")
    shown.add_row("one operation", duration(speeds.operation_s))
    shown.add_row("one call of the optimizer", duration(speeds.update_call_s))
    return shown
