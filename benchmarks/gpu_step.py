"""Training steps on a GPU, one system per process: what a step takes once it goes round, and what
bounds it.

A system that defers an update to the next forward has no step that begins and ends by itself. So
time is taken where the loss of a step has arrived in host memory, and a step is what lies between
two such moments: everything that any step does is in one of the intervals.

    forward, backward 0 │ step 0, forward, backward 1 │ step 1, forward, backward 2 │ ...
                     loss 0                        loss 1                        loss 2

Events in the device's stream divide it into forward and backward. Its bounds:

    link      the bytes that the plan moves between host and device, each direction at the speed of
              a raw pinned copy, both directions at the same time
    compute   the operations of forward and backward, blocks' second forward included, at the rate
              of a large layer's products
    bus       the bytes of the CPU's updates over its memory bus, in a loop without arithmetic
    disk      records on nvme: read and written, at what a short pass over a file reached

The roofline is the larger of link and compute: what the device's side could do. Bus and disk are
said beside it, for they may be what a step waits for.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any

import torch

import offload
from benchmarks.generation import Passes, dispatch, give_quick_values
from benchmarks.gpu_machine import GpuMachine, clocks
from benchmarks.gpu_parts import say
from benchmarks.gpu_sizes import Case
from offload.bench.record import Kind, Record, Row
from offload.bench.systems import Offload, batch_of, between, made
from offload.bench.table import Column, number, span
from offload.config import OffloadConfig
from offload.gpt import LanguageModel, build_meta_model
from offload.planning.step.step_time import READ, TO_DEVICE, TO_HOST, WRITE
from offload.process.child import Parent
from offload.process.machine import peak_rss_nbytes
from offload.tiers import accelerator
from offload.tiers.errors import IntegrityError
from offload.train.plain import StepTimes, timed_step
from offload.train.text import Batch

_PASSES, _TURNS = 4, 3  # of inference
_LARGE_NBYTES = 16 << 30
COLUMNS = (
    Column("s/step", number("seconds")),
    Column("predicted", number("predicted_s")),
    Column("range", lambda row: span(row.measures.get("seconds", ()))),
    Column("forward", number("forward_s")),
    Column("backward", number("backward_s")),
    Column("tokens/s", number("tokens_per_s", digits=0)),
    Column("model TFLOP/s", number("model_flops_per_s", 1e12, 0)),
    Column("% of the roofline", number("share_of_roofline", 0.01, 0)),
    Column("% of all bounds", number("share_of_all_bounds", 0.01, 0)),
    Column("peak host GiB", number("peak_rss_nbytes", 2**30, 1)),
    Column("peak device GiB", number("peak_reserved_nbytes", 2**30, 1)),
)


class QuickOffload(Offload):
    """`Offload` with initial values that take no time to make, and events between passes."""

    def built(self, config: OffloadConfig) -> LanguageModel:
        model = build_meta_model(config)
        give_quick_values(model)
        return model

    def step(self, micro_batches: Sequence[Batch]) -> StepTimes:
        self._marks: list[Any] = []

        def loss_of(*batch: torch.Tensor) -> torch.Tensor:
            self._mark()
            loss: torch.Tensor = self._loss_of(*batch)
            self._mark()
            return loss

        return timed_step(loss_of, micro_batches, self._update)

    def _update(self) -> None:
        self._mark()
        super()._update()

    def _mark(self) -> None:
        event = accelerator.of(self._engine.device).event(self._engine.device, timing=True)
        event.record()
        self._marks.append(event)

    def counted(self) -> dict[str, Any]:
        """The last step's seconds of forward and backward on the device; waits and updates on
        trial since the start."""
        marks, report = self._marks, self._engine.report()
        marks[-1].synchronize()
        passes = [a.elapsed_time(b) * 1e-3 for a, b in pairwise(marks)]
        return {
            "forward_s": sum(passes[::2]), "backward_s": sum(passes[1::2]), "waits": report.waits,
            "trials": asdict(report.trials), "gradient_norm": report.gradient_norm,
        }  # fmt: skip


def train(options: Mapping[str, Any], parent: Parent) -> None:
    """Build, take `steps` steps, the first one to warm up, and close, as a child's program. Answers
    after each step: one that is cut short leaves those before it.

    IntegrityError for a loss that is not finite.
    """
    started = time.perf_counter()
    kind, device = accelerator.of(accelerator.default_device()), accelerator.default_device()
    system, config = made(options)
    steps, passes = options["steps"], config.gradient_accumulation_steps
    result: dict[str, Any] = {"built_s": time.perf_counter() - started}
    losses, ends, moved, counted = [], [], [], []
    with ThreadPoolExecutor(1) as beside:
        for step in range(steps):
            speed = beside.submit(clocks) if step == steps - 1 else None  # amid work
            numbers = range(step * passes, (step + 1) * passes)
            times = system.step([batch_of(config, number, device) for number in numbers])
            losses.append(times.loss)
            ends.append(times.known_at)
            moved.append(system.moved())
            counted.append(system.counted() if isinstance(system, QuickOffload) else {})
            if not math.isfinite(times.loss):
                raise IntegrityError(f"losses are not finite: {losses}; such steps have no time")
            result |= {
                "losses": losses,
                "seconds": [b - a for a, b in pairwise(ends)],
                "moved_nbytes": [between(a, b) for a, b in pairwise(moved)],
                "counted": counted,
                "clocks": speed.result() if speed is not None else {},
                "first_step_s": ends[0] - started - result["built_s"],
                "peak_rss_nbytes": peak_rss_nbytes(),
                "peak_device_nbytes": kind.peak_nbytes(device),
                "peak_reserved_nbytes": kind.peak_reserved_nbytes(device),
            }
            parent.answer(result)
    system.close()  # a hundred gigabytes of pinned memory take their time to be given back


def bounds(case: Case, machine: GpuMachine) -> dict[str, float]:
    """The bounds in seconds per step."""
    speeds = machine.speeds
    seconds = {
        "compute": case.flops / speeds.matmul_flops_per_s["bf16"],
        "bus": case.adam_nbytes / machine.bus_bytes_per_s,
        "link": max(
            case.nbytes_over(TO_DEVICE) / speeds.host_to_device_bytes_per_s,
            case.nbytes_over(TO_HOST) / speeds.device_to_host_bytes_per_s,
        ),
    }
    read, written = case.nbytes_over(READ), case.nbytes_over(WRITE)
    if read or written:
        seconds["disk"] = (
            read / speeds.nvme_read_bytes_per_s + written / speeds.nvme_write_bytes_per_s
        )
    return seconds


def row_of(label: str, case: Case, step: Mapping[str, Any], machine: GpuMachine) -> Row:
    """A row with a measured step and its bounds."""
    seconds = statistics.median(step["seconds"])
    limits = bounds(case, machine)
    facts = {
        "tokens_per_s": case.tokens / seconds,
        "model_flops_per_s": case.model_flops / seconds,
        "share_of_roofline": max(limits["link"], limits["compute"]) / seconds,
        "share_of_all_bounds": max(limits.values()) / seconds,
        **{name: float(value) for name, value in step.items() if name.startswith("peak_")},
        "predicted_s": case.predicted_s,
        **{f"bound by {name}, s": value for name, value in sorted(limits.items())},
    }
    for link in (TO_DEVICE, TO_HOST):
        moved = [each[link] for each in step["moved_nbytes"] if link in each]
        if moved and case.nbytes_over(link):
            facts[f"{link}, moved per planned"] = statistics.median(moved) / case.nbytes_over(link)
    measures = {"seconds": list(step["seconds"])}
    after_first = [each for each in step["counted"][1:] if each]
    if after_first:
        for name in ("forward_s", "backward_s"):
            measures[name] = [each[name] for each in after_first]
        first, last = step["counted"][0], step["counted"][-1]
        waits = between(first["waits"], last["waits"])
        facts |= {f"waited for {n}, s": s / len(after_first) for n, s in waits.items()}
        facts |= {f"updates on trial, {n}": float(count) for n, count in last["trials"].items()}
    return Row(label, Kind.OFFLOAD, measures, facts)


def generate(_: Mapping[str, Any], parent: Parent) -> None:
    """Generate with weights in host memory, as a child's program: of 3 B parameters, in bf16 and
    in fewer bits, one token per pass and many; on a small GPU with a small model."""
    free = accelerator.free_nbytes(accelerator.default_device())
    shape = "dense" if free >= _LARGE_NBYTES else "small"
    record = Record("inference", {"shape": shape, "passes": _PASSES, "rounds": _TURNS})
    for storage in (None, "nf4"):
        config: dict[str, Any] = {
            "device": "cuda", "precision": "bf16", "budget": {"device": "2GiB"},
            "placement": {"parameters": "host"},
            **({"storage": {"weights": storage}} if storage else {}),
        }  # fmt: skip
        with ExitStack() as stack:
            model = dispatch(shape, config, stack)
            for batch in (1, 32):
                name = f"{storage or 'bf16'} weights on host, batch {batch}"
                say(name)
                passes = Passes(model, {"batch": batch, "prompt": 4, "passes": _PASSES})
                turns = [passes.turn(partial(_fetched, model)) for _ in range(_TURNS)]
                seconds = [each["seconds"] for each in turns]
                measures = {
                    "seconds": seconds, "tokens_per_s": [batch / each for each in seconds],
                    "bytes_per_s": [each["read_nbytes"] / each["seconds"] for each in turns],
                }  # fmt: skip
                record.rows.append(Row(name, Kind.OFFLOAD, measures))
                parent.answer(record.to_dict())


def _fetched(model: Any) -> int:
    nbytes: int = offload.dispatched(model).report().bytes_moved[TO_DEVICE]
    return nbytes
