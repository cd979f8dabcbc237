"""`make gpu-check`: tests, inference and training steps on the GPU that is there; one record.

    python -m benchmarks.gpu_check [CALL or PART ...] [--out FILE or FOLDER]

    a   a first look at a small model, then 8 B: all on host, and where the planner puts it; with
        one and eight passes per step, clipped and not
    b   tests, inference
    c   a long sequence, 24 GiB of a larger GPU, 13 B on three tiers, sizes of chunks,
        3.6 B, a longer sequence

Each call takes less than ten minutes and begins with a probe of the machine; by default all three
run, one after the other. Each part is a process of its own with a time limit. Those for which there
is no time or memory are left out, and the record, which is written anew after each, says why.

Exit status 1 if a test or a part failed, 0 otherwise, and without a GPU.
"""

import argparse
import datetime
import importlib.metadata
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_machine import GpuMachine
from benchmarks.gpu_parts import Outcome, Status, run_part
from benchmarks.gpu_sizes import CALLS, TRAININGS, Case, Training, case_of
from benchmarks.gpu_step import COLUMNS as STEP_COLUMNS
from benchmarks.gpu_step import row_of
from offload.bench.record import Record, this_machine
from offload.bench.table import Column, number, print_record
from offload.process.child import repository
from offload.tiers import accelerator
from offload.tiers.errors import OffloadError, PathError

LIMIT_S = 535.0  # one call; with what is between its parts, nine minutes
LIMITS_S = {"probe": 60.0, "tests": 280.0, "inference": 100.0}
_PARTS = [part for parts in CALLS.values() for part in parts]
MIN_PART_S = 20.0  # a part that has less is not begun
_LARGE_NUMEL = 1e9
_TESTS_WRAP_UP_S = 10.0  # for a part to say which of its processes hang


_RECORDS = repository() / "benchmarks" / "records"
_COLUMNS = (
    Column("ms", number("seconds", 1e-3)), Column("GB/s", number("bytes_per_s", 1e9, 1)),
    Column("tokens/s", number("tokens_per_s", digits=1)),
)  # fmt: skip


@dataclass
class Check:
    """The parts so far, and the time that is left for others."""

    folder: Path  # for swap files and the parts' own
    record: Record
    out: Path
    limit_s: float = LIMIT_S
    clock: Callable[[], float] = time.monotonic
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    build_s_per_parameter: float = 0.0  # the most of the steps so far

    def __post_init__(self) -> None:
        self.deadline = self.clock() + self.limit_s

    def left_s(self) -> float:
        return self.deadline - self.clock()

    def run(self, name: str, options: Mapping[str, Any], limit_s: float) -> Outcome:
        """Run a part, say how it ended, and write the record."""
        limit_s = min(limit_s, self.left_s())
        if limit_s < MIN_PART_S:
            return self.leave_out(name, f"{max(0.0, limit_s):.0f} s were left")
        say(f"{name} ...")
        return self.add(run_part(name, {"limit_s": limit_s, **options}, limit_s, self.folder))

    def leave_out(self, name: str, why: str) -> Outcome:
        return self.add(Outcome(name, Status.LEFT_OUT, note=why))

    def add(self, outcome: Outcome) -> Outcome:
        """Keep how a part ended."""
        note = f": {outcome.note}" if outcome.note else ""
        say(f"{outcome.name}: {outcome.status}, {outcome.seconds:.0f} s{note}")
        self.outcomes[outcome.name] = outcome
        self.record.details["parts"] = [asdict(each) for each in self.outcomes.values()]
        self.write()
        return outcome

    def write(self) -> None:
        """Write the record as JSON, at once or not at all. PathError if it cannot be written."""
        new = self.out.with_name(f".{self.out.name}.new")
        self.record.write(new, "--out")
        new.replace(self.out)


def say(text: str) -> None:
    print(f"gpu-check: {text}", flush=True)


# ---------------------------------------------------------------- the parts in their order
def run_all(check: Check, parts: Iterable[str]) -> None:
    """Run the parts that the record does not have yet, after the probe."""
    machine = _probed(check)
    for name in parts:
        try:
            _run(check, machine, name)
        except PathError:  # of the record
            raise
        except Exception as error:  # noqa: BLE001 - it is a line, and not the end
            ended = check.outcomes.get(name, Outcome(name, Status.LEFT_OUT))
            why = "".join(traceback.format_exception(error))
            check.add(replace(ended, status=Status.FAILED, note=why))


def _run(check: Check, machine: GpuMachine | None, name: str) -> None:
    if name == "tests":
        _run_tests(check)
    elif name not in TRAININGS:
        outcome = check.run(name, {}, LIMITS_S[name])
        if outcome.result:
            print_record(Record.from_dict(outcome.result), _COLUMNS)
    elif machine is None:
        check.leave_out(name, "without the probe nothing says what the machine can hold")
    else:
        _run_step(check, machine, TRAININGS[name], name)


def _probed(check: Check) -> GpuMachine | None:
    """The machine, measured; None if that failed."""
    probed = check.run("probe", {"folder": str(check.folder)}, LIMITS_S["probe"])
    if not probed.ok:
        return None
    check.record.machine = probed.result["hardware"]
    check.record.details["machine"] = probed.result["machine"]
    return GpuMachine.from_dict(probed.result["machine"])


def _run_tests(check: Check) -> None:
    limit_s = min(LIMITS_S["tests"], check.left_s())
    within = {"folder": str(check.folder), "limit_s": limit_s - _TESTS_WRAP_UP_S}
    tests = check.run("tests", within, limit_s)
    if tests.ok and not tests.result["ok"]:  # it ran to its end, with failures in it
        lines = [tests.result["counts"], *tests.result["failed"], *tests.result["said"]]
        check.add(replace(tests, status=Status.FAILED, note="\n".join(lines)))
    if unreached := tests.result.get("unreached"):
        say(f"tests that were not reached: {', '.join(unreached)}")


def _run_step(check: Check, machine: GpuMachine, training: Training, name: str) -> None:
    """Train what the machine can hold, as far as there is time."""
    case = case_of(training, machine)
    left_s = check.left_s()
    if isinstance(case, str):
        check.leave_out(name, case)
    elif (seconds := case.estimated_s(check.build_s_per_parameter)) > left_s:
        check.leave_out(name, f"would take about {seconds:.0f} s, {max(0, left_s):.0f} were left")
    else:
        check.record.details["cases"][name] = asdict(case)
        options = {
            "program": "benchmarks.gpu_step:QuickOffload", "steps": training.steps,
            "config": {**case.config, "nvme": {"paths": [str(check.folder)]}},
            "folder": str(check.folder),
        }  # fmt: skip
        _add_row(check, case, check.run(name, options, left_s), machine)


def _add_row(check: Check, case: Case, outcome: Outcome, machine: GpuMachine) -> None:
    """Add the row of a step, and what building its model took to what others are expected to."""
    training, result, record = case.training, outcome.result, check.record
    if outcome.status is Status.FAILED or not result.get("seconds"):
        return
    if outcome.ok and case.numel > _LARGE_NUMEL:  # else it is imports
        each_s = (outcome.seconds - sum(result["seconds"])) / case.numel
        check.build_s_per_parameter = max(check.build_s_per_parameter, each_s)
    record.rows = [row for row in record.rows if row.name != training.name]
    record.rows.append(row_of(training.name, case, result, machine))
    check.write()


def succeeded(outcomes: Iterable[Outcome]) -> bool:
    """Whether all parts that were begun succeeded, tests included."""
    return all(outcome.status in (Status.DONE, Status.LEFT_OUT) for outcome in outcomes)


# ---------------------------------------------------------------- the command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check and return the exit status."""
    options = _parser().parse_args(arguments)
    if accelerator.default() is None:
        say(f"no GPU check: PyTorch {importlib.metadata.version('torch')} sees no GPU here")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a part that runs is ended, too
    ended: list[Outcome] = []
    try:
        if options.folder is not None and not options.folder.is_dir():
            raise PathError(f"--folder: {options.folder} is not a folder; name one on the disk")
        for parts in _calls(options.names):
            with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=options.folder) as private:
                check = begin(options.out, Path(private), options.commit, options.limit_s)
                run_all(check, parts)
            ended += check.outcomes.values()
            if check.record.rows:
                print_record(check.record, STEP_COLUMNS)
            say(f"record: {check.out}")
    except OffloadError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    return 0 if succeeded(ended) else 1


def _calls(names: Sequence[str]) -> list[Sequence[str]]:
    """The parts of each call; parts that are named by themselves are one."""
    calls = [CALLS[name] for name in CALLS if name in names or "all" in names]
    parts = [part for name in names for part in _PARTS if part.split(":")[0] == name]
    return [*calls, *([parts] if parts else [])]


def begin(
    out: Path | None, folder: Path, commit: str | None = None, limit_s: float = LIMIT_S
) -> Check:
    """Write an empty record. PathError where it cannot be written."""
    machine, now = this_machine(), datetime.datetime.now(datetime.UTC)
    gpu = machine.setdefault("gpu", "none")
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    details = {
        "machine": {}, "parts": [], "cases": {}, "date": f"{now:%Y-%m-%d %H:%M UTC}",
        "commit": commit or _commit(),
    }  # fmt: skip
    path = out or _RECORDS
    path = path / f"gpu-{slug}-{now:%Y-%m-%d}.json" if path.is_dir() else path
    check = Check(folder, Record("gpu", {}, machine=machine, details=details), _new(path), limit_s)
    check.write()
    return check


def _new(path: Path) -> Path:
    """A path that no file has: `path`, with a number after its name if need be."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_stem(f"{path.stem}-{number}")
    return free


def _commit() -> str:
    """The commit of the checkout, `-dirty` if it was changed since; unknown where there is none."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        said = subprocess.run(command, cwd=repository(), capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return said.stdout.strip()


def _parser() -> argparse.ArgumentParser:
    kinds = list(dict.fromkeys(part.split(":")[0] for part in _PARTS))
    known = ["all", *CALLS, *kinds]
    parser = argparse.ArgumentParser(prog="gpu-check", description="Check the GPU that is there.")
    add, said = parser.add_argument, f"calls, or kinds of parts: {', '.join(known)} (default: all)"
    add("names", nargs="*", choices=known, default="all", metavar="NAME", help=said)
    add("--out", type=Path, metavar="PATH", help="record or its folder (default: records/)")
    add("--limit-s", type=float, default=LIMIT_S, metavar="SECONDS", help="of one call")
    add("--commit", metavar="NAME", help="of the code, where it is not a checkout")
    add("--folder", type=Path, metavar="DIR", help="of swap files (default: the temporary folder)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
