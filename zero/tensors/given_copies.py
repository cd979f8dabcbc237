"""Copies that `model.state_dict()` returned, where torch returns the parameters themselves.

In torch, writing to an entry writes to the parameter. So each copy is watched by its version
counter, without keeping its values. At the next use of the parameters a written copy is copied to
its parameter, or refused if the parameter has changed since.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from offload.tiers.errors import StateError
from offload.zero.tensors.local_tensors import forget_values


class Versioned(Protocol):
    """The home of a parameter's values."""

    @property
    def version(self) -> int:
        """A number that changes with the values."""
        ...


@dataclass(slots=True, eq=False)
class _Given:
    param: nn.Parameter
    group: Versioned
    name: str
    version: int  # of the group, when it was copied
    copied: weakref.ref[torch.Tensor]
    counter: torch.Tensor  # counts versions with the copy; without values
    counted: int

    @property
    def is_written(self) -> bool:
        return self.counter._version != self.counted

    @property
    def is_stale(self) -> bool:
        """Whether the parameter has changed since it was copied."""
        return self.version != self.group.version


class GivenCopies:
    """The copies of one model. For the thread of the model."""

    def __init__(self) -> None:
        self._given: list[_Given] = []

    def note(self, param: nn.Parameter, group: Versioned, name: str, copied: torch.Tensor) -> None:
        if copied.is_inference():  # its versions are not counted
            return
        counter = copied.detach()
        forget_values(counter)
        given = _Given(
            param, group, name, group.version, weakref.ref(copied), counter, copied._version
        )
        self._given.append(given)

    def written(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield parameters whose copies were written to, with those copies. The caller must exhaust
        the iterator.

        Raises StateError for copies of parameters that have changed since."""
        if not self._given:
            return
        self._given = [g for g in self._given if g.is_written or g.copied() is not None]
        written = [given for given in self._given if given.is_written]
        params = {id(given.param) for given in written}
        wrong = [given for given in written if given.copied() is None or given.is_stale]
        if not wrong and len(params) < len(written):
            wrong = written  # two copies of one parameter were written: which one counts is unknown
        if wrong:
            self._given = [given for given in self._given if given not in wrong]
            self._refuse(wrong)
        fresh = [given for given in self._given if not given.is_stale]
        for given in written:
            copied = given.copied()
            assert copied is not None, "just looked at"
            given.counted = given.counter._version
            yield given.param, copied
        for given in fresh:  # the write gave the parameter a new version
            if given in written or id(given.param) not in params:
                given.version = given.group.version

    def forget_stale(self) -> None:
        """Forget copies of parameters that have changed since: a load is setting all of them
        anyway."""
        self._given = [given for given in self._given if not given.is_stale]

    def _refuse(self, wrong: Sequence[_Given]) -> None:
        gone = wrong[0].copied() is None
        why = "is gone since" if gone else "is not what the parameter was when that was done"
        more = f" ({len(wrong) - 1} more like it)" if len(wrong) > 1 else ""
        raise StateError(
            f"{wrong[0].name}: what model.state_dict() gave was written to, and {why}{more}: it is "
            "a copy (in torch it would be the parameter itself). Write with "
            "model.load_state_dict() or inside engine.gathered(...), or .clone() what is not meant "
            "for the model"
        )
