"""run.html: one run on one page, made only from the files in its folder, even if it was killed.

The page has no scripts and fetches nothing. All contents of files are escaped, and missing ones are
left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeGuard

from offload.config.file import read_document
from offload.pages.chart import Layer, Series, has_any, line_chart, share_chart
from offload.pages.html_page import key, lines, page, table
from offload.planning.choice.durations import duration, three_digits
from offload.planning.choice.run_check import MEASURED, PREDICTION, Row, RunCheck, check_run
from offload.planning.choice.run_check import usual_step_s as usual
from offload.runs.metrics import write_whole
from offload.runs.page_rows import PageRows, bucketed, read_object, read_rows
from offload.runs.page_step import TRACE, read_waterfall
from offload.tiers.errors import ConfigError, OffloadError
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes

PAGE = "run.html"
_METRICS, _PLAIN, _CONFIG = "metrics.jsonl", "plain.jsonl", "config.resolved.yaml"
_STRETCHES = 240  # of steps, in a chart of shares
_LINKS = ("nvme read", "nvme write", "host to device", "device to host")
# Colours of what the model's thread waits for: those of what it waits for does.
_WAITS = {"nvme": "nvme read", "link": "host to device", "update": "update", "ranks": "network"}
_MIB = float(1 << 20)


def write_page(folder: Path) -> Path:
    """Write run.html from the files in `folder`, replacing an older one, and return its path.

    Raises ConfigError if the folder holds no run, PathError if the page cannot be written.
    """
    path = folder / PAGE
    write_whole(path, run_page(folder))
    return path


def run_page(folder: Path) -> str:
    """Return the page's HTML. Raise ConfigError if the folder holds no run."""
    run = _Run.read(folder)
    body = "".join(
        f"<section><h2>{escape(title)}</h2>{content}</section>"
        for title, make in _SECTIONS
        if (content := make(run))
    )
    return page(f"{run.name}: a run of offload", f"{_header(run)}{body}", by="offload")


@dataclass(frozen=True)
class _Run:
    folder: Path
    name: str
    rows: PageRows
    plain: PageRows
    config: Mapping[str, Any]
    config_text: str
    predicted: Mapping[str, Any]
    measured: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> _Run:
        config_path = folder / _CONFIG
        if not (folder / _METRICS).is_file() and not config_path.is_file():
            raise ConfigError(
                f"{folder} holds no run: neither {_METRICS} nor {_CONFIG} is there; name the "
                "folder of a run of `offload train`, or of offload.initialize(..., run_folder=...)"
            )
        config, text = _config(config_path)
        return cls(
            folder, folder.resolve().name, read_rows(folder / _METRICS),
            read_rows(folder / _PLAIN), config, text,
            read_object(folder / PREDICTION) or {}, read_object(folder / MEASURED) or {},
        )  # fmt: skip

    def at(self, key: str) -> Any:
        """A value of the configuration; None if there is none."""
        values: Any = self.config
        for part in key.split("."):
            values = values.get(part) if isinstance(values, Mapping) else None
        return values

    @property
    def usual_step_s(self) -> float | None:
        seconds = [s for s in self.rows.known("seconds") if s > 0]
        return usual(seconds) or (statistics.median(seconds) if seconds else None)

    @property
    def check(self) -> RunCheck | None:
        """The comparison with the prediction; None without a readable prediction or a step."""
        try:
            return check_run(self.folder)
        except ConfigError:
            return None


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
def _header(run: _Run) -> str:
    about = "".join(f'<p class="quiet">{escape(text)}</p>' for text in _about(run))
    state, kind = _state(run)
    return (
        f'<h1>{escape(run.name)}</h1>{about}<p class="verdict {kind}">{escape(state)}</p>'
        f'<div class="figures">{"".join(_cards(run))}</div>'
        f'<div class="after">{lines(_remarks(run))}</div>'
    )


def _about(run: _Run) -> Iterator[str]:
    model = run.at("train.model")
    if isinstance(model, Mapping):
        sizes = (f"{model.get(name)} {what}" for name, what in _SIZES.items() if model.get(name))
        yield f"{model.get('shape')}: {', '.join(sizes)}; text: {run.at('train.text')}"
    keys = {"device": "", "precision": "", "optimizer.type": ""}
    if _has_ranks(run.rows):
        keys["zero.stage"] = "ZeRO stage "
    found = [f"{said}{run.at(key)}" for key, said in keys.items() if run.at(key) is not None]
    placement = run.at("placement")
    if isinstance(placement, Mapping):
        found += [
            f"{name} {(_place_of_experts if name == 'experts' else _place)(where)}"
            for name, where in placement.items() if where
        ]  # fmt: skip
    if found:
        yield "; ".join(found)


_SIZES = {
    "layers": "layers", "hidden": "wide", "heads": "heads", "experts": "experts", "vocab": "tokens",
}  # fmt: skip


def _place(where: Any) -> str:
    if isinstance(where, Mapping):
        where = where.get("tier", where)
    if isinstance(where, Mapping):
        return " + ".join(f"{tier} {share}" for tier, share in where.items())
    return str(where)


def _place_of_experts(by_class: Any) -> str:
    if not isinstance(by_class, Mapping):
        return _place(by_class)
    places = {name: _place(where) for name, where in by_class.items()}
    if len(set(places.values())) == 1:
        return next(iter(places.values()))
    return ", ".join(f"{name} {place}" for name, place in places.items())


def _state(run: _Run) -> tuple[str, str]:
    """The state of the run as text, and whether it is `good` or `bad`."""
    steps = int(run.rows.steps[-1]) if run.rows.steps else 0
    wanted = run.at("train.steps")
    of = f" of {wanted:,}" if isinstance(wanted, int) and wanted >= steps else ""
    if run.measured.get("cut_short") is True:
        how = "ended by an error, or by Ctrl-C or SIGTERM before all of them were saved"
        return f"{steps:,}{of} steps; {how}", "bad"
    if run.measured.get("stopped") is True:
        return f"stopped by Ctrl-C or SIGTERM after {steps:,}{of} steps, all saved", "good"
    if run.measured:
        return f"ended after {steps:,}{of} steps", "good"
    return f"{steps:,}{of} steps; under way when this page was made, or cut short", "bad"


def _cards(run: _Run) -> Iterator[str]:
    rows = run.rows
    losses, validation = rows.known("loss"), rows.known("validation_loss")
    if losses:
        last = "not finite" if rows.steps[-1] in rows.nonfinite else f"{losses[-1]:.4g}"
        yield _card("loss", last, f"from {losses[0]:.4g}")
    if validation:
        yield _card("validation loss", f"{validation[-1]:.4g}", f"least {min(validation):.4g}")
    seconds = run.usual_step_s
    if seconds is not None:
        yield _card("usual step", duration(seconds), _count(len(rows.steps), "step"))
    tokens = [value for value in rows.known("tokens_per_second") if value > 0]
    if tokens:
        yield _card("tokens/s", f"{statistics.median(tokens):,.0f}", "median")
    rss = rows.known("rss_nbytes")
    if rss:
        peak = run.measured.get("rss_nbytes")
        if _is_number(peak):
            yield _card("RAM of the process", _bytes(max([peak, *rss])), "peak")
        else:
            yield _card("RAM of the process", _bytes(max(rss)), "greatest at the end of a step")
    waited, whole = _sums(rows, "waited"), sum(_lengths(rows))
    waited.pop(_LOOP, None)
    if waited and whole:
        share = min(1.0, sum(waited.values()) / whole)
        most = max(waited, key=lambda name: waited[name])
        yield _card("waiting", _percent(share), f"of the steps' time, most for {most}")


def _card(name: str, value: str, aside: str) -> str:
    return (
        f'<div class="card"><span class="quiet">{escape(name)}</span><b>{escape(value)}</b>'
        f'<span class="quiet">{escape(aside)}</span></div>'
    )


def _remarks(run: _Run) -> Iterator[str]:
    rows = run.rows
    if rows.damaged:
        yield f"{_count(rows.damaged, 'line')} of {_METRICS} could not be read: left out"
    if not rows.steps:
        yield "no step has ended yet"
    bad = rows.nonfinite
    if bad:
        yield f"the loss was not finite in {_count(len(bad), 'step')}, first in step {bad[0]:,}"
    skipped = max(rows.known("skipped_steps"), default=0.0)
    if skipped > 0:
        yield f"{_count(int(skipped), 'step')} skipped: gradients not finite"
    if _has_ranks(rows):
        yield "of several ranks: memory, traffic and waits are those of rank 0"


def _has_ranks(rows: PageRows) -> bool:
    return any(name not in _LINKS for name in rows.names("moved"))


# ---------------------------------------------------------------- charts
def _loss(run: _Run) -> str:
    rows, plain = run.rows, run.plain
    series = [
        Series("offload", rows.steps, rows.numbers("loss"), "wide" if plain.steps else "line")
    ]
    if plain.steps:  # thin and dashed on top, so that both are seen where they coincide
        series.append(Series("plain PyTorch", plain.steps, plain.numbers("loss"), "dashed"))
    series.append(Series("validation", rows.steps, rows.numbers("validation_loss"), "dots"))
    shown = [each for each in series if has_any(each.ys)]
    if not shown:
        return ""
    names = {"offload": "offload", "plain PyTorch": "plain PyTorch (dashed)",
             "validation": "validation (dots)"}  # fmt: skip
    said = ", ".join(names[each.name] for each in shown) if len(shown) > 1 else ""
    notes = [said, *([_agreement(rows, plain)] if plain.steps else [])]
    return _card_of(line_chart(shown, "{:.4g}".format, base=None), *notes)


def _agreement(ours: PageRows, plain: PageRows) -> str:
    """A sentence on how closely the losses of both agree."""
    of_plain = dict(zip(plain.steps, plain.numbers("loss"), strict=True))
    mine = zip(ours.steps, ours.numbers("loss"), strict=True)
    pairs = [(loss, of_plain.get(step)) for step, loss in mine]
    apart = [abs(a - b) for a, b in pairs if a is not None and b is not None]
    if not apart:
        return ""
    if not max(apart):
        return f"the losses of all {len(apart):,} steps are those of plain PyTorch, bit for bit"
    return (
        f"equal to the last bit in {apart.count(0.0):,} of {len(apart):,} steps, at most "
        f"{max(apart):.1g} apart in the others"
    )


def _memory(run: _Run) -> str:
    rows, charts = run.rows, []
    budgets = run.at("budget")
    tiers = [*map(str, Tier)]
    for tier in [*tiers, *(name for name in rows.names("tiers") if name not in tiers)]:
        held = rows.numbers(tier, "tiers")
        if not any(held):
            continue
        budget = budgets.get(tier) if isinstance(budgets, Mapping) else None
        limit = (f"budget.{tier}", float(budget)) if _is_number(budget) else None
        chart = line_chart(
            [Series(f"{tier} holds", rows.steps, held)], _bytes, unit=_MIB, limit=limit
        )
        most = max(value for value in held if value is not None)
        peaks = run.measured.get("tiers")
        peak = peaks.get(tier) if isinstance(peaks, Mapping) else None
        note = f"at most {_bytes(most)} at the end of a step"
        if _is_number(peak):
            note = f"peak {_bytes(peak)}, {note}"
        if limit is not None:
            note += f"; {limit[0]} (dashed): {_bytes(limit[1])}"
        charts.append(_titled(tier, chart, note))
    ours, plain = rows.numbers("rss_nbytes"), run.plain.numbers("rss_nbytes")
    if has_any(ours):
        series = [Series("offload", rows.steps, ours)]
        if has_any(plain):
            series.append(Series("plain PyTorch", run.plain.steps, plain, "dashed"))
        note = "plain PyTorch is dashed" if len(series) > 1 else ""
        charts.append(
            _titled("RAM of the process (RSS)", line_chart(series, _bytes, unit=_MIB), note)
        )
    return _cards_of(charts)


def _waterfall(run: _Run) -> str:
    found = read_waterfall(run.folder / TRACE)
    if found is None:
        return ""
    note = (
        f"step {found.step:,}, {duration(found.seconds)}, from the end of the step before to its "
        f"own; point at a stretch for its name and bytes. All recorded steps: {TRACE}, for "
        "ui.perfetto.dev"
    )
    return f'<div class="card">{found.html()}<p class="quiet after">{escape(note)}</p></div>'


_LOOP = "loop"  # beside the waits: what the program did between a step and the next forward


def _said(name: str) -> str:
    return "between steps" if name == _LOOP else name


def _lengths(rows: PageRows) -> list[float]:
    """The seconds of each step, which contain those in `waited` and `links`."""
    return [max(0.0, seconds or 0.0) for seconds in rows.numbers("seconds")]


def _parts(rows: PageRows, group: str, name: str) -> list[float]:
    return [seconds or 0.0 for seconds in rows.numbers(name, group)]


def _sums(rows: PageRows, group: str) -> dict[str, float]:
    """The seconds of all steps, by name."""
    return {name: sum(_parts(rows, group, name)) for name in rows.names(group)}


def _waits(run: _Run) -> str:
    rows = run.rows
    names = rows.names("waited")
    whole = sum(_lengths(rows))
    if not names or not whole:
        return ""
    xs = _ends(rows.steps)
    lengths = bucketed(_lengths(rows), _STRETCHES)
    waited = {name: bucketed(_parts(rows, "waited", name), _STRETCHES) for name in names}
    # whatever the file says
    lengths = [max(s, sum(each[i] for each in waited.values())) for i, s in enumerate(lengths)]
    layers = [
        Layer(_said(name), _WAITS.get(name, "waiting"), _shares(each, lengths))
        for name, each in waited.items()
    ]
    rest = [1.0 - sum(layer.shares[i] for layer in layers) for i in range(len(xs))]
    layers.append(Layer("not waiting", "compute", [max(0.0, share) for share in rest]))
    keys = key((layer.meaning, layer.name) for layer in layers)
    total = [
        (escape(_said(name)), duration(seconds), _percent(min(1.0, seconds / whole)))
        for name, seconds in _sums(rows, "waited").items()
    ]
    sums = table(["waited for", "in all", "of the steps' time"], total)
    note = (
        "of the thread that trains: for nvme, copies over the link, updates, other ranks; and the "
        "loop's own time between steps"
    )
    return f'<div class="card">{share_chart(xs, layers)}{keys}{_note(note)}{sums}</div>'


def _shares(parts: Iterable[float], wholes: Iterable[float]) -> list[float]:
    return [part / whole if whole else 0.0 for part, whole in zip(parts, wholes, strict=True)]


def _ends(steps: Sequence[float]) -> list[float]:
    """The last step of each stretch of `bucketed`."""
    count = min(_STRETCHES, len(steps))
    return [steps[(number + 1) * len(steps) // count - 1] for number in range(count)]


def _links(run: _Run) -> str:
    rows, charts, total = run.rows, [], []
    whole = sum(rows.seconds())
    names = rows.names("moved")
    if not names or not whole:
        return ""
    xs, lengths = _ends(rows.steps), bucketed(rows.seconds(), _STRETCHES)
    for name in names:
        moved = rows.growth("moved", name)
        speeds: list[float | None] = [
            nbytes / seconds if seconds else None
            for nbytes, seconds in zip(bucketed(moved, _STRETCHES), lengths, strict=True)
        ]
        meaning = name if name in _LINKS else "network"
        charts.append(
            _titled(name, line_chart([Series(name, xs, speeds, meaning=meaning)], _speed), "")
        )
        per_step = sum(moved) / len(rows.steps)
        total.append(
            (escape(name), _bytes(sum(moved)), _bytes(per_step), _speed(sum(moved) / whole))
        )
    sums = table(["link", "in all", "per step", "on average"], total)
    return f'<div class="card">{sums}{_uses(rows)}</div>{_cards_of(charts)}'


_USES = {"busy": "busy", "stalled": "idle, work waiting", "idle": "idle"}


def _uses(rows: PageRows) -> str:
    """A table of each link's use of the steps' time."""
    whole = sum(_lengths(rows))
    found: dict[str, dict[str, str]] = {}
    for group, name in rows.columns:
        link, _, word = name.rpartition(" ")
        if group == "links" and word in _USES:
            share = min(1.0, sum(_parts(rows, group, name)) / whole)
            found.setdefault(link, {})[word] = _percent(share)
    if not found:
        return ""
    cells = [
        (escape(link), *(shares.get(word, "-") for word in _USES)) for link, shares in found.items()
    ]
    return table(["of the steps' time", *_USES.values()], cells)


def _pace(run: _Run) -> str:
    rows = run.rows
    predicted = run.predicted.get("seconds")
    limit = ("predicted", float(predicted)) if _is_number(predicted) else None
    seconds = [value if value else None for value in rows.numbers("seconds")]
    shown: list[tuple[str, list[float | None], Callable[[float], str], Any]] = [
        ("seconds per step", seconds, duration, limit),
        ("gradient norm", rows.numbers("gradient_norm"), _digits, None),
        ("learning rate", rows.numbers("lr"), "{:.3g}".format, None),
    ]
    charts = []
    for name, ys, text, line in shown:
        if has_any(ys):
            series = [Series(name, rows.steps, ys)]
            note = f"{line[0]} (dashed): {text(line[1])}" if line is not None else ""
            charts.append(_titled(name, line_chart(series, text, limit=line), note))
    return _cards_of(charts)


# ---------------------------------------------------------------- tables
def _check(run: _Run) -> str:
    found = run.check
    if found is None:
        return ""
    rows = [_check_row(row) for row in found.rows]
    shown = table(["", "predicted", "measured", "predicted / measured"], rows) if rows else ""
    notes = list(found.missing)
    if not found.finished:
        notes.append("memory as it was at the ends of steps: the run has not ended")
    if any(row.is_bound for row in found.rows):
        notes.append("at most: the most that can come is predicted, not what comes")
    return f'<div class="card">{shown}<div class="after">{lines(notes)}</div></div>'


def _check_row(row: Row) -> tuple[str, str, str, str]:
    text = duration if row.unit == "seconds" else _bytes
    most = "at most " if row.is_bound else ""
    ratio = f"{row.ratio:.2f}" if row.measured else "-"
    return escape(row.name), most + text(row.predicted), text(row.measured), ratio


def _settings(run: _Run) -> str:
    if not run.config_text:
        return ""
    text = run.config_text[:_MOST_TEXT]
    cut = "\n... (cut)" if len(run.config_text) > _MOST_TEXT else ""
    return f'<div class="card"><pre>{escape(text)}{cut}</pre></div>'


_MOST_TEXT = 64 << 10

_SECTIONS: tuple[tuple[str, Callable[[_Run], str]], ...] = (
    ("Loss", _loss),
    ("Memory, against its budgets", _memory),
    ("One step", _waterfall),
    ("Waiting", _waits),
    ("Links", _links),
    ("Pace", _pace),
    ("Predicted and measured", _check),
    ("Configuration", _settings),
)


# ---------------------------------------------------------------- words
def _titled(name: str, chart: str, note: str) -> str:
    return f"<h3>{escape(name)}</h3>{chart}{_note(note)}" if chart else ""


def _card_of(chart: str, *notes: str) -> str:
    return f'<div class="card">{chart}{"".join(map(_note, notes))}</div>' if chart else ""


def _cards_of(charts: Iterable[str]) -> str:
    cards = "".join(f'<div class="card">{chart}</div>' for chart in charts if chart)
    return f'<div class="charts">{cards}</div>' if cards else ""


def _note(text: str) -> str:
    return f'<p class="quiet after">{escape(text)}</p>' if text else ""


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e18


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("s" if number != 1 else "")


def _bytes(nbytes: float) -> str:
    return format_bytes(int(nbytes))


def _speed(bytes_per_s: float) -> str:
    if 0 < bytes_per_s < 1e6:
        return f"{bytes_per_s / 1e3:.3g} kB/s"
    if 0 < bytes_per_s < 1e8:
        return f"{three_digits(bytes_per_s / 1e6)} MB/s"
    return f"{three_digits(bytes_per_s / 1e9)} GB/s"


def _digits(value: float) -> str:
    return three_digits(value) if value < 1e9 else f"{value:.3g}"


def _percent(share: float) -> str:
    if 0 < share < 0.001:
        return "<0.1 %"
    return f"{share * 100:.1f} %" if share < 0.0995 else f"{share * 100:.0f} %"
