"""The end of an engine: parameters leave the tiers and become ordinary tensors again.

    host    tensors of their own in RAM
    file    tensors in a private file without a name, in the first folder of `nvme.paths`. Pages are
            read as they are used; what is written stays in RAM (the mapping is private, as that of
            torch.load(mmap=True)). The file is gone with the last of its tensors

A parameter comes back in the format in which it was given, or in the one that it computed in where
that has more bits. Where that is wider than the weight in its tier, it has the value of the master.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import nn

from offload.memory.tier_manager import TieredHomes
from offload.process import machine
from offload.swap.io.swap_file import NO_SPACE, SwapFile
from offload.swap.io.timeout_thread import TimeoutThread
from offload.tiers.errors import BudgetError, ConfigError, NoSpaceError, StorageError
from offload.tiers.tier import PAGE_NBYTES
from offload.tiers.units import format_bytes, round_up
from offload.zero.groups.group import ParamGroup
from offload.zero.groups.store import WeightStore
from offload.zero.tensors.local_tensors import hold, is_dtensor, like, local_of
from offload.zero.tensors.paged import PagedTensor
from offload.zero.tensors.placeholders import exchanging

Keep = Literal["host", "file", "drop"]
_KINDS = "host", "file", "drop"
_GIVE_BACK_NBYTES = 16 << 20  # copied before the RAM of what is free in the tier is given back


def check_keep(keep: Keep | None) -> None:
    """Raise ConfigError for an unknown value."""
    if keep is not None and keep not in _KINDS:
        raise ConfigError(f"close(keep={keep!r}): expected one of {', '.join(_KINDS)}")


@dataclass(eq=False, slots=True)
class _Given:
    """One parameter of the model, and the values and gradient that it gets back."""

    param: nn.Parameter
    kind: type
    shape: tuple[int, ...]  # of this rank's part
    dtype: torch.dtype
    start: int  # in a file
    values: torch.Tensor | None = None
    gradient: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def as_copy(self) -> nn.Parameter:
        """Another parameter, of the same class, that has the values."""
        assert self.values is not None, "all were put"
        if is_dtensor(self.param):
            return nn.Parameter(like(self.param, self.values), self.param.requires_grad)
        made: nn.Parameter = self.kind(self.values, self.param.requires_grad)
        return made


class Place(Protocol):
    """The destination of the values."""

    def put(self, given: _Given, first: int, values: torch.Tensor) -> None:
        """Store `values` (1D) as those of a parameter from element `first` on."""
        ...

    def finish(self, given: list[_Given]) -> None:
        """Give each parameter its own values, once all were stored."""
        ...


class GivenBack:
    """The parameters of one model, on their way out of the tiers."""

    def __init__(
        self, model: nn.Module, store: WeightStore, homes: TieredHomes,
        dtypes: Mapping[int, torch.dtype],
    ) -> None:  # fmt: skip
        """`dtypes` holds the format in which each parameter was given, by its id."""
        self._model = model
        self._store = store
        self._homes = homes
        # Set by what trains: a parameter's master and gradient, and the end of a group's states.
        self.master_of: Callable[[nn.Parameter], torch.Tensor | None] = lambda _: None
        self.gradient_of: Callable[[nn.Parameter], torch.Tensor | None] = lambda _: None
        self.close_states: Callable[[ParamGroup], None] = close_weights
        self._given: dict[int, _Given] = {}
        self._place: Place | None = None  # once `take` has begun
        self._taken = 0  # groups whose values are there
        self.nbytes = 0  # of all of them
        for group in store.groups:
            for (param, kind), spec in zip(group.own_classes(), group.layout.params, strict=True):
                if id(param) not in store.whole:  # no row
                    self._add(param, kind, spec.shape, dtypes)
        for packed in store.packed:
            self._add(packed.param, packed.own_class, packed.spec.shape, dtypes)

    def _add(
        self, param: nn.Parameter, kind: type, shape: tuple[int, ...],
        dtypes: Mapping[int, torch.dtype],
    ) -> None:  # fmt: skip
        own = self._store.dtype
        dtype = torch.promote_types(dtypes.get(id(param), own), own)
        self._given[id(param)] = found = _Given(param, kind, tuple(shape), dtype, self.nbytes)
        self.nbytes += round_up(found.nbytes, 64)

    # ---------------------------------------------------------------- is there room?
    def __len__(self) -> int:
        return len(self._given)

    @property
    def promised_nbytes(self) -> int:
        """Bytes of RAM that the configuration has given to the tiers."""
        return self._homes.ram_budget_nbytes

    def check_room_for(self, params: Collection[nn.Parameter]) -> None:
        """BudgetError where RAM cannot have copies of `params`."""
        nbytes = sum(self._given[id(param)].nbytes for param in params)
        missing = nbytes - machine.available_memory_nbytes()
        if missing > 0:
            raise BudgetError(
                f"copy.deepcopy: {format_bytes(nbytes)} of parameters would come into RAM, and "
                f"{format_bytes(missing)} are missing; close other programs, or write them to "
                "files with engine.save_checkpoint(folder), from which offload.initialize(other, "
                "weights=folder) reads them"
            )

    def copied(self, params: Collection[nn.Parameter]) -> dict[int, nn.Parameter]:
        """Return ordinary parameters, by the ids of `params`, with the values that closing would
        give back; the tiers keep theirs. A collective where parameters are sharded."""
        wanted = {id(param): self._given[id(param)] for param in params}
        place = _Ram()
        with torch.inference_mode(False), torch.no_grad():
            for group in self._store.groups:
                self._take_group(group, place, wanted)
            place.finish([*wanted.values()])
            return {number: given.as_copy() for number, given in wanted.items()}

    def missing_in_ram(self) -> int:
        """Return the bytes that RAM lacks. The tiers free their RAM as the values are moved."""
        held = self._homes.pool.tier
        freed = held.touched_nbytes if held.gives_back else 0
        return max(0, self.nbytes - machine.available_memory_nbytes() - freed)

    @property
    def fits(self) -> bool:
        """Whether the values take no more RAM than was promised to the tiers, and than is free."""
        return self.nbytes <= self.promised_nbytes and not self.missing_in_ram()

    def place(self, keep: Keep, folder: str, timeout_s: float) -> Place:
        """Return the destination of the values, the same one again after a `take` that failed.
        Raises BudgetError if RAM has no room, and NoSpaceError or PathError if the folder has none;
        nothing is changed."""
        if isinstance(self._place, _File if keep == "file" else _Ram):
            return self._place
        if keep == "file":
            return _File(folder, self.nbytes, timeout_s)
        missing = self.missing_in_ram()
        if missing:
            raise BudgetError(
                f"close(keep='host'): {format_bytes(self.nbytes)} of parameters would come into "
                f"RAM, and {format_bytes(missing)} are missing; close other programs, or use "
                "close(keep='file'), which leaves them on disk, or close(keep='drop') after "
                "engine.save_checkpoint"
            )
        return _Ram()

    # ---------------------------------------------------------------- out of the tiers
    def take(self, place: Place) -> None:
        """Move every value to `place`, group by group; the tiers hold none of them afterwards.

        RAM holds no more than the tiers were given: states that remain in them give up their
        copies. After an error it can be called again, also with another place: what was moved is
        kept, and the rest follows.
        """
        with torch.inference_mode(False), torch.no_grad():
            self._move_on_to(place)
            self._take_gradients()
            self._homes.begin_emptying()
            copied = 0
            since = _GIVE_BACK_NBYTES  # the buffers of updates are free now
            for group in self._store.groups[self._taken :]:
                nbytes = self._take_group(group, place, self._given)
                self._taken += 1
                self.close_states(group)
                copied, since = copied + nbytes, since + nbytes
                if since >= _GIVE_BACK_NBYTES:
                    since = 0
                    self._homes.hold_within(self._homes.pool.tier.arena.nbytes - copied)
            place.finish(list(self._given.values()))

    def _move_on_to(self, place: Place) -> None:
        """Go on with another place, which takes over what the one before has."""
        before, given = self._place, [*self._given.values()]
        if isinstance(before, _File) and before is not place:
            before.finish(given)  # what follows is put into private pages of the mapping
        elif before is not place:
            for each in given:
                if each.values is not None:
                    place.put(each, 0, each.values.reshape(-1))
        self._place = place

    def _take_gradients(self) -> None:
        for given in self._given.values():
            with torch._C.DisableTorchFunctionSubclass():
                gradient = given.param.grad
            if isinstance(gradient, PagedTensor):
                found = self.gradient_of(given.param)
                if found is not None:
                    given.gradient = found.to(device="cpu", dtype=given.dtype)

    def _take_group(
        self, group: ParamGroup, place: Place, wanted: Mapping[int, _Given]
    ) -> int:  # fmt: skip
        store, copied = self._store, 0
        for index, (param, spec) in enumerate(zip(group.params, group.layout.params, strict=True)):
            given = wanted.get(store.whole.get(id(param), id(param)))
            if given is None:
                continue
            values: torch.Tensor | None = None
            if group.is_written(index):  # its master follows when the writer has ended
                values = param.detach()
            elif given.dtype is not group.dtype:
                values = self.master_of(param)
            if values is None:
                values = group.flat()[spec.offset : spec.stop]
            place.put(given, store.whole_of(param)[1], local_of(values).reshape(-1))
            copied += values.numel() * given.dtype.itemsize
        return copied

    # ---------------------------------------------------------------- into the model
    def install(self) -> None:
        """Give the model its parameters back; nothing of the tiers stays on its modules."""
        with (
            torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), exchanging(),
        ):  # fmt: skip
            for given in self._given.values():
                param = given.param
                assert given.values is not None, "all were put"
                kept = param.grad if given.gradient is None else given.gradient
                param.grad = None
                param.__class__ = given.kind
                hold(param, given.values)
                if kept is not None:
                    param.grad = kept.to(device="cpu", dtype=given.dtype)
            others = (p for p in self._model.parameters() if id(p) not in self._given)
            for tensor in (*self._model.buffers(), *others):
                if tensor.device.type != "cpu":
                    tensor.data = tensor.data.to("cpu")


def close_weights(group: ParamGroup) -> None:
    """Close a group whose values were copied; its state stays open if it has views."""
    group.close()
    if not group.state.has_views():
        group.state.close()


class _Ram:
    """RAM, with a tensor of its own for each parameter."""

    def put(self, given: _Given, first: int, values: torch.Tensor) -> None:
        if given.values is None:
            given.values = torch.empty(given.shape, dtype=given.dtype, device="cpu")
        given.values.view(-1)[first : first + values.numel()].copy_(values)

    def finish(self, given: list[_Given]) -> None:
        for each in given:
            if each.values is None:  # it has no elements
                each.values = torch.empty(each.shape, dtype=each.dtype, device="cpu")


class _File:
    """A private file, mapped when it is complete."""

    def __init__(self, folder: str, nbytes: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._nbytes = round_up(max(nbytes, 1), PAGE_NBYTES)
        self._file = SwapFile(folder, direct=False, timeout_s=timeout_s)
        try:
            self._file.reserve(self._nbytes)
        except NoSpaceError as error:
            self._file.close()
            raise NoSpaceError(
                f"close(keep='file'): {error}", path=error.path, nbytes=nbytes, errno=error.errno
            ) from error

    def put(self, given: _Given, first: int, values: torch.Tensor) -> None:
        stored = values.to(device="cpu", dtype=given.dtype).contiguous()
        pages = stored.view(torch.uint8).numpy().data
        start = given.start + first * given.dtype.itemsize
        file = self._file
        call = TimeoutThread("writing", file.path, _write, file.fd, pages, start)
        try:
            call.result(self._timeout_s)
        except OSError as error:
            kind = NoSpaceError if error.errno in NO_SPACE else StorageError
            raise kind(
                f"close(keep='file'): writing {file.path} failed: {error.strerror}",
                path=file.path, offset_bytes=start, nbytes=len(pages), errno=error.errno,
            ) from error  # fmt: skip

    def finish(self, given: list[_Given]) -> None:
        mapped = mmap.mmap(
            self._file.fd, self._nbytes, flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )  # fmt: skip
        self._file.close()  # the mapping keeps the bytes
        for each in given:
            count = torch.Size(each.shape).numel()
            each.values = torch.empty(each.shape, dtype=each.dtype, device="cpu")
            if count:
                each.values = torch.frombuffer(
                    mapped, dtype=each.dtype, count=count, offset=each.start
                ).view(each.shape)


def _write(fd: int, pages: memoryview, offset_bytes: int) -> None:
    done = 0
    while done < len(pages):
        done += os.pwrite(fd, pages[done:], offset_bytes + done)
