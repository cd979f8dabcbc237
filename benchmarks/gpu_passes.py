"""Passes of a large batch with all weights at home in host memory: how near to the link's limit.

Each pass computes one token of every sequence, and copies to the device what its budget does not
keep. Bounds, measured between the passes and by the probe:

    link      the bytes that were copied, at the speed of one large copy of pinned memory
    compute   two operations per weight and sequence, at the rate of a large layer's products

The model is the largest of a few Llama shapes that host memory holds, and that can be loaded in the
time there is, by the planner's bytes; `benchmarks.generation` has the shapes and the passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from benchmarks.generation import Passes, bytes_over, dispatch, on_meta
from benchmarks.gpu_machine import GpuMachine
from benchmarks.gpu_parts import say
from benchmarks.gpu_sizes import GIB
from offload.bench.record import Kind, Record, Row, Target
from offload.bench.rounds import seconds_of
from offload.config import OffloadConfig
from offload.planning.choice.planner import lay_out_plan
from offload.planning.plan.plan import Hardware, needed_nbytes
from offload.process.child import Parent
from offload.tiers import accelerator
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes
from offload.zero.groups.discovery import discover
from offload.zero.groups.model_shape import ModelShape

OURS, LINK, COMPUTE = "ours, all on host", "bound by link", "bound by compute"
LONGEST = "the larger bound"
BATCH, PROMPT, PASSES, ROUNDS = 256, 4, 3, 3
DEVICE_BUDGET_NBYTES = 24 * GIB
_SPARE_NBYTES = 6 * GIB  # of RAM: CUDA's libraries, and a tensor while it is loaded
_WINDOW_NBYTES = 1 * GIB
_STARTED_S = 25.0  # imports, CUDA, the tree of modules
_LOAD_S_PER_ELEMENT = 6e-9  # one thread: values are made, looked at, converted, copied or encoded
_COPY_NBYTES = 1 << 30


@dataclass(frozen=True)
class PassCase:
    """A shape of `benchmarks.generation`, and how it is stored."""

    name: str
    shape: str
    storage: str | None = None

    @property
    def share(self) -> float:
        """The share of the bound that has to be reached."""
        return 0.9 if self.storage is None else 0.85


CASES = (
    PassCase("70 B", "70b"), PassCase("39 B", "large"), PassCase("13 B", "13b"),
    PassCase("3 B", "dense"), PassCase("0.02 B", "small"),
)  # fmt: skip
ON_REQUEST = (PassCase("175 B int4", "175b", "int4"), PassCase("39 B int4", "large", "int4"))
NAMED = {case.name: case for case in (*CASES, *ON_REQUEST)}


@dataclass(frozen=True)
class Choice:
    """The case to compute, and its configuration (all but the folder for files)."""

    case: PassCase
    numel: int
    config: dict[str, Any]
    estimated_s: float  # of the whole process
    why: tuple[str, ...] = ()  # not a larger one


def choose(
    machine: GpuMachine, time_s: float, name: str | None = None
) -> tuple[Choice | None, tuple[str, ...]]:
    """The first case that host memory holds and that is loaded and measured in `time_s`, by
    estimate; and why each larger case was not chosen. A named case is chosen whatever its time."""
    refused: list[str] = []
    for case in CASES if name is None else (NAMED[name],):
        device = min(DEVICE_BUDGET_NBYTES, machine.device_nbytes // 2)
        numel, needed = _sizes_of(case, device, machine)
        host = needed + _WINDOW_NBYTES
        short = host + _SPARE_NBYTES - machine.host_nbytes
        if short > 0:
            refused.append(f"{case.name}: needs {format_bytes(short)} more RAM than there is")
            continue
        estimated = _estimate_s(numel, needed, machine)
        if name is None and estimated > time_s:
            refused.append(
                f"{case.name}: would take about {estimated:.0f} s, there are {time_s:.0f}"
            )
            continue
        config = settings(case, device, host)
        return Choice(case, numel, config, estimated, tuple(refused)), tuple(refused)
    return None, tuple(refused)


def settings(case: PassCase, device_nbytes: int, host_nbytes: int) -> dict[str, Any]:
    return {
        "device": "cuda", "precision": "bf16", "placement": {"parameters": "host"},
        "budget": {"device": device_nbytes, "host": host_nbytes, "nvme": 0},
        **({} if case.storage is None else {"storage": {"weights": case.storage}}),
    }  # fmt: skip


def _sizes_of(case: PassCase, device_nbytes: int, machine: GpuMachine) -> tuple[int, int]:
    """The number of parameters, and the least bytes of host memory that the plan needs for them."""
    roomy = 1 << 50
    config = OffloadConfig.load(settings(case, device_nbytes, roomy)).for_inference()
    shape = shape_of(case.shape).stored(config.stored)
    plan = lay_out_plan(config, shape, Hardware(machine.device_nbytes, roomy, roomy, roomy))
    return sum(group.numel for group in shape.groups), needed_nbytes(plan, Tier.HOST)


@cache
def shape_of(name: str) -> ModelShape:
    """The planner's shape of a shape of `benchmarks.generation`, frozen."""
    return discover(on_meta(name), frozen=True).shape()


def _estimate_s(numel: int, host_nbytes: int, machine: GpuMachine) -> float:
    link_s = host_nbytes / machine.speeds.host_to_device_bytes_per_s
    loaded = numel * _LOAD_S_PER_ELEMENT
    passes = (ROUNDS + 1) * (PASSES + 1)
    return _STARTED_S + host_nbytes / machine.touch_bytes_per_s + loaded + passes * 2 * link_s


# ---------------------------------------------------------------- the part
def run_pass(options: Mapping[str, Any], parent: Parent) -> None:
    """Dispatch, and take turns of passes with raw copies before and behind each. A child's program.
    The record is answered before the model is closed: pinned memory takes time to release."""
    device = torch.device(options["config"]["device"])
    batch, storage = options["batch"], options["storage"]
    turn = {"device": str(device), "batch": batch, "prompt": PROMPT, "passes": PASSES}
    with ExitStack() as stack:
        say("loading ...")
        model = dispatch(options["shape"], options["config"], stack)
        moved = bytes_over(model, "host to device")
        copy, passes = RawCopy(device, options["copy_nbytes"]), Passes(model, turn)
        turns, speeds = list[dict[str, Any]](), list[float]()
        for number in range(-1, options["rounds"]):
            before = copy.bytes_per_s()
            found = passes.turn(moved)
            say(f"{found['seconds']:.2f} s per pass")
            if number >= 0:
                turns.append(found)
                speeds.append(max(before, copy.bytes_per_s()))
        numel = sum(param.numel() for param in model.parameters())
        record = Record("pass", {"batch": batch, "prompt": PROMPT, "passes": PASSES})
        _add_rows(record, turns, speeds, 2 * numel * batch / options["flops_per_s"])
        record.compare(LONGEST, OURS, "seconds", Target(options["share"]))
        record.note_rounds(options["rounds"])
        record.notes.append(
            f"{numel / 1e9:.2f} B parameters, bf16{f', stored as {storage}' if storage else ''}, "
            f"batch {batch}, prompts of {PROMPT} tokens, {PASSES} passes a turn, device budget "
            f"{format_bytes(options['config']['budget']['device'])}"
        )
        if len({tuple(each["chosen"]) for each in turns}) > 1:
            record.notes.append("TOKENS DIFFER between turns")
        if accelerator.is_accelerator(device):
            peak = float(accelerator.of(device).peak_nbytes(device))
            record.rows[0].facts["peak_device_nbytes"] = peak
        parent.answer(record.to_dict())


def _add_rows(
    record: Record, turns: list[dict[str, Any]], speeds: list[float], compute_s: float
) -> None:
    names = ("seconds", "read_nbytes", "peak_rss_nbytes")
    measures = {name: [float(each[name]) for each in turns] for name in names}
    measures["tokens_per_s"] = [record.options["batch"] / each for each in measures["seconds"]]
    link = [n / speed for n, speed in zip(measures["read_nbytes"], speeds, strict=True)]
    bounds = {
        LINK: link, COMPUTE: [compute_s] * len(turns),
        LONGEST: [max(each, compute_s) for each in link],
    }  # fmt: skip
    record.rows.append(Row(OURS, Kind.OURS, measures))
    record.rows += [Row(name, Kind.LIMIT, {"seconds": found}) for name, found in bounds.items()]


class RawCopy:
    """One large copy from memory that PyTorch pinned."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._there = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._here = torch.ones(nbytes, dtype=torch.uint8)
        if accelerator.is_accelerator(device):
            self._here = self._here.pin_memory()

    def bytes_per_s(self) -> float:
        return self._here.nbytes / seconds_of(lambda: self._there.copy_(self._here))


def options_of(choice: Choice, machine: GpuMachine, folder: str) -> dict[str, Any]:
    """The options of `run_pass`."""
    return {
        **asdict(choice.case), "share": choice.case.share, "batch": BATCH, "rounds": ROUNDS,
        "copy_nbytes": _COPY_NBYTES, "flops_per_s": machine.matmul_flops_per_s,
        "config": {**choice.config, "nvme": {"paths": [folder]}},
    }  # fmt: skip
