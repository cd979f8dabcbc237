"""States at home in device memory.

The device's update works on them in place; for the CPU's they are staged through host memory piece
by piece.
"""

import torch

from offload.swap.device.device_slot import Links
from offload.swap.device.streams import StreamEvent, keeping, mark_here
from offload.swap.io.io_backend import Priority
from offload.swap.states.memory_state import HomeSnapshot
from offload.swap.states.state import HostPiece, Snapshot, State
from offload.swap.threads.transfer import Transfer
from offload.tiers.errors import StateError
from offload.tiers.memory_tier import Lease
from offload.tiers.tier import Residency


class DeviceHomeState(State):
    """Device memory is the home. Work in it waits for the marks of what other streams do in it."""

    in_place = True
    at_home_on_device = True
    can_snapshot = True

    def __init__(
        self, name: str, nbytes: int, piece_nbytes: int, lease: Lease, links: Links,
        trainable_nbytes: int | None = None, stride_nbytes: int | None = None, *,
        is_record: bool = False,
    ) -> None:  # fmt: skip
        """`is_record`: the update alone works with it. Other readers and writers (loading, reading
        values out) get a copy in host memory, one such copy at a time."""
        super().__init__(name, nbytes, piece_nbytes, trainable_nbytes, stride_nbytes)
        self._lease = lease
        self._links = links
        self._is_record = is_record
        self._copy = links.record_copy if is_record else links.host_copy
        self._busy = links.fences.claim(lease.extent)  # streams beside the model's that work in it

    def _before_here(self) -> None:
        """Work queued on the current stream from here on runs after the other streams' work."""
        for mark in self._busy:
            mark.before_compute()

    def _worked(self, mark: StreamEvent) -> None:
        self._busy = mark.replacing(self._busy)

    # ---------------------------------------------------------------- compute side
    def prefetch(self, *, next_use: float | None, priority: Priority = Priority.NORMAL) -> bool:
        return True

    def tensor(self) -> torch.Tensor:
        if self._is_record:
            return self.host_tensor()
        self._before_here()
        return self._lease.tensor[: self.nbytes]  # not kept: the memory may move while asleep

    def blank(self) -> torch.Tensor:
        return self.host_blank() if self._is_record else self.tensor()

    def mark_dirty(self, *, trainable_only: bool = False) -> None:
        """Take home the copy of a record; anything else was changed where it is at home."""
        if self._is_record:
            self.mark_host_dirty()

    def residency(self) -> Residency:
        return Residency.CLEAN

    # ---------------------------------------------------------------- host side
    def host_tensor(self) -> torch.Tensor:
        copy = self.host_blank()
        self._before_here()
        self._links.to_host.copy(copy, self._lease.tensor[: self.nbytes]).wait()
        return copy

    def host_blank(self) -> torch.Tensor:
        return self._copy.lend(self)

    def mark_host_dirty(self) -> None:
        values = self._copy.take_back(self)
        self._before_here()
        self._links.to_device.copy(self._lease.tensor[: self.nbytes], values).wait()

    # ---------------------------------------------------------------- update on the CPU
    def host_piece(self, piece: int) -> HostPiece | None:
        return None

    def mark_piece_dirty(self, piece: int) -> None:
        raise StateError(f"{self.name} is staged: use write_piece")

    def read_piece(self, piece: int, destination: torch.Tensor) -> Transfer[None]:
        span = self.span(piece)
        target = destination[: span.stop - span.start]
        self._before_here()
        mark = self._links.to_host.copy(target, self._lease.tensor[span])
        self._worked(mark)
        return self._links.to_host.transfer(mark, f"{self.name} to the host", keeping(target))

    def write_piece(self, piece: int, source: torch.Tensor) -> Transfer[None]:
        span = self.span(piece)
        source = source[: span.stop - span.start]
        self._before_here()
        mark = self._links.to_device.copy(self._lease.tensor[span], source)
        self._worked(mark)
        return self._links.to_device.transfer(mark, f"{self.name} to the device", keeping(source))

    # ---------------------------------------------------------------- a save in the background
    def snapshot(self) -> Snapshot:
        self.settle()
        mark_here(self._links.device).wait()  # it may have been written to in place
        return HomeSnapshot(self._read_unchanged)

    def _read_unchanged(self, piece: int, pages: torch.Tensor) -> HostPiece:
        """Copy a piece on any thread. What wrote it is done, and nothing overwrites it meanwhile:
        the copy waits for no mark, and leaves none."""
        source = self._lease.tensor[self.span(piece)]
        self._links.to_host.copy(pages[: source.numel()], source, after=()).wait()
        return HostPiece(pages)

    # ---------------------------------------------------------------- update on the device
    def device_piece(self, piece: int) -> torch.Tensor | None:
        self._before_here()
        return self._lease.tensor[self.span(piece)]

    def used_device_piece(self, piece: int, until: StreamEvent) -> None:
        self._worked(until)

    def discard(self) -> None:
        """Keep the memory, which is a permanent home; its content no longer counts."""

    def settle(self) -> None:
        for mark in self._busy:
            if not mark.done():  # they are kept when they are: to ask is less than to wait
                mark.wait()

    def close(self) -> None:
        marks = (*self._busy, mark_here(self._links.device))
        self._links.fences.retire(self._lease.extent, marks)
        self._lease.free()
