"""Reading and writing whole parameters from outside of the model.

At most one group's weights are in memory at a time beside those that the caller asks for together.
"""

import logging
import weakref
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from offload.swap.threads.shield import defer_signals, ending_with, interrupted_in_waits
from offload.tiers.errors import BudgetError, StateError, TierFullError, UnsupportedError
from offload.zero.experts.packed import PackedParam
from offload.zero.experts.packed_values import PackedValues
from offload.zero.groups.group import ParamGroup
from offload.zero.groups.store import WeightStore
from offload.zero.groups.write_tracker import digest
from offload.zero.tensors.local_tensors import forget_values, like

_log = logging.getLogger("offload")


@dataclass(slots=True, eq=False)
class _Given:
    name: str  # of the parameter
    copied: weakref.ref[torch.Tensor]
    counter: torch.Tensor  # counts versions with the copy; without values
    counted: int

    @property
    def is_written(self) -> bool:
        return self.counter._version != self.counted


class StateDictCopies:
    """Copies that `model.state_dict()` returned, where torch returns the parameters themselves. For
    the thread of the model.

    In torch, writing to an entry writes to the parameter; here it would be lost. So each copy is
    watched by its version counter, without keeping its values, and a written one is refused at the
    next use of the parameters, unless `load_state_dict` sets them first.
    """

    def __init__(self) -> None:
        self._given: list[_Given] = []

    def note(self, name: str, copied: torch.Tensor) -> None:
        if copied.is_inference():  # its versions are not counted
            return
        counter = copied.detach()
        forget_values(counter)
        self._given.append(_Given(name, weakref.ref(copied), counter, copied._version))

    def check(self) -> None:
        """Raise StateError, once, if a copy was written to."""
        written = [given for given in self._given if given.is_written]
        self._given = [
            given for given in self._given if given not in written and given.copied() is not None
        ]
        if written:
            more = f" ({len(written) - 1} more like it)" if len(written) > 1 else ""
            raise StateError(
                f"{written[0].name}: what model.state_dict() gave was written to{more}: it is a "
                "copy (in torch it would be the parameter itself). Write with "
                "model.load_state_dict() or inside engine.gathered(...), or .clone() what is not "
                "meant for the model"
            )

    def forget(self, names: Container[str]) -> None:
        """Forget the copies of these parameters, which a load is setting anyway."""
        self._given = [given for given in self._given if given.name not in names]


class WeightValues:
    """Access to the weights of a store (see `released.Values`)."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._given = StateDictCopies()
        self._told_of_rounding = False
        self._packed = PackedValues(store, self.full, self.gathered, self._mark_written)

    @contextmanager
    def reading(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """Provide full parameters for reading alone."""
        plain, packed = self._apart(params)
        with self._packed.shown(packed, keep=False), self._entered(self._groups_of(plain)):
            yield

    @contextmanager
    def gathered(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """Provide full parameters for reading and writing. A parameter that was written keeps
        exactly what was written: its master becomes that value."""
        plain, packed = self._apart(params)
        groups = self._groups_of(plain)
        with self._packed.shown(packed, keep=True), self._entered(groups):
            before = [_digests(group) for group in groups]
            with ending_with(lambda: self._accept_changes(groups, before)):
                yield

    def _apart(
        self, params: Sequence[nn.Parameter]
    ) -> tuple[list[nn.Parameter], list[PackedParam]]:
        """Return the parameters of groups, and the packed ones."""
        pairs = [(param, self._store.packed_of(param)) for param in params]
        packed = [each for _, each in pairs if each is not None]
        return [param for param, each in pairs if each is None], list(dict.fromkeys(packed))

    def _groups_of(self, params: Sequence[nn.Parameter]) -> list[ParamGroup]:
        return list(dict.fromkeys(self._find(param)[0] for param in params))

    @contextmanager
    def _entered(self, groups: Sequence[ParamGroup]) -> Iterator[None]:
        user = object()
        with ending_with(lambda: _leave(groups, user)):
            self._enter(groups, user)
            yield

    @interrupted_in_waits
    def _enter(self, groups: Sequence[ParamGroup], user: object) -> None:
        """Enter groups. Raises BudgetError if they do not fit together."""
        for group in groups:
            group.pending_update.begin_missed()
        for count, group in enumerate(groups):
            try:
                group.enter(user)
                self._store.handles.note(group)
                group.state.settle()  # what goes home must not be half of what the caller writes
            except TierFullError as error:
                raise BudgetError(
                    f"gathered: {len(groups)} groups at once do not fit, {count} do ({error}); "
                    "gather fewer at a time, or raise the budget"
                ) from error

    @defer_signals
    def _accept_changes(self, groups: Sequence[ParamGroup], known: Sequence[list[int]]) -> None:
        """Take over any rank's writes on all ranks, from each element's owner."""
        if self._store.unusable is not None:
            return  # there is nothing to write to any more
        changed: list[int] = []
        for group, before in zip(groups, known, strict=True):
            if group.is_gathered:
                group.writes.copy_assigned(group.flat)
            group.writes.note_versions()
            pairs = zip(_digests(group), before, strict=True)
            changed += [int(now != digest) for now, digest in pairs]
        rows = self._store.ranks.exchange(changed, "which parameters were written")
        start = 0
        for group in groups:
            stop = start + len(group.params)
            # of experts that are spread over ranks, those at this place in between have others
            same = rows[self._store.ranks.rank % group.ep_size :: group.ep_size, start:stop]
            indices = np.flatnonzero(same.any(axis=0)).tolist()
            if indices:
                self.accept(group, indices)
                group.copies.overwritten()
            start = stop

    def accept(self, group: ParamGroup, indices: Sequence[int]) -> None:
        """Send written parameters of a gathered group home, and update what is made from them.
        Quantized weights are rounded to what is stored.

        Raises UnsupportedError for quantized weights on several ranks, which each have all of them.
        """
        specs = (group.layout.params[index] for index in indices)
        stored = [f"{s.name}, stored in {s.stored.name}," for s in specs if s.stored is not None]
        if stored and self._store.ranks.sharding.world_size > 1:
            raise UnsupportedError(
                f"{stored[0]} was written on one of several ranks, each of which has all of it; "
                "add it to storage.skip, or write on one rank"
            )
        group.state.mark_dirty()
        if stored and not self._told_of_rounding:
            self._told_of_rounding = True  # a merge writes every block's
            _log.warning(
                "%s was written: the new values are rounded, and so are those of others like it "
                "that are written from here on", stored[0],
            )  # fmt: skip
        for index in indices:
            self._follow(group, index)
        group.writes.note_writes(indices)

    def _mark_written(self, param: nn.Parameter) -> None:
        """Treat a parameter of a group as written, with the values that it has."""
        group, index = self._find(param)
        if group.has_masters:
            with self._entered([group]):
                self.accept(group, [index])

    def _follow(self, group: ParamGroup, index: int) -> None:
        """Do nothing after a write: nothing is made from weights alone."""

    def give_out(self, param: nn.Parameter) -> torch.Tensor:
        """Return a copy as `full`, for a state dict: see `StateDictCopies`."""
        copied = self.full(param)
        spec = self._store.spec_of(param)
        assert spec is not None, "managed, for it has values"
        self._given.note(spec.name, copied)
        return copied

    def adopt_changes(self, *, loading: Container[str] = ()) -> None:
        """Take in writes between passes to parameters that are always gathered. Raises StateError
        if a copy in a state dict was written to, unless it is of a parameter in `loading` (names),
        which is set anyway."""
        for group in self._store.groups:
            self._adopt(group)
        self._packed.adopt()
        self._given.forget(loading)
        self._given.check()

    def _adopt(self, group: ParamGroup) -> None:
        if group.is_gathered and not group.is_entered:
            changed = group.changed()
            if changed:
                self.accept(group, changed)

    def adopt_written(self, group: ParamGroup, indices: Sequence[int]) -> None:
        """Keep what a forward wrote to parameters of its group: as `accept`, in the middle of a
        graph.

        What that forward has saved is not outdated by it.
        """
        names = ", ".join(group.layout.params[index].name for index in indices)
        self._store.ranks.refuse_forward_write(names)
        writes = group.writes
        version, written = writes.version, dict(writes.written_at)
        self.accept(group, indices)
        writes.version, writes.written_at = version, written

    @interrupted_in_waits
    def full(self, param: nn.Parameter) -> torch.Tensor:
        """Return a copy of a parameter in its own precision."""
        packed = self._store.packed_of(param)
        if packed is not None:
            return self._packed.whole(packed)
        group, index = self._find(param)
        spec = group.layout.params[index]
        return like(param, spec.of(group.flat()).clone())

    # ---------------------------------------------------------------- what only training has
    def master(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return a copy of a parameter's master; None if it has none."""
        return None

    def close_states(self, group: ParamGroup) -> None:
        """Close the states of a group whose values were copied; those with views stay open."""
        group.unmap()
        if not group.state.has_views():
            group.state.close()

    def _find(self, param: nn.Parameter) -> tuple[ParamGroup, int]:
        self._store.check_usable()
        place = self._store.group_of(param)
        if place is None:
            raise StateError(
                f"a parameter of shape {tuple(param.shape)} is not managed by this engine"
            )
        self._adopt(place[0])
        return place


@defer_signals
def _leave(groups: Sequence[ParamGroup], user: object) -> None:
    for group in groups:
        group.leave(user)


def _digests(group: ParamGroup) -> list[int]:
    return [digest(param) for param in group.params]
