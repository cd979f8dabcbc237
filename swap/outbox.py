"""Device memory through which gradients leave for the host.

    model's stream   ┤ fill 0 ├┤ fill 1 ├┤ fill 2 ├──(wait)──┤ fill 0 ├
    to host                    ├── copy 0 ──┤├── copy 1 ──┤├── copy 2 ──┤

A kernel fills a buffer, so that autograd can free the gradient itself at once;
no thread waits. Where the link is slower than backward, the model's stream waits for a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offload.swap.device_state import Links
from offload.swap.streams import CopyMark
from offload.swap.transfer import Transfer


class Outbox:
    """A ring of `buffers` (1D uint8, device memory, all of one size). For the model's threads."""

    def __init__(self, buffers: Sequence[torch.Tensor], links: Links) -> None:
        self.nbytes = buffers[0].numel()  # of one buffer
        self._buffers = list(buffers)
        self._left = [CopyMark()] * len(buffers)
        self._links = links
        self._next = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer for the current stream to fill (1D uint8); its last content has left by then."""
        self._left[self._next].before_compute()
        return self._buffers[self._next][:nbytes]

    def send(self, destination: torch.Tensor, filled: torch.Tensor) -> CopyMark:
        """Start copying what `take` gave to host memory, once the current stream has filled it."""
        mark = self._links.to_host.copy(destination, filled)
        self._left[self._next] = mark
        self._next = (self._next + 1) % len(self._buffers)
        return mark

    def when_left(self, mark: CopyMark, what: object, then: Callable[[], object]) -> Transfer[None]:
        """Run `then` when everything sent up to `mark` has arrived."""
        return self._links.to_host.transfer(mark, what, then)
