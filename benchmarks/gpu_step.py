"""Training steps on a GPU, one system per process: what a step takes once it goes round, and what
bounds it.

A system that defers an update to the next forward has no step that begins and ends by itself. So
time is taken where the loss of a step has arrived in host memory, and a step is what lies between
two such moments: everything that any step does is in one of the intervals.

    forward, backward 0 │ step 0, forward, backward 1 │ step 1, forward, backward 2 │ ...
                     loss 0                        loss 1                        loss 2

Its bounds, with all states on the host:

    link      the bytes that no step can do without, each direction at the speed of a raw pinned
              copy, both directions at the same time
    compute   the operations of forward and backward, blocks' second forward included, at the rate
              of a large layer's products
    bus       the optimizer's bytes over the host's memory bus, in a loop without arithmetic
    disk      records that spilled: read and written, at what a short pass over a file reached

The roofline is the larger of link and compute: what the device's side could do. Bus and disk are
said beside it, for they may be what a step waits for.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from benchmarks.generation import give_quick_values
from benchmarks.gpu_machine import GpuMachine
from benchmarks.gpu_sizes import Case
from offload.bench.record import Kind, Row
from offload.bench.systems import Offload, batch_of, between, made
from offload.bench.table import Column, number, span
from offload.config import OffloadConfig
from offload.gpt import LanguageModel, build_meta_model
from offload.process.child import Parent
from offload.process.machine import peak_rss_nbytes
from offload.tiers import accelerator
from offload.tiers.errors import IntegrityError

TO_DEVICE, TO_HOST = "host to device", "device to host"
COLUMNS = (
    Column("s/step", number("seconds")),
    Column("predicted", number("predicted_s")),
    Column("range", lambda row: span(row.measures.get("seconds", ()))),
    Column("tokens/s", number("tokens_per_s", digits=0)),
    Column("model TFLOP/s", number("model_flops_per_s", 1e12, 0)),
    Column("% of the roofline", number("share_of_roofline", 0.01, 0)),
    Column("% of all bounds", number("share_of_all_bounds", 0.01, 0)),
    Column("peak host GiB", number("peak_rss_nbytes", 2**30, 1)),
    Column("peak device GiB", number("peak_device_nbytes", 2**30, 1)),
)


class QuickOffload(Offload):
    """`Offload` with initial values that take no time to make."""

    def built(self, config: OffloadConfig) -> LanguageModel:
        model = build_meta_model(config)
        give_quick_values(model)
        return model


def train(options: Mapping[str, Any], parent: Parent) -> None:
    """Build, take `steps` steps, the first one to warm up, answer, and close, as a child's program.

    IntegrityError for a loss that is not finite.
    """
    started = time.perf_counter()
    system, config = made(options)
    device = torch.device("cuda" if config.device == "cuda" else "cpu")
    built_s = time.perf_counter() - started
    losses, ends, moved = [], [], []
    for step in range(options["steps"]):
        times = system.step([batch_of(config, step, device)])
        losses.append(times.loss)
        ends.append(times.known_at)
        moved.append(system.moved())
    if not all(math.isfinite(loss) for loss in losses):
        raise IntegrityError(f"losses are not finite: {losses}; no such step is worth its time")
    gpu = accelerator.is_accelerator(device)
    parent.answer(
        {
            "losses": losses,
            "seconds": [b - a for a, b in pairwise(ends)],
            "moved_nbytes": [between(a, b) for a, b in pairwise(moved)],
            "built_s": built_s,
            "first_step_s": ends[0] - started - built_s,
            "peak_rss_nbytes": peak_rss_nbytes(),
            "peak_device_nbytes": accelerator.of(device).peak_nbytes(device) if gpu else 0,
        }
    )  # before it closes: a hundred gigabytes of pinned memory take their time to be given back
    system.close()


def bounds(case: Case, machine: GpuMachine) -> dict[str, float]:
    """The bounds in seconds per step."""
    seconds = {
        "compute": case.flops / machine.matmul_flops_per_s,
        "bus": case.adam_nbytes / machine.bus_bytes_per_s,
        "link": max(
            case.min_to_device_nbytes / machine.speeds.host_to_device_bytes_per_s,
            case.weights_nbytes / machine.speeds.device_to_host_bytes_per_s,
        ),
    }
    if case.record_nbytes_on_nvme:
        reads = case.record_nbytes_on_nvme / machine.speeds.nvme_read_bytes_per_s
        seconds["disk"] = reads + case.record_nbytes_on_nvme / machine.speeds.nvme_write_bytes_per_s
    return seconds


def row_of(label: str, kind: Kind, case: Case, step: Mapping[str, Any], machine: GpuMachine) -> Row:
    """A row with a measured step and its bounds."""
    seconds = statistics.median(step["seconds"])
    limits = bounds(case, machine)
    facts = {
        "tokens_per_s": case.tokens / seconds,
        "model_flops_per_s": case.model_flops / seconds,
        "share_of_roofline": max(limits["link"], limits["compute"]) / seconds,
        "share_of_all_bounds": max(limits.values()) / seconds,
        "peak_rss_nbytes": float(step["peak_rss_nbytes"]),
        "peak_device_nbytes": float(step["peak_device_nbytes"]),
        **({"predicted_s": case.predicted_s} if kind is Kind.OFFLOAD else {}),
        **{f"bound by {name}, s": value for name, value in sorted(limits.items())},
    }
    for link, needed in ((TO_DEVICE, case.min_to_device_nbytes), (TO_HOST, case.weights_nbytes)):
        moved = [each[link] for each in step["moved_nbytes"] if link in each]
        if moved:
            facts[f"{link}, moved per least"] = statistics.median(moved) / needed
    return Row(label, kind, {"seconds": list(step["seconds"])}, facts)
