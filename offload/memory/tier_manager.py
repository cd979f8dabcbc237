"""The tiers of an engine: opens the memory and files of a plan, and gives every state its home."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from offload.kernels.bits import FLOAT_OF
from offload.kernels.gpu import triton_launch
from offload.memory.asleep import AwayTier
from offload.memory.device_homes import DeviceHomes
from offload.memory.memory_guard import MemoryGuard, read_headroom
from offload.memory.preflight import divided_gpu
from offload.planning.machine.baseline import GPU_CONTEXT_NBYTES
from offload.planning.plan.plan import Hardware, Plan, needed_nbytes, spare_nbytes
from offload.planning.plan.shortfalls import SMALLER_PASS
from offload.process import machine
from offload.swap.activations.activation_window import ActivationWindow
from offload.swap.activations.activations import ActivationTier
from offload.swap.device.device_slot import Links
from offload.swap.device.mirrored_state import MirroredState
from offload.swap.device.streams import CopyStream, mark_here
from offload.swap.io.backends import measured_speed, open_backend
from offload.swap.io.block_store import BlockStore
from offload.swap.io.requests_and_retries import Operation
from offload.swap.io.swap_file import SwapFile, check_directory, free_space
from offload.swap.io.timeout_thread import TimeoutThread
from offload.swap.states.cached_file_state import CachedFileState
from offload.swap.states.memory_state import MemoryState
from offload.swap.states.quantized_state import DeviceQuantizedState, QuantizedState
from offload.swap.states.slot import Slot
from offload.swap.states.slot_pool import SlotPool
from offload.swap.states.state import State
from offload.swap.threads.lanes import Lane
from offload.swap.threads.worker import ParallelRunner
from offload.tiers import accelerator
from offload.tiers.errors import ConfigError, NoSpaceError, PathError, StateError
from offload.tiers.file_tier import FileTier
from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.memory_tier import Lease, MemoryTier
from offload.tiers.tier import PAGE_NBYTES, TIERS, Tier
from offload.tiers.units import format_bytes, round_up
from offload.zero.groups.layout import Layout, lay_out_quantized
from offload.zero.groups.store import NextUse
from offload.zero.groups.weight_quantizer import WeightQuantizer
from offload.zero.ranks.collectives import SharedMemory, Workspace
from offload.zero.ranks.sharding import ALONE, Sharding
from offload.zero.step.device_update import DeviceWork
from offload.zero.step.matrices import MatrixWork
from offload.zero.step.records import RecordFormat

if TYPE_CHECKING:
    from offload.config import NvmeConfig, OffloadConfig

_log = logging.getLogger("offload")

_BESIDE_EXPERTS_NBYTES = 2 << 20  # of a call; shorter ones reach less of a disk's bandwidth


class TierManager:
    """The tiers of one engine, and the states in them. `close` gives everything back."""

    def __init__(
        self, plan: Plan, nvme: NvmeConfig, device: torch.device, dtype: torch.dtype
    ) -> None:  # fmt: skip
        """`dtype` is the format in which parameters are computed with."""
        self.plan = plan
        self.ledger = Ledger()
        self.lock = threading.RLock()
        self._dtype = dtype
        self._itemsize = dtype.itemsize
        self._memory: dict[Tier, MemoryTier] = {}
        self.store: BlockStore | None = None
        self.swap_folders: Sequence[str] = ()
        self._nvme = nvme
        self._timeout_s = nvme.timeout_s
        self._away: list[AwayTier] = []  # tiers that were saved, the first one first
        self.spare = replace(spare_nbytes(plan), files=0)  # of the budgets
        self._staging: list[Lease] = []
        self._update_buffers: list[Lease] = []
        # as many threads as PyTorch computes with; they start when there is much to dequantize
        self._run = ParallelRunner(torch.get_num_threads(), min_share=1)
        self._end_limit: Callable[[], None] = lambda: None
        with ExitStack() as opened:
            opened.callback(self._close_memory)
            if plan.gpu_budget_nbytes is not None and accelerator.is_accelerator(device):
                self._limit(plan.gpu_budget_nbytes, device)
            for tier in TIERS:
                if not tier.is_file:
                    budget = plan.budgets[tier]
                    self._memory[tier] = MemoryTier.open(tier, budget, device, self.ledger)
            self.pool = SlotPool(self._memory[Tier.HOST], self.lock)
            self._device = DeviceHomes(plan, self._memory[Tier.DEVICE], device, self.lock)
            opened.callback(self._device.close)
            if plan.opens_files:
                self._open_files()
            self.activations = self._open_activations(device)
            self.guard = MemoryGuard(self.pool, read_headroom, sharing=ranks_here())
            self.guard.start()
            opened.pop_all()

    def _limit(self, budget_nbytes: int, device: torch.device) -> None:
        """Hold PyTorch to the part of budget.gpu that is not the context's."""
        text = (
            f"budget.gpu is full. {divided_gpu(self.plan, budget_nbytes)} and others; raise "
            f"budget.gpu, lower budget.device, or {SMALLER_PASS}"
        )
        self._end_limit = accelerator.of(device).limit(
            device, budget_nbytes - GPU_CONTEXT_NBYTES, partial(_log.error, "%s", text)
        )

    def _open_files(self) -> None:
        try:
            self.store = self._open_store(self._nvme)
        except NoSpaceError as error:
            raise PathError(f"nvme.paths: {error}") from error

    def _open_store(self, nvme: NvmeConfig) -> BlockStore:
        paths = nvme_paths(nvme)
        shares = [1.0]
        if len(paths) > 1:
            shares = [measured_speed(path, nvme.timeout_s) for path in paths]
        tier = FileTier(self.plan.budgets[Tier.NVME], shares, self.ledger)
        needed = needed_nbytes(self.plan, Tier.NVME)
        with ExitStack() as opened:
            files = [
                opened.enter_context(SwapFile(path, timeout_s=nvme.timeout_s)) for path in paths
            ]
            for file, share in zip(files, tier.shares, strict=True):
                file.reserve(int(needed * share) // PAGE_NBYTES * PAGE_NBYTES)
            self.swap_folders = paths
            spare = spare_nbytes(self.plan)
            self.spare = replace(spare, files=min(spare.files, self.free_nvme_nbytes()))
            options: dict[str, float] = {"timeout_s": nvme.timeout_s}
            if nvme.threads != "auto":
                options["workers"] = nvme.threads
            if not self.plan.trains and any(group.table for group in self.plan.groups):
                # experts that a router chose wait for the calls of what is being read ahead
                options["io_block_nbytes"] = _BESIDE_EXPERTS_NBYTES
            backend = opened.enter_context(open_backend(nvme.backend, **options))
            store = BlockStore(files, tier, backend, lock=self.lock)
            opened.pop_all()
        return store

    def _open_activations(self, device: torch.device) -> ActivationTier | None:
        plan = self.plan.activations
        if plan is None:
            return None
        with self.lock:
            lease = self._memory[plan.window_tier].lease(
                plan.window_nbytes, owner="saved activations", state_class=StateClass.ACTIVATIONS,
                in_parts=True,
            )  # fmt: skip
        links = self._device.links
        if not self.plan.gpu:  # copies into the window are no traffic between host and device
            links = Links(CopyStream(device), CopyStream(device))
        return ActivationTier(
            ActivationWindow(lease), self.store if plan.disk_nbytes else None, plan.disk_nbytes,
            links, self.lock, device=device, in_place=not self.plan.gpu,
            trim=machine.trim_memory if device.type == "cpu" else None,
        )  # fmt: skip

    # ---------------------------------------------------------------- states
    def parameters(
        self, index: int, name: str, numel: int, next_use: NextUse, trainable: int,
        stride: int | None = None,
    ) -> State:  # fmt: skip
        tier, group = self.plan.parameters[index], self.plan.groups[index]
        size, piece = numel * self._itemsize, self.plan.chunk_numel * self._itemsize
        cut = trainable * self._itemsize, None if stride is None else stride * self._itemsize
        label, kind = f"{name} parameters", StateClass.PARAMETERS
        if group.dequantized:
            return self._quantized(tier, label, size, piece, group.layout, next_use)
        return self._computed_with(tier, label, size, piece, kind, next_use, *cut)

    def kv_page(self, tier: Tier, name: str, nbytes: int, next_use: NextUse) -> State:
        """Return a state for the keys and values of some tokens."""
        size = round_up(nbytes, PAGE_NBYTES)
        return self._computed_with(tier, name, nbytes, size, StateClass.KV, next_use)

    def _computed_with(
        self, tier: Tier, name: str, nbytes: int, piece_nbytes: int, state_class: StateClass,
        next_use: NextUse, trainable_nbytes: int | None = None, stride_nbytes: int | None = None,
    ) -> State:  # fmt: skip
        """Return a state that the model reads."""
        cut = trainable_nbytes, stride_nbytes
        home = self._state(tier, name, nbytes, piece_nbytes, state_class, next_use, *cut)
        if tier.on_device or not self.plan.gpu:  # it is there, or comes there by itself
            return home
        return MirroredState(home, self._device.slot(name, nbytes, next_use))

    def _quantized(
        self, tier: Tier, label: str, nbytes: int, piece: int, layout: Layout, next_use: NextUse
    ) -> State:
        """Return a state for weights whose home is quantized, as they cross every link."""
        kind, state_class = FLOAT_OF[self._dtype], StateClass.PARAMETERS
        quantizer = WeightQuantizer(lay_out_quantized(layout, self._itemsize), kind, self._run)
        stored = quantizer.stored_nbytes(nbytes)
        home = self._computed_with(tier, label, stored, piece, state_class, next_use)
        if self.plan.gpu:
            there = self._device.slot(label, nbytes, next_use)
            return DeviceQuantizedState(home, quantizer, there)
        slot = Slot(label, nbytes, state_class, self.pool, next_use)
        return QuantizedState(home, quantizer, slot)

    def kv_memory(self, name: str, nbytes: int) -> Lease:
        """Return memory where the model computes. Its previous contents may still be read: work
        that the model's stream is given from now on comes after that."""
        pool = self._device.pool if self.plan.gpu else self.pool
        lease = pool.demand(nbytes, name, StateClass.KV)
        for mark in self._device.links.fences.claim(lease.extent) if self.plan.gpu else ():
            mark.before_compute()
        return lease

    def free_kv_memory(self, lease: Lease) -> None:
        """Free the memory; reads of it that are already queued may finish."""
        if self.plan.gpu:
            self._device.links.fences.retire(lease.extent, (mark_here(self._device.links.device),))
        with self.lock:
            lease.free()

    def gradients(
        self, index: int, name: str, numel: int, itemsize: int, next_use: NextUse
    ) -> State:
        tier = self.plan.gradients[index]
        if itemsize > self._itemsize and tier.is_file:
            tier = Tier.HOST  # fp32 sums that were not planned for: never a file of twice the size
        size, piece = numel * itemsize, self.plan.chunk_numel * itemsize
        label, kind = f"{name} gradients", StateClass.GRADIENTS
        if not size:  # all is frozen
            return MemoryState(label, size, piece, None)
        return self._state(tier, label, size, piece, kind, next_use)

    def record(self, index: int, name: str, chunk: int, nbytes: int, next_use: NextUse) -> State:
        tier = self.plan.records[index][chunk]
        label = f"{name} optimizer chunk {chunk}"
        return self._state(tier, label, nbytes, nbytes, StateClass.OPTIMIZER, next_use)

    @property
    def record_format(self) -> RecordFormat:
        return self.plan.record_format

    def _state(
        self, tier: Tier, name: str, nbytes: int, piece_nbytes: int, state_class: StateClass,
        next_use: NextUse, trainable_nbytes: int | None = None, stride_nbytes: int | None = None,
    ) -> State:  # fmt: skip
        cut = trainable_nbytes, stride_nbytes
        if tier.on_device and self.plan.gpu:
            return self._device.at_home(name, nbytes, piece_nbytes, state_class, *cut)
        if tier.is_file:
            assert self.store is not None, "the plan puts something on nvme"
            slot = Slot(name, nbytes, state_class, self.pool, next_use)
            return CachedFileState(self.store, slot, piece_nbytes, *cut)
        if tier is Tier.HOST:
            lease = self.pool.demand(nbytes, name, state_class)  # copies make room
        else:
            with self.lock:
                lease = self._memory[tier].lease(nbytes, owner=name, state_class=state_class)
        # other ranks' parts are in a state with strides, too
        spare = None if tier.on_device or stride_nbytes else self.pool
        return MemoryState(name, nbytes, piece_nbytes, lease, *cut, spare)

    def device_work(self) -> DeviceWork:
        """Return the device's streams and memory for updates and gradients beside the model."""

        def landing_of(nbytes: int, owner: str) -> torch.Tensor:
            lease = self.pool.demand(nbytes, owner, StateClass.STAGING)
            self._staging.append(lease)
            return lease.tensor

        return self._device.work(landing_of)

    def free_nvme_nbytes(self) -> int:
        """Return the free bytes of all paths together, if each gets as much as the one with the
        least. Raises PathError if a path cannot be looked at."""
        try:
            free = [free_space(path, self._timeout_s) for path in self.swap_folders]
        except OSError as error:
            places = ", ".join(map(str, self.swap_folders))
            raise PathError(
                f"nvme.paths: {places} cannot be looked at: {error.strerror}; name another"
            ) from None
        return min(free, default=0) * len(free)

    def let_wait(
        self, for_updates: Callable[[], bool], uses_left: Callable[[], float] = lambda: math.inf
    ) -> None:
        """Let a demand that finds no memory wait for copies in transit, and for `for_updates`; an
        offer for a state that is used later than `uses_left` waits for memory that the step's end
        gives back."""
        self.pool.uses_left = uses_left
        self.pool.await_progress = self._device.await_progress(for_updates)
        self._device.pool.await_progress = self._device.await_progress(for_updates)

    def shared_memory(self) -> SharedMemory:
        """Allocate memory for buffers that belong to several ranks, where the model computes."""
        planned = self.plan.shared
        assert planned is not None, "there are several ranks"
        pool = self._device.pool if self.plan.gpu else self.pool
        wanted = {"received": planned.received_nbytes, "summed": planned.summed_nbytes}
        leases = {
            what: pool.demand(nbytes, f"the workspace of collectives, {what}", StateClass.STAGING)
            for what, nbytes in wanted.items()
            if nbytes
        }
        self._staging += leases.values()
        workspace = Workspace(**{what: lease.tensor for what, lease in leases.items()})
        return SharedMemory(pool, planned.gather_nbytes, workspace, self._device.links.fences)

    def matrix_work(self) -> MatrixWork:
        """Allocate memory for the products of Muon, where the model computes and on the host."""
        planned, memory = self.plan, []
        pools = self._device.pool if planned.gpu else self.pool, self.pool
        for pool, nbytes in zip(pools, planned.products_nbytes, strict=True):
            if nbytes:
                self._staging.append(pool.demand(nbytes, "products of Muon", StateClass.STAGING))
            memory.append(self._staging[-1].tensor if nbytes else torch.empty(0, dtype=torch.uint8))
        dtype = torch.float32 if planned.products[0] == "fp32" else torch.bfloat16
        return MatrixWork(memory[0], memory[planned.gpu], dtype)

    def staging(self) -> list[torch.Tensor]:
        """Return the update's buffers (1D uint8, host memory)."""
        buffers = []
        for index in range(self.plan.staging_buffers):
            buffers.append(
                self._memory[Tier.HOST].lease(
                    self.plan.staging_nbytes, owner=f"update buffer {index}",
                    state_class=StateClass.STAGING,
                )
            )  # fmt: skip
        self._update_buffers = buffers
        return [lease.tensor for lease in buffers]

    def bytes_moved(self) -> dict[str, int]:
        """Return the bytes over each link since the start."""
        io = self.store.backend.moved_nbytes if self.store is not None else {}
        return {
            "nvme read": io.get(Operation.READ, 0),
            "nvme write": io.get(Operation.WRITE, 0),
            **self._device.moved_nbytes(),
            **(self.activations.bytes_moved() if self.activations is not None else {}),
        }

    def lanes(self) -> list[Lane]:
        """Return the lanes that the model's thread waits for: files, and links of the device."""
        files = [] if self.store is None else [self.store.backend.lane]
        return [*files, *self._device.lanes()]

    @property
    def ram_budget_nbytes(self) -> int:
        """The sum of the budgets of memory that is RAM."""
        in_ram = [Tier.HOST] if self.plan.gpu else [Tier.HOST, Tier.DEVICE]
        return sum(self.plan.budgets[tier] for tier in in_ram)

    # ---------------------------------------------------------------- asleep
    @property
    def away(self) -> list[Tier]:
        """The tiers that have no memory now."""
        return [each.tier.name for each in self._away if each.has_left]

    def save(self, *, host: bool) -> None:
        """Drop the copies in memory that is given back, the device's and, with `host`, the host's,
        and save the rest, before `leave`. Where both are RAM, the device tier's goes to swap files,
        or stays if there are none. Raises ConfigError if `host` needs files that the configuration
        has not, StateError for saved activations, else what `AwayTier.save` raises."""
        if host and self.store is None:
            if not self.plan.budgets[Tier.NVME]:
                raise ConfigError(
                    "host=True writes what host memory holds to swap files, and budget.nvme is 0: "
                    "set budget.nvme and nvme.paths, or release the device alone"
                )
            self._open_files()
        if self.activations is not None:
            self.activations.settle()
            if self.activations.parked_nbytes:
                raise StateError(
                    f"release_device() while {format_bytes(self.activations.parked_nbytes)} of "
                    "activations are saved for a backward: call it first, or drop the graph (the "
                    "loss, or the model's output)"
                )
        if host or not self.plan.gpu:
            self.pool.empty()
        accelerator.synchronize(self._device.links.device)
        self._device.pool.empty()
        device = self.pool if self.plan.gpu else self.store
        for tier, to in ((Tier.DEVICE, device), (Tier.HOST, self.store if host else None)):
            if to is not None and tier not in self.away:
                self._away.append(AwayTier(self._memory[tier], to, self._device.links))
                self._away[-1].save()

    def leave(self) -> None:
        """Give back the memory of all tiers that were saved."""
        for each in self._away:
            each.has_left = True
            each.tier.leave()
        self.guard.give_back()

    def come_back(self) -> None:
        """Take all memory again; then call `forget_saved` or, if it fails, `leave`."""
        for each in reversed(self._away):
            each.come_back()

    def forget_saved(self) -> None:
        """Forget what was saved of tiers that have their memory."""
        with self.lock:
            for each in [each for each in reversed(self._away) if not each.has_left]:
                each.forget()
                self._away.remove(each)

    def begin_emptying(self) -> None:
        """Prepare for parameters to leave the tiers: no update is made any more."""
        self.guard.close()  # which would set other limits than `hold_within`
        buffers, self._update_buffers = self._update_buffers, []
        with self.lock:
            for lease in buffers:
                lease.free()

    def hold_within(self, limit_nbytes: int) -> None:
        """While the tiers are emptied, give up copies in host memory down to `limit_nbytes` bytes,
        and the RAM of all that is free there."""
        self.pool.keep_within(max(0, limit_nbytes))
        self.guard.give_back()

    def close(self) -> None:
        """Close the files, which removes their bytes, and unpin memory."""
        self.guard.close()
        try:
            self._device.close()
        finally:
            self._close_memory()

    def _close_memory(self) -> None:
        with ExitStack() as last_first:
            for tier in self._memory.values():
                last_first.callback(tier.close)
            if self.store is not None:
                last_first.callback(self.store.close)
            last_first.callback(self._run.close)
            last_first.callback(self._end_limit)


def nvme_paths(nvme: NvmeConfig) -> list[str]:
    """Return the configured folders, or `machine.swap_folder()`. `{rank}` and `{local_rank}` in a
    path stand for this process's rank in the process group, and for that of `torchrun`."""
    if not nvme.paths:
        return [str(machine.swap_folder())]
    return [_of_rank(path, *_numbers()) for path in nvme.paths]


def _numbers() -> tuple[int, int]:
    """Return this process's rank, and its number among the processes of this machine."""
    world = torch.distributed
    joined = world.is_available() and world.is_initialized()
    rank = world.get_rank() if joined else int(os.environ.get("RANK", "0"))
    return rank, int(os.environ.get("LOCAL_RANK", rank if joined else 0))


def _of_rank(path: str, rank: int, local_rank: int) -> str:
    return path.replace("{rank}", str(rank)).replace("{local_rank}", str(local_rank))


def _free_nbytes(nvme: NvmeConfig, free: Mapping[str, int], here: int) -> int:
    """Return the free bytes of the folders' disks that are available to this rank, one of `here`:
    ranks with a folder on the same disk share what is free there."""
    rank, local_rank = _numbers()
    free_of_disk: dict[int, int] = {}
    for template, path in zip(nvme.paths or nvme_paths(nvme), nvme_paths(nvme), strict=True):
        disk = os.stat(path).st_dev
        sharing = sum(
            _disk_of(_of_rank(template, rank - local_rank + other, other)) in (disk, None)
            for other in range(here)
        )
        free_of_disk[disk] = free[path] // max(1, sharing)
    return sum(free_of_disk.values())


def _disk_of(path: str) -> int | None:
    """Return the device number of a folder's disk; None for a folder that does not exist (yet)."""
    try:
        return os.stat(path).st_dev
    except OSError:
        return None


def this_machine(
    nvme: NvmeConfig, device: torch.device, sharding: Sharding = ALONE, here: int | None = None
) -> Hardware:
    """Return the hardware that one rank's plan may use here: ranks on one machine share its RAM and
    disks equally. `here` is the number of ranks on this machine, by default `ranks_here()`.

    Raises PathError if a folder cannot be used.
    """
    reports: dict[Path, int] = {}
    free: dict[str, int] = {}  # by folder, as it is named
    for path in nvme_paths(nvme):
        report = check_directory(path, timeout_s=nvme.timeout_s)
        if report.path in reports:
            raise ConfigError(f"nvme.paths: {report.path} is named twice; remove one")
        reports[report.path] = free[path] = report.free_nbytes
    here = ranks_here() if here is None else here
    looking = TimeoutThread("looking at", ", ".join(free), _free_nbytes, nvme, free, here)
    free_nbytes = looking.result(nvme.timeout_s)
    computes = accelerator.is_accelerator(device)
    missing = triton_launch.missing(device) if computes else "the model computes on the CPU"
    return Hardware(
        accelerator.free_nbytes(device), machine.memory_limit_nbytes() // here,
        machine.available_memory_nbytes() // here, free_nbytes, missing, sharding,
        max(1, machine.cpu_count() // here),
        accelerator.of(device).held_nbytes(device) if computes else 0,
    )  # fmt: skip


def ranks_here() -> int:
    """Return how many ranks run on this machine, as `torchrun` says; else how many there are."""
    world = torch.distributed
    if not (world.is_available() and world.is_initialized()):
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", world.get_world_size()))


def compute_device(config: OffloadConfig) -> torch.device:
    """Return the device to compute on. Raises ConfigError if the configured one is missing."""
    kind = accelerator.default_type() if config.device == "auto" else config.device
    if kind == "cpu":
        return torch.device("cpu")
    chosen = accelerator.KINDS[kind]
    if not chosen.is_available():
        raise ConfigError(
            f"device: {kind}, but this PyTorch sees no {chosen.title} device; set device: cpu or "
            "auto (`offload doctor` says why)"
        )
    return chosen.current_device()
