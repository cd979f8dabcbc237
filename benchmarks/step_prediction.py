"""The accuracy of the predicted time of a step: measured steps beside `estimate_step`.

    python -m benchmarks.step_prediction [--rounds 5] [--cases 'NAME; NAME'] [--path FOLDER]
                                         [--json FILE]

Each case is a model, a placement and a batch, trained in a process of its own; the cases step in
turn, as in `offload bench step`. The machine's speeds are measured anew in every round, just before
its steps, because a shared machine's drift: a prediction is made of them and compared with that
round's steps. `memest` and the planner use the same measurement, kept from when it was made last.
Nothing of a case is fitted: the facts come from a run of the model without values.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from offload.bench.contenders import LLAMA_151M, OURS, Contender, SystemSpec, Turn, all_on
from offload.bench.record import Kind, Record, Row
from offload.bench.rounds import in_turn
from offload.bench.table import Column, number, print_record, span
from offload.config import OffloadConfig
from offload.gpt import build_meta_model
from offload.memory.tier_manager import compute_device, this_machine
from offload.planning.activations.facts import ActivationFacts
from offload.planning.activations.trace import trace_activations
from offload.planning.choice.planner import make_plan, resolved_config
from offload.planning.machine.calibration import machine_speeds
from offload.planning.machine.speeds import Speeds
from offload.planning.plan.estimate import StepEstimate
from offload.planning.plan.plan import Plan
from offload.planning.plan.workload import Workload
from offload.planning.step.step_time import estimate_step
from offload.zero.groups.discovery import discover
from offload.zero.groups.model_shape import ModelShape

BAR = 0.2  # a prediction may be this far from what was measured
_SHORT_S = 1.0  # steps shorter than this are taken several times per round


@dataclass(frozen=True)
class Case:
    """One configuration: its differences from that of the 151 M shape."""

    name: str
    overrides: tuple[str, ...]
    batches: int = 1
    in_one_piece: bool = False


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
CASES = (
    Case("151 M fp32, host", _HOST),
    Case("151 M fp32, nvme", _NVME),
    Case("151 M fp32, nvme, 4 passes", (*_NVME, "gradient_accumulation_steps=4"), 4),
    Case("151 M fp32, nvme, 4 micro-batches", (*_NVME, "micro_batches=4"), 4, True),
    Case("151 M bf16, host", (*_HOST, *_BF16)),
    Case("151 M bf16, nvme", (*_NVME, *_BF16)),
    Case("151 M fp32, optimizer on nvme", (*all_on("host", optimizer="nvme"), "budget.host=2GiB")),
    Case("151 M fp32, nvme, 1 x 32 tokens", (*_NVME, *_batch(1, 32))),
    Case("30 M fp32, host, 4 x 256", (*_HOST, *_30M, *_batch(4, 256))),
    Case("30 M fp32, host, 4 x 256, kept", (*_HOST, *_30M, *_batch(4, 256), *_KEEP)),
    Case("30 M fp32, nvme, 2 x 128, kept", (*_NVME, *_30M, "budget.host=128MiB",
                                            *_batch(2, 128), *_KEEP)),
    Case("30 M bf16, nvme, 8 x 256", (*_NVME, *_30M, *_BF16, "budget.host=128MiB",
                                      *_batch(8, 256))),
    Case("5 M fp32, host, 8 x 128, kept", (*_HOST, *_DEMO, *_batch(8, 128), *_KEEP)),
    Case("5 M fp32, three tiers, 8 x 128, kept", (
        *_DEMO, *_batch(8, 128), *_KEEP, "budget.host=48MiB", "budget.device=16MiB",
        "optimizer.chunk=262144", "placement.parameters={device: 25%, host: 25%, nvme: 50%}",
        "placement.gradients={device: 25%, host: 75%}",
        "placement.optimizer={host: 20%, nvme: 80%}",
    )),
)  # fmt: skip


@dataclass
class Run:
    """A case with its process, and its results round by round."""

    case: Case
    contender: Contender
    plan: Plan
    config: OffloadConfig
    shape: ModelShape
    facts: ActivationFacts
    workload: Workload
    measured: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)  # read, written
    estimate: StepEstimate | None = None

    def turn(self, speeds: Speeds) -> None:
        """Predict from `speeds`, then measure."""
        self.estimate = estimate_step(
            self.plan, self.config, self.shape, self.facts, self.workload, speeds
        )
        turns = [self._measured()]
        while sum(turn.seconds for turn in turns) < _SHORT_S and len(turns) < 7:
            turns.append(self._measured())
        self.measured.append(statistics.median(turn.seconds for turn in turns))
        self.predicted.append(self.estimate.seconds)
        self.moved.append((turns[-1].read_nbytes, turns[-1].written_nbytes))

    def _measured(self) -> Turn:
        turn = self.contender.turn()
        assert turn is not None, "what fails of ours is raised"
        return turn

    def forget(self) -> None:
        self.measured, self.predicted, self.moved = [], [], []

    def close(self) -> None:
        self.contender.close()


def start(case: Case, folder: Path, stack: ExitStack) -> Run:
    config = OffloadConfig.load(LLAMA_151M, (*case.overrides, f"nvme.paths=[{folder}]"))
    model = build_meta_model(config)
    shape = discover(model, config.groups.blocks).shape()
    device = compute_device(config)
    plan = make_plan(config, shape, this_machine(config.nvme, device))
    config = resolved_config(config, plan, device.type)
    batch = config.train.batch * (case.batches if case.in_one_piece else 1)
    passes = 1 if case.in_one_piece else case.batches
    workload = Workload(batch, config.train.sequence, passes)
    facts = trace_activations(model, config, workload)
    name = f"case-{abs(hash(case)):x}"
    spec = SystemSpec(
        name, case.name, Kind.OURS, OURS, batches=case.batches, in_one_piece=case.in_one_piece
    )
    contender = Contender(spec, config, folder)
    stack.callback(contender.kill)
    return Run(case, contender, plan, config, shape, facts, workload)


RATIO = "predicted_per_measured"
COLUMNS = (
    Column("predicted", number("predicted_s")), Column("measured", number("seconds")),
    Column("ratio", number(RATIO)),
    Column("range", lambda row: span(row.measures[RATIO])),
    Column("bytes", number("predicted_per_moved_nbytes", digits=3)),
)  # fmt: skip


def measure(
    cases: Sequence[Case], folder: Path, rounds: int
) -> Iterator[tuple[list[Run], list[Speeds]]]:
    """Measure every case once per round, each round beginning with another one; yields the results
    after each round but the first, which does not count."""
    speeds: list[Speeds] = []
    with ExitStack() as stack:
        runs = []
        for case in cases:
            print(f"starting {case.name}", flush=True)
            runs.append(start(case, folder, stack))
        for number, order in in_turn(runs, rounds):
            speeds.append(machine_speeds([folder], remeasure=True))
            for run in order:
                run.turn(speeds[-1])
                print(
                    f"round {number + 1}: {run.case.name}: {run.predicted[-1]:.4f} s predicted, "
                    f"{run.measured[-1]:.4f} s measured", flush=True,
                )  # fmt: skip
            if number < 0:
                speeds.clear()
                for run in runs:
                    run.forget()
            else:
                yield runs, speeds
        for run in runs:
            run.close()


def row_of(run: Run) -> Row:
    """A row of ratios round by round; of nvme's bytes, predicted over moved, both ways together."""
    assert run.estimate is not None, "it had a turn"
    ratios = [p / m for p, m in zip(run.predicted, run.measured, strict=True)]
    measures = {"predicted_s": run.predicted, "seconds": run.measured, RATIO: ratios}
    links = run.estimate.links
    note = f"bound by {max(links, key=lambda link: link.seconds).name}"
    row = Row(run.case.name, Kind.OURS, measures, note=note)
    moved = statistics.median(sum(each) for each in run.moved)
    if moved:
        said = sum(link.nbytes for link in links if link.name.startswith("nvme"))
        row.facts["predicted_per_moved_nbytes"] = said / moved
    return row


def record_of(runs: Sequence[Run], speeds: Sequence[Speeds]) -> Record:
    record = Record("step prediction", {"rounds": len(speeds)}, [row_of(run) for run in runs])
    near = [row for row in record.rows if abs(row.median(RATIO) - 1) <= BAR]
    record.notes.append(f"{len(near)} of {len(runs)} cases within {BAR:.0%}")
    record.details["speeds"] = [asdict(each) for each in speeds]
    record.details["cases"] = {
        run.case.name: {
            "overrides": run.case.overrides, "workload": asdict(run.workload),
            "facts": asdict(run.facts), "moved_nbytes": run.moved,
            "links": [asdict(link) for link in run.estimate.links] if run.estimate else [],
        }
        for run in runs
    }  # fmt: skip
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", default="", help="names, separated by ;")
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wanted = [part.strip() for part in options.cases.split(";") if part.strip()]
    cases = [case for case in CASES if not wanted or case.name in wanted]
    if not cases or options.rounds < 1:
        parser.error("nothing to measure: name at least one case and one round")
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        for runs, speeds in measure(cases, Path(folder), options.rounds):
            found = record_of(runs, speeds)
            if options.json is not None:  # anew after every round: one may be the last
                found.write(options.json)
    print_record(found, COLUMNS)


if __name__ == "__main__":
    main()
