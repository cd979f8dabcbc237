"""Device memory through which gradients leave for the host.

    model's stream   ┤ fill 0 ├┤ fill 1 ├┤ fill 2 ├──(wait)──┤ fill 0 ├
    to host                    ├── copy 0 ──┤├── copy 1 ──┤├── copy 2 ──┤

A kernel fills a buffer, so that autograd can free the gradient itself at once;
no thread waits. Where the link is slower than backward, the model's stream waits for a buffer.

Starting a copy costs the CPU more than filling: small gradients with one destination share a buffer
and a copy, a `Bucket`. It lies in the buffer as in the destination, in whatever order it is filled:

    destination   ├─ 0 ─┤├──── 1 ────┤├ 2 ┤├──── 3 ────┤    a run of 0, 1, 2
    buffer        ├─ 0 ─┤├──── 1 ────┤├ 2 ┤

It leaves when the run is complete, or when anything else needs the ring, or its arrival is asked
for; what was not filled is not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offload.swap.device.device_slot import Links
from offload.swap.device.streams import StreamEvent, current_stream, mark_of
from offload.swap.threads.transfer import Transfer
from offload.tiers.accelerator import Stream


class Run:
    """Neighbouring ranges of a destination, which fit a buffer together. In elements."""

    def __init__(self, first: int, ranges: Sequence[range]) -> None:
        """`first`: the number of the first of `ranges`, which are in order, in the destination."""
        self.first = first
        self.ranges = ranges
        self.start, self.stop = ranges[0].start, ranges[-1].stop
        # where each is put in a buffer
        self.places = [slice(each.start - self.start, each.stop - self.start) for each in ranges]


def runs_of(ranges: Sequence[range], most: int) -> list[Run | None]:
    """The run that each of `ranges`, which are in order, belongs to: of `most` elements at most.
    None for a range that is longer."""
    runs: list[Run | None] = []
    first = 0
    for last, each in enumerate(ranges):
        if len(each) > most:
            runs.append(None)
        elif last + 1 == len(ranges) or ranges[last + 1].stop - ranges[first].start > most:
            runs += [Run(first, ranges[first : last + 1])] * (last + 1 - first)
        else:
            continue
        first = last + 1
    return runs


class Bucket:
    """A buffer that a run is being put in, from its first gradient until it leaves."""

    def __init__(self, run: Run, destination: torch.Tensor, buffer: torch.Tensor) -> None:
        """`destination`: the run, 1D; `buffer`: memory of the same dtype."""
        self.run = run
        self.destination = destination
        self.buffer = buffer
        self.filled: set[int] = set()  # ranges by index
        self.streams: list[Stream | None] = []  # the streams that fill it
        self.mark: StreamEvent | None = None  # once it has left

    def room(self, index: int) -> torch.Tensor:
        """The buffer's part for a range, for the stream current at `StagingRing.bucket`."""
        return self.buffer[self.run.places[index - self.run.first]]

    def spans(self) -> list[slice]:
        """The filled spans. Neighbouring ranges are merged with the unused gap between them."""
        spans: list[slice] = []
        before = False
        for index, place in enumerate(self.run.places, self.run.first):
            filled = index in self.filled
            if filled and before:
                spans[-1] = slice(spans[-1].start, place.stop)
            elif filled:
                spans.append(place)
            before = filled
        return spans


class StagingRing:
    """A ring of `buffers` (1D uint8, device memory, all of one size). For the model's threads, one
    at a time, on any streams."""

    def __init__(self, buffers: Sequence[torch.Tensor], links: Links) -> None:
        self.nbytes = buffers[0].numel()  # of one buffer
        self._buffers = list(buffers)
        self._left = [StreamEvent()] * len(buffers)
        self._links = links
        self._next = 0
        self._bucket: Bucket | None = None  # the open one, in the next buffer

    # ---------------------------------------------------------------- one at a time
    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer for the current stream to fill (1D uint8); its last content has left by then."""
        self._send_bucket()
        self._left[self._next].before_compute()
        return self._buffers[self._next][:nbytes]

    def send(self, destination: torch.Tensor, filled: torch.Tensor) -> StreamEvent:
        """Start copying what `take` gave to host memory, once the current stream has filled it."""
        mark = self._links.to_host.copy(destination, filled)
        self._went(mark)
        return mark

    def _went(self, mark: StreamEvent) -> None:
        self._left[self._next] = mark
        self._next = (self._next + 1) % len(self._buffers)

    # ---------------------------------------------------------------- packed
    def bucket(self, run: Run, index: int, whole: torch.Tensor) -> Bucket:
        """The open bucket of a run of `whole` (1D), for the current stream to fill a range of."""
        bucket = self._bucket
        if bucket is None or bucket.run is not run or index in bucket.filled:
            self._send_bucket()
            destination = whole[run.start : run.stop]
            buffer = self._buffers[self._next].view(whole.dtype)
            bucket = self._bucket = Bucket(run, destination, buffer)
        stream = current_stream(self._links.device)
        if stream not in bucket.streams:
            self._left[self._next].before(stream)
            bucket.streams.append(stream)
        return bucket

    def filled(self, bucket: Bucket, index: int) -> None:
        """Record that the stream that was current at `bucket` has filled a range."""
        bucket.filled.add(index)
        if len(bucket.filled) == len(bucket.run.ranges):
            self._send_bucket()

    def sent(self, bucket: Bucket) -> StreamEvent:
        """Send a bucket, if it is still open; returns the mark of its copy."""
        if bucket is self._bucket:
            self._send_bucket()
        assert bucket.mark is not None, "only the open bucket has not been sent"
        return bucket.mark

    def _send_bucket(self) -> None:
        bucket, self._bucket = self._bucket, None
        if bucket is None:
            return
        device, mark = self._links.device, self._left[self._next]
        # a thread may send what others have filled
        after = [mark_of(stream, device) for stream in bucket.streams]
        for span in bucket.spans():
            destination, source = bucket.destination[span], bucket.buffer[span]
            mark = self._links.to_host.copy(
                destination.view(torch.uint8), source.view(torch.uint8), after
            )
        bucket.mark = mark
        self._went(mark)
        del bucket.destination  # its owner keeps it until it has arrived

    # ---------------------------------------------------------------- arrival
    def when_left(
        self, mark: StreamEvent, what: object, then: Callable[[], object]
    ) -> Transfer[None]:
        """Run `then` when everything sent up to `mark` has arrived."""
        return self._links.to_host.transfer(mark, what, then)
