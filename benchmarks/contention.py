"""How much a machine slows down when it does at once what a step on nvme does at once.

    python -m benchmarks.contention [--config FILE] [-o KEY=VALUE ...] [--rounds 7] [--json FILE]
                                    [--read-gb 2.3] [--written-gb 2.4] [--path FOLDER]

The roofline of `offload bench step` is the longest of compute, disk and bus, each measured while
nothing else runs. Here the forward and backward of the plain model run beside loops that contain
none of our runtime: raw O_DIRECT reads and writes of a step's bytes, an XXH3 over each of their
blocks, and the optimizer's traffic through a loop in C, spread over the time that the model takes
by itself. What the model then takes is what the machine leaves to any program that streams these
bytes behind its compute: alone / beside is the largest share of the roofline it can reach.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from offload import machine
from offload.bench.contenders import LLAMA_151M, count_parameters
from offload.bench.io import fill, noise
from offload.bench.io_raw import Shape, ThreadsLoop
from offload.bench.limits import BusLimit
from offload.bench.record import Kind, Record, Row
from offload.bench.rounds import interleaved, seconds_of
from offload.bench.systems import Plain, batch_of
from offload.bench.table import Column, number, print_record
from offload.config import OffloadConfig
from offload.swap.block_store import checksum_of
from offload.swap.swap_file import SwapFile

SHAPE = Shape("threads", 6, 8 << 20)
FILE_NBYTES = 512 << 20
SLICE_NBYTES = 128 << 20  # of the disk's bytes that are begun together
ALONE = "nothing"
BUS_NUMEL = 1 << 22  # parameters per pass of the bus loop: 112 MiB of traffic in fp32

Work = Callable[[], object]


class Compute:
    """Forward and backward of the plain model; gradients are dropped."""

    def __init__(self, config: OffloadConfig) -> None:
        self._config = config
        self._plain = Plain(config, Path())
        self._number = 0

    def __call__(self) -> None:
        inputs, targets = batch_of(self._config, self._number)
        self._number += 1
        self._plain.model(inputs, targets).backward()
        self._plain.model.zero_grad()


class Disk:
    """A step's bytes through a raw loop, slice by slice, with or without a checksum of each."""

    def __init__(
        self, folder: Path, read_nbytes: float, written_nbytes: float, opened: ExitStack
    ) -> None:
        file = opened.enter_context(SwapFile(folder))
        file.reserve(FILE_NBYTES)
        self._buffer = noise(max(SHAPE.depth * SHAPE.block_nbytes, SLICE_NBYTES))
        fill(file, self._buffer, FILE_NBYTES, lambda _: None)
        self._loop = ThreadsLoop(SHAPE, file, self._buffer, FILE_NBYTES)
        opened.callback(self._loop.close)
        self._slices = max(1, round((read_nbytes + written_nbytes) / SLICE_NBYTES))
        self._mix = (int(read_nbytes / self._slices), int(written_nbytes / self._slices))

    def slices(self, *, checked: bool) -> list[Work]:
        def move() -> None:
            self._loop.mixed(*self._mix)
            if checked:
                checksum_of(self._buffer[: sum(self._mix)])

        return [move] * self._slices


@contextmanager
def beside(streams: Sequence[Sequence[Work]], seconds: float) -> Iterator[None]:
    """Run each stream on a thread of its own, its slices spread evenly over `seconds`."""
    started = time.perf_counter()

    def run(slices: Sequence[Work]) -> None:
        for place, work in enumerate(slices):
            time.sleep(max(0.0, started + seconds * place / len(slices) - time.perf_counter()))
            work()

    threads = [threading.Thread(target=run, args=(slices,)) for slices in streams]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


def measure(options: argparse.Namespace, config: OffloadConfig) -> dict[str, list[float]]:
    """Seconds of forward and backward per round, by what ran beside them."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.path)))
        compute = Compute(config)
        disk = Disk(folder, options.read_gb * 1e9, options.written_gb * 1e9, stack)
        bus = BusLimit(config.precision, BUS_NUMEL, machine.cpu_count(), stack)
        passes = [bus.measure] * round(count_parameters(config) / BUS_NUMEL)
        compute()
        alone_s = min(seconds_of(compute) for _ in range(2))
        raw, checked = disk.slices(checked=False), disk.slices(checked=True)
        loads: dict[str, list[Sequence[Work]]] = {
            ALONE: [], "raw disk": [raw], "raw disk, checksums": [checked], "bus": [passes],
            "raw disk, checksums, bus": [checked, passes],
        }  # fmt: skip

        def timed(streams: Sequence[Sequence[Work]]) -> Callable[[], float]:
            def turn() -> float:
                with beside(streams, 0.9 * alone_s):
                    return seconds_of(compute)

            return turn

        turns = {name: timed(streams) for name, streams in loads.items()}
        return interleaved(turns, options.rounds, lambda text: print(text, flush=True))


def record_of(found: dict[str, list[float]], title: str, options: argparse.Namespace) -> Record:
    record = Record("contention", {"overrides": options.overrides}, notes=[title])
    for name, seconds in found.items():
        record.rows.append(Row(name, Kind.LIMIT, {"seconds": seconds}))
        if name != ALONE:
            record.compare(ALONE, name, "seconds")
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path)
    parser.add_argument("-o", dest="overrides", action="append", default=[])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--read-gb", type=float, default=2.3)
    parser.add_argument("--written-gb", type=float, default=2.4)
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = OffloadConfig.load(options.config or LLAMA_151M, options.overrides)
    found = measure(options, config)
    moved = f"{options.read_gb:g} GB read, {options.written_gb:g} GB written"
    title = f"{count_parameters(config) / 1e6:.0f} M parameters, {config.precision}, {moved}"
    record = record_of(found, title, options)
    print_record(record, (Column("s", number("seconds")),))
    if options.json is not None:
        record.write(options.json)


if __name__ == "__main__":
    main()
