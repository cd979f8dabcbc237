"""`offload bench copy`: copies between host and device memory through our streams.

The limit is one large copy from memory that PyTorch pinned, on a stream of its own; ours goes
through `CopyStream`, in pieces as the runtime moves them, from memory pinned as the host tier pins
its own, and from pageable memory. Each direction alone, then both at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from offload.bench.record import Kind, Record
from offload.bench.rounds import Say, Timed, measure, moving
from offload.bench.table import Column, number
from offload.process import machine
from offload.swap.device.streams import CopyStream, StreamEvent
from offload.tiers import accelerator
from offload.tiers.errors import BudgetError, UnsupportedError
from offload.tiers.memory import HostMemory
from offload.tiers.units import format_bytes, round_up

DEFAULT_NBYTES = 1 << 30
PIECE_NBYTES = 64 << 20
_SHARE_OF_MEMORY = 16  # by default one buffer takes at most this part of what is free

COLUMNS = (
    Column("ms", number("seconds", 1e-3, 1)),
    Column("GB/s", number("bytes_per_s", 1e9, 1)),
)


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
    measure(record, _systems(nbytes, device), options.rounds, say)
    for way in _WAYS:
        for kind in ("pinned", "pageable"):
            record.compare(f"ours {kind}, {way}", f"raw, {way}", "bytes_per_s")
    record.notes.append(
        f"{format_bytes(nbytes)} per copy and direction; ours in pieces of "
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


def _pieces(
    destination: torch.Tensor, source: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for start in range(0, source.numel(), PIECE_NBYTES):
        end = start + PIECE_NBYTES
        yield destination[start:end], source[start:end]


def _start(
    stream: CopyStream, destination: torch.Tensor, source: torch.Tensor
) -> Sequence[StreamEvent]:
    return [stream.copy(*pair) for pair in _pieces(destination, source)]


def _wait(marks: Sequence[StreamEvent]) -> None:
    for mark in marks:
        mark.wait()


_WAYS = ("host to device", "device to host", "both at once")


def _systems(nbytes: int, device: torch.device) -> list[Timed]:
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    raw = [torch.zeros(nbytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
    memory = HostMemory(2 * nbytes, pin_for=device)
    pinned = [memory.tensor(i * nbytes, nbytes) for i in range(2)]
    pageable = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2)]
    note = "" if memory.pinned else "could not be pinned"
    systems = []
    for way in _WAYS:
        moved = nbytes * (2 if way == _WAYS[2] else 1)
        systems += [
            moving(f"raw, {way}", Kind.LIMIT, moved, _raw_copy(way, raw, there, device)),
            moving(
                f"ours pinned, {way}", Kind.OURS, moved,
                _our_copy(way, pinned, there, device), note,
            ),
            moving(
                f"ours pageable, {way}", Kind.OURS, moved,
                _our_copy(way, pageable, there, device),
            ),
        ]  # fmt: skip
    return systems


def _pairs(
    way: str, host: Sequence[torch.Tensor], there: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(destination, source) of the copies of one way."""
    pairs = [(there[0], host[0]), (host[1], there[1])]
    return {_WAYS[0]: pairs[:1], _WAYS[1]: pairs[1:], _WAYS[2]: pairs}[way]


def _raw_copy(
    way: str, host: Sequence[torch.Tensor], there: Sequence[torch.Tensor], device: torch.device
) -> Callable[[], None]:
    pairs = _pairs(way, host, there)
    kind = accelerator.of(device)
    streams = [kind.stream(device) for _ in pairs]

    def run() -> None:
        for stream, (destination, source) in zip(streams, pairs, strict=True):
            with kind.entered(stream):
                destination.copy_(source, non_blocking=True)
        for stream in streams:
            stream.synchronize()

    return run


def _our_copy(
    way: str, host: Sequence[torch.Tensor], there: Sequence[torch.Tensor], device: torch.device
) -> Callable[[], None]:
    pairs = _pairs(way, host, there)
    streams = [CopyStream(device) for _ in pairs]

    def run() -> None:
        copies = zip(streams, pairs, strict=True)
        marks = [mark for stream, pair in copies for mark in _start(stream, *pair)]
        _wait(marks)

    return run
