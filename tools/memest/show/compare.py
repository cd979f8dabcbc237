"""The answer of `memest compare`: a table and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from offload.pages.page import Cell
from offload.planning.plan.estimate import Estimate
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes
from offload.tools.memest.show import view
from offload.tools.memest.show.render_json import places
from offload.tools.memest.show.tables import bullets, ruled
from offload.tools.memest.systems.compare import Row

NODE_TITLES = {
    **view.PLACE_TITLES, Tier.HOST: "RAM of a node", Tier.NVME: "Disk of a node",
}  # fmt: skip


_NO_STEPS = "steps are compared on one GPU (or CPU) whose speed is known; `memest MODEL` has ours"


@dataclass(frozen=True)
class Comparison:
    """The estimate of offload, and the rows of all systems, offload's last."""

    ours: Estimate
    rows: Sequence[Row]

    @property
    def tiers(self) -> Sequence[tuple[Tier, int]]:
        """The places that exist, and their capacities."""
        held = {tier: place for row in self.rows for tier, place in row.places.items()}
        return [(tier, held[tier].capacity_nbytes) for tier in Tier if tier in held]

    @property
    def notes(self) -> tuple[str, ...]:
        notes = [*self.ours.notes, *(note for row in self.rows for note in row.notes)]
        if not any(row.step_s for row in self.rows):
            notes.append(_NO_STEPS)
        return tuple(dict.fromkeys(notes))


def _heads(found: Comparison) -> tuple[str, ...]:
    places = (f"{NODE_TITLES[tier]} of {format_bytes(n)}" for tier, n in found.tiers)
    return ("system", *places, "step", "fits")


def _cells(found: Comparison) -> Iterator[tuple[Cell, ...]]:
    """Yield the cells of each system: its bytes in each place, its step, and whether it fits."""
    for row in found.rows:
        held = [(tier, row.places.get(tier)) for tier, _ in found.tiers]
        yield (
            Cell(str(row.system), strong=row is found.rows[-1]),
            *(
                Cell(
                    format_bytes(place.peak_nbytes) if place and place.peak_nbytes else "-",
                    state="bad" if tier in row.full else "",
                )
                for tier, place in held
            ),
            Cell(view.step_cells(row.step_s, None)[0]),
            Cell("yes", state="good") if row.fits else Cell("no", state="bad"),
        )


def comparison_table(found: Comparison) -> RenderableType:
    """Return the comparison as tables for a terminal."""
    ours = found.ours
    styles = {"good": "green", "bad": "red", "": ""}
    table = ruled(*(head.replace(" of ", "\nof ") for head in _heads(found)), left=["fits"])
    for cells in _cells(found):
        table.add_row(*(Text(cell.text, style=styles[cell.state]) for cell in cells))
    title = f"{view.model_text(ours, ours.model)}\n{ours.hardware}, {view.workload_text(ours)}"
    return Group(Text(title), table, "", *bullets(found.notes))


def to_values(found: Comparison) -> dict[str, Any]:
    systems = [
        {
            "system": str(row.system),
            "fits": row.fits,
            "step_s": row.step_s,
            "places": places(row.places),
            "short": [str(tier) for tier in row.full],
            "notes": list(row.notes),
        }
        for row in found.rows
    ]
    return {"schema": "memest-compare/1", "systems": systems, "notes": list(found.notes)}
