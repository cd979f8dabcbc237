"""Copies between host and device memory, beside the computation.

On a GPU copies run on a stream of their own and hand over by events, never by synchronising. On a
CPU a copy is a copy: the same calls, done when they return.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class CopyMark:
    """A copy that was started. `event` is None where copies are done when they return."""

    event: torch.cuda.Event | None = None

    def done(self) -> bool:
        return self.event is None or self.event.query()

    def before_compute(self) -> None:
        """What the current stream does from here on sees the copy."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)

    def wait(self) -> None:
        """Block this thread until the copy is done."""
        if self.event is not None:
            self.event.synchronize()


class CopyStream:
    """Starts copies in order. One per direction; counts what it moves. Thread-safe on a GPU as
    far as PyTorch's streams are."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.moved_nbytes = 0

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> CopyMark:
        """Start `destination = source` (1D uint8, equal length, one of them on the device).

        Starts after everything the current stream was given so far: that may still read what
        `destination` held, or be writing `source`.
        """
        self.moved_nbytes += source.numel()
        if self._stream is None:
            destination.copy_(source)
            return CopyMark()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return CopyMark(event)
