"""The streams and memory of a device that updates and gradients use beside the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offload.swap.device.device_state import Links
from offload.swap.device.outbox import Outbox
from offload.swap.device.streams import CopyStream, WorkStream


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """Streams and memory. A CPU that does everything needs neither."""

    stream: WorkStream  # for the update thread
    links: Links  # for the update's own copies
    buffers: Sequence[torch.Tensor] = ()  # 1D uint8 on the device: staging of chunks stepped there
    partials: torch.Tensor | None = None  # 1D fp64 on the device: room for all sums of squares
    outbox: Outbox | None = None  # on the way to accumulators in host memory

    @classmethod
    def nothing(cls) -> DeviceWork:
        """Return the work of a CPU, with streams that do nothing and without memory."""
        cpu = torch.device("cpu")
        return cls(WorkStream(cpu), Links(CopyStream(cpu), CopyStream(cpu)))
