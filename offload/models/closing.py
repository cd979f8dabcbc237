"""The end of an engine: parameters leave the tiers and become ordinary tensors in RAM again.

A parameter comes back in the format in which it was given, or in the one that it computed in where
that has more bits. Where that is wider than the weight in its tier, it has the value of the master.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from offload.memory.tier_manager import TierManager
from offload.process import machine
from offload.tiers.units import format_bytes
from offload.zero.groups.group import ParamGroup
from offload.zero.groups.store import WeightStore
from offload.zero.groups.weight_values import WeightValues
from offload.zero.tensors.local_tensors import hold, local_of
from offload.zero.tensors.paged import PagedTensor
from offload.zero.tensors.placeholders import exchanging

Keep = Literal["host", "drop"]
_GIVE_BACK_NBYTES = 16 << 20  # copied before the RAM of what is free in the tier is given back


@dataclass(eq=False, slots=True)
class _Given:
    """One parameter of the model, and the values that it gets back."""

    param: nn.Parameter
    kind: type
    shape: tuple[int, ...]  # of this rank's part
    dtype: torch.dtype
    values: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def storage(self) -> torch.Tensor:
        """Return the tensor of the values, made when it is first asked for."""
        if self.values is None:
            self.values = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        return self.values


class GivenBack:
    """The parameters of one model, on their way out of the tiers."""

    def __init__(
        self, model: nn.Module, store: WeightStore, values: WeightValues, tier_manager: TierManager,
        dtypes: Mapping[int, torch.dtype],
    ) -> None:  # fmt: skip
        """`dtypes` holds the format in which each parameter was given, by its id."""
        self._model = model
        self._store = store
        self._values = values
        self._tier_manager = tier_manager
        params = [
            (param, kind, spec.shape) for group in store.groups
            for (param, kind), spec in zip(group.own_classes(), group.layout.params, strict=True)
            if id(param) not in store.whole  # no row
        ]  # fmt: skip
        params += [(each.param, each.own_class, each.spec.shape) for each in store.packed]
        self._given: dict[int, _Given] = {}
        for param, kind, shape in params:
            dtype = torch.promote_types(dtypes.get(id(param), store.dtype), store.dtype)
            self._given[id(param)] = _Given(param, kind, tuple(shape), dtype)
        self.nbytes = sum(each.nbytes for each in self._given.values())

    # ---------------------------------------------------------------- is there room?
    def refusal(self, *, within_budget: bool) -> str | None:
        """Return the reason why the values cannot come into RAM, which the tiers free as they are
        moved; None if there is none. `within_budget`: they are to take no more than the
        configuration has given to the tiers."""
        held = self._tier_manager.pool.tier
        freed = held.touched_nbytes if held.gives_back else 0
        missing = self.nbytes - machine.available_memory_nbytes() - freed
        if missing > 0:
            return (
                f"close(keep='host'): {format_bytes(self.nbytes)} of parameters would come into "
                f"RAM, and {format_bytes(missing)} are missing; close other programs, or save "
                "them with engine.save_checkpoint and use close(keep='drop')"
            )
        budget = self._tier_manager.ram_budget_nbytes
        if within_budget and self.nbytes > budget:
            return (
                f"{format_bytes(self.nbytes)} of parameters are more than budget.host "
                f"({format_bytes(budget)}); close(keep='host') brings them into RAM all the same"
            )
        return None

    # ---------------------------------------------------------------- out of the tiers
    def take(self) -> None:
        """Copy every value to RAM, group by group; the tiers hold none of them afterwards.

        RAM holds no more than the tiers were given: states that remain in them give up their
        copies.
        """
        with torch.inference_mode(False), torch.no_grad():
            self._tier_manager.begin_emptying()
            arena_nbytes, copied = self._tier_manager.pool.tier.arena.nbytes, 0
            since = _GIVE_BACK_NBYTES  # the buffers of updates are free now
            for group in self._store.groups:
                nbytes = self._take_group(group)
                self._values.close_states(group)
                copied, since = copied + nbytes, since + nbytes
                if since >= _GIVE_BACK_NBYTES:
                    since = 0
                    self._tier_manager.hold_within(arena_nbytes - copied)

    def _take_group(self, group: ParamGroup) -> int:
        store, copied = self._store, 0
        for param, spec in zip(group.params, group.layout.params, strict=True):
            given = self._given[store.whole.get(id(param), id(param))]
            values: torch.Tensor | None = None
            if given.dtype is not group.dtype:
                values = self._values.master(param)
            if values is None:
                values = group.flat()[spec.offset : spec.stop]
            flat, first = local_of(values).reshape(-1), store.whole_of(param)[1]
            given.storage().view(-1)[first : first + flat.numel()].copy_(flat)
            copied += values.numel() * given.dtype.itemsize
        return copied

    # ---------------------------------------------------------------- into the model
    def install(self) -> None:
        """Give the model its parameters back; nothing of the tiers stays on its modules."""
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), exchanging():
            for given in self._given.values():
                param = given.param
                own, param.grad = param.grad, None
                param.__class__ = given.kind
                hold(param, given.storage())
                if own is not None and not isinstance(own, PagedTensor):  # the program's
                    param.grad = own.to(device="cpu", dtype=given.dtype)
            others = (p for p in self._model.parameters() if id(p) not in self._given)
            for tensor in (*self._model.buffers(), *others):
                if tensor.device.type != "cpu":
                    tensor.data = tensor.data.to("cpu")
