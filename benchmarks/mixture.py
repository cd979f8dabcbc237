"""A small mixture of experts beside the dense model with as many parameters per token.

    python -m benchmarks.mixture [-o train.steps=100 ...] [--json FILE] [--page FILE]

Trains `examples/moe.yaml` and `examples/moe-dense.yaml` in turn, a step of each, on the same
batches: a machine whose speed drifts treats both alike. Then the dense model again for as many
steps as it makes in the time of the mixture, with a schedule of that length. Validation losses are
those of the tokens alone, without the balancing loss.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch

import offload
from offload.bench.record import Kind, Record, Row
from offload.bench.table import Column, number, print_record
from offload.config import OffloadConfig
from offload.gpt import build_meta_model, evaluating
from offload.pages.chart import Series, line_chart
from offload.pages.html_page import page, table
from offload.train.batches import Batches
from offload.train.schedule import lr_factor

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MIXTURE, DENSE, LONGER = "mixture", "dense", "dense, as many seconds"


@dataclass
class Curve:
    """One run: seconds of each step, and validation losses with the steps at which they were."""

    seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


class Run:
    """One model and its engine, a step at a time."""

    def __init__(self, config: OffloadConfig) -> None:
        self._config = config.owning_the_loop()
        self._batches = Batches.of(config)
        self._model = build_meta_model(config)
        self._engine = offload.initialize(self._model, self._config)
        self.curve = Curve()

    def step(self) -> None:
        """Timed with its updates, which a loop of its own would do during the next step."""
        train, done = self._config.train, len(self.curve.seconds)
        began = time.perf_counter()
        lr = self._config.optimizer.lr * lr_factor(train.schedule, done, train.steps)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.backward(self._model(*self._batches.train_at(done, 0)).loss)
        self._engine.optimizer.step()
        self._engine.optimizer.zero_grad()
        self._engine.settle()
        self.curve.seconds.append(time.perf_counter() - began)
        done += 1
        if done == train.steps or done % train.evaluate_every == 0:
            self.curve.steps.append(done)
            self.curve.losses.append(self._validation())

    def _validation(self) -> float:
        with torch.no_grad(), evaluating(self._model):
            return statistics.mean(
                float(self._model(*self._batches.validation_at(index)).loss)
                for index in range(self._config.train.evaluate_batches)
            )

    def close(self) -> None:
        self._engine.close()


def train_in_turn(configs: dict[str, OffloadConfig]) -> dict[str, Curve]:
    """All of them, a step of each after the other."""
    steps = {config.train.steps for config in configs.values()}
    assert len(steps) == 1, "they are compared at equal steps"
    runs = {name: Run(config) for name, config in configs.items()}
    try:
        for number in range(steps.pop()):
            for name in sorted(runs, reverse=bool(number % 2)):
                runs[name].step()
    finally:
        for run in runs.values():
            run.close()
    return {name: run.curve for name, run in runs.items()}


def train_alone(config: OffloadConfig) -> Curve:
    with closing(Run(config)) as run:
        for _ in range(config.train.steps):
            run.step()
    return run.curve


def measure(overrides: list[str]) -> Record:
    files = {MIXTURE: "moe.yaml", DENSE: "moe-dense.yaml"}
    configs = {n: OffloadConfig.load(EXAMPLES / file, overrides) for n, file in files.items()}
    curves = train_in_turn(configs)
    pairs = zip(curves[MIXTURE].seconds, curves[DENSE].seconds, strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    steps = max(1, round(configs[DENSE].train.steps * ratio))
    configs[LONGER] = OffloadConfig.load(configs[DENSE], [f"train.steps={steps}"])
    curves[LONGER] = train_alone(configs[LONGER])
    record = Record("mixture", {"configs": sorted(files.values()), "overrides": overrides})
    for name, curve in curves.items():
        model, train = configs[name].train.model, configs[name].train
        facts = {
            "validation_loss": curve.losses[-1], "steps": train.steps,
            "numel": model.numel, "active_numel": model.active_numel,
        }  # fmt: skip
        record.rows.append(Row(name, Kind.OURS, {"seconds": curve.seconds}, facts))
        record.details[name] = {"steps": curve.steps, "validation_losses": curve.losses}
    record.details["step_ratio"] = ratio
    train = configs[MIXTURE].train
    record.notes += [
        f"{train.text}, {train.batch} x {train.sequence} bytes a step, seed "
        f"{configs[MIXTURE].seed}; validation: {train.evaluate_batches} batches of text that is "
        "not trained on",
        f"a step of the mixture takes {ratio:.2f} x the dense one's (median of {train.steps} "
        f"pairs), so the dense model makes {steps} steps in as many seconds",
    ]
    return record


COLUMNS = (
    Column("steps", lambda row: f"{row.facts['steps']:,.0f}"),
    Column("parameters", lambda row: f"{row.facts['numel']:,.0f}"),
    Column("of them per token", lambda row: f"{row.facts['active_numel']:,.0f}"),
    Column("s/step", number("seconds", digits=3)),
    Column("validation loss", number("validation_loss", digits=4)),
)


def page_of(record: Record) -> str:
    """The curves over steps, and over time in steps of the dense model."""
    lines = {MIXTURE: "line", DENSE: "dashed", LONGER: "wide"}
    ratio = record.details["step_ratio"]

    def series(name: str, factor: float) -> Series:
        found = record.details[name]
        xs = [step * factor for step in found["steps"]]
        return Series(name, xs, found["validation_losses"], lines[name])

    charts = (
        ("equal steps: mixture, and dense (dashed)",
         [series(MIXTURE, 1), series(DENSE, 1)], "step"),
        ("equal seconds: mixture, and dense for as long (wide)",
         [series(MIXTURE, ratio), series(LONGER, 1)], "dense step"),
    )  # fmt: skip
    drawn = "".join(
        f'<div class="card"><h3>{title}</h3>'
        f"{line_chart(each, '{:.3g}'.format, base=None, x_name=x)}</div>"
        for title, each, x in charts
    )
    rows = [[row.name, *(column.text(row) for column in COLUMNS)] for row in record.rows]
    heads = ["", *(column.heading for column in COLUMNS)]
    about = "".join(f'<p class="quiet">{note}</p>' for note in record.notes)
    body = (
        "<h1>Validation loss: 12 experts, two per byte, and a dense model of equal compute</h1>"
        f'{about}<div class="charts">{drawn}</div>'
        f'<div class="card after">{table(heads, rows)}</div>'
    )
    return page("A mixture of experts beside a dense model", body, by="benchmarks/mixture.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", dest="overrides", action="append", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    record = measure(options.overrides)
    print_record(record, COLUMNS)
    if options.json is not None:
        record.write(options.json)
    if options.page is not None:
        options.page.write_text(page_of(record))


if __name__ == "__main__":
    main()
