"""`offload bench io`: our block store against a raw loop on the same device.

Every system has a file of its own in the same folder, written in full before it is timed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from offload.bench.io_raw import RAW, Shape, ThreadsLoop, fill, noise, raw_loop
from offload.bench.record import Kind, Record
from offload.bench.rounds import Say, Timed, measure, moving
from offload.bench.table import Column, number
from offload.process import machine
from offload.swap.io.backends import open_backend
from offload.swap.io.block_store import BlockStore, StoredBlock
from offload.swap.io.swap_file import SwapFile, file_system_of, free_space
from offload.swap.threads.transfer import Transfer
from offload.tiers.errors import BudgetError, ConfigError, PathError
from offload.tiers.file_tier import FileTier
from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.units import format_bytes

DEFAULT_NBYTES = 1 << 30
BLOCK_NBYTES = 16 << 20  # of our store
_IN_FLIGHT = 4  # blocks
_BUFFER_NBYTES = RAW.depth * RAW.block_nbytes + _IN_FLIGHT * BLOCK_NBYTES
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
    """Run the bench. PathError where no file can be made, BudgetError if the buffer does not fit in
    memory, StorageError if the device fails."""
    folder = options.folder or machine.swap_folder()
    nbytes = _nbytes(options, folder)
    if (available := machine.available_memory_nbytes()) < _BUFFER_NBYTES:
        raise BudgetError(
            f"the bench's buffers take {format_bytes(_BUFFER_NBYTES)} of memory, and "
            f"{format_bytes(available)} are free; end other programs first"
        )
    record = Record("io", {**asdict(options), "folder": str(folder), "nbytes": nbytes})
    record.note_rounds(options.rounds)
    with ExitStack() as stack:
        shape = Shape(min(RAW.depth, nbytes // RAW.block_nbytes), RAW.block_nbytes)
        raw = raw_loop(folder, nbytes, say, stack, shape)
        systems = [*_raw_systems(raw), *_our_systems(options, folder, nbytes, stack, say)]
        systems.sort(key=lambda system: not system.name.endswith("read"))
        measure(record, systems, options.rounds, say)
        record.notes.append(_where(folder, nbytes, raw.file))
    for direction in ("read", "write"):
        record.compare(f"ours {direction}", f"raw {direction}", "bytes_per_s")
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
    needed = 2 * nbytes + _IN_FLIGHT * BLOCK_NBYTES  # raw, and ours
    if needed > free:
        raise PathError(
            f"--size: {format_bytes(nbytes)} per file need {format_bytes(needed)} in {folder}, "
            f"{format_bytes(free)} are free; at most {format_bytes(free // 4)}"
        )
    return nbytes


def _raw_systems(loop: ThreadsLoop) -> list[Timed]:
    systems = []
    for direction in ("read", "write"):
        work = partial(loop.run, write=direction == "write")
        systems.append(moving(f"raw {direction}", Kind.LIMIT, loop.nbytes, work, loop.name))
    return systems


def _our_systems(
    options: IoOptions, folder: Path, nbytes: int, stack: ExitStack, say: Say
) -> list[Timed]:  # fmt: skip
    count = min(_IN_FLIGHT, nbytes // BLOCK_NBYTES)
    parts = noise(count, BLOCK_NBYTES)
    file = SwapFile(folder)
    stack.callback(file.close)
    file.reserve(nbytes + count * BLOCK_NBYTES)
    fill(file, parts[0], nbytes + count * BLOCK_NBYTES, say)
    loop = StoreLoop(file, parts, nbytes // BLOCK_NBYTES, backend=options.backend)
    stack.callback(loop.close)
    loop.write()
    note = f"{loop.backend}, {count} x {format_bytes(BLOCK_NBYTES)}"
    return [
        moving("ours read", Kind.OURS, loop.nbytes, loop.read, note),
        moving("ours write", Kind.OURS, loop.nbytes, loop.write, note),
    ]


def _where(folder: Path, nbytes: int, file: SwapFile) -> str:
    how = "O_DIRECT" if file.o_direct else "through the page cache: this is RAM, not the disk"
    return f"{format_bytes(nbytes)} per pass on {file_system_of(folder.resolve())}, {how}"


# ---------------------------------------------------------------- our way to the disk
class StoreLoop:
    """Writes and reads `blocks` blocks of a `BlockStore`; at most one per part of the buffer is in
    flight.

    Every pass writes all blocks anew, as a training step does, so each replaces its predecessor
    and the extents move around in the file.
    """

    def __init__(
        self, file: SwapFile, parts: Sequence[memoryview], blocks: int, *, backend: str
    ) -> None:
        """`file` must hold all blocks and one more per part; parts are of one size."""
        self.block_nbytes = parts[0].nbytes
        assert all(part.nbytes == self.block_nbytes for part in parts), "blocks are of one size"
        room = (blocks + len(parts)) * self.block_nbytes
        tier = FileTier(room, [1.0], Ledger())
        mover = open_backend(backend)
        self.backend = mover.name
        self._store = BlockStore([file], tier, mover)
        self._parts = parts
        self._stored: list[StoredBlock | None] = [None] * blocks

    @property
    def nbytes(self) -> int:
        return len(self._stored) * self.block_nbytes

    def write(self) -> None:
        """Write every block."""

        def start(index: int, part: memoryview) -> Transfer[StoredBlock]:
            return self._store.write(
                part, owner=f"block {index}", state_class=StateClass.OPTIMIZER,
                replaces=self._stored[index],
            )  # fmt: skip

        for index, block in self._flow(start):
            self._stored[index] = block

    def read(self) -> None:
        """Read every block, after a `write`."""

        def start(index: int, part: memoryview) -> Transfer[None]:
            block = self._stored[index]
            assert block is not None, "written first"
            return self._store.read(block, part)

        for _ in self._flow(start):
            pass

    def _flow(self, start: Callable[[int, memoryview], Transfer[T]]) -> list[tuple[int, T]]:
        flying: deque[tuple[int, Transfer[T]]] = deque()
        ended: list[tuple[int, T]] = []
        for index in range(len(self._stored)):
            if len(flying) == len(self._parts):
                first, transfer = flying.popleft()
                ended.append((first, transfer.wait()))
            flying.append((index, start(index, self._parts[index % len(self._parts)])))
        ended += [(index, transfer.wait()) for index, transfer in flying]
        return ended

    def close(self) -> None:
        """Close store, backend and file."""
        self._store.close()
