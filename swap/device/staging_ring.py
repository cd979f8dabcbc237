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

A gradient that is added to what the destination holds lands beside it, in a buffer of host memory.
The thread that watches the copies adds it there. No other thread waits, unless all are full.

    to host       ├─ copy 0 to landing 0 ─┤├─ copy 1 to landing 1 ─┤
    additions                              ├── add 0 ──┤            ├── add 1 ──┤
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from offload.swap.device.streams import CopyStream, StreamEvent, current_stream, mark_of
from offload.swap.threads.transfer import Transfer
from offload.tiers.accelerator import Stream

_log = logging.getLogger("offload")
Addition = Callable[[torch.Tensor], object]  # adds what has landed (1D) where it belongs


class Run:
    """Neighbouring ranges of a destination, which fit a buffer together. In elements."""

    def __init__(self, first: int, ranges: Sequence[range]) -> None:
        """`first`: the number of the first of `ranges`, which are in order, in the destination."""
        self.first = first
        self.ranges = ranges
        self.start, self.stop = ranges[0].start, ranges[-1].stop
        # where each is put in a buffer
        self.places = [slice(each.start - self.start, each.stop - self.start) for each in ranges]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a gradient, small enough for one buffer."""

    number: int  # among the ranges of all parts
    run: Run
    elements: slice  # of the gradient
    blocks: slice  # of the gradient, cut into blocks


def parts_of(ranges: Sequence[range], max_numel: int, block: int) -> list[list[Part]]:
    """The parts of each of `ranges`, which are in order: of at most `max_numel` elements, and of
    whole blocks where there are several."""
    step = max(1, max_numel // block) * block
    places = [
        (index, range(start, min(start + step, each.stop)))
        for index, each in enumerate(ranges)
        for start in range(each.start, each.stop, step)
    ]
    runs = runs_of([place for _, place in places], max_numel)
    parts: list[list[Part]] = [[] for _ in ranges]
    for number, ((index, place), run) in enumerate(zip(places, runs, strict=True)):
        start = place.start - ranges[index].start
        blocks = slice(start // block, -(-(start + len(place)) // block))
        parts[index].append(Part(number, run, slice(start, start + len(place)), blocks))
    return parts


def runs_of(ranges: Sequence[range], max_numel: int) -> list[Run]:
    """The run that each of `ranges`, which are in order, belongs to: of at most `max_numel`
    elements, as many as each range has at most."""
    runs: list[Run] = []
    first = 0
    for last in range(len(ranges)):
        ends = last + 1 == len(ranges)
        if ends or ranges[last + 1].stop - ranges[first].start > max_numel:
            runs += [Run(first, ranges[first : last + 1])] * (last + 1 - first)
            first = last + 1
    return runs


@dataclass(eq=False, repr=False)
class Bucket:
    """A buffer that a run is being put in, from its first gradient until it leaves."""

    run: Run
    destination: torch.Tensor  # the run, 1D
    buffer: torch.Tensor  # memory of the same dtype
    lands: bool  # the destination is host memory of the ring, for `additions` to read
    filled: set[int] = field(default_factory=set)  # ranges by index
    streams: list[Stream | None] = field(default_factory=list)  # the streams that fill it
    mark: StreamEvent | None = None  # once it has left
    additions: dict[int, Addition] = field(default_factory=dict)  # of filled ranges by index

    def add_all(self) -> None:
        try:
            for index, add in self.additions.items():
                add(self.destination[self.run.places[index - self.run.first]])
        finally:
            self.additions.clear()  # they keep views of what was added to

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

    def __init__(
        self, buffers: Sequence[torch.Tensor], to_host: CopyStream, device: torch.device,
        landings: Sequence[torch.Tensor] = (),
    ) -> None:  # fmt: skip
        """`landings` are buffers of host memory, of the same size; without any, nothing lands. The
        thread that watches `to_host` makes additions: other copies should have another link."""
        self.nbytes = buffers[0].numel()  # of one buffer
        self.lands = bool(landings)
        self._has_warned = False
        self._to_host = to_host
        self._device = device
        self._buffers = list(buffers)
        self._left = [StreamEvent()] * len(buffers)
        self._landings = deque(landings)  # the one to be used next is first
        self._landed = deque(Transfer.completed(None) for _ in landings)
        self._next = 0
        self._bucket: Bucket | None = None  # the open one, in the next buffer

    def warn_of_waits(self) -> None:
        """Log, once, that gradients are added by the thread of backward: nothing lands here."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "gradients of more than one backward pass are added up, and backward waits for "
                "each of them; set gradient_accumulation_steps to the passes before a step"
            )

    def bucket(
        self, run: Run, index: int, dtype: torch.dtype, whole: torch.Tensor | None = None
    ) -> Bucket:
        """The open bucket of a run of `whole` (1D), for the current stream to fill a range of. If
        that is None, the run lands in host memory of the ring. One run is always used alike."""
        bucket = self._bucket
        if bucket is None or bucket.run is not run or index in bucket.filled:
            self._send_bucket()
            if whole is None:
                self._landed[0].wait()  # until what has landed there before was added
                destination = self._landings[0].view(dtype)[: run.stop - run.start]
            else:
                destination = whole[run.start : run.stop]
            buffer = self._buffers[self._next].view(dtype)
            bucket = self._bucket = Bucket(run, destination, buffer, whole is None)
        stream = current_stream(self._device)
        if stream not in bucket.streams:
            self._left[self._next].before(stream)
            bucket.streams.append(stream)
        return bucket

    def filled(self, bucket: Bucket, index: int, add: Addition | None = None) -> None:
        """Record that a range of `bucket` is filled. Where it lands, `add` takes it from there."""
        bucket.filled.add(index)
        if add is not None:
            bucket.additions[index] = add
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
        mark = self._left[self._next]
        # a thread may send what others have filled
        after = [mark_of(stream, self._device) for stream in bucket.streams]
        for span in bucket.spans():
            destination, source = bucket.destination[span], bucket.buffer[span]
            mark = self._to_host.copy(
                destination.view(torch.uint8), source.view(torch.uint8), after
            )
        bucket.mark = mark
        self._left[self._next] = mark
        self._next = (self._next + 1) % len(self._buffers)
        if bucket.lands:  # in the next landing buffer
            what = "gradients that are added"
            self._landed[0] = self._to_host.transfer(mark, what, bucket.add_all)
            self._landed.rotate(-1)
            self._landings.rotate(-1)
        else:
            del bucket.destination  # its owner keeps it until it has arrived

    def when_left(
        self, mark: StreamEvent, what: object, then: Callable[[], object]
    ) -> Transfer[None]:
        """Run `then` when everything sent up to `mark` has arrived, and was added."""
        return self._to_host.transfer(mark, what, then)
