"""The cost of the runtime itself per block and step, where there is nothing else to do.

    python -m benchmarks.overhead [--blocks 24] [--steps 8] [--rounds 7] [--device cuda]
                                  [--placements 'NAME; NAME'] [--path FOLDER] [--json FILE]

Blocks of a Llama so small that neither a GPU nor a disk has work worth the name: what a step takes
is calls. Plain PyTorch and the placements live in one process and take their steps in turn. A
block's milliseconds are those of the whole step, optimizer included, by the number of blocks; the
overhead is what remains without plain PyTorch's in the same round. On a GPU a step ends when the
device has done it. Beside the wall's time there is the process's, of all its threads together: it
says little of waiting, and is worth more where the machine has other work. On the null GPU
(`tests/null_gpu`) the calls of CUDA per block are counted, too.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload.bench.record import LEAST_ROUNDS, Kind, Record
from offload.bench.rounds import Timed, measure, seconds_of
from offload.bench.systems import Ours, Plain, System, batch_of
from offload.bench.table import Column, number, print_record
from offload.config import OffloadConfig
from offload.tiers import accelerator
from offload.train import plain

PLAIN, RECOMPUTED = "plain PyTorch", "plain PyTorch, recomputed"
_KEPT = {"tier": "device", "checkpoint": False}
_ALL_ON: dict[str, dict[str, Any]] = {
    tier: {"parameters": tier, "gradients": tier, "optimizer": tier, "activations": _KEPT}
    for tier in ("device", "host", "nvme")
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    **_ALL_ON,
    "nvme, activations recomputed on nvme": {
        **_ALL_ON["nvme"], "activations": {"tier": "nvme", "checkpoint": True},
    },
}  # fmt: skip
_CALLS = (
    "cuLaunchKernelEx", "cudaLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaEventRecord",
    "cudaEventRecordWithFlags", "cudaEventQuery", "cudaEventSynchronize", "cudaStreamWaitEvent",
    "cudaStreamSynchronize", "cudaDeviceSynchronize",
)  # fmt: skip
_BUDGET = {"device": "256MiB", "host": "512MiB", "nvme": "1GiB"}


def settings(
    blocks: int, placement: Mapping[str, Any], folder: Path, device: str
) -> dict[str, Any]:
    """A configuration of the small model."""
    shape = {"shape": "llama", "layers": blocks, "hidden": 64, "heads": 2, "mlp": 128}
    return {
        "device": device, "precision": "fp32", "budget": _BUDGET, "placement": placement,
        "nvme": {"paths": [str(folder)]}, "optimizer": {"type": "adamw", "lr": 1e-4},
        "train": {"model": {**shape, "vocab": 256, "max_sequence": 16}, "batch": 1, "sequence": 16},
    }  # fmt: skip


class OnDevice(Plain):
    """Plain PyTorch with its model on the device that the configuration names."""

    def __init__(self, config: OffloadConfig, folder: Path) -> None:
        plain.Plain.__init__(self, config, torch.device(config.device))


def steps_of(system: System, config: OffloadConfig, count: int) -> Callable[[], dict[str, float]]:
    """A function that takes `count` steps, waits for all of their work, and returns the seconds per
    step of the wall and of the process, and the calls of CUDA, if they are counted."""
    device = torch.device(config.device)
    batch = batch_of(config, 0, device)

    def steps() -> None:
        for _ in range(count):
            system.step([batch])
        system.settle()
        accelerator.synchronize(device)

    def measured() -> dict[str, float]:
        calls, cpu = cuda_calls(), time.process_time()
        found = {"seconds": seconds_of(steps), "cpu_s": time.process_time() - cpu}
        if calls is not None:
            found["cuda_calls"] = (cuda_calls() or 0) - calls
        return {name: value / count for name, value in found.items()}

    return measured


def cuda_calls() -> int | None:
    """The number of CUDA calls of this process that give it work, wait for it or query it; None if
    they are not counted."""
    if not hasattr(ctypes.CDLL(None), "null_gpu_counts"):
        return None
    from tests.null_gpu.calls import counts

    return sum(count for name, count in counts().items() if name in _CALLS)


def timed(
    name: str, make: Callable[[OffloadConfig, Path], System], placement: Mapping[str, Any],
    options: argparse.Namespace, stack: ExitStack,
) -> Timed:  # fmt: skip
    """Build one system, which is closed with `stack`."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.path)))
    values = settings(options.blocks, placement, folder, options.device)
    config = OffloadConfig.load(values)
    system = make(config, folder)
    stack.callback(system.close)
    run = steps_of(system, config, options.steps)
    kind = Kind.LIMIT if make is OnDevice else Kind.OURS
    return Timed(name, kind, partial(_per_block, run, options.blocks))


def _per_block(run: Callable[[], dict[str, float]], blocks: int) -> dict[str, float]:
    return {name: value / blocks for name, value in run().items()}


def run(options: argparse.Namespace) -> Record:
    """The record: a row per system, with the seconds of one block in one step."""
    wanted = [name.strip() for name in options.placements.split(";")]
    record = Record("overhead", {"blocks": options.blocks, "device": options.device})
    with ExitStack() as stack:
        systems = [timed(PLAIN, OnDevice, PLACEMENTS["device"], options, stack)]
        recomputed = {**PLACEMENTS["device"], "activations": {"tier": "device", "checkpoint": True}}
        systems.append(timed(RECOMPUTED, OnDevice, recomputed, options, stack))
        systems += [timed(name, Ours, PLACEMENTS[name], options, stack) for name in wanted]
        measure(record, systems, options.rounds, lambda _: None)
    for row in record.rows[2:]:
        base = record.rows[1] if "recomputed" in row.name else record.rows[0]
        for name, of in (("overhead_s", "seconds"), ("cpu_overhead_s", "cpu_s")):
            pairs = zip(row.measures[of], base.measures[of], strict=True)
            row.measures[name] = [ours - plain for ours, plain in pairs]
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=LEAST_ROUNDS)
    parser.add_argument("--device", default=accelerator.default_type())
    parser.add_argument("--placements", default="; ".join(PLACEMENTS))
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    record = run(options)
    columns = (
        Column("ms", number("seconds", 1e-3, 3)),
        Column("over plain", number("overhead_s", 1e-3, 3)),
        Column("CPU ms", number("cpu_s", 1e-3, 3)),
        Column("over plain", number("cpu_overhead_s", 1e-3, 3)),
        *([Column("CUDA calls", number("cuda_calls", 1, 1))] if cuda_calls() else []),
    )
    print_record(record, columns)
    if options.json is not None:
        record.write(options.json)


if __name__ == "__main__":
    main()
