"""run.html: one run on one page, made only from the files in its folder, even if it was killed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from offload.checkpoint.format.disk import write_named
from offload.config.file import read_document
from offload.display.words import duration, share
from offload.pages.page import Figure, Page, Section, Table, to_html
from offload.pages.pictures import Line, Picture, can_draw, line_picture
from offload.runs.metrics import MEASURED, MetricsFile, usual_step_s
from offload.tiers.errors import ConfigError, OffloadError
from offload.tiers.tier import TIERS
from offload.tiers.units import format_bytes

PAGE = "run.html"
_METRICS, _CONFIG = "metrics.jsonl", "config.resolved.yaml"
_LOOP = "loop"  # beside the waits: what the program did between a step and the next forward
_MAX_VALUE = 1e300  # larger ones have no sum

Numbers = npt.NDArray[np.float64]


def write_page(folder: Path) -> Path:
    """Write run.html from the files in `folder`, replacing an older one, and return its path.

    Raises ConfigError if the folder holds no run, PathError if the page cannot be written.
    """
    path = folder / PAGE
    write_named(path, run_page(folder))
    return path


def run_page(folder: Path) -> str:
    """Return the page's HTML. Raise ConfigError if the folder holds no run."""
    run = _Run.read(folder)
    verdict, state = _state(run)
    sections = (
        Section("", lines=tuple(_remarks(run))),
        Section("Loss and pace", list(_curves(run)) if can_draw() else ()),
        _memory(run),
        _waits(run),
        Section("Configuration", code=run.config_text),
    )
    name = folder.resolve().name
    page = Page(
        f"{name}: a run of offload", name, (), verdict, state, tuple(_figures(run)), sections
    )
    return to_html(page, by="offload")


@dataclass(frozen=True)
class _Run:
    folder: Path
    rows: Rows
    config: Mapping[str, Any]
    config_text: str
    measured: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> _Run:
        path = folder / _CONFIG
        if not (folder / _METRICS).is_file() and not path.is_file():
            raise ConfigError(
                f"{folder} holds no run: neither {_METRICS} nor {_CONFIG} is there; name the "
                "folder of a run of `offload train`"
            )
        config, text = _config(path)
        measured = _object(folder / MEASURED)
        return cls(folder, Rows(MetricsFile(folder / _METRICS).read()), config, text, measured)


class Rows:
    """The steps of a run in ascending order; the later one if a step was taken twice."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        by_step = {row["step"]: row for row in rows}
        self._rows = [by_step[step] for step in sorted(by_step)]
        self.steps = np.array(sorted(by_step), np.float64)
        # steps whose loss is null, and not left out
        self.nonfinite = [row["step"] for row in self._rows if row.get("loss", 0.0) is None]

    def column(self, name: str, group: str = "") -> Numbers:
        """The value of each step, of a plain figure or of one in a group; nan if it is unknown, or
        too large to be summed."""
        rows = (row.get(group, {}) if group else row for row in self._rows)
        values = [row.get(name) for row in rows]
        column = np.array(values, np.float64)  # None becomes nan
        return np.where(np.abs(column) < _MAX_VALUE, column, np.nan)

    def known(self, name: str) -> list[float]:
        """The known values of a plain figure."""
        column = self.column(name)
        return [float(value) for value in column[~np.isnan(column)]]

    def sums(self, group: str) -> dict[str, float]:
        """The sum over all steps of each figure in a group; those that are 0 are left out."""
        names = dict.fromkeys(name for row in self._rows for name in row.get(group, ()))
        sums = {name: float(np.nansum(self.column(name, group))) for name in names}
        return {name: value for name, value in sums.items() if value > 0}

    def step_seconds(self) -> float:
        """The seconds of all steps, which contain those in `waited`."""
        return float(np.nansum(np.maximum(self.column("seconds"), 0.0)))


def _object(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file; empty if there is none."""
    try:
        content = json.loads(path.read_text(errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def at(values: Any, key: str) -> Any:
    """The value of `section.key`; None if there is none."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _config(path: Path) -> tuple[Mapping[str, Any], str]:
    """The values of the configuration, as far as it is YAML, and its text."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return {}, ""
    try:
        value = read_document(path).value
    except OffloadError:
        value = None
    return (value if isinstance(value, Mapping) else {}), text


# ---------------------------------------------------------------- the top
def _state(run: _Run) -> tuple[str, str]:
    """The state of the run as text, and whether it is `good` or `bad`."""
    steps = int(run.rows.steps[-1]) if len(run.rows.steps) else 0
    wanted = at(run.config, "train.steps")
    of = f" of {wanted:,}" if isinstance(wanted, int) and wanted >= steps else ""
    if run.measured.get("cut_short") is True:
        how = "ended by an error, or by Ctrl-C or SIGTERM before all of them were saved"
        return f"{steps:,}{of} steps; {how}", "bad"
    if run.measured.get("stopped") is True:
        return f"stopped by Ctrl-C or SIGTERM after {steps:,}{of} steps, all saved", "good"
    if run.measured:
        return f"ended after {steps:,}{of} steps", "good"
    return f"{steps:,}{of} steps; under way when this page was made, or cut short", "bad"


def _figures(run: _Run) -> Iterator[Figure]:
    rows = run.rows
    losses = rows.known("loss")
    if losses:
        last = "not finite" if rows.steps[-1] in rows.nonfinite else f"{losses[-1]:.4g}"
        yield Figure("loss", last, f"from {losses[0]:.4g}")
    seconds = [value for value in rows.known("seconds") if value > 0]
    if seconds:
        usual = usual_step_s(seconds) or statistics.median(seconds)
        yield Figure("usual step", duration(usual), _count(len(rows.steps), "step"))
    waited, whole = rows.sums("waited"), rows.step_seconds()
    waited.pop(_LOOP, None)
    if waited and whole:
        longest = max(waited, key=lambda name: waited[name])
        part = share(sum(waited.values()) / whole)
        yield Figure("waiting", part, f"of the steps' time, most for {longest}")


def _remarks(run: _Run) -> Iterator[str]:
    rows = run.rows
    if not can_draw():
        yield "curves are drawn where matplotlib is installed: pip install offload[report]"
    if not len(rows.steps):
        yield "no step has ended yet"
    bad = rows.nonfinite
    if bad:
        yield f"the loss was not finite in {_count(len(bad), 'step')}, first in step {bad[0]:,}"
    skipped = max(rows.known("skipped_steps"), default=0.0)
    if skipped > 0:
        yield f"{_count(int(skipped), 'step')} skipped: gradients not finite"


# ---------------------------------------------------------------- sections
def _curves(run: _Run) -> Iterator[Picture]:
    rows = run.rows
    losses = [
        Line("offload", rows.steps, rows.column("loss")),
        Line("validation", rows.steps, rows.column("validation_loss")),
    ]
    shown = [line for line in losses if not np.isnan(line.ys).all()]
    if shown:
        yield line_picture("loss", shown, "{:.4g}".format)
    tokens, seconds = rows.column("tokens_per_second"), rows.column("seconds")
    if not np.isnan(tokens).all():
        yield line_picture("tokens/s", [Line("tokens/s", rows.steps, tokens)], "{:,.5g}".format)
    elif not np.isnan(seconds).all():
        line = Line("seconds", rows.steps, seconds)
        yield line_picture("seconds per step", [line], "{:.3g}".format)


def _memory(run: _Run) -> Section:
    """The bytes of each tier: as shares of budgets over the steps, and in numbers."""
    rows, lines, table = run.rows, [], []
    held = rows.sums("tiers")
    for tier in sorted(held, key=[*map(str, TIERS), *held].index):
        column = rows.column(tier, "tiers")
        budget, peak = at(run.config, f"budget.{tier}"), at(run.measured, f"tiers.{tier}")
        if _is_number(budget):
            lines.append(Line(tier, rows.steps, column / budget))
        table.append((tier, _bytes(np.nanmax(column)), _bytes(peak), _bytes(budget)))
    if sizes := rows.known("rss_nbytes"):
        peak = _bytes(run.measured.get("rss_nbytes"))
        table.append(("RAM of the process", _bytes(max(sizes)), peak, "-"))
    heads = ("", "most at the end of a step", "peak", "budget")
    title = "share of each tier's budget"
    pictures = []
    if lines and can_draw():
        pictures.append(line_picture(title, lines, "{:.0%}".format, from_zero=True))
    return Section("Memory", pictures, [Table(heads, table)] if table else ())


def _waits(run: _Run) -> Section:
    rows, whole = run.rows, run.rows.step_seconds()
    if not whole:
        return Section("")
    table = [
        ("between steps" if name == _LOOP else name, duration(seconds), share(seconds / whole))
        for name, seconds in rows.sums("waited").items()
    ]
    note = (
        "the thread that trains waited for files (nvme), copies over the link, updates and other "
        "ranks; between steps is the loop's own time"
    )
    heads = ("waited for", "in all", "of the steps' time")
    return Section("Waiting", tables=[Table(heads, table)], lines=[note]) if table else Section("")


# ---------------------------------------------------------------- words
def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e18


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("s" if number != 1 else "")


def _bytes(nbytes: Any) -> str:
    return format_bytes(int(nbytes)) if _is_number(nbytes) else "-"
