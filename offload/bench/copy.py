"""`offload bench copy`: copies between host and device memory through the runtime's streams.

The limit is one large copy from memory that PyTorch pinned, on a stream of its own. The rows of
offload go through `CopyStream`, in pieces as the runtime moves them, from memory pinned as the host
tier pins its own. Each direction is measured alone, then both at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from offload.bench.record import Kind, Record
from offload.bench.rounds import Say, Timed, measure, moving
from offload.bench.table import Column, number
from offload.process import machine
from offload.swap.device.streams import CopyStream
from offload.tiers import accelerator
from offload.tiers.errors import BudgetError, UnsupportedError
from offload.tiers.memory import HostMemory
from offload.tiers.units import format_bytes, round_up

DEFAULT_NBYTES = 1 << 30
PIECE_NBYTES = 64 << 20
_SHARE_OF_MEMORY = 16  # by default one buffer takes at most this part of what is free

COLUMNS = (Column("ms", number("seconds", 1e-3, 1)), Column("GB/s", number("bytes_per_s", 1e9, 1)))


@dataclass(frozen=True)
class CopyOptions:
    """`nbytes` per copy; None takes 1 GiB, or less where memory is short."""

    nbytes: int | None = None
    rounds: int = 7


def run_copy(options: CopyOptions, say: Say) -> Record:
    """Run the bench. UnsupportedError without a GPU, BudgetError if the buffers do not fit."""
    device = accelerator.default_device()
    if not accelerator.is_accelerator(device):
        raise UnsupportedError(
            "offload bench copy: this PyTorch sees no GPU to copy to; `offload bench io` and "
            "`offload bench adam` measure what a machine without one has"
        )
    nbytes = _nbytes(options, device)
    record = Record("copy", {**asdict(options), "nbytes": nbytes})
    record.note_rounds(options.rounds)
    measure(record, copy_systems(nbytes, device), options.rounds, say)
    for way in _WAYS:
        record.compare(f"offload, {way}", f"raw, {way}", "bytes_per_s")
    record.notes.append(
        f"{format_bytes(nbytes)} per copy and direction; offload's in pieces of "
        f"{format_bytes(min(PIECE_NBYTES, nbytes))}"
    )
    return record


def _nbytes(options: CopyOptions, device: torch.device) -> int:
    free = min(machine.available_memory_nbytes(), accelerator.free_nbytes(device))
    default = min(DEFAULT_NBYTES, free // _SHARE_OF_MEMORY)
    nbytes = default if options.nbytes is None else options.nbytes
    if nbytes * 4 > free or nbytes < 4096:
        raise BudgetError(
            f"--size: four buffers of {format_bytes(nbytes)} do not fit in {format_bytes(free)}, "
            f"or are under a page; choose 4KiB to {format_bytes(free // 4)}"
        )
    return round_up(nbytes, 4096)


# The copies of each way, by their place in `copy_systems`' pairs.
_WAYS = {"host to device": (0,), "device to host": (1,), "both at once": (0, 1)}
Pair = tuple[torch.Tensor, torch.Tensor]  # destination, source


def copy_systems(nbytes: int, device: torch.device) -> list[Timed]:
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    memory = HostMemory(2 * nbytes, pin_for=device)
    raw = [torch.zeros(nbytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
    pinned = [memory.tensor(i * nbytes, nbytes) for i in range(2)]
    note = "" if memory.pinned else "could not be pinned"  # known once it was handed out
    systems = []
    for way, places in _WAYS.items():
        for name, kind, host, copies, said in (
            ("raw", Kind.LIMIT, raw, _raw_copies, ""),
            ("offload", Kind.OFFLOAD, pinned, _stream_copies, note),
        ):
            pairs = ((there[0], host[0]), (host[1], there[1]))
            run = copies([pairs[place] for place in places], device)
            systems.append(moving(f"{name}, {way}", kind, nbytes * len(places), run, said))
    return systems


def _raw_copies(pairs: Sequence[Pair], device: torch.device) -> Callable[[], None]:
    kind = accelerator.of(device)
    streams = [kind.stream(device) for _ in pairs]

    def run() -> None:
        for stream, (destination, source) in zip(streams, pairs, strict=True):
            with kind.entered(stream):
                destination.copy_(source, non_blocking=True)
        for stream in streams:
            stream.synchronize()

    return run


def _stream_copies(pairs: Sequence[Pair], device: torch.device) -> Callable[[], None]:
    streams = [CopyStream(device) for _ in pairs]

    def run() -> None:
        events = []
        for stream, (destination, source) in zip(streams, pairs, strict=True):
            pieces = zip(destination.split(PIECE_NBYTES), source.split(PIECE_NBYTES), strict=True)
            events += [stream.copy(*piece) for piece in pieces]
        for event in events:
            event.wait()

    return run
