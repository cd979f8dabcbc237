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

import torch
import xxhash

from offload.swap.states.state import State
from offload.swap.threads.lanes import profiled
from offload.tiers.errors import UnsupportedError
from offload.zero.groups.layout import Layout
from offload.zero.groups.pending_update import PendingUpdate
from offload.zero.groups.shared_views import check_format, covers
from offload.zero.tensors.local_tensors import hold, local_of
from offload.zero.tensors.placeholders import exchanging, placeholder

NO_COPIES = (
    "a model in tiers cannot be copied or pickled: its parameters are not in its modules. Copy it "
    "before offload.initialize (also for AveragedModel), load model.state_dict() into another "
    "model, or use engine.save_checkpoint()"
)


def digest(param: torch.Tensor) -> int:
    """Return a digest of the bytes of a parameter's values (of this rank's part)."""
    flat = local_of(param).detach().cpu().reshape(-1).view(torch.uint8)
    return int(xxhash.xxh3_64_intdigest(flat.numpy().data))


def _references(tensor: torch.Tensor) -> int:
    """Return how many tensors and Python storage objects refer to the memory of `tensor`."""
    memory = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(memory._cdata))


def _outside_inference(function: Callable[[ParamGroup], None]) -> Callable[[ParamGroup], None]:
    """Run `function` outside of inference mode: parameters must not become inference tensors."""

    @functools.wraps(function)
    def call(group: ParamGroup) -> None:
        if not torch.is_inference_mode_enabled():  # the context costs more than most of the rest
            return function(group)
        with torch.inference_mode(False):
            return function(group)

    return call


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

    def invalidate_gathered(self) -> None:
        """Note that an update was submitted: copies made before it hold old values."""

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


class ParamGroup:
    """Parameters that move together. `gather` and `release` are for the thread of the model."""

    __slots__ = (
        "_managed", "_references", "_shown", "_users", "_watched", "_written",
        "check_assigned", "copies", "device", "dtype", "ep_size", "has_masters", "index",
        "is_gathered", "is_lazy", "layout", "name", "params", "pending_update", "state",
        "updated_at", "version", "written_at",
    )  # fmt: skip

    def __init__(
        self, index: int, name: str, layout: Layout, params: Sequence[torch.nn.Parameter],
        dtype: torch.dtype, state: State, device: torch.device,
        classes_of: Callable[[type], Classes], ep_size: int = 1,
    ) -> None:  # fmt: skip
        """`classes_of` returns the classes for a parameter of a given class. `ep_size` > 1: an
        expert of a table that is spread over so many ranks, where other ranks have other
        experts."""
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
        # True: without gradients a module's call gathers only what has to be decoded, when it is
        # needed, and computes with codes until then (coded_uses.py)
        self.is_lazy = False
        # the address and strides of each parameter's values when they were gathered last
        self._shown: list[tuple[int, tuple[int, ...]]] = []
        self._references = 0  # to the buffer's memory, when it was gathered last
        self.version = 0  # counts updates and users' writes
        self.updated_at = 0  # the version that the last update made
        self.written_at: dict[int, int] = {}  # the version that a user's write to a parameter made
        self.is_gathered = False  # else `param.data` is a view of the buffer
        self.pending_update = PendingUpdate()
        placeholders = [placeholder(spec.shape, dtype, device) for spec in layout.params]
        # each parameter with its spec, its classes and what it holds while released
        self._managed = [
            (param, spec, classes_of(type(param)), empty)
            for param, spec, empty in zip(self.params, layout.params, placeholders, strict=True)
        ]
        self._watched: dict[int, int] = {}  # parameters whose `.data` was taken -> digest then
        self._users: set[object] = set()
        # refuses a tensor that `.data` of a gathered parameter was set to
        self.check_assigned: Callable[[torch.nn.Parameter, torch.Tensor], None] = lambda *_: None
        self._written = [param._version for param in self.params]  # counters of known writes

    def own_classes(self) -> list[tuple[torch.nn.Parameter, type]]:
        """Return the parameters with their original classes."""
        return [(param, classes.own) for param, _, classes, _ in self._managed]

    @property
    def is_entered(self) -> bool:
        """Whether a module's forward or `gathered` has entered and not left."""
        return bool(self._users)

    @property
    def is_left_in_codes(self) -> bool:
        """Whether a module's call has entered, and nothing was decoded since."""
        return self.is_lazy and self.is_entered and not self.is_gathered

    def fall_behind(self, catch_up: Callable[[], None]) -> None:
        """Note that a step was missed: before anything is read, `catch_up` begins its update."""
        self.pending_update.fall_behind(catch_up)
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
        with torch._C.DisableTorchFunctionSubclass(), exchanging():
            self._show(flat)
            self._shown = self._find_places()
            self._references = _references(flat)  # without the tensors that `_show` made
        self.is_gathered = True

    def _show(self, flat: torch.Tensor) -> None:
        stays = self._stays
        for param, spec, classes, _ in self._managed:
            hold(param, spec.of(flat))
            param.__class__ = classes.own if stays else classes.gathered

    def release(self) -> None:
        """Stop using the buffer (unless the home is used in place): it may be evicted now."""
        if not self.is_gathered or self._stays:
            return
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

    def show_released(self, param: torch.nn.Parameter, kind: type) -> None:
        """Give a parameter the class of released parameters again, unless it was gathered
        meanwhile."""
        if not self.is_gathered:
            param.__class__ = kind

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

    def invalidate(self) -> None:
        """Note that an update was submitted: values read before it are old."""
        self.version += 1
        self.updated_at = self.version
        self.copies.invalidate_gathered()

    def changed(self) -> list[int]:
        """Return the parameters (by index) that were written to since the last call or
        `note_versions`, also through `.data`. If a `.data` was set to another tensor, its values
        are copied into the buffer."""
        assigned = self.copy_assigned()
        with torch._C.DisableTorchFunctionSubclass():  # released ones would be asked one by one
            versions = [param._version for param in self.params]
        if not assigned and not self._watched and versions == self._written:
            return []
        through_data = [
            index for index, before in self._watched.items() if digest(self.params[index]) != before
        ]
        self._watched.clear()
        pairs = zip(versions, self._written, strict=True)
        self._written = versions
        written = [index for index, (now, known) in enumerate(pairs) if now != known]
        return sorted({*assigned, *through_data, *written})

    def watch(self, index: int) -> None:
        """Note that the `.data` of a gathered parameter is taken: autograd does not count what is
        written through it."""
        if self.is_gathered and index not in self._watched:
            self._watched[index] = digest(self.params[index])

    def copy_assigned(self) -> list[int]:
        """Copy what `param.data` was set to while gathered into the buffer; return those parameters
        (by index).

        Raises UnsupportedError for values of another shape, dtype or device, and if the user still
        refers to the previous `.data`: that is a view of the buffer, whose values would change.
        """
        if not self.is_gathered:
            return []
        places = self._find_places()
        if places == self._shown:
            return []
        pairs = zip(places, self._shown, strict=True)
        assigned = [index for index, (now, then) in enumerate(pairs) if now != then]
        with torch.inference_mode(False):
            self._copy_values(assigned)
        return assigned

    def _copy_values(self, assigned: Sequence[int]) -> None:
        flat = self.flat()
        self._refuse_kept(flat, assigned)
        values = {index: local_of(self.params[index]).detach() for index in assigned}
        for index, given in values.items():
            spec = self.layout.params[index]
            check_format(spec.name, given, spec.shape, self.dtype, flat.device)
        for index, given in values.items():
            own = self.layout.params[index].of(flat)
            if covers(own, given):
                values[index] = given.clone()  # `w.data.t()`
            else:
                self.check_assigned(self.params[index], given)
        for index, given in values.items():
            view = self.layout.params[index].of(flat)
            view.copy_(given)
            hold(self.params[index], view)

    def _refuse_kept(self, flat: torch.Tensor, assigned: Sequence[int]) -> None:
        memory = flat.untyped_storage()._cdata
        now = [local_of(self.params[index]).untyped_storage()._cdata for index in assigned]
        left = sum(each != memory for each in now)
        if _references(flat) > self._references - left:
            names = ", ".join(self.layout.params[index].name for index in assigned)
            raise UnsupportedError(
                f"{names}: .data was set to another tensor while something else refers to the "
                "values from before, which are overwritten in the engine's tiers: a tensor of the "
                "program (backup = p.data), or the graph of a forward whose output is still there; "
                "keep copies (backup = p.data.clone()), compute that forward within "
                "torch.no_grad(), or write with p.data.copy_(...)"
            )

    def _find_places(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return the address and the strides of each parameter's values: those of `w.data.t()` are
        at the same address."""
        locals_ = [local_of(param) for param in self.params]
        return [(memory.data_ptr(), memory.stride()) for memory in locals_]

    def note_versions(self) -> None:
        """Account for all writes up to now."""
        self._watched.clear()
        self._written = [param._version for param in self.params]

    def adopt(self) -> None:
        """Let `param.data` follow the state, which has the parameters' first values."""
        if self._stays:
            self.gather()
        else:
            self.unmap()
