"""A save that goes on while the model trains.

    save_checkpoint(wait=False)   the numbers and buffers are copied, the versions on nvme kept, and
    │                             parameters written that are used in place in host memory, where
    │                             they might be overwritten
    ├─ training ──────────────▶
    └─ a thread ──────────────▶   groups in order of use, one that an update waits for first; then
                                  the manifest; then the folder gets its name

`swap/threads/save_gate.py` says what may be overwritten meanwhile. Beside the buffers of any save
nothing is copied in memory: what has no room for a second version waits for its turn.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from offload.checkpoint.engine.model import saved_states
from offload.checkpoint.engine.run_state import RunState
from offload.checkpoint.engine.saving import Saver, check_savable
from offload.checkpoint.format.disk import device_of, free_nbytes, storage_errors
from offload.checkpoint.format.folder import PendingFolder
from offload.swap.io.block_store import GROWTH_NBYTES
from offload.swap.states.state import Snapshot, State
from offload.swap.threads.save_gate import SaveGate
from offload.swap.threads.shield import defer_signals, interrupted_in_waits
from offload.swap.threads.worker import in_thread
from offload.tiers.errors import OffloadError
from offload.tiers.tier import PAGE_NBYTES
from offload.tiers.units import format_bytes, round_up

if TYPE_CHECKING:
    from offload.models.trained import Trained

_log = logging.getLogger("offload")
Snapshots = Mapping[State, Snapshot]
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


def _why_not(engine: Trained, frozen: bool) -> str:
    """The reason why a save of this engine cannot go on while it trains; empty if it can."""
    if engine.ranks is not None:
        return "several ranks write it together"
    for state in saved_states(engine, frozen=frozen):
        if not state.can_snapshot:
            return f"{state.name} is at home in the device's memory, or quantized"
    return ""


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
        self.is_cancelled = False  # it is to end soon, and leave nothing
        self._pid = os.getpid()
        self._began_s = time.perf_counter()
        with ExitStack() as unless_begun:
            held = unless_begun.enter_context(ExitStack())
            saver, folder, gate = self._begin(engine, path, state, held, frozen)
            with defer_signals:
                self._end = in_thread("offload-checkpoint", self._run, saver, folder, gate, held)
                saves.under_way = self
                _under_way.add(self)
                unless_begun.pop_all()

    # ---------------------------------------------------------------- on the model's thread
    def _begin(
        self, engine: Trained, path: Path, state: Mapping[str, Any] | None, held: ExitStack,
        frozen: bool,
    ) -> tuple[Saver, PendingFolder, SaveGate]:  # fmt: skip
        check_savable(engine)
        run = RunState.of(engine, state)
        base = None if frozen else engine.frozen_base.record(engine)
        snapshots = _snapshots(saved_states(engine, frozen=base is None), held)
        saver = Saver(engine, run, base, snapshots)
        folder = held.enter_context(PendingFolder(path))
        saver.begin(folder.path)
        fixed = [  # they might be changed in place
            number for number, saved in enumerate(saver.saved)
            if saver.has_weights(number)
            and not all(snapshots[g.state].is_versioned for g in saved.groups if g.state.nbytes)
        ]  # fmt: skip
        for number in fixed:
            saver.write_parameters(number)
        with defer_signals:
            gate, lent = held.enter_context(engine.steps.policy.beside_save())
        room = min(lent, _room_on_disk(engine, folder.path, saver.nbytes()))
        gate.close(_held(engine, saver, snapshots, fixed), room)
        saver.on_bytes = self._check
        return saver, folder, gate

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
    def _run(self, saver: Saver, folder: PendingFolder, gate: SaveGate, held: ExitStack) -> None:
        try:
            with held:
                self._write(saver, gate)
                folder.commit()
            self._done()
            seconds = time.perf_counter() - self._began_s
            _log.info(
                "%s: %s saved beside training in %.3g s", self.path,
                format_bytes(saver.nbytes()), seconds,
            )  # fmt: skip
        except _Cancelled:
            _log.warning("%s was not saved: it was given up", self.path)

    def _write(self, saver: Saver, gate: SaveGate) -> None:
        numbers = {g.index: n for n, saved in enumerate(saver.saved) for g in saved.groups}
        left = dict.fromkeys(range(len(saver.saved)))
        while left:
            wanted = gate.next_wanted()
            number = next(iter(left)) if wanted is None else numbers[wanted]
            saver.write_groups([number])
            del left[number]
            for group in saver.saved[number].groups:
                gate.passed(group.index)
        saver.finish()
        self._check(0)

    def _check(self, nbytes: int) -> None:
        if self.is_cancelled:
            raise _Cancelled(f"{self.path} was given up")


class BackgroundSaves:
    """The background saves of one engine: at most one is under way."""

    def __init__(self) -> None:
        self.under_way: BackgroundSave | None = None
        self._said = False

    def begin(
        self, engine: Trained, path: Path, state: Mapping[str, Any] | None,
        done: Callable[[], None], *, frozen: bool,
    ) -> bool:  # fmt: skip
        """Like `save_engine`, but return once the state is fixed, and write it while the engine
        trains; `done()` is called on another thread when it is complete. Returns False, after
        logging the reason once, if that is impossible: nothing was begun then."""
        reason = _why_not(engine, frozen)
        if not reason:
            BackgroundSave(engine, path, state, self, done, frozen=frozen)
        elif not self._said:
            self._said = True
            _log.warning("save_checkpoint(wait=False) waits: %s", reason)
        return not reason

    def wait(self) -> None:
        """Block until it has ended; raises its error, once."""
        if self.under_way is not None:
            try:
                self.under_way.wait()
            finally:
                if self.under_way.has_ended:  # a Ctrl-C ends the wait alone
                    self.under_way = None

    def give_up(self) -> None:
        """End the save, and leave nothing."""
        if self.under_way is not None:
            self.under_way.is_cancelled = True
            self.wait()


def _snapshots(states: Sequence[State], held: ExitStack) -> Snapshots:
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


def _held(
    engine: Trained, saver: Saver, snapshots: Snapshots, fixed: Sequence[int]
) -> dict[int, int | None]:
    """The bytes left of each group, by index, for the gate; None if they have no versions. `fixed`:
    the groups whose parameters were written."""
    written = {group.index for number in fixed for group in saver.saved[number].groups}
    held: dict[int, int | None] = {}
    for each in engine.optimizer_states:
        weights = () if each.group.index in written else (each.group.state,)
        left = [state for state in (*weights, *each.records) if state in snapshots]
        if left:
            versioned = all(snapshots[state].is_versioned for state in left)
            stored = sum(round_up(s.nbytes, PAGE_NBYTES) + PAGE_NBYTES * s.pieces for s in left)
            held[each.group.index] = stored if versioned else None
    return held


def _room_on_disk(engine: Trained, folder: Path, nbytes: int) -> int:
    """The bytes that swap files may grow by, so that the checkpoint has room beside them."""
    with storage_errors("looking at", folder):
        device = device_of(folder)
        rooms = [
            free_nbytes(path) - (nbytes if device_of(path) == device else 0) - GROWTH_NBYTES
            for path in map(Path, engine.swap_folders)
        ]
    return max(0, min(rooms, default=0))
