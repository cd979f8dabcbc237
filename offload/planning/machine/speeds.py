"""The speeds of a machine, as the time model uses them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from offload.process.disk_cache import Number, Positive

Rates = Annotated[Mapping[str, Positive], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class ComputeSpeeds:
    """The speeds that do not depend on a disk."""

    gpu: bool  # whether the model computes on a GPU
    matmul_flops_per_s: Rates  # by precision: fp32, bf16, fp16
    compute_bytes_per_s: Positive  # operations bound by the memory of the compute device
    compute_bytes_per_s_in: Rates = field(default_factory=dict)
    # ... by precision, where that makes a difference
    operation_s: Number  # what one call of a kernel costs beside its work
    host_bytes_per_s: Positive  # the optimizer's traffic over the memory bus, all cores
    optimizer_parameters_per_s: Rates = field(default_factory=dict)
    # AdamW with a split master, by format of states (fp32, bf16, int8); absent: bound by the bus
    update_call_s: Number = 0.0  # what one call of the optimizer costs on all cores beside its work
    host_to_device_bytes_per_s: Number = 0.0
    device_to_host_bytes_per_s: Number = 0.0


@dataclass(frozen=True, kw_only=True)
class DiskSpeeds:
    """The speeds of all paths of a configuration together, and what the model loses to I/O by
    sharing cores and memory bus: 0 beside a GPU, or if it was not measured."""

    nvme_read_bytes_per_s: Positive = 0.0
    nvme_write_bytes_per_s: Positive = 0.0
    nvme_mixed_bytes_per_s: Positive = 0.0  # both directions at once, together; 0: not measured
    io_lost_s_per_byte: Number = 0.0  # that compute loses to each byte moved beside it


@dataclass(frozen=True, kw_only=True)
class Speeds(ComputeSpeeds, DiskSpeeds):
    """Sustained rates of one rank's share of a machine, in bytes and operations per second."""

    name: str  # `this machine`, `RTX 4090 + Gen4 SSD`
    endurance_nbytes: int = 0  # that may be written to the SSDs in all; 0: unknown


# Where nothing is measured: only the ratios matter, to say which link is the slowest.
NOMINAL = Speeds(
    name="nominal", gpu=False, matmul_flops_per_s={"fp32": 1e11, "bf16": 1e11, "fp16": 1e11},
    compute_bytes_per_s=2e10, operation_s=0.0, host_bytes_per_s=2e10,
    nvme_read_bytes_per_s=2e9, nvme_write_bytes_per_s=2e9,
    host_to_device_bytes_per_s=1e10, device_to_host_bytes_per_s=1e10,
)  # fmt: skip
