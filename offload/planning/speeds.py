"""How fast a machine is: the numbers that the model of time works with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload.planning.network import Network


@dataclass(frozen=True)
class Speeds:
    """Sustained rates of one rank's share of a machine. Bytes and operations per second."""

    name: str  # `this machine`, `RTX 4090 + Gen4 SSD`
    gpu: bool  # whether the model computes on a GPU
    matmul_flops_per_s: Mapping[str, float]  # by precision: fp32, bf16, fp16
    compute_bytes_per_s: float  # operations bound by the memory of the compute device
    operation_s: float  # what one call of a kernel costs beside its work
    host_bytes_per_s: float  # the optimizer's traffic over the memory bus, all cores
    optimizer_parameters_per_s: Mapping[str, float] = field(default_factory=dict)
    # measured rate by format of states (fp32, bf16, int8); absent: bound by the bus
    nvme_read_bytes_per_s: float = 0.0
    nvme_write_bytes_per_s: float = 0.0
    host_to_device_bytes_per_s: float = 0.0
    device_to_host_bytes_per_s: float = 0.0
    endurance_nbytes: int = 0  # that may be written to the SSDs in all; 0: unknown
    compute_bytes_per_s_in: Mapping[str, float] = field(default_factory=dict)
    # ... by precision, where that makes a difference
    # Where model, optimizer and I/O share cores and memory bus. 0 and 1 beside a GPU, or where
    # nobody measured: then they are taken to share without loss.
    nvme_mixed_bytes_per_s: float = 0.0  # both directions at once, together; 0: not measured
    io_lost_s_per_byte: float = 0.0  # that compute loses to each byte moved beside it
    optimizer_lost_share: float = 1.0  # that compute loses per second of the optimizer alone
    update_disk_share: float = 1.0  # of those rates that an update gets behind a forward
    request_s: float = 0.0  # one read or write of nvme, beside its bytes
    network: Network | None = None  # between ranks; None: not known


# Where nobody measured: only the ratios matter, to say which link is the slowest.
NOMINAL = Speeds(
    name="nominal", gpu=False, matmul_flops_per_s={"fp32": 1e11, "bf16": 1e11, "fp16": 1e11},
    compute_bytes_per_s=2e10, operation_s=0.0, host_bytes_per_s=2e10,
    nvme_read_bytes_per_s=2e9, nvme_write_bytes_per_s=2e9,
    host_to_device_bytes_per_s=2e10, device_to_host_bytes_per_s=2e10,
)  # fmt: skip
