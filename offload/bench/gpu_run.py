"""The parts of a GPU check, one after the other, and the record they leave."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from offload.bench.gpu_bounds import copy_speeds, judge
from offload.bench.gpu_machine import GpuMachine
from offload.bench.gpu_markdown import render
from offload.bench.gpu_process import Outcome, Status, run_part
from offload.bench.gpu_sizes import DEEPSPEED, OURS, SHAPES, STEPS, Case, Needs, choose
from offload.tiers.errors import PathError

TOTAL_S = 465.0  # all parts together; with what is between them, under eight minutes
LIMITS_S = {"probe": 40.0, "tests": 140.0, "kernels": 60.0, "copies": 40.0, "step": 240.0}
PARTS = ("tests", "kernels", "copies", "step")
LEAST_S = 20.0  # a part that has less is not begun
_TESTS_WRAP_UP_S = 10.0  # for a part to say which of its processes hang
_STEP = {"ours": "step", "ours beside": "step:beside", "deepspeed": "step:deepspeed"}
_COMPILE = "deepspeed"  # its CPU Adam, while the tests run
_COMPILE_S = 150.0
_PEER_SHARE = 0.35  # of the time for steps, kept for the case that DeepSpeed can hold


@dataclass(frozen=True)
class Wanted:
    """What of the check is to be run, and with what."""

    parts: tuple[str, ...] = PARTS
    model: str | None = None  # a shape's name; None takes the largest that has the time
    memory_nbytes: int | None = None  # None takes what the system says is available


@dataclass
class Check:
    """The parts so far, and the time that is left for others."""

    folder: Path  # for swap files and the parts' own
    record: dict[str, Any]
    out: Path  # without suffix
    deadline: float
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def run(self, name: str, options: Mapping[str, Any], limit_s: float) -> Outcome:
        """Run a part, say how it ended, and write the record."""
        limit_s = min(limit_s, self.left_s())
        if limit_s < LEAST_S:
            note = f"{max(0.0, limit_s):.0f} s were left of {TOTAL_S:.0f}"
            return self.add(Outcome(name, Status.LEFT_OUT, note=note))
        say(f"{name} ...")
        return self.add(run_part(name, {"limit_s": limit_s, **options}, limit_s, self.folder))

    def leave_out(self, name: str, why: str) -> Outcome:
        return self.add(Outcome(name, Status.LEFT_OUT, note=why))

    def add(self, outcome: Outcome) -> Outcome:
        self.outcomes[outcome.name] = outcome
        self.record["parts"] = [asdict(each) for each in self.outcomes.values()]
        self.write()
        note = f": {outcome.note}" if outcome.note else ""
        say(f"{outcome.name}: {outcome.status}, {outcome.seconds:.0f} s{note}")
        return outcome

    def write(self) -> None:
        """JSON and Markdown. PathError if they cannot be written."""
        text = json.dumps(self.record, indent=1, allow_nan=False) + "\n"
        try:
            self.out.with_name(self.out.name + ".json").write_text(text)
            self.out.with_name(self.out.name + ".md").write_text(render(self.record))
        except OSError as error:
            raise PathError(f"--out: {self.out} cannot be written: {error.strerror}") from error


def say(text: str) -> None:
    print(f"gpu-check: {text}", flush=True)


def run_all(check: Check, wanted: Wanted) -> None:
    """All parts, in an order in which each finds what the ones before it measured or compiled."""
    here = {"folder": str(check.folder)}
    probed = check.run("probe", {**here, "memory_nbytes": wanted.memory_nbytes}, LIMITS_S["probe"])
    if probed.ok:
        check.record["hardware"] = probed.result["hardware"]
        check.record["machine"] = probed.result["machine"]
    peer = "step" in wanted.parts and importlib.util.find_spec("deepspeed") is not None
    with ThreadPoolExecutor(1) as beside:
        compiled = beside.submit(run_part, _COMPILE, {}, _COMPILE_S, check.folder) if peer else None
        if "tests" in wanted.parts:
            _run_tests(check)
        if compiled is not None:
            check.add(compiled.result())
    for name in ("kernels", "copies"):
        if name in wanted.parts:
            check.run(name, {}, LIMITS_S[name])
    if "step" not in wanted.parts:
        return
    if not probed.ok:
        check.leave_out(_STEP["ours"], "without the probe there is nothing to choose sizes by")
        return
    run_steps(check, GpuMachine(**probed.result["machine"]), wanted.model)


def _run_tests(check: Check) -> None:
    limit_s = LIMITS_S["tests"]
    within = {"folder": str(check.folder), "limit_s": limit_s - _TESTS_WRAP_UP_S}
    tests = check.run("tests", within, limit_s)
    if tests.ok and not tests.result["ok"]:  # it ran to its end, with failures in it
        found = tests.result
        note = f"{found['failed']} failed, {found['passed']} passed, {len(found['broken'])} broken"
        check.add(replace(tests, status=Status.FAILED, note=note))


def run_steps(check: Check, machine: GpuMachine, model: str | None) -> None:
    """Ours at the largest size; then DeepSpeed, where it is, and ours at DeepSpeed's size."""
    ends = time.monotonic() + min(LIMITS_S["step"], check.left_s())
    peer = check.outcomes.get(_COMPILE)
    case, refused = _choose(machine, ends, 0.0 if peer is None else _PEER_SHARE, (OURS,), model)
    if case is None:
        check.leave_out(_STEP["ours"], "; ".join(refused))
        return
    _run_step(check, machine, "ours", case, ends)
    if peer is None or not peer.ok:
        why = "not installed: pip install 'offload[bench]'" if peer is None else peer.note
        check.leave_out(_STEP["deepspeed"], why)
        return
    both, refused = _choose(machine, ends, 0.5, (OURS, DEEPSPEED), model)
    if both is None:
        check.leave_out(_STEP["deepspeed"], "; ".join(refused))
        return
    beside = "ours"
    if (both.shape, both.batch) != (case.shape, case.batch):
        beside = "ours beside"
        _run_step(check, machine, beside, both, ends)
    _run_step(check, machine, "deepspeed", both, ends)
    _compare(check, beside)


def _choose(
    machine: GpuMachine, ends: float, kept: float, needs: Sequence[Needs], model: str | None
) -> tuple[Case | None, tuple[str, ...]]:
    """Within the time until `ends`, a part of it `kept` for others; a named model, whatever the
    estimate of its time."""
    if model is not None:
        return choose(machine, math.inf, needs, [s for s in SHAPES if s.name == model])
    return choose(machine, (ends - time.monotonic()) * (1 - kept), needs)


def _run_step(check: Check, machine: GpuMachine, system: str, case: Case, ends: float) -> None:
    labels = {"deepspeed": "DeepSpeed ZeRO-3, all on cpu"}
    name = _STEP[system]
    step: dict[str, Any] = {
        "name": name, "label": labels.get(system, "ours"), "system": system, "case": case.to_dict(),
    }  # fmt: skip
    check.record["steps"].append(step)
    check.record["notes"] += [f"{name}: {text}" for text in case.why]
    options = {
        "system": system, "config": case.config(), "steps": STEPS, "folder": str(check.folder),
    }  # fmt: skip
    outcome = check.run(name, options, ends - time.monotonic())
    if outcome.result and outcome.status is not Status.FAILED:
        copies = check.outcomes.get("copies")
        speeds = copy_speeds(copies.result if copies is not None else {})
        step["judged"] = judge(case, outcome.result, machine, speeds)
        check.write()


def _compare(check: Check, beside: str) -> None:
    judged = {step["system"]: step.get("judged") for step in check.record["steps"]}
    ours, theirs = judged.get(beside), judged.get("deepspeed")
    if ours and theirs:
        ratio = ours["tokens_per_s"] / theirs["tokens_per_s"]
        check.record["ratios"].append(f"tokens/s, ours / DeepSpeed ZeRO-3: {ratio:.2f}")
        check.write()


def succeeded(outcomes: Iterable[Outcome]) -> bool:
    """Whether all tests and parts of ours that were begun went well; peers may fail."""
    return all(
        outcome.status in (Status.DONE, Status.LEFT_OUT) or "deepspeed" in outcome.name
        for outcome in outcomes
    )
