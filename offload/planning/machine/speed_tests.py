"""The measurements behind `Speeds`: short loops over the parts of a step.

Rates are those of a long training run: arrays larger than every cache, files that are already
written and in no drive's memory. For a loop over cores and memory alone the fastest run counts,
since other programs slow the others; for a disk, or two things at once, the median counts.

The cost of a model on a CPU beside its products is measured on small models, forward and backward,
in the terms in which facts are counted: bytes that operations touch, and calls. What I/O costs the
cores is measured as it happens in a step: a product runs beside the store's backend, and the time
that it loses is counted.
"""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

from offload.config import OffloadConfig
from offload.gpt import build_meta_model
from offload.planning.activations.facts import PassCost
from offload.planning.activations.trace import DTYPES, trace_activations
from offload.planning.machine.optimizer_variants import (
    SPLIT,
    SPLIT_BF16,
    SPLIT_INT8,
    Arrays,
    stepper,
)
from offload.planning.machine.speeds import ComputeSpeeds, DiskSpeeds
from offload.planning.plan.estimate import Workload
from offload.swap.io.backends import open_backend
from offload.swap.io.block_store import checksum_of
from offload.swap.io.io_backend import IOBackend
from offload.swap.io.requests_and_retries import Operation
from offload.swap.io.swap_file import SwapFile, file_system_of, free_space
from offload.swap.threads.transfer import Transfer, all_of
from offload.swap.threads.worker import ParallelRunner, available_cores, in_thread
from offload.tiers import accelerator
from offload.tiers.memory import HostMemory

_CPU = torch.device("cpu")
_FORMATS = {"fp32": SPLIT, "bf16": SPLIT_BF16, "int8": SPLIT_INT8}

_PRODUCT = (512, 1024, 4096)  # tokens, inputs, outputs: a layer of some hundred million parameters
_PRODUCT_GPU = (4096, 4096, 16384)
_TRIAL = (64, 256, 256)  # 8 MFLOP: 3 ms at the 3 GFLOP/s of a format without a fast kernel
_MAX_PRODUCT_S = 0.6  # the three products of one layer may take this long, else smaller ones count
_OPTIMIZER_NUMEL = 1 << 24  # 128 MiB at least of each format: beyond caches
_OPTIMIZER_CALLS = 64  # to be told from one: of as many elements that each core has a part
_BLOCK_NBYTES = 8 << 20
_IN_FLIGHT_NBYTES = 64 << 20
# Per path: what is read was written half a file before, which is more than the memory of a drive.
# All of it is written when it is new, then once alone and once beside reads: these three times, and
# what moves beside products, wear a drive.
_FILE_NBYTES = 4 << 30
_IN_MEMORY, _MEMORY_NBYTES = ("tmpfs", "ramfs"), 512 << 20  # what such a file takes is RAM
_FILL_S = 2.5  # files are as large as what can be written in this time
_PART_S = 2.5  # no part of a file takes longer: a drive may become slow after its first GiB
_BESIDE_NBYTES = 64 << 20  # of each file, in each direction, while products run
_FREE_DIVISOR = 4  # files are at most a quarter of what is free
_MAX_REPEAT_S = 0.6
_BESIDE_S = 0.4  # how long something runs beside the product
_ROUNDS = 3  # of which the median counts: a step meets the usual disk, not its best moment

# Of small models: layers, hidden, mlp, heads, batch, sequence.
_CALLS = (2, 64, 128, 2, 1, 16)  # too small for anything but calls
_SAMPLES = ((4, 128, 384, 4, 16, 128), (2, 256, 768, 4, 8, 128))
_TOUCHED_NBYTES, _TOUCHES = 128 << 20, 16  # of each array on a GPU, and before one synchronisation
_PASSES, _MAX_PASSES_S = 4, 0.8  # of one model
_MIN_RATE_SHARE = 0.05  # of products in fp32, which stands for slower formats: they take minutes
_MIN_LEFT = 0.02  # of a pass: what is left of it beside products is no less than that

Work = Callable[[], object]
Sample = tuple[int, int, int, int, int, int]


def seconds(work: Work, repeat: int = 3, device: torch.device = _CPU) -> float:
    """Return the fastest of `repeat` runs after a warm-up; fewer if they take long. A run ends when
    `device` has completed its work."""
    began = time.perf_counter()
    _timed(work, device)
    times = [_timed(work, device)]
    while len(times) < repeat and time.perf_counter() - began < _MAX_REPEAT_S:
        times.append(_timed(work, device))
    return min(times)


def _timed(work: Work, device: torch.device) -> float:
    accelerator.synchronize(device)
    started = time.perf_counter()
    work()
    accelerator.synchronize(device)
    return time.perf_counter() - started


# ---------------------------------------------------------------- compute
def measure_compute() -> ComputeSpeeds:
    """Measure all compute speeds. Blocks for two to four seconds and holds about 300 MiB."""
    device = torch.device(accelerator.default_type())
    gpu = accelerator.is_accelerator(device)
    with closing(ParallelRunner(available_cores(), min_share=1)) as runner:
        call_s, rates = optimizer_rates(_OPTIMIZER_NUMEL, runner)
    to_device, to_host = _copy_rates(device) if gpu else (0.0, 0.0)
    products = {name: matmul_rate(dtype, device) for name, dtype in DTYPES.items()}
    operation_s, touching = measure_models(products, device)
    return ComputeSpeeds(
        gpu=gpu,
        matmul_flops_per_s=products,
        compute_bytes_per_s=touching["fp32"],
        compute_bytes_per_s_in=touching,
        operation_s=operation_s,
        host_bytes_per_s=max(_FORMATS[name].traffic * rate for name, rate in rates.items()),
        optimizer_parameters_per_s=rates,
        update_call_s=call_s,
        host_to_device_bytes_per_s=to_device,
        device_to_host_bytes_per_s=to_host,
    )


def optimizer_rates(numel: int, runner: ParallelRunner) -> tuple[float, dict[str, float]]:
    """Measure seconds per call of the optimizer beside its elements, by what a step over `numel`
    takes longer in many calls, and elements per second without them, by format of states."""
    streams = [stream for variant in _FORMATS.values() for stream in variant.streams]
    arrays = Arrays(numel, streams)
    cut_s = seconds(stepper(SPLIT, arrays, runner, _OPTIMIZER_CALLS), 5)
    times = {name: seconds(stepper(v, arrays, runner), 5) for name, v in _FORMATS.items()}
    call_s = max(0.0, cut_s - times["fp32"]) / (_OPTIMIZER_CALLS - 1)
    # a step takes no less than half of its time for its elements, however much others disturb it
    return call_s, {n: numel / max(took / 2, took - call_s) for n, took in times.items()}


def matmul_rate(
    dtype: torch.dtype, device: torch.device, shape: tuple[int, int, int] | None = None
) -> float:
    """FLOP/s of a layer's three products (forward, gradients of input and weight) together.

    A CPU may have fast 16-bit kernels for only some of the three; training needs all.
    """
    gpu = accelerator.is_accelerator(device)
    wanted = shape or (_PRODUCT_GPU if gpu else _PRODUCT)
    rate = 0.0
    for each in (wanted,) if gpu else (_TRIAL, wanted):
        if rate and 6 * math.prod(each) / rate > _MAX_PRODUCT_S:  # there is no fast kernel
            break
        rate = 6 * math.prod(each) / seconds(_layer(dtype, device, each), 5, device)
    return rate


def _layer(dtype: torch.dtype, device: torch.device, shape: tuple[int, int, int]) -> Work:
    tokens, inputs, outputs = shape
    x = _random(device, tokens, inputs).to(dtype)  # TI
    weight = _random(device, outputs, inputs).to(dtype)  # OI
    gradient = _random(device, tokens, outputs).to(dtype)  # TO

    def work() -> None:
        F.linear(x, weight)
        gradient @ weight
        gradient.t() @ x

    return work


def _random(device: torch.device, *shape: int) -> torch.Tensor:
    """Return random values from a separate generator, which leaves training's unchanged."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(*shape, device=device, generator=generator)


def _copy_rates(device: torch.device) -> tuple[float, float]:
    pinned = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(pinned, device=device)
    to_device = seconds(lambda: there.copy_(pinned, non_blocking=True), device=device)
    to_host = seconds(lambda: pinned.copy_(there, non_blocking=True), device=device)
    return pinned.numel() / to_device, pinned.numel() / to_host


# ---------------------------------------------------------------- passes of small models
def measure_models(
    products: Mapping[str, float], device: torch.device, samples: Sequence[Sample] = _SAMPLES
) -> tuple[float, dict[str, float]]:
    """Measure seconds per kernel call, and bytes per second that operations touch by precision.

    `products` are FLOP/s of matrix products by precision. A 16-bit format without a fast kernel is
    not measured: its products take all of the time. On a GPU one rate serves all precisions.
    """
    cost, took_s = _passes("fp32", _CALLS, device)
    operation_s = took_s / cost.operations
    touching: dict[str, float] = {}
    if accelerator.is_accelerator(device):
        return operation_s, dict.fromkeys(products, memory_rate(device))
    for precision, rate in products.items():
        if rate < _MIN_RATE_SHARE * products["fp32"]:
            touching[precision] = touching["fp32"]
            continue
        touched, left_s = 0, 0.0
        for sample in samples:
            cost, took_s = _passes(precision, sample, device)
            touched += cost.touched_nbytes
            beside_s = cost.flops / rate + cost.operations * operation_s
            left_s += max(_MIN_LEFT * took_s, took_s - beside_s)
        touching[precision] = touched / left_s
    return operation_s, touching


def memory_rate(device: torch.device) -> float:
    """Bytes per second of an element-wise operation over arrays beyond caches.

    On a GPU that is what bounds all but products, and what products leave of a small model's pass
    does not show it: calls count there (an H100 that copied 3.0 TB/s showed 1.6 in bf16).
    """
    x, y = (torch.zeros(_TOUCHED_NBYTES // 4, device=device) for _ in range(2))

    def work() -> None:
        for _ in range(_TOUCHES):
            y.add_(x)

    return _TOUCHES * 3 * _TOUCHED_NBYTES / seconds(work, device=device)


def _passes(precision: str, sample: Sample, device: torch.device) -> tuple[PassCost, float]:
    """The work of a forward and backward pass, and the seconds that both take together."""
    layers, hidden, mlp, heads, batch, sequence = sample
    shape = {
        "layers": layers, "hidden": hidden, "heads": heads, "mlp": mlp, "vocab": 512, "tied": False,
    }  # fmt: skip
    config = OffloadConfig.load(
        {"precision": precision, "device": device.type, "train": {"model": shape}}
    )
    model = build_meta_model(config)
    facts = trace_activations(model, config, Workload(batch, sequence))
    model.to(DTYPES[precision]).to_empty(device=device)
    for param in model.parameters():
        param.detach().fill_(0.02)
    tokens = torch.zeros(batch, sequence, dtype=torch.int64, device=device)  # BS
    times: list[float] = []
    while len(times) < 2 or (len(times) <= _PASSES and sum(times) < _MAX_PASSES_S):
        started = time.perf_counter()
        loss = model(tokens, tokens).loss
        loss.backward()
        accelerator.synchronize(device)
        times.append(time.perf_counter() - started)
        model.zero_grad()
    return facts.forward + facts.backward, min(times[1:])


# ---------------------------------------------------------------- disk
def measure_disk(
    paths: Sequence[Path], *, beside_compute: bool, file_nbytes: int = _FILE_NBYTES
) -> DiskSpeeds:
    """Measure swap files of `file_nbytes` in all `paths` at once, less if little is free or writes
    are slow. Blocks for some seconds and removes the files."""
    with ExitStack() as stack:
        files = [stack.enter_context(SwapFile(path)) for path in paths]
        room = min(free_space(path) for path in paths) // _FREE_DIVISOR
        if any(file_system_of(file.directory) in _IN_MEMORY for file in files):
            room = min(room, _MEMORY_NBYTES)
        nbytes = max(2 * _BLOCK_NBYTES, min(file_nbytes, room) // _BLOCK_NBYTES * _BLOCK_NBYTES)
        for file in files:
            file.reserve(nbytes)
        backend = stack.enter_context(open_backend())
        return _Disk(files, backend, nbytes).measure(beside_compute=beside_compute)


class _Disk:
    """Measures swap files. Reads and writes cycle through the files, half a file apart:

    ├───── written before ─────┤├ writes ┤├───── written before ─────┤├ reads ┤├ ... ┤
    """

    def __init__(self, files: Sequence[SwapFile], backend: IOBackend, nbytes: int) -> None:
        self._files, self._backend, self._nbytes = files, backend, nbytes
        self._next = {"r": 0, "w": 0}  # offsets
        # what the tiers move from and to: its huge pages make a disk twice as fast as small ones do
        self._memory = HostMemory(_IN_FLIGHT_NBYTES)
        self._buffer: memoryview = self._memory.tensor(0, _IN_FLIGHT_NBYTES).numpy().data
        # nothing that a device could compress
        self._buffer[:] = np.random.default_rng(0).bytes(_IN_FLIGHT_NBYTES)

    def measure(self, *, beside_compute: bool) -> DiskSpeeds:
        """Measure the three rates in turn, since the speed of a disk that is shared, or throttled
        after a while, changes during the measurement."""
        # first writes take up to twice as long, and are rare in a run
        self._move("w", self._nbytes, _FILL_S)
        self._nbytes = self._next["w"]
        self._next["w"] = self._nbytes // 2 // _BLOCK_NBYTES * _BLOCK_NBYTES
        part = max(_BLOCK_NBYTES, self._nbytes // _ROUNDS)
        ways = ("w", "r", "rw")
        rounds = [[self._move(how, part, _PART_S) for how in ways] for _ in range(_ROUNDS)]
        write, read, mixed = map(statistics.median, zip(*rounds, strict=True))
        return DiskSpeeds(
            nvme_read_bytes_per_s=read, nvme_write_bytes_per_s=write, nvme_mixed_bytes_per_s=mixed,
            io_lost_s_per_byte=self._lost_s_per_byte() if beside_compute else 0.0,
        )  # fmt: skip

    def _lost_s_per_byte(self) -> float:
        """Seconds that a product loses per byte that is moved and checked beside it."""
        product = _layer(torch.float32, _CPU, _PRODUCT)
        part = max(_BLOCK_NBYTES, min(_BESIDE_NBYTES, self._nbytes // _ROUNDS))
        lost_s = statistics.median(self._lost_s(product, part) for _ in range(_ROUNDS))
        return lost_s / (2 * part * len(self._files))

    def _lost_s(self, product: Work, part: int) -> float:
        """Seconds that products lose per `part` bytes moved in each direction beside them."""
        alone_s = seconds(product)
        stop = threading.Event()
        products = 0

        def move() -> int:
            turns = 0
            while not stop.is_set():
                self._move("rw", part, math.inf)
                turns += 1
            return turns

        started = time.perf_counter()
        moving = in_thread("offload-calibration", move)
        try:
            while (took_s := time.perf_counter() - started) < _BESIDE_S:
                product()
                products += 1
        finally:
            stop.set()
            turns = moving.wait()
        return max(0.0, took_s - products * alone_s) / max(1, turns)

    def _move(self, how: str, nbytes: int, max_s: float) -> float:
        """Move the next `nbytes` of each file in each direction in `how` (r, w or rw); stop early
        if that takes longer than `max_s`. Return bytes per second, all files and ways together."""
        waiting: list[Transfer[None]] = []
        started = time.perf_counter()
        max_waiting = _IN_FLIGHT_NBYTES // _BLOCK_NBYTES
        count = 0
        for _ in range(nbytes // _BLOCK_NBYTES):
            if count and time.perf_counter() - started > max_s:
                break
            for direction in how:
                offset = self._next[direction] % self._nbytes
                self._next[direction] = offset + _BLOCK_NBYTES
                for file in self._files:
                    slot = count % max_waiting
                    count += 1
                    if len(waiting) >= max_waiting:
                        waiting.pop(0).wait()
                    part = self._buffer[slot * _BLOCK_NBYTES : (slot + 1) * _BLOCK_NBYTES]
                    waiting.append(self._submit(direction, file, part, offset))
        all_of(waiting).wait()
        for file in self._files:
            if not file.o_direct:  # what only the page cache has is not moved yet
                os.fdatasync(file.fd)
                os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return count * _BLOCK_NBYTES / (time.perf_counter() - started)

    def _submit(
        self, direction: str, file: SwapFile, part: memoryview, offset_bytes: int
    ) -> Transfer[None]:
        """Submit a transfer with a checksum, like those of the block store."""
        reads = direction == "r"

        def check() -> None:
            checksum_of(part)

        return self._backend.submit(
            Operation.READ if reads else Operation.WRITE, file.fd, part, offset_bytes,
            path=file.path, before=None if reads else check, after=check if reads else None,
        )  # fmt: skip
