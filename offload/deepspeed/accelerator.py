"""`deepspeed.accelerator.get_accelerator()`: what training loops ask the device for."""

from __future__ import annotations

import os

from offload.tiers import accelerator
from offload.tiers.errors import UnsupportedError


class _Accelerator:
    """The device that an engine with `device: auto` computes on."""

    def device_name(self, device_index: int | None = None) -> str:
        """Return `cuda`, `cuda:1`, or `cpu`, which has no numbers."""
        kind = accelerator.default_type()
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def current_device_name(self) -> str:
        return str(accelerator.default_device())

    def device_count(self) -> int:
        """Return the number of devices; at least 1, the CPU."""
        return max(1, accelerator.device_count())

    def is_available(self) -> bool:
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        accelerator.synchronize(accelerator.default_device())

    def communication_backend_name(self) -> str:
        return "gloo" if accelerator.default() is None else "nccl"

    def set_device(self, device_index: int) -> None:
        """Do nothing: an engine takes the device of LOCAL_RANK by itself. Raise UnsupportedError
        for another device."""
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if self.device_name() != "cpu" and device_index != local:
            raise UnsupportedError(
                f"set_device({device_index}): this process computes on the device of LOCAL_RANK: "
                f"{local}; start it with torchrun, or set LOCAL_RANK"
            )

    def empty_cache(self) -> None:
        """Do nothing: there is no cache that has to be emptied."""


def get_accelerator() -> _Accelerator:
    """Return the accelerator; there is one per process."""
    return _Accelerator()
