"""`make gpu-check`: tests, kernels, copies and training steps on the GPU that is there; one record.

    python -m benchmarks.gpu_check [--out FILE or FOLDER] [--parts NAMES] [--model NAME]
                                   [--memory SIZE] [--folder DIR]

    probe     what the machine has: sizes of the steps are chosen by it
    tests     pytest -m gpu
    kernels   each Triton kernel against a copy of as many bytes
    copies    offload bench copy
    step      the largest Llama that fits, ours; where DeepSpeed is installed, the largest that both
              can hold, ours and DeepSpeed's; one with half of the optimizer's states on nvme, as
              far as the time that is left allows

Each part is a process of its own with a time limit. The record is written anew after each, so that
whatever ends the check leaves what was found until then. Exit status 1 if a test or our own part
failed, 0 otherwise, and 0 where there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import math
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
from benchmarks.gpu_sizes import DEEPSPEED, LARGE, SHAPES, STEPS, Case, Peer, choose
from benchmarks.gpu_step import COLUMNS as STEP_COLUMNS
from benchmarks.gpu_step import row_of
from offload.bench.contenders import INSTALL_BENCH
from offload.bench.copy import COLUMNS as COPY_COLUMNS
from offload.bench.record import Kind, Record, this_machine
from offload.bench.table import print_record
from offload.process.child import repository
from offload.tiers import accelerator
from offload.tiers.errors import OffloadError, PathError
from offload.tiers.units import parse_bytes

TOTAL_S = 535.0  # all parts together; with what is between them, nine minutes
LIMITS_S = {"probe": 60.0, "tests": 140.0, "kernels": 60.0, "copies": 40.0, "step": 320.0}
PARTS = ("tests", "kernels", "copies", "step")
LEAST_S = 20.0  # a part that has less is not begun
_TESTS_WRAP_UP_S = 10.0  # for a part to say which of its processes hang
_COMPILE = "deepspeed"  # its CPU Adam, while the tests run
_COMPILE_S = 150.0
_PEER_SHARE = 0.5  # of the time for steps, kept for the case that DeepSpeed can hold
_SPILL_SHARE = 0.5  # of the time that is left: a disk may give less than the probe's short passes
_SPILLED = 50  # per cent of the optimizer's states
_OURS, _BESIDE, _THEIRS = "step", "step:beside", "step:deepspeed"
_SPILL = "step:spill"
_LABELS = {
    _OURS: "ours", _BESIDE: "ours, as large as DeepSpeed", _THEIRS: "DeepSpeed ZeRO-3, all on cpu",
    _SPILL: "ours, half of the optimizer's states on nvme",
}  # fmt: skip
_PROGRAMS = {True: "benchmarks.trained:DeepSpeedZero3", False: "benchmarks.gpu_step:QuickOurs"}
_COLUMNS = {"kernels": KERNEL_COLUMNS, "copies": COPY_COLUMNS}
_NAMED = {shape.name: shape for shape in (LARGE, *SHAPES)}


@dataclass(frozen=True)
class Wanted:
    """The selected parts of the check, and their options."""

    parts: tuple[str, ...] = PARTS
    model: str | None = None  # a shape's name; None takes the largest that has the time
    memory_nbytes: int | None = None  # None takes what the system says is available


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
        if limit_s < LEAST_S:
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
def run_all(check: Check, wanted: Wanted) -> None:
    """Run all parts, in an order in which each finds what earlier ones measured or compiled."""
    here = {"folder": str(check.folder)}
    probed = check.run("probe", {**here, "memory_nbytes": wanted.memory_nbytes}, LIMITS_S["probe"])
    if probed.ok:
        check.record.machine = probed.result["hardware"]
        check.record.details["machine"] = probed.result["machine"]
    peer = "step" in wanted.parts and importlib.util.find_spec("deepspeed") is not None
    with ThreadPoolExecutor(1) as beside:
        compiled = beside.submit(run_part, _COMPILE, {}, _COMPILE_S, check.folder) if peer else None
        if "tests" in wanted.parts:
            _run_tests(check)
        if compiled is not None:
            check.add(compiled.result())
    for name in ("kernels", "copies"):
        if name in wanted.parts:
            found = check.run(name, {}, LIMITS_S[name])
            if found.result:
                print_record(Record.from_dict(found.result), _COLUMNS[name])
    if "step" not in wanted.parts:
        return
    if probed.ok:
        run_steps(check, GpuMachine.from_dict(probed.result["machine"]), wanted.model)
    else:
        check.leave_out("step", "without the probe there is nothing to choose sizes by")


def _run_tests(check: Check) -> None:
    limit_s = LIMITS_S["tests"]
    within = {"folder": str(check.folder), "limit_s": limit_s - _TESTS_WRAP_UP_S}
    tests = check.run("tests", within, limit_s)
    if tests.ok and not tests.result["ok"]:  # it ran to its end, with failures in it
        found = tests.result
        note = f"{found['failed']} failed, {found['passed']} passed, {len(found['broken'])} broken"
        lines = [note, *found["failures"], *found["broken"]]
        check.add(replace(tests, status=Status.FAILED, note="\n".join(lines)))


def run_steps(check: Check, machine: GpuMachine, model: str | None) -> None:
    """Train ours at the largest size; then DeepSpeed, if installed, and ours at DeepSpeed's size;
    in the time left, what needs nvme. A named model may take all of it."""
    limit_s = check.left_s() if model else min(LIMITS_S["step"], check.left_s())
    ends = time.monotonic() + limit_s
    peer = check.outcomes.get(_COMPILE)
    case, refused = _choose(machine, ends, 0.0 if peer is None else _PEER_SHARE, (), model)
    if case is None:
        check.leave_out(_OURS, "; ".join(refused))
        return
    _run_step(check, machine, _OURS, case, ends)
    _run_peer(check, machine, case, model, ends)
    _run_spill(check, machine, model, ends)


def _run_peer(
    check: Check, machine: GpuMachine, case: Case, model: str | None, ends: float
) -> None:
    """Train DeepSpeed, if installed, beside `case` or ours at the size that DeepSpeed can hold."""
    peer = check.outcomes.get(_COMPILE)
    if peer is None or not peer.ok:
        check.leave_out(_THEIRS, INSTALL_BENCH if peer is None else peer.note)
        return
    both, refused = _choose(machine, ends, 0.5, (DEEPSPEED,), model)
    if both is None:
        check.leave_out(_THEIRS, "; ".join(refused))
        return
    beside = _OURS
    if (both.shape, both.batch) != (case.shape, case.batch):
        beside = _BESIDE
        _run_step(check, machine, beside, both, ends)
    _run_step(check, machine, _THEIRS, both, ends)
    check.record.compare(_label(beside, both), _label(_THEIRS, both), "tokens_per_s")
    check.write()


def _run_spill(check: Check, machine: GpuMachine, model: str | None, ends: float) -> None:
    case, refused = _choose(machine, ends, 1 - _SPILL_SHARE, (), model, _SPILLED)
    if case is None:
        check.leave_out(_SPILL, refused[-1])
    else:
        _run_step(check, machine, _SPILL, case, ends)


def _choose(
    machine: GpuMachine,
    ends: float,
    kept: float,
    peers: Sequence[Peer],
    model: str | None,
    spilled: int = 0,
) -> tuple[Case | None, tuple[str, ...]]:
    """The case to train within the time until `ends`, of which a share `kept` is for others; a
    named model, whatever the estimate of its time."""
    if model is not None:
        return choose(machine, math.inf, peers, [_NAMED[model]], spilled)
    return choose(machine, (ends - time.monotonic()) * (1 - kept), peers, spilled=spilled)


def _label(name: str, case: Case) -> str:
    return f"{_LABELS[name]}, {case.shape.name}"


def _run_step(check: Check, machine: GpuMachine, name: str, case: Case, ends: float) -> None:
    label = _label(name, case)
    check.record.details["cases"][name] = {**asdict(case), "label": label}
    check.record.notes += [f"{name}: {text}" for text in case.why]
    theirs = name == _THEIRS
    config = {**case.config, "nvme": {"paths": [str(check.folder)]}}
    options = {
        "program": _PROGRAMS[theirs],
        "settings": {"device": "cpu"} if theirs else {}, "config": config, "steps": STEPS,
        "folder": str(check.folder),
    }  # fmt: skip
    outcome = check.run(name, options, ends - time.monotonic())
    if outcome.result and outcome.status is not Status.FAILED:
        kind = Kind.PEER if theirs else Kind.OURS
        check.record.rows.append(row_of(label, kind, case, outcome.result, machine))
        check.write()


def succeeded(outcomes: Iterable[Outcome]) -> bool:
    """Whether all tests and our own parts that were begun succeeded; peers may fail."""
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
            run_all(check, Wanted(options.parts, options.model, options.memory))
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


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu-check", description="Check the GPU that is there.")
    parser.add_argument(
        "--out", type=Path, metavar="PATH",
        help="the record, or a folder for it (default: benchmarks/records)",
    )  # fmt: skip
    parser.add_argument(
        "--parts", type=_parts, default=PARTS, metavar="NAMES",
        help=f"of {', '.join(PARTS)}, separated by commas (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--model", choices=list(_NAMED),
        help="train this one, however long it may take (default: the largest that has the time)",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=_size, metavar="SIZE",
        help="RAM to count on, where the system says less or shall have less: 64GiB makes the "
        "optimizer of a large model spill to nvme",
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="for swap files (default: the temporary folder)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
