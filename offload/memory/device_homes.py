"""The device's side of an engine's homes: streams, slots for mirrors, memory for kernels."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack

import torch

from offload.kernels.gpu import triton_launch
from offload.planning.plan.plan import Plan
from offload.swap.device.device_home import DeviceHomeState
from offload.swap.device.device_slot import DeviceSlot, Links, OpenReads
from offload.swap.device.fences import Fences
from offload.swap.device.staging_ring import StagingRing
from offload.swap.device.streams import CopyStream, WorkStream, mark_here
from offload.swap.states.slot_pool import SlotPool
from offload.swap.states.state import State
from offload.swap.threads.lanes import Lane
from offload.tiers import accelerator
from offload.tiers.ledger import StateClass
from offload.tiers.memory_tier import Lease, MemoryTier
from offload.zero.groups.store import NextUse
from offload.zero.step.device_update import DeviceWork

_log = logging.getLogger("offload")
_TO_DEVICE, _TO_HOST = "host to device", "device to host"


class DeviceHomes:
    """The part of `TierManager` that is open where the model computes on a GPU (or where host
    memory stands in for one). On a CPU there are no streams, and nothing is mirrored."""

    def __init__(
        self, plan: Plan, tier: MemoryTier, device: torch.device, lock: threading.RLock
    ) -> None:
        self._plan = plan.device
        self._device = device
        fences = Fences()
        # The update has links of its own: a copy for a group that is needed later, waiting for its
        # turn, must not hold up a copy that the model waits for.
        self.links, self._update_links = (
            Links(CopyStream(device), CopyStream(device), device, fences) for _ in range(2)
        )
        self._gradients_to_host = CopyStream(device)  # the thread behind it adds them up there
        self._stream = WorkStream(device)
        self.pool = SlotPool(tier, lock)
        self._reads = OpenReads(device)  # of slots of `pool`
        self._leases: list[Lease] = []
        mark_here(device).wait()  # what PyTorch has freed may still be read, by streams of its own
        trains = any(group.layout.numel_trainable for group in plan.groups)
        if accelerator.is_accelerator(device) and plan.device is None and trains:
            _log.warning(
                "gradients are converted and their norm is taken on the CPU, and each is waited "
                "for: %s", triton_launch.missing(device),
            )  # fmt: skip

    # ---------------------------------------------------------------- states
    def at_home(
        self, name: str, nbytes: int, piece_nbytes: int, state_class: StateClass,
        trainable_nbytes: int | None = None, stride_nbytes: int | None = None,
    ) -> State:  # fmt: skip
        """Return a state at home on the device."""
        lease = self.pool.demand(nbytes, name, state_class)
        return DeviceHomeState(
            name, nbytes, piece_nbytes, lease, self._update_links, trainable_nbytes, stride_nbytes,
            is_record=state_class is StateClass.OPTIMIZER,
        )  # fmt: skip

    def slot(self, name: str, nbytes: int, next_use: NextUse) -> DeviceSlot:
        """Return a slot of device memory, for parameters that are at home elsewhere."""
        kind = StateClass.PARAMETERS
        return DeviceSlot(name, nbytes, kind, self.pool, next_use, self.links, self._reads)

    # ---------------------------------------------------------------- work
    def work(self, landing_of: Callable[[int, str], torch.Tensor]) -> DeviceWork:
        """Return the streams and memory for the update and the gradients. `landing_of` leases host
        memory of a size for an owner."""
        plan = self._plan
        if plan is None:
            return DeviceWork(self._stream, self._update_links)
        buffers = [
            self._lease(plan.staging_nbytes, f"update buffer {index} of the device")
            for index in range(plan.staging_buffers)
        ]
        waiting = [
            self._lease(plan.ring_nbytes, f"gradients leaving, buffer {index}")
            for index in range(plan.ring_buffers)
        ]
        partials = None
        if plan.partials_nbytes:
            kind = StateClass.GRADIENTS  # kept while asleep: of gradients that wait for a step
            partials = self._lease(plan.partials_nbytes, "sums of squares", kind, torch.float64)
        landings = [
            landing_of(plan.ring_nbytes, f"gradients to be added, buffer {index}")
            for index in range(plan.landing_buffers)
        ]
        ring = None
        if waiting:
            ring = StagingRing(waiting, self._gradients_to_host, self._device, landings)
        return DeviceWork(self._stream, self._update_links, buffers, partials, ring)

    def _lease(
        self, nbytes: int, owner: str, state_class: StateClass = StateClass.STAGING,
        dtype: torch.dtype = torch.uint8,
    ) -> torch.Tensor:  # fmt: skip
        lease = self.pool.demand(nbytes, owner, state_class)
        self._leases.append(lease)
        lease.tensor = lease.tensor.view(dtype)  # the lease's own one, which follows its memory
        return lease.tensor

    def moved_nbytes(self) -> dict[str, int]:
        """Return the bytes over both pairs of links since the start."""
        both = (self.links, self._update_links)
        return {
            _TO_DEVICE: sum(links.to_device.moved_nbytes for links in both),
            _TO_HOST: sum(stream.moved_nbytes for stream in self._to_host()),
        }

    def _to_host(self) -> list[CopyStream]:
        return [self.links.to_host, self._update_links.to_host, self._gradients_to_host]

    # ---------------------------------------------------------------- waiting
    def lanes(self) -> list[Lane]:
        """Return the links that the model's thread waits for."""
        both = (self.links, self._update_links)
        streams = [*(links.to_device for links in both), *self._to_host()]
        return [stream.lane for stream in streams]

    def await_progress(self, otherwise: Callable[[], bool]) -> Callable[[], bool]:
        """Return a wait function for a full pool: copies in transit hold memory at both ends."""

        def wait() -> bool:
            streams = (self.links.to_device, self.links.to_host, self._gradients_to_host)
            return any(stream.await_oldest() for stream in streams) or otherwise()

        return wait

    def close(self) -> None:
        """Wait for all work on the device, on every stream, even if one of the waits fails: the
        memory that the work uses is given back after this."""
        with ExitStack() as last_first:
            last_first.callback(accelerator.synchronize, self._device)
            last_first.callback(self._update_links.close)
            last_first.callback(self._gradients_to_host.close)
            last_first.callback(self.links.close)
            last_first.callback(self._stream.close)
