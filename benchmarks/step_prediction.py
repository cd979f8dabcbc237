"""The accuracy of the predicted time of a step: measured steps beside `estimate_step`.

    python -m benchmarks.step_prediction [--rounds 5] [--cases 'NAME; NAME'] [--path FOLDER]
                                         [--json FILE]

Each case is a model, a placement and a batch, trained in a process of its own; the cases step in
turn, as in `offload bench step`. The machine's speeds are measured anew in every round, because a
shared machine's drift: a prediction is made of them and compared with that round's step. `memest`
and the planner use the same measurement, kept from when it was made last. Nothing of a case is
fitted: the facts come from a run of the model without values.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from offload.bench.contenders import (
    LLAMA_151M,
    OFFLOAD,
    Contender,
    StepOptions,
    SystemSpec,
    all_on,
    train_in_turn,
)
from offload.bench.record import Kind, Record, Row
from offload.bench.table import Column, number, print_record, span
from offload.config import OffloadConfig
from offload.gpt import build_meta_model
from offload.memory.tier_manager import compute_device, this_machine
from offload.planning.activations.trace import trace_activations
from offload.planning.choice.planner import make_plan, resolved_config
from offload.planning.machine.calibration import machine_speeds
from offload.planning.machine.speeds import Speeds
from offload.planning.plan.estimate import StepEstimate, Workload
from offload.planning.step.step_time import estimate_step
from offload.zero.groups.parameter_grouping import group_parameters

BAR = 0.2  # a prediction may be this far from what was measured
RATIO = "predicted_per_measured"
_SPEEDS = "the machine's speeds"
COLUMNS = (
    Column("predicted", number("predicted_s")), Column("measured", number("seconds")),
    Column("ratio", number(RATIO)),
    Column("range", lambda row: span(row.measures[RATIO])),
    Column("bytes", number("predicted_per_moved_nbytes", digits=3)),
)  # fmt: skip


def _case(name: str, overrides: tuple[str, ...], batches: int = 1) -> SystemSpec:
    """A configuration by its differences from that of the 151 M shape."""
    return SystemSpec(name, name, Kind.OFFLOAD, OFFLOAD, overrides, batches=batches)


def _model(layers: int, hidden: int, mlp: int, heads: int, vocab: int = 8192) -> tuple[str, ...]:
    sizes = {"layers": layers, "hidden": hidden, "mlp": mlp, "heads": heads, "vocab": vocab}
    return tuple(f"train.model.{name}={value}" for name, value in sizes.items())


def _batch(batch: int, sequence: int) -> tuple[str, ...]:
    return (f"train.batch={batch}", f"train.sequence={sequence}")


_HOST, _NVME = (*all_on("host"), "budget.host=auto"), all_on("nvme")
_BF16 = ("precision=bf16",)
_KEEP = ("placement.activations.checkpoint=false",)
_30M = _model(8, 512, 1536, 8)
_DEMO = _model(6, 256, 768, 4, vocab=256)
CASES = [
    _case("151 M fp32, host", _HOST),
    _case("151 M fp32, nvme", _NVME),
    _case("151 M fp32, nvme, 4 passes", (*_NVME, "gradient_accumulation_steps=4"), 4),
    _case("151 M bf16, host", (*_HOST, *_BF16)),
    _case("151 M bf16, nvme", (*_NVME, *_BF16)),
    _case("151 M fp32, optimizer on nvme", (*all_on("host", optimizer="nvme"), "budget.host=2GiB")),
    _case("151 M fp32, nvme, 1 x 32 tokens", (*_NVME, *_batch(1, 32))),
    _case("30 M fp32, host, 4 x 256", (*_HOST, *_30M, *_batch(4, 256))),
    _case("30 M fp32, host, 4 x 256, kept", (*_HOST, *_30M, *_batch(4, 256), *_KEEP)),
    _case("30 M fp32, nvme, 2 x 128, kept", (*_NVME, *_30M, "budget.host=128MiB",
                                            *_batch(2, 128), *_KEEP)),
    _case("30 M bf16, nvme, 8 x 256", (*_NVME, *_30M, *_BF16, "budget.host=128MiB",
                                      *_batch(8, 256))),
    _case("5 M fp32, host, 8 x 128, kept", (*_HOST, *_DEMO, *_batch(8, 128), *_KEEP)),
    _case("5 M fp32, three tiers, 8 x 128, kept", (
        *_DEMO, *_batch(8, 128), *_KEEP, "budget.host=48MiB", "budget.device=16MiB",
        "optimizer.chunk=262144", "placement.parameters={device: 25%, host: 25%, nvme: 50%}",
        "placement.gradients={device: 25%, host: 75%}",
        "placement.optimizer={host: 20%, nvme: 80%}",
    )),
]  # fmt: skip


def predictor(spec: SystemSpec) -> Callable[[Speeds], StepEstimate]:
    """Return the prediction of a case's step from the machine's speeds."""
    config = OffloadConfig.load(LLAMA_151M, spec.overrides)
    model = build_meta_model(config)
    shape = group_parameters(model, config.groups.blocks).shape()
    device = compute_device(config)
    plan = make_plan(config, shape, this_machine(config.nvme, device))
    config = resolved_config(config, plan, device.type)
    workload = Workload(config.train.batch, config.train.sequence, spec.batches)
    facts = trace_activations(model, config, workload)
    return partial(estimate_step, plan, config, shape, facts, workload)


def add_prediction(row: Row, predicted: Sequence[StepEstimate]) -> None:
    """Add the prediction of each round to the measured row; and of nvme's bytes, both ways
    together, what was predicted over what was moved."""
    seconds = [estimate.seconds for estimate in predicted]
    row.measures["predicted_s"] = seconds
    measured = row.measures["seconds"]
    row.measures[RATIO] = [p / m for p, m in zip(seconds, measured, strict=True)]
    links = predicted[-1].links
    row.note = f"bound by {max(links, key=lambda link: link.seconds).name}"
    moved = row.median("read_nbytes") + row.median("written_nbytes")
    if moved:
        said = sum(link.nbytes for link in links if link.name.startswith("nvme"))
        row.facts["predicted_per_moved_nbytes"] = said / moved


def run(options: StepOptions) -> Record:
    """Measure the cases, and predict each step from the speeds of its round."""

    def speeds(
        systems: Sequence[Contender], folder: Path, opened: ExitStack
    ) -> Mapping[str, Callable[[], Any]]:
        return {_SPEEDS: partial(machine_speeds, [folder], remeasure=True)}

    record = Record("step prediction", {})
    base = OffloadConfig.load(LLAMA_151M)
    systems, results = train_in_turn(record, options, CASES, base, print, speeds)
    for system in systems:
        row = record.measured(system.spec.label)
        assert row is not None, "a failure of offload is raised"
        predict = predictor(system.spec)
        predicted = [predict(each) for each in results[_SPEEDS]]
        add_prediction(row, predicted)
        record.details[row.name] = [asdict(link) for link in predicted[-1].links]
    ratios = [row.median(RATIO) for row in record.rows if row.measured]
    near = [ratio for ratio in ratios if abs(ratio - 1) <= BAR]
    record.notes.append(f"{len(near)} of {len(ratios)} cases within {BAR:.0%}")
    record.details["speeds"] = [asdict(each) for each in results[_SPEEDS]]
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", default="", help="names, separated by ;")
    parser.add_argument("--path", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = tuple(part.strip() for part in options.cases.split(";") if part.strip())
    record = run(StepOptions(None, (), options.path, names, options.rounds))
    print_record(record, COLUMNS)
    if options.json is not None:
        record.write(options.json)


if __name__ == "__main__":
    main()
