"""The codes that undo a speculative update of optimizer records in host memory.

An old version of a record takes 12 bytes per parameter, and a host has no room for it. A code takes
1.4, and the gradient, which is kept until the step in any case (`kernels.cpu.undo`):

    update   chunk 0, 1, ...      each with its code, until the step decides
    accept                        the codes are dropped; chunks that come later need none
    undo     the chunks made      by another update, with the same gradient and numbers

A chunk whose code would overflow stays as it is, and so do those behind it, which are likely to be
alike: an accepted step updates them as if nothing had been speculative.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from offload.kernels.cpu.undo import undo_step, undoable_step
from offload.kernels.cpu.undo_code import code_numel
from offload.kernels.floats import Array, Runner
from offload.swap.states.slot_pool import SlotPool
from offload.tiers.ledger import StateClass
from offload.tiers.memory_tier import Lease

# positional and other arguments of one step of a part of a chunk, which both kernels have
StepCall = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(eq=False, repr=False)
class Codes:
    """The codes of one update. `step` and `undo` are for the update thread."""

    pool: SlotPool
    _leases: dict[int, Lease] = field(default_factory=dict)  # by chunk
    made: list[int] = field(default_factory=list)  # chunks that were stepped, and have their code
    left: list[int] = field(default_factory=list)  # chunks that stay as they are
    _accepted: threading.Event = field(default_factory=threading.Event)
    _writing: bool = False  # the update thread writes a code
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def lease(cls, pool: SlotPool, nbytes: Mapping[int, int], owner: str) -> Codes | None:
        """Return room for chunks' codes, of so many bytes each; None if there is too little."""
        codes = cls(pool)
        with ExitStack() as leased:
            leased.callback(codes.free)
            for chunk, size in nbytes.items():
                lease = pool.offer(
                    size, f"{owner}, what undoes chunk {chunk}", StateClass.STAGING,
                    next_use=pool.uses_left(),
                )  # fmt: skip
                if lease is None:
                    return None
                codes._leases[chunk] = lease
            leased.pop_all()
        return codes

    def step(self, chunk: int, calls: Sequence[StepCall], run: Runner) -> bool:
        """Step a chunk with its code, or leave it as it is where there is no room for that. Returns
        False if it is to be stepped without a code."""
        with self._lock:
            if self._accepted.is_set() or chunk not in self._leases:
                return False
            if self.left:
                self.left.append(chunk)
                return True
            self._writing = True
        made = False
        try:
            made = self._step(chunk, calls, run)
        finally:
            accepted = self._written(chunk, made=made)
        return made or not accepted

    def _written(self, chunk: int, *, made: bool) -> bool:
        """Note that a code is written. Returns whether the step has decided meanwhile."""
        with self._lock:
            self._writing = False
            accepted = self._accepted.is_set()
            if not accepted:
                (self.made if made else self.left).append(chunk)
        if accepted:
            self.free()
        return accepted

    def _step(self, chunk: int, calls: Sequence[StepCall], run: Runner) -> bool:
        for index, ((given, named), code) in enumerate(self._with_codes(chunk, calls)):
            if not undoable_step(*given, **named, code=code, run=run):
                self.undo(chunk, calls[:index], run)
                return False
        return True

    def undo(self, chunk: int, calls: Sequence[StepCall], run: Runner) -> None:
        """Undo the step of a chunk, which was made with the same `calls`."""
        for (given, named), code in self._with_codes(chunk, calls):
            undo_step(*given, **named, code=code, run=run)

    def _with_codes(
        self, chunk: int, calls: Sequence[StepCall]
    ) -> Iterator[tuple[StepCall, Array]]:
        room, start = self._leases[chunk].tensor.numpy().view(np.int32), 0
        for call in calls:
            (_, weight, *_), _ = call
            stop = start + code_numel(len(weight))
            yield call, room[start:stop]
            start = stop

    def accept(self) -> Sequence[int]:
        """Let what was made count, and drop the codes. Returns the chunks that were left as they
        were; none is from here on."""
        with self._lock:
            self._accepted.set()
            writing = self._writing
        if not writing:
            self.free()
        return self.left

    def free(self) -> None:
        """Give the memory back. Idempotent."""
        with self.pool.lock:
            leases, self._leases = self._leases, {}
            for lease in leases.values():
                lease.free()
