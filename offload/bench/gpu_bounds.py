"""What bounds a training step on a GPU with its states on the host, and what share was reached.

    link      the bytes that no step can do without, each direction at the speed of a raw pinned
              copy, both directions at the same time
    compute   the operations of forward and backward, blocks' second forward included, at the rate
              of one large product
    bus       the optimizer's bytes over the host's memory bus, in a loop without arithmetic
    disk      records that spilled: read and written, at what a short pass over a file reached

The roofline (Williams, Waterman, Patterson, 2009) is the larger of link and compute: what the
device's side could do. Bus and disk are said beside it, for they may be what a step waits for.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from offload.bench.gpu_machine import GpuMachine
from offload.bench.gpu_sizes import Case

TO_DEVICE, TO_HOST = "host to device", "device to host"


def copy_speeds(copies: Mapping[str, Any]) -> dict[str, float]:
    """Bytes per second of raw pinned copies, by direction, from the record of the copies."""
    rows = {row["name"]: row for row in copies.get("rows", ())}
    found = {}
    for way in (TO_DEVICE, TO_HOST):
        row = rows.get(f"raw, {way}")
        if row is not None and row["measures"]:
            found[way] = statistics.median(row["measures"]["bytes_per_s"])
    return found


def bounds(case: Case, machine: GpuMachine, speeds: Mapping[str, float]) -> dict[str, float]:
    """Seconds per step; `link` is missing where copies were not measured."""
    found = {
        "compute": case.shape.flops(case.tokens, recomputed=True) / machine.matmul_flops_per_s,
        "bus": case.adam_nbytes / machine.bus_bytes_per_s,
    }
    if {TO_DEVICE, TO_HOST} <= set(speeds):
        found["link"] = max(
            case.least_to_device_nbytes / speeds[TO_DEVICE],
            case.least_to_host_nbytes / speeds[TO_HOST],
        )
    if case.record_nbytes_on_nvme:
        reads = case.record_nbytes_on_nvme / machine.disk_read_bytes_per_s
        found["disk"] = reads + case.record_nbytes_on_nvme / machine.disk_write_bytes_per_s
    return found


def judge(
    case: Case, step: Mapping[str, Any], machine: GpuMachine, speeds: Mapping[str, float]
) -> dict[str, Any]:
    """A measured step against its bounds: what the record and its table say of it."""
    seconds = statistics.median(step["seconds"])
    limits = bounds(case, machine, speeds)
    model_flops = case.shape.flops(case.tokens, recomputed=False)
    judged: dict[str, Any] = {
        "seconds": seconds,
        "tokens_per_s": case.tokens / seconds,
        "model_flops_per_s": model_flops / seconds,
        "bounds_s": limits,
    }
    if "link" in limits:
        roofline = max(limits["link"], limits["compute"])
        judged["roofline_s"] = roofline
        judged["share_of_roofline"] = roofline / seconds
        judged["share_of_all_bounds"] = max(limits.values()) / seconds
    moved = step.get("moved_nbytes") or []
    least = {TO_DEVICE: case.least_to_device_nbytes, TO_HOST: case.least_to_host_nbytes}
    for link, nbytes in least.items():
        if moved and link in moved[0]:
            each = statistics.median(step_moved[link] for step_moved in moved)
            judged[f"{link}, moved per least"] = each / nbytes
    return judged
