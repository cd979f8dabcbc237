"""`make gpu-check`: tests, kernels, copies and training steps on the GPU that is there; one record.

    python -m benchmarks.gpu_check [--out FILE or FOLDER] [--parts NAMES]
                                   [--folder DIR]

    probe     the machine's memory and speeds; models that it cannot hold are left out
    tests     pytest -m gpu
    kernels   each Triton kernel against a copy of as many bytes
    copies    offload bench copy
    step      Llamas of 0.15, 3.6, 8 and 13 B parameters, as far as memory and time allow; where
              DeepSpeed is installed, it trains 3.6 B, too

Each part is a process of its own with a time limit. The record is written anew after each, so that
a check that is cut short leaves the results until then. Exit status 1 if a test or a part other
than DeepSpeed's failed, 0 otherwise, and 0 where there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_kernels import COLUMNS as KERNEL_COLUMNS
from benchmarks.gpu_machine import GpuMachine
from benchmarks.gpu_parts import Outcome, Status, run_part
from benchmarks.gpu_sizes import SHAPES, STEPS, Case, case_of, deepspeed_short
from benchmarks.gpu_step import COLUMNS as STEP_COLUMNS
from benchmarks.gpu_step import row_of
from offload.bench.contenders import INSTALL_BENCH
from offload.bench.copy import COLUMNS as COPY_COLUMNS
from offload.bench.record import Kind, Record, this_machine
from offload.bench.table import print_record
from offload.process.child import repository
from offload.tiers import accelerator
from offload.tiers.errors import OffloadError, PathError

TOTAL_S = 535.0  # all parts together; with what is between them, nine minutes
LIMITS_S = {"probe": 60.0, "tests": 140.0, "kernels": 60.0, "copies": 40.0}
PARTS = ("tests", "kernels", "copies", "step")
MIN_PART_S = 20.0  # a part that has less is not begun
_TESTS_WRAP_UP_S = 10.0  # for a part to say which of its processes hang
_COMPILE = "deepspeed"  # its CPU Adam, while the tests run
_COMPILE_S = 150.0


@dataclass(frozen=True)
class Training:
    """A system that trains a shape, with `spilled` per cent of the optimizer's states on nvme."""

    label: str
    shape: str
    spilled: int = 0

    @property
    def name(self) -> str:
        """The label of its row."""
        return f"{self.label}, {self.shape}"


_OFFLOAD, _DEEPSPEED = "step:3.6 B", "step:deepspeed"
_HALF = "offload, half of the optimizer's states on nvme"
TRAININGS = {
    "step:0.15 B": Training("offload", "0.15 B"),  # small enough for a GPU that computes nothing
    _OFFLOAD: Training("offload", "3.6 B"),
    _DEEPSPEED: Training("DeepSpeed ZeRO-3, all on cpu", "3.6 B"),
    "step:8 B": Training("offload", "8 B"),
    "step:spill": Training(_HALF, "3.6 B", 50),
    "step:13 B": Training(_HALF, "13 B", 50),
}
_PROGRAMS = {True: "benchmarks.trained:DeepSpeedZero3", False: "benchmarks.gpu_step:QuickOffload"}
_COLUMNS = {"kernels": KERNEL_COLUMNS, "copies": COPY_COLUMNS}


@dataclass
class Check:
    """The parts so far, and the time that is left for others."""

    folder: Path  # for swap files and the parts' own
    record: Record
    out: Path
    deadline: float
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def run(self, name: str, options: Mapping[str, Any], limit_s: float) -> Outcome:
        """Run a part, say how it ended, and write the record."""
        limit_s = min(limit_s, self.left_s())
        if limit_s < MIN_PART_S:
            return self.leave_out(name, f"{max(0.0, limit_s):.0f} s were left of {TOTAL_S:.0f}")
        say(f"{name} ...")
        return self.add(run_part(name, {"limit_s": limit_s, **options}, limit_s, self.folder))

    def leave_out(self, name: str, why: str) -> Outcome:
        return self.add(Outcome(name, Status.LEFT_OUT, note=why))

    def add(self, outcome: Outcome) -> Outcome:
        self.outcomes[outcome.name] = outcome
        self.record.details["parts"] = [asdict(each) for each in self.outcomes.values()]
        self.write()
        note = f": {outcome.note}" if outcome.note else ""
        say(f"{outcome.name}: {outcome.status}, {outcome.seconds:.0f} s{note}")
        return outcome

    def write(self) -> None:
        """Write the record as JSON. PathError if it cannot be written."""
        self.record.write(self.out, "--out")


def say(text: str) -> None:
    print(f"gpu-check: {text}", flush=True)


# ---------------------------------------------------------------- the parts in their order
def run_all(check: Check, parts: Sequence[str] = PARTS) -> None:
    """Run the parts, in an order in which each finds what earlier ones measured or compiled."""
    probed = check.run("probe", {"folder": str(check.folder)}, LIMITS_S["probe"])
    if probed.ok:
        check.record.machine = probed.result["hardware"]
        check.record.details["machine"] = probed.result["machine"]
    peer = "step" in parts and importlib.util.find_spec("deepspeed") is not None
    with ThreadPoolExecutor(1) as beside:
        compiled = beside.submit(run_part, _COMPILE, {}, _COMPILE_S, check.folder) if peer else None
        if "tests" in parts:
            _run_tests(check)
        if compiled is not None:
            check.add(compiled.result())
    for name in ("kernels", "copies"):
        if name in parts:
            outcome = check.run(name, {}, LIMITS_S[name])
            if outcome.result:
                print_record(Record.from_dict(outcome.result), _COLUMNS[name])
    if "step" not in parts:
        return
    if probed.ok:
        run_steps(check, GpuMachine.from_dict(probed.result["machine"]))
    else:
        check.leave_out("step", "without the probe nothing says what the machine can hold")


def _run_tests(check: Check) -> None:
    limit_s = LIMITS_S["tests"]
    within = {"folder": str(check.folder), "limit_s": limit_s - _TESTS_WRAP_UP_S}
    tests = check.run("tests", within, limit_s)
    if tests.ok and not tests.result["ok"]:  # it ran to its end, with failures in it
        lines = [tests.result["counts"], *tests.result["said"]]
        check.add(replace(tests, status=Status.FAILED, note="\n".join(lines)))


def run_steps(check: Check, machine: GpuMachine) -> None:
    """Train what the machine can hold, in the order of the list, as far as there is time."""
    for name, training in TRAININGS.items():
        case = case_of(SHAPES[training.shape], machine, training.spilled)
        if isinstance(case, str):
            check.leave_out(name, case)
        elif why := _missing(check, machine, name, case):
            check.leave_out(name, why)
        else:
            _run_step(check, machine, name, case)
    check.record.compare(TRAININGS[_OFFLOAD].name, TRAININGS[_DEEPSPEED].name, "tokens_per_s")
    check.write()


def _missing(check: Check, machine: GpuMachine, name: str, case: Case) -> str:
    """Why the case is not trained; empty if nothing is missing."""
    if name == _DEEPSPEED:
        peer = check.outcomes.get(_COMPILE)
        if peer is None or not peer.ok:
            return INSTALL_BENCH if peer is None else peer.note
        if short := deepspeed_short(case, machine):
            return short
    left_s = check.left_s()
    if case.estimated_s > left_s:
        return f"would take about {case.estimated_s:.0f} s, {left_s:.0f} s were left"
    return ""


def _run_step(check: Check, machine: GpuMachine, name: str, case: Case) -> None:
    label = TRAININGS[name].name
    check.record.details["cases"][name] = {**asdict(case), "label": label}
    is_peer = name == _DEEPSPEED
    config = {**case.config, "nvme": {"paths": [str(check.folder)]}}
    options = {
        "program": _PROGRAMS[is_peer],
        "settings": {"device": "cpu"} if is_peer else {}, "config": config, "steps": STEPS,
        "folder": str(check.folder),
    }  # fmt: skip
    outcome = check.run(name, options, check.left_s())
    if outcome.result and outcome.status is not Status.FAILED:
        kind = Kind.PEER if is_peer else Kind.OFFLOAD
        check.record.rows.append(row_of(label, kind, case, outcome.result, machine))
        check.write()


def succeeded(outcomes: Iterable[Outcome]) -> bool:
    """Whether all parts that were begun succeeded, tests included; DeepSpeed's may fail."""
    return all(
        outcome.status in (Status.DONE, Status.LEFT_OUT) or "deepspeed" in outcome.name
        for outcome in outcomes
    )


# ---------------------------------------------------------------- the command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check and return the exit status."""
    options = _parser().parse_args(arguments)
    missing = no_gpu()
    if missing:
        say(missing)
        return 0
    try:
        if options.folder is not None and not options.folder.is_dir():
            raise PathError(f"--folder: {options.folder} is not a folder; name one on the disk")
        with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=options.folder) as private:
            check = begin(options.out, Path(private))
            run_all(check, options.parts)
    except OffloadError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    if check.record.rows:
        print_record(check.record, STEP_COLUMNS)
    say(f"record: {check.out}")
    return 0 if succeeded(check.outcomes.values()) else 1


def no_gpu() -> str:
    """The reason why there is nothing to check, in one line; empty where there is a GPU."""
    import torch

    if accelerator.default() is None:
        return f"no GPU check: PyTorch {torch.__version__} sees no GPU here"
    return ""


def begin(out: Path | None, folder: Path) -> Check:
    """Write an empty record. PathError where it cannot be written."""
    machine = this_machine()
    name = machine.setdefault("gpu", "none")
    now = datetime.datetime.now(datetime.UTC)
    details: dict[str, Any] = {
        "date": now.strftime("%Y-%m-%d %H:%M UTC"), "machine": {}, "parts": [], "cases": {},
    }  # fmt: skip
    record = Record("gpu", {}, details=details, machine=machine)
    check = Check(folder, record, _record_file(out, name, now), time.monotonic() + TOTAL_S)
    check.write()
    return check


def _record_file(out: Path | None, gpu: str, now: datetime.datetime) -> Path:
    """The path of the record; in a folder it has the name that it has by default."""
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    folder = repository() / "benchmarks" / "records" if out is None else out
    return folder / f"gpu-{slug}-{now:%Y-%m-%d}.json" if folder.is_dir() else folder


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; choose from {', '.join(PARTS)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu-check", description="Check the GPU that is there.")
    parser.add_argument(
        "--out", type=Path, metavar="PATH",
        help="the record, or a folder for it (default: benchmarks/records)",
    )  # fmt: skip
    parser.add_argument(
        "--parts", type=_parts, default=PARTS, metavar="NAMES",
        help=f"some of {', '.join(PARTS)}, separated by commas (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="of swap files (default: the temporary folder)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
