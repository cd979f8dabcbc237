"""The bounds of a training step, measured in the same rounds.

    compute     forward and backward of the plain model, everything in RAM, no optimizer
    disk        the step's bytes through a raw loop: reads and writes one after the other or mixed,
                whichever is faster here
    bus         the optimizer's bytes through a loop without arithmetic

A step that overlaps all of them perfectly takes as long as the longest: the roofline (Williams,
Waterman, Patterson, 2009).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from offload.bench.io import best, fill, noise
from offload.bench.io_raw import GRID, ThreadsLoop, try_grid
from offload.bench.rounds import Say, seconds_of
from offload.bench.stream import BusLoop
from offload.planning.machine.optimizer_variants import PLAIN, SPLIT, Arrays
from offload.swap.io.swap_file import SwapFile
from offload.swap.threads.worker import ParallelRunner


@dataclass(frozen=True)
class DiskSpeed:
    """Bytes per second of one round; `mixed` counts both directions together."""

    read: float
    write: float
    mixed: float

    def seconds(self, read_nbytes: int, written_nbytes: int) -> float:
        """The least time for these bytes."""
        apart = read_nbytes / self.read + written_nbytes / self.write
        return min(apart, (read_nbytes + written_nbytes) / self.mixed)


def roofline(bounds: Mapping[str, Sequence[float]]) -> list[float]:
    """The longest of the bounds, round by round."""
    return [max(values) for values in zip(*bounds.values(), strict=True)]


class DiskLimit:
    """Raw loops over a file of `nbytes` in `folder`, closed with `opened`."""

    def __init__(self, folder: Path, nbytes: int, say: Say, opened: ExitStack) -> None:
        """Blocks for seconds."""
        self._file = opened.enter_context(SwapFile(folder))
        self._file.reserve(nbytes)
        buffer = noise(max(shape.depth * shape.block_nbytes for shape in GRID))
        fill(self._file, buffer, nbytes, say)
        tried = try_grid(self._file, buffer, nbytes, say, GRID)
        shapes = [best(tried, write=write) for write in (False, True)]
        self._read, self._write = (ThreadsLoop(s, self._file, buffer, nbytes) for s in shapes)
        opened.callback(self._read.close)
        opened.callback(self._write.close)
        self.note = f"read {shapes[0]}, write {shapes[1]}"
        self._block = shapes[0].block_nbytes
        self._file_nbytes = nbytes

    def measure(self, read_share: float) -> DiskSpeed:
        """One round; the mix has `read_share` of its bytes read."""
        read_s = seconds_of(lambda: self._read.run(write=False))
        write_s = seconds_of(lambda: self._write.run(write=True))
        blocks = self._file_nbytes // self._block
        reads = round(blocks * read_share)
        mix = (reads * self._block, (blocks - reads) * self._block)
        mixed_s = seconds_of(lambda: self._read.mixed(*mix))
        return DiskSpeed(
            self._read.nbytes / read_s, self._write.nbytes / write_s, sum(mix) / mixed_s
        )


class BusLimit:
    """The traffic of the optimizer that a precision calls for, over `numel` parameters; its threads
    are closed with `opened`."""

    def __init__(self, precision: str, numel: int, threads: int, opened: ExitStack) -> None:
        """Blocks for a second."""
        streams = (PLAIN if precision == "fp32" else SPLIT).streams
        arrays = Arrays(numel, streams)
        runner = ParallelRunner(threads, min_share=1)
        opened.callback(runner.close)
        self._loop = BusLoop(streams, [arrays[stream] for stream in streams], runner)
        self.traffic = self._loop.traffic

    def measure(self) -> float:
        """Bytes per second of one pass."""
        return self._loop.nbytes / seconds_of(self._loop)
