"""`memest profiles`: every part that has a name, its figures and where they are from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from offload.tiers.units import format_bytes
from offload.tools.memest.hardware.parts import GPUS, LINKS, MACHINES, SSDS


def print_profiles() -> None:
    """All of them, on standard output."""
    Console().print(Group(*_tables()))


def _tables() -> Iterator[RenderableType]:
    gpus = [
        (g.name, format_bytes(g.nbytes), f"{g.flops_per_s['bf16'] / 1e12:,.4g}",
         f"{g.bytes_per_s / 1e9:,.0f}", g.link.name)
        for g in GPUS
    ]  # fmt: skip
    yield _table("GPUs", ["name", "memory", "bf16 TFLOP/s", "GB/s", "link"], gpus)
    yield _sources([(gpu.name, gpu.source) for gpu in GPUS])
    links = [(link.name, f"{link.bytes_per_s / 1e9:,.4g}") for link in LINKS]
    yield _table("Links", ["name", "GB/s each way"], links)
    yield _sources([(link.name, link.source) for link in LINKS])
    ssds = [
        (s.name, format_bytes(s.nbytes), f"{s.read_bytes_per_s / 1e9:.3g}",
         f"{s.write_bytes_per_s / 1e9:.3g}", f"{s.endurance_nbytes / 1e12:,.0f}")
        for s in SSDS
    ]  # fmt: skip
    header = ["name", "size", "read GB/s", "write GB/s", "rated TB written"]
    yield _table("SSDs, sustained", header, ssds)
    yield _sources([(ssd.name, ssd.source) for ssd in SSDS])
    machines = [
        (m.name, f"{m.gpus} x {m.gpu.name}", format_bytes(m.ram_nbytes),
         f"{m.ssds} x {m.ssd.name}" if m.ssd else "-")
        for m in MACHINES
    ]  # fmt: skip
    yield _table("Machines", ["name", "GPUs", "RAM", "disks"], machines)
    yield _sources([(machine.name, machine.source) for machine in MACHINES])


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title_justify="left",
        title=Text(title, style="bold"), title_style="",
    )  # fmt: skip
    for index, name in enumerate(header):
        number = index > 0 and rows[0][index][:1].isdigit() and " x " not in rows[0][index]
        table.add_column(name, justify="right" if number else "left", no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    return table


def _sources(named: Sequence[tuple[str, str]]) -> RenderableType:
    """`A, B: source` per line, parts of one source together."""
    by_source: dict[str, list[str]] = {}
    for name, source in named:
        by_source.setdefault(source, []).append(name)
    lines = [f"{', '.join(names)}: {source}" for source, names in by_source.items()]
    return Text("\n" + "\n".join(lines) + "\n", style="dim")
