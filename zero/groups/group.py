"""A group of parameters: one flat buffer, gathered before use and released after it.

The owner of the memory of `param.data` (likewise of a DTensor's local tensor):

    released   a placeholder of the parameter's full shape (placeholders.py); the state owns
               the bytes, in any tier. The parameter's class fetches them when it is read
               (released.py)
    gathered   views of the state's buffer; while one of them lives, the buffer cannot be dropped

A group whose home is the memory it is used in stays gathered, except while its update runs in the
background, so that half an update is never read. Where all its states are in memory the step waits
for the update, and the group always stays gathered. A group with masters is released after each use
even there: writes to its parameters have to reach the masters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from offload.swap.states.state import State
from offload.swap.threads.lanes import profiled
from offload.swap.threads.transfer import Transfer
from offload.zero.groups.layout import Layout
from offload.zero.groups.write_tracker import WriteTracker
from offload.zero.tensors.local_tensors import hold
from offload.zero.tensors.placeholders import exchanging, placeholder

NO_COPIES = (
    "a model in tiers cannot be copied or pickled: its parameters are not in its modules. Copy it "
    "before offload.initialize (also for AveragedModel), load model.state_dict() into another "
    "model, or use engine.save_checkpoint()"
)


def _outside_inference(function: Callable[[ParamGroup], None]) -> Callable[[ParamGroup], None]:
    """Run `function` outside of inference mode: parameters must not become inference tensors."""

    @functools.wraps(function)
    def call(group: ParamGroup) -> None:
        if not torch.is_inference_mode_enabled():  # the context costs more than most of the rest
            return function(group)
        with torch.inference_mode(False):
            return function(group)

    return call


class Update(Protocol):
    """An update of a group, as its readers see it."""

    ready: Transfer[None]
    begun: bool  # the values may have changed


class RankCopies:
    """This rank's copies of the parts of a group's buffer that other ranks update. One rank alone
    has no copies: the methods of this base class do nothing."""

    @property
    def is_outdated(self) -> bool:
        """Whether other ranks' parts have to be fetched before the buffer is used."""
        return False

    @property
    def is_arriving(self) -> bool:
        """Whether a thread reads this rank's part for a collective that has not ended."""
        return False

    def invalidate_gathered(self, update: Update | None = None) -> None:
        """Note that the parts were loaded, or an `update` is about to be submitted: copies made
        before it hold old values."""

    def refresh(self) -> None:
        """Begin to fetch parts that other ranks have changed. All ranks refresh the same groups in
        the same order, also those that only some of them use."""

    def overwritten(self) -> None:
        """Note that all ranks wrote to the whole buffer: of each part, its owner's values count."""

    def on_last_release(self) -> None:
        """Note that no module or caller uses the whole buffer any more, for now."""


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes that one parameter has (see released.py)."""

    own: type
    released: type
    gathered: type


@dataclass(slots=True, eq=False)
class PendingUpdate:
    """The update that readers of a group's weights and optimizer states wait for.

    A reader undoes a speculative one, which its step has not made yet (speculative_updates.py), and
    begins the one that makes up for missed steps (lazy_updates.py).
    """

    ready: Transfer[None] | None = None  # None: no update is pending
    undo: Callable[[], None] | None = None  # undoes a speculative update, which no step has made
    catch_up: Callable[[], None] | None = None  # begins the update by the steps that were missed
    step_waits: bool = False  # as every state is at home in the memory where it is used

    def begin_missed(self) -> None:
        """Begin the update by the steps that were missed, if there are any."""
        if self.catch_up is not None:
            if self.ready is not None:  # where an interrupt can end the wait
                self.ready.wait()
            self.catch_up()

    def decided(self) -> Transfer[None] | None:
        """Return what readers wait for, after undoing an update that no step has made."""
        if self.undo is not None:
            self.undo()
        return self.ready

    def wait(self) -> None:
        """Block until the pending update is visible, and the update by the steps that were missed.
        Every reader of weights or optimizer states comes here."""
        self.decided()
        if self.catch_up is not None:
            self.begin_missed()
        ready = self.ready
        if ready is not None:
            ready.wait()
            if self.ready is ready:  # else another thread has made a step meanwhile
                self.ready = None


class ParamGroup:
    """Parameters that move together, and whether they are gathered now, for which users. `gather`
    and `release` are for the thread of the model."""

    __slots__ = (
        "_managed", "_users", "copies", "device", "dtype", "ep_size", "has_masters", "index",
        "is_gathered", "is_lazy", "layout", "matrices", "name", "params", "pending_update",
        "state", "writes",
    )  # fmt: skip

    def __init__(
        self, index: int, name: str, layout: Layout, params: Sequence[torch.nn.Parameter],
        dtype: torch.dtype, state: State, device: torch.device,
        classes_of: Callable[[type], Classes], ep_size: int = 1, *, matrices: bool = False,
    ) -> None:  # fmt: skip
        """`classes_of` returns the classes for a parameter of a given class. `ep_size` > 1: an
        expert of a table that is spread over so many ranks, where other ranks have other
        experts. `matrices`: what it trains are matrices that are updated whole (Muon)."""
        self.matrices = matrices
        self.index = index
        self.ep_size = ep_size
        self.name = name
        self.layout = layout
        self.params = list(params)  # in the layout's order
        self.dtype = dtype
        self.state = state
        self.copies = state if isinstance(state, RankCopies) else RankCopies()
        self.device = device
        self.has_masters = False  # True: a write to a parameter has to reach its master, too
        # True: without gradients a module's call gathers only what has to be dequantized, when it
        # is needed, and computes with quantized weights until then (quantized_ops.py)
        self.is_lazy = False
        self.pending_update = PendingUpdate()
        self.writes = WriteTracker(self.params, layout.params)
        self.is_gathered = False  # True: each `param.data` is a view of the buffer
        self._users: set[object] = set()  # who has entered and not left
        # each parameter with its spec, its classes and what it holds while released
        self._managed = [
            (param, spec, classes_of(type(param)), placeholder(spec.shape, dtype, device))
            for param, spec in zip(self.params, layout.params, strict=True)
        ]

    def own_classes(self) -> list[tuple[torch.nn.Parameter, type]]:
        return [(param, classes.own) for param, _, classes, _ in self._managed]

    @property
    def is_entered(self) -> bool:
        """Whether a module's forward or `gathered` has entered and not left."""
        return bool(self._users)

    @property
    def is_left_quantized(self) -> bool:
        """Whether a module's call has entered, and nothing was dequantized since."""
        return self.is_lazy and self.is_entered and not self.is_gathered

    def fall_behind(self, catch_up: Callable[[], None]) -> None:
        """Note that a step was missed: before anything is read, `catch_up` begins its update."""
        self.pending_update.catch_up = catch_up
        self.invalidate()
        if self.is_gathered:
            self.unmap()

    def has_kept_views(self) -> bool:
        """Take the group's own views away, and return whether others have views of the values
        that an update would write to."""
        if self.is_gathered:
            self.unmap()
        written = self.state.undoable()
        return written is not None and written.has_views()

    def flat(self) -> torch.Tensor:
        """Return the whole buffer in one dimension, once it is updated and has arrived."""
        self.pending_update.wait()
        return self.state.tensor().view(self.dtype)

    def gather(self) -> None:
        """Let every parameter's data be a view of the buffer. Idempotent; blocks until valid."""
        if self.is_gathered and not self.copies.is_outdated:
            if self.state.in_place:
                self.pending_update.wait()
            return
        self._gather()

    @_outside_inference
    def _gather(self) -> None:
        with profiled(f"gather {self.name}"):
            flat = self.flat()
        stays = self._stays
        with torch._C.DisableTorchFunctionSubclass(), exchanging():
            for param, spec, classes, _ in self._managed:
                hold(param, spec.of(flat))
                param.__class__ = classes.own if stays else classes.gathered
            self.writes.note_shown(flat)
        self.is_gathered = True

    def release(self) -> None:
        """Stop using the buffer (unless the home is used in place): it may be evicted now."""
        if self.is_gathered and not self._stays:
            self.unmap()

    @property
    def _stays(self) -> bool:
        return self.state.in_place and not self.has_masters

    @_outside_inference
    def unmap(self) -> None:
        """Let no parameter refer to the buffer until gathered again."""
        self.is_gathered = False  # first: an interrupt must not leave NaN as gathered
        with torch._C.DisableTorchFunctionSubclass(), exchanging():
            for param, _, classes, empty in self._managed:
                param.__class__ = classes.released  # first: the placeholder must not be read
                hold(param, empty)

    def enter(self, user: object, *, calls: bool = False) -> None:
        """Note that `user` (a module's call, a `gathered`) needs the parameters; it must call
        `leave`, also if this raises. `calls`: it is a module's call."""
        self._users.add(user)
        if not (calls and self.is_lazy) or torch.is_grad_enabled():
            self.gather()

    def leave(self, user: object) -> None:
        """Note that `user` is done; the last one to leave releases. Idempotent."""
        self._users.discard(user)
        if not self._users:
            self.release()
            self.copies.on_last_release()

    def await_or_unmap(self) -> None:
        """Let no parameter show half of a submitted update: wait for it where the step does, or
        unmap the parameters where the buffer is in place."""
        if self.pending_update.step_waits:
            self.gather()
        elif self.state.in_place:
            self.unmap()

    def invalidate(self, update: Update | None = None) -> None:
        """Note that an update is submitted: values read before it are old."""
        self.writes.note_update()
        self.copies.invalidate_gathered(update)

    def changed(self) -> list[int]:
        """Return the parameters that were written to, as `WriteTracker.changed` does."""
        return self.writes.changed(self.flat if self.is_gathered else None)

    def adopt(self) -> None:
        """Let `param.data` follow the state, which has the parameters' first values."""
        if self._stays:
            self.gather()
        else:
            self.unmap()
