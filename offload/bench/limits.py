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

from offload.bench.io import fill, noise
from offload.bench.io_raw import RAW, ThreadsLoop
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
        buffer = noise(RAW.depth * RAW.block_nbytes)
        fill(self._file, buffer, nbytes, say)
        self._loop = ThreadsLoop(RAW, self._file, buffer, nbytes)
        opened.callback(self._loop.close)
        self.note = str(RAW)

    def measure(self, read_share: float) -> DiskSpeed:
        """One round; the mix has `read_share` of its bytes read."""
        nbytes = self._loop.nbytes
        read_s = seconds_of(lambda: self._loop.run(write=False))
        write_s = seconds_of(lambda: self._loop.run(write=True))
        read = round(nbytes // RAW.block_nbytes * read_share) * RAW.block_nbytes
        mixed_s = seconds_of(lambda: self._loop.mixed(read, nbytes - read))
        return DiskSpeed(nbytes / read_s, nbytes / write_s, nbytes / mixed_s)


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
