"""`memest profiles`: every known part, its figures and their sources."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from offload.tiers.units import format_bytes
from offload.tools.memest.hardware.parts import GPUS, LINKS, MACHINES, SSDS
from offload.tools.memest.show.tables import ruled, show


def print_profiles() -> None:
    """Print all parts to standard output."""
    gpus = ruled("name", "memory", "bf16 TFLOP/s", "GB/s", "link", title="GPUs", left=["link"])
    for g in GPUS:
        rates = f"{g.flops_per_s['bf16'] / 1e12:,.4g}", f"{g.bytes_per_s / 1e9:,.0f}"
        gpus.add_row(g.name, format_bytes(g.nbytes), *rates, g.link.name)
    _show(gpus, [(gpu.name, gpu.source) for gpu in GPUS])
    links = ruled("name", "GB/s each way", title="Links")
    for link in LINKS:
        links.add_row(link.name, f"{link.bytes_per_s / 1e9:,.4g}")
    _show(links, [(link.name, link.source) for link in LINKS])
    heads = ("name", "size", "read GB/s", "write GB/s", "rated TB written")
    ssds = ruled(*heads, title="SSDs, sustained")
    for s in SSDS:
        rates = f"{s.read_bytes_per_s / 1e9:.3g}", f"{s.write_bytes_per_s / 1e9:.3g}"
        ssds.add_row(s.name, format_bytes(s.nbytes), *rates, f"{s.endurance_nbytes / 1e12:,.0f}")
    _show(ssds, [(ssd.name, ssd.source) for ssd in SSDS])
    machines = ruled("name", "GPUs", "RAM", "disks", title="Machines", left=["GPUs", "disks"])
    for m in MACHINES:
        drives = f"{m.ssds} x {m.ssd.name}" if m.ssd else "-"
        machines.add_row(m.name, f"{m.gpus} x {m.gpu.name}", format_bytes(m.ram_nbytes), drives)
    _show(machines, [(machine.name, machine.source) for machine in MACHINES])


def _show(table: Table, named: Sequence[tuple[str, str]]) -> None:
    """Print a table, and a line `A, B: source` for the parts of each source."""
    by_source: dict[str, list[str]] = {}
    for name, source in named:
        by_source.setdefault(source, []).append(name)
    lines = [f"{', '.join(names)}: {source}" for source, names in by_source.items()]
    show(table, Text("\n" + "\n".join(lines) + "\n", style="dim"))
