"""Copies that `model.state_dict()` returned, where torch returns the parameters themselves.

In torch, writing to an entry writes to the parameter; here it would be lost. So each copy is
watched by its version counter, without keeping its values, and a written one is refused at the next
use of the parameters, unless `load_state_dict` sets them first.
"""

from __future__ import annotations

import weakref
from collections.abc import Container
from dataclasses import dataclass

import torch

from offload.tiers.errors import StateError
from offload.zero.tensors.local_tensors import forget_values


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
    """The copies of one model. For the thread of the model."""

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
