"""A save that goes on while the model trains.

    save_checkpoint(wait=False)   the numbers and buffers are copied, the versions on nvme kept, and
    │                             parameters written that are in memory, where they might be
    │                             overwritten in place
    ├─ training ──────────────▶
    └─ a thread ──────────────▶   groups in order of use, one that an update waits for first; then
                                  the manifest; then the folder gets its name

Each rank has such a thread. They exchange in a process group of their own, and take the groups in
one order. `swap/threads/save_gate.py` says what may be overwritten meanwhile. Nothing is copied in
memory beside the buffers of any save: what has no room for a second version waits for its turn.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from offload.checkpoint.engine.model import SavedGroup, saved_states
from offload.checkpoint.engine.saving import Saver
from offload.checkpoint.engine.shards import Snapshots, on_all, whole_state
from offload.checkpoint.format.disk import device_of, free_nbytes, storage_errors
from offload.swap.io.block_store import GROWTH_NBYTES
from offload.swap.states.state import Snapshot, State
from offload.swap.threads.save_gate import SaveGate
from offload.swap.threads.shield import defer_signals, interrupted_in_waits
from offload.swap.threads.worker import in_thread
from offload.tiers.errors import OffloadError
from offload.tiers.tier import PAGE_NBYTES
from offload.tiers.units import format_bytes, round_up
from offload.zero.ranks.ranks import Ranks

if TYPE_CHECKING:
    from offload.models.trained import Trained

_log = logging.getLogger("offload")
_under_way: WeakSet[BackgroundSave] = WeakSet()


def _complete_all() -> None:
    """Complete all saves before a program ends."""
    for save in list(_under_way):
        try:
            save.wait()
        except OffloadError as error:
            _log.error("%s was not saved: %s", save.path, error)


# concurrent.futures takes no more work from such a call of its own on, which was registered before
threading._register_atexit(_complete_all)  # type: ignore[attr-defined]


class _Cancelled(OffloadError):
    """The save was given up."""


class BackgroundSave:
    """A save, from when its state is fixed. A program does not end before it is complete."""

    def __init__(
        self, engine: Trained, path: Path, state: Mapping[str, Any] | None, saves: BackgroundSaves,
        done: Callable[[], None], *, frozen: bool,
    ) -> None:  # fmt: skip
        """Raises the error of a state or folder that cannot be saved. From then on it is the save
        that `saves` waits for; `done()` is called on the thread, once it is complete."""
        self.path = path
        self._done = done
        self.given_up: Exception | None = None  # why it is to end soon, and leave nothing
        self._pid = os.getpid()
        self._began_s = time.perf_counter()
        self._ranks = saves.ranks
        with ExitStack() as unless_begun:
            held = unless_begun.enter_context(ExitStack())
            saver, gate = self._begin(engine, path, state, held, frozen)
            with defer_signals:
                try:
                    self._end = in_thread("offload-checkpoint", self._run, saver, gate, held)
                except RuntimeError as error:  # no thread; the other ranks learn of it
                    self.given_up = error
                    self._run(saver, gate, held)
                saves.under_way = self
                _under_way.add(self)
                unless_begun.pop_all()

    # ---------------------------------------------------------------- on the model's thread
    def _begin(
        self, engine: Trained, path: Path, state: Mapping[str, Any] | None, held: ExitStack,
        frozen: bool,
    ) -> tuple[Saver, SaveGate]:  # fmt: skip
        saver = Saver(engine, path, state, self._ranks, partial(_snapshots, held), frozen=frozen)
        with on_all(self._ranks, saver.failed):
            saver.begin(held)
            at_once = [int(_is_changed_in_place(saver, saved)) for saved in saver.saved]
            # on any rank: each has budgets of its own
            rows = engine.store.ranks.exchange(at_once, "which parameters are written at once")
            for number in np.flatnonzero(rows.any(axis=0)).tolist():
                saver.write_parameters(number)
            with defer_signals:
                gate, lent = held.enter_context(engine.steps.policy.beside_save())
            gate.close(_held(engine, saver), min(lent, _room_on_disk(engine, saver)))
        saver.on_bytes = self._check
        return saver, gate

    @property
    def has_ended(self) -> bool:
        """Whether `wait` would not block."""
        return not self._is_mine or self._end.done()

    @interrupted_in_waits
    def wait(self) -> None:
        """Block until it has ended; raises its error."""
        if self._is_mine:
            self._end.wait()

    @property
    def _is_mine(self) -> bool:
        """Whether this process made the save; a forked child has no such thread."""
        return self._pid == os.getpid()

    # ---------------------------------------------------------------- on its thread
    def _run(self, saver: Saver, gate: SaveGate, held: ExitStack) -> None:
        try:
            with on_all(self._ranks, saver.failed), held:
                self._write(saver, gate)
                saver.commit()
            self._done()
            _log.info(
                "%s: %s saved beside training in %.3g s", self.path,
                format_bytes(saver.nbytes()), time.perf_counter() - self._began_s,
            )  # fmt: skip
        except _Cancelled:
            _log.warning("%s was not saved: it was given up", self.path)

    def _write(self, saver: Saver, gate: SaveGate) -> None:
        numbers = {g.index: n for n, saved in enumerate(saver.saved) for g in saved.groups}
        left = dict.fromkeys(range(len(saver.saved)))
        reader, check = saver.reader, partial(self._check, 0)
        while left:
            reader.attempt(check, by_all=True)
            wanted = gate.next_wanted()
            agreed = reader.meet(-1 if wanted is None else numbers[wanted])
            number = next(iter(left)) if agreed < 0 else agreed
            saver.write_group(number)
            del left[number]
            for group in saver.saved[number].groups:
                gate.passed(group.index)
        reader.attempt(check, by_all=True)

    def _check(self, nbytes: int) -> None:
        if self.given_up is not None:
            raise self.given_up


class BackgroundSaves:
    """The background saves of one engine: at most one is under way."""

    def __init__(self) -> None:
        self.under_way: BackgroundSave | None = None
        self.ranks: Ranks | None = None  # with a process group that no other thread uses
        self._said = False

    def begin(
        self, engine: Trained, path: Path, state: Mapping[str, Any] | None,
        done: Callable[[], None], *, frozen: bool,
    ) -> bool:  # fmt: skip
        """Like `save_engine`, but return once the state is fixed, and write it while the engine
        trains; `done()` is called on another thread when it is complete. Returns False, after
        logging the reason once, if that is impossible: nothing was begun then. All ranks call it
        together."""
        states = saved_states(engine, frozen=frozen)
        names = [state.name for state in states if not state.can_snapshot]
        if engine.store.ranks.exchange([len(names)], "whether a save can go on beside steps").any():
            if not self._said:
                self._said = True
                what = names[0] if names else "a state of another rank"
                _log.warning("save_checkpoint(wait=False) waits: %s is quantized", what)
            return False
        if engine.ranks is not None and self.ranks is None:
            self.ranks = engine.ranks.beside_training()
        BackgroundSave(engine, path, state, self, done, frozen=frozen)
        return True

    def wait(self) -> None:
        """Block until it has ended; raises its error, once."""
        if self.under_way is not None:
            try:
                self.under_way.wait()
            finally:
                if self.under_way.has_ended:  # a Ctrl-C ends the wait alone
                    _under_way.discard(self.under_way)
                    self.under_way = None

    def give_up(self) -> None:
        """End the save, and leave nothing."""
        if self.under_way is not None:
            self.under_way.given_up = _Cancelled(f"{self.under_way.path} was given up")
            self.wait()


def _snapshots(held: ExitStack, states: Sequence[State]) -> Snapshots:
    """The snapshots of states, valid until `held` is closed."""
    snapshots: dict[State, Snapshot] = {}

    @held.callback
    def let_go_all() -> None:
        for state, snapshot in snapshots.items():
            for piece in range(state.pieces):
                snapshot.let_go(piece)

    for state in states:
        with defer_signals:
            snapshots[state] = state.snapshot()
    return snapshots


def _is_changed_in_place(saver: Saver, saved: SavedGroup) -> bool:
    """Whether users may write to the parameters of a group that its snapshots show."""
    shown = map(saver.snapshots.get, map(whole_state, saved.groups))
    return any(snapshot is not None and not snapshot.is_versioned for snapshot in shown)


def _held(engine: Trained, saver: Saver) -> dict[int, int | None]:
    """The bytes left of each group, by index, for the gate; None if they have no versions."""
    written = {group.index for n in saver.has_parameters for group in saver.saved[n].groups}
    snapshots = saver.snapshots
    held: dict[int, int | None] = {}
    for each in engine.optimizer_states:
        weights = () if each.group.index in written else (whole_state(each.group),)
        left = [state for state in (*weights, *each.records) if state in snapshots]
        if left:
            versioned = all(snapshots[state].is_versioned for state in left)
            stored = sum(round_up(s.nbytes, PAGE_NBYTES) + PAGE_NBYTES * s.pieces for s in left)
            held[each.group.index] = stored if versioned else None
    return held


def _room_on_disk(engine: Trained, saver: Saver) -> int:
    """The bytes that swap files may grow by, so that the checkpoint has room beside them. Ranks,
    which may share a disk, take equal parts."""
    rooms = []
    for path in map(Path, engine.swap_folders):
        with storage_errors("looking at", path):
            beside = not saver.reader.writes or device_of(path) == device_of(saver.folder.path)
            rooms.append(free_nbytes(path) - saver.nbytes() * beside - GROWTH_NBYTES)
    return max(0, min(rooms, default=0)) // (engine.ranks.world_size if engine.ranks else 1)
