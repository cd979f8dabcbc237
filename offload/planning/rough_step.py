"""A step's seconds for thousands of placements at once: few terms, arrays instead of plans.

Only for choosing what is then laid out and predicted properly (`step_time`). A link is taken to be
busy for its bytes over its rate, and the slowest link to bound the step:

    nvme    parameters are read once per direction of a pass, less what a copy in memory saves at
            each turn; states are read and written once per step, gradients once per pass
    links   of a GPU: parameters down once per direction, gradients up once per pass
    busy    computing, and on a CPU also the optimizer and what both lose to I/O beside them

Beside a GPU the update is a pipeline of its own (optimizer, links, nvme), and hides behind one pass
in one direction alone: the forward that follows it, or the backward that its gradients come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offload.planning.speeds import Speeds
from offload.tiers.ledger import StateClass

Floats = npt.NDArray[np.float64]
DEVICE, HOST, NVME = range(3)  # columns
_BESIDE = 0.01  # of what passes beside the slowest link: overlap is never perfect

# Where nobody measured: only the ratios matter, to say which link is the slowest.
NOMINAL = Speeds(
    name="nominal", gpu=False, matmul_flops_per_s={"fp32": 1e11, "bf16": 1e11, "fp16": 1e11},
    compute_bytes_per_s=2e10, operation_s=0.0, host_bytes_per_s=2e10,
    nvme_read_bytes_per_s=2e9, nvme_write_bytes_per_s=2e9,
    host_to_device_bytes_per_s=2e10, device_to_host_bytes_per_s=2e10,
)  # fmt: skip


@dataclass(frozen=True)
class StepWork:
    """What a step does wherever states live. Seconds and bytes; 0 where it is not known."""

    passes: int
    compute_s: float
    hiding_s: float  # of it: the pass, in one direction, that updates run beside; inf: unknown
    optimizer_s: float  # by the CPU, for all parameters
    optimizer_on_device_s: float
    gradients_travel: int  # times that gradients at home elsewhere go home: 0 if updates use them
    saved_nbytes: int  # activations that leave for nvme
    in_flight_nbytes: int  # of memory that reading ahead needs
    gpu: bool


def rough_seconds(
    held: Mapping[StateClass, Floats], spare_host: Floats, spare_device: Floats, work: StepWork,
    speeds: Speeds,
) -> Floats:  # fmt: skip
    """Seconds per placement, and beside the slowest link the others count a little: of placements
    that are as fast the one that moves less is better.

    `held`: bytes by placement and tier (N x 3); `spare`: what homes leave of the budgets.
    """
    spare = np.maximum(spare_host, 0)
    window = spare / 2 if work.saved_nbytes else np.zeros_like(spare)
    io_bytes, io_s = _io(held, spare - window, work, speeds)
    if work.saved_nbytes:
        moved = 2 * np.maximum(0, work.saved_nbytes - window)
        io_bytes = io_bytes + moved
        io_s = io_s + moved / _mixed(speeds)
    on_device = _share(held[StateClass.OPTIMIZER], DEVICE) * work.gpu
    by_cpu = work.optimizer_s * (1 - on_device)
    if work.gpu:
        passing, updating, links = _links(held, spare_device, work, speeds)
        update = by_cpu + work.optimizer_on_device_s * on_device
        update = np.maximum(np.maximum(update, updating), _records_s(held, speeds))
        shown = np.maximum(0, update - work.hiding_s)
        busy = np.maximum(work.compute_s, passing) + shown
    else:
        busy = work.compute_s + by_cpu + speeds.io_lost_s_per_byte * io_bytes
        links = np.zeros_like(spare)
    ahead = np.clip(spare / max(1, work.in_flight_nbytes), 0, 1)
    waiting = np.where(io_s > 0, (1 - ahead) * np.minimum(busy, io_s), 0)
    slowest = np.maximum(np.maximum(busy, io_s), links) + waiting
    seconds: Floats = slowest + _BESIDE * (io_s + links)
    return seconds


def _io(
    held: Mapping[StateClass, Floats], spare: Floats, work: StepWork, speeds: Speeds
) -> tuple[Floats, Floats]:
    """Bytes and seconds of nvme."""
    parameters = held[StateClass.PARAMETERS][:, NVME]
    gradients = held[StateClass.GRADIENTS][:, NVME] * work.gradients_travel
    records = held[StateClass.OPTIMIZER][:, NVME]
    turns = 2 * work.passes
    kept = np.minimum(spare, parameters)
    reads = turns * (parameters - kept) + gradients + records
    reads = np.maximum(0, reads - np.minimum(spare - kept, gradients + records))
    writes = parameters + gradients + records
    read, write = _rates(speeds)
    apart = reads / read + writes / write
    if not speeds.nvme_mixed_bytes_per_s:
        return reads + writes, apart
    together = np.maximum(reads / read, writes / write)
    return reads + writes, np.maximum(together, (reads + writes) / _mixed(speeds))


def _records_s(held: Mapping[StateClass, Floats], speeds: Speeds) -> Floats:
    """Seconds of nvme for the optimizer's records, each way once."""
    records = held[StateClass.OPTIMIZER][:, NVME]
    read, write = _rates(speeds)
    seconds: Floats = np.maximum(records / read, records / write)
    return seconds


def _links(
    held: Mapping[StateClass, Floats], spare: Floats, work: StepWork, speeds: Speeds
) -> tuple[Floats, Floats, Floats]:
    """Seconds of the busier direction between host and GPU: in passes, in the update, in both."""
    parameters, gradients = held[StateClass.PARAMETERS], held[StateClass.GRADIENTS]
    by_device = _share(held[StateClass.OPTIMIZER], DEVICE)
    by_cpu = 1 - by_device
    away = parameters[:, HOST] + parameters[:, NVME]
    leaving = gradients[:, HOST] + gradients[:, NVME]
    copies = np.minimum(np.maximum(spare, 0), away)
    # copies on the device of what the CPU has stepped are sent again
    down, up = 2 * work.passes * (away - copies) + copies * by_cpu, leaving * work.passes
    there_and_back = parameters[:, DEVICE] * by_cpu
    if math.isinf(work.hiding_s):
        passing = _slower(down, up, speeds)
        return passing, np.zeros_like(passing), passing
    stepped_down = there_and_back + leaving * by_device
    stepped_up = there_and_back + away * by_device + gradients[:, DEVICE] * by_cpu
    return (
        _slower(down, up, speeds), _slower(stepped_down, stepped_up, speeds),
        _slower(down + stepped_down, up + stepped_up, speeds),
    )  # fmt: skip


def _slower(down: Floats, up: Floats, speeds: Speeds) -> Floats:
    """Seconds of two directions side by side."""
    down_rate, up_rate = (
        rate or 2e10
        for rate in (speeds.host_to_device_bytes_per_s, speeds.device_to_host_bytes_per_s)
    )
    seconds: Floats = np.maximum(down / down_rate, up / up_rate)
    return seconds


def _share(held: Floats, column: int) -> Floats:
    share: Floats = held[:, column] / np.maximum(1, held.sum(axis=1))
    return share


def _rates(speeds: Speeds) -> tuple[float, float]:
    read = speeds.nvme_read_bytes_per_s or NOMINAL.nvme_read_bytes_per_s
    return read, speeds.nvme_write_bytes_per_s or NOMINAL.nvme_write_bytes_per_s


def _mixed(speeds: Speeds) -> float:
    return speeds.nvme_mixed_bytes_per_s or sum(_rates(speeds)) / 2
