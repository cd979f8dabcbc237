"""`offload bench io`: the runtime's block store against a raw loop on the same device.

Every system has a file of its own in the same folder, written in full before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from offload.bench.io_raw import fill, noise, raw_loop
from offload.bench.record import Kind, Record
from offload.bench.rounds import Say, measure, moving
from offload.bench.table import Column, number
from offload.process import machine
from offload.swap.io.backends import open_backend
from offload.swap.io.block_store import BlockStore, StoredBlock
from offload.swap.io.swap_file import SwapFile, file_system_of, free_space
from offload.swap.threads.transfer import Transfer
from offload.tiers.errors import ConfigError, PathError
from offload.tiers.file_tier import FileTier
from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.units import format_bytes

DEFAULT_NBYTES = 1 << 30
BLOCK_NBYTES = 16 << 20  # of the block store
_IN_FLIGHT = 4  # blocks
T = TypeVar("T")

COLUMNS = (
    Column("s", number("seconds")),
    Column("GB/s", number("bytes_per_s", 1e9)),
    Column("CPU-s/GB", number("cpu_s_per_gb", digits=4)),
)


@dataclass(frozen=True)
class IoOptions:
    """`nbytes` per pass; None takes 1 GiB, or a tenth of the free space on the device."""

    folder: Path | None = None
    nbytes: int | None = None
    backend: str = "auto"
    rounds: int = 7


def run_io(options: IoOptions, say: Say) -> Record:
    """Run the bench. PathError where no file can be made, StorageError if the device fails."""
    folder = options.folder or machine.swap_folder()
    nbytes = _nbytes(options, folder)
    record = Record("io", {**asdict(options), "folder": str(folder), "nbytes": nbytes})
    record.note_rounds(options.rounds)
    with ExitStack() as stack:
        raw = raw_loop(folder, nbytes, say, stack)
        store = StoreLoop(stack.enter_context(SwapFile(folder)), nbytes, options.backend, say)
        stack.callback(store.close)
        store.write()
        systems = [
            moving("raw read", Kind.LIMIT, raw.nbytes, partial(raw.run, write=False), raw.name),
            moving("offload read", Kind.OFFLOAD, nbytes, store.read, store.name),
            moving("raw write", Kind.LIMIT, raw.nbytes, partial(raw.run, write=True), raw.name),
            moving("offload write", Kind.OFFLOAD, nbytes, store.write, store.name),
        ]
        measure(record, systems, options.rounds, say)
        how = "through the page cache: this is RAM, not the disk"
        how = "O_DIRECT" if raw.file.o_direct else how
        system = file_system_of(folder.resolve())
        record.notes.append(f"{format_bytes(nbytes)} per pass on {system}, {how}")
    for direction in ("read", "write"):
        record.compare(f"offload {direction}", f"raw {direction}", "bytes_per_s")
    return record


def _nbytes(options: IoOptions, folder: Path) -> int:
    """The bytes per pass: whole blocks, at least one round of the buffers."""
    if not folder.is_dir():
        raise PathError(f"--path: {folder} is not a folder; name one on the disk to be measured")
    free = free_space(folder)
    wanted = min(DEFAULT_NBYTES, free // 10) if options.nbytes is None else options.nbytes
    if options.nbytes is not None and wanted <= 0:
        raise ConfigError(
            f"--size: {wanted} bytes cannot be timed; choose {format_bytes(BLOCK_NBYTES)} or more"
        )
    nbytes = max(wanted // BLOCK_NBYTES, 1) * BLOCK_NBYTES
    needed = 2 * nbytes + _IN_FLIGHT * BLOCK_NBYTES  # the raw loop's file, and the store's
    if needed > free:
        raise PathError(
            f"--size: {format_bytes(nbytes)} per file need {format_bytes(needed)} in {folder}, "
            f"{format_bytes(free)} are free; at most {format_bytes(free // 4)}"
        )
    return nbytes


class StoreLoop:
    """Writes and reads blocks of a `BlockStore`, a few in flight.

    Every pass writes all blocks anew, as a training step does, so each replaces its predecessor
    and the extents move around in the file.
    """

    def __init__(self, file: SwapFile, nbytes: int, backend: str, say: Say) -> None:
        """A pass moves `nbytes`. Blocks until all of `file`, which is larger, is written."""
        blocks = nbytes // BLOCK_NBYTES
        self._parts = noise(min(_IN_FLIGHT, blocks), BLOCK_NBYTES)
        room = (blocks + len(self._parts)) * BLOCK_NBYTES
        file.reserve(room)
        fill(file, self._parts[0], room, say)
        mover = open_backend(backend)
        self.name = f"{mover.name}, {len(self._parts)} x {format_bytes(BLOCK_NBYTES)}"
        self._store = BlockStore([file], FileTier(room, [1.0], Ledger()), mover)
        self._stored: list[StoredBlock | None] = [None] * blocks

    def write(self) -> None:
        """Write every block."""

        def start(index: int, part: memoryview) -> Transfer[StoredBlock]:
            return self._store.write(
                part, owner=f"block {index}", state_class=StateClass.OPTIMIZER,
                replaces=self._stored[index],
            )  # fmt: skip

        self._stored = [*self._flow(start)]

    def read(self) -> None:
        """Read every block, after a `write`."""

        def start(index: int, part: memoryview) -> Transfer[None]:
            block = self._stored[index]
            assert block is not None, "written first"
            return self._store.read(block, part)

        self._flow(start)

    def _flow(self, start: Callable[[int, memoryview], Transfer[T]]) -> list[T]:
        """Start every block's transfer, as soon as the last one of its part has ended."""
        started: list[Transfer[T]] = []
        count = len(self._parts)
        for index in range(len(self._stored)):
            if index >= count:
                started[index - count].wait()
            started.append(start(index, self._parts[index % count]))
        return [transfer.wait() for transfer in started]

    def close(self) -> None:
        """Close store, backend and file."""
        self._store.close()
