"""A group of parameters: one flat buffer, gathered before use and released after it.

Who owns the memory of `param.data` (of a DTensor's local tensor, likewise):

    RELEASED   a one-element placeholder (NaN) of the parameter's full shape; the state owns
               the bytes, wherever they are
    GATHERED   views of the state's buffer; while one of them lives, the buffer cannot be dropped

A group whose home is the memory it is used in stays GATHERED, except while an update of it runs in
the background: nobody can read half of an update. Where all its states are in memory there is
nothing to hide, the update is waited for in the step, and it stays GATHERED for good.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch

from offload.swap.state import State
from offload.swap.transfer import Transfer
from offload.zero.layout import Layout
from offload.zero.local_tensors import hold


class GroupState(enum.Enum):
    RELEASED = "released"
    GATHERED = "gathered"


class ParamGroup:
    """Parameters that move together. `gather` and `release` are for the thread of the model."""

    def __init__(
        self, index: int, name: str, layout: Layout, params: Sequence[torch.nn.Parameter],
        dtype: torch.dtype, state: State, device: torch.device,
    ) -> None:  # fmt: skip
        self.index = index
        self.name = name
        self.layout = layout
        self.params = list(params)  # in the layout's order
        self.dtype = dtype
        self.state = state
        self.device = device
        self.permanent = False  # True: every state is in memory that it is used in
        self.version = 0  # counts updates; a saved handle of an older version is stale
        self.residing = GroupState.RELEASED
        self.pending: Transfer[None] | None = None  # an update that readers have to wait for
        self._users: set[object] = set()
        self._held_for: set[int] = set()  # users of a pass that is repeated without data
        self.on_hold: Callable[[ParamGroup, object, bool], None] | None = None  # True: entered
        self._written = [param._version for param in self.params]  # counters of known writes
        nan = float("nan") if dtype.is_floating_point else 0
        self._placeholder = torch.full((), nan, dtype=dtype, device=device)

    @property
    def in_use(self) -> bool:
        """True while a module's forward or `gathered` has entered and not left."""
        return bool(self._users or self._held_for)

    def wait_for_update(self) -> None:
        """Block until a pending update of this group is visible."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def flat(self) -> torch.Tensor:
        """The whole buffer, 1D, valid: waits for a pending update and for its arrival."""
        self.wait_for_update()
        return self.state.tensor().view(self.dtype)

    @torch.inference_mode(False)  # an evaluation must not turn parameters into inference tensors
    def gather(self) -> None:
        """Let every parameter's data be a view of the buffer. Idempotent; blocks until valid."""
        if self.residing is GroupState.GATHERED and not self.state.is_outdated:
            if self.state.in_place:
                self.wait_for_update()
            return
        flat = self.flat()
        for param, spec in zip(self.params, self.layout.params, strict=True):
            hold(param, flat[spec.offset : spec.stop].view(spec.shape))
        self.residing = GroupState.GATHERED

    @torch.inference_mode(False)
    def release(self) -> None:
        """Let go of the buffer (unless it is at home in place): it may be dropped now."""
        if self.residing is GroupState.RELEASED or self.state.in_place:
            return
        self._put_placeholders()

    def _put_placeholders(self) -> None:
        self.residing = GroupState.RELEASED  # first: an interrupt must not leave NaN as gathered
        for param, spec in zip(self.params, self.layout.params, strict=True):
            hold(param, self._placeholder.expand(spec.shape))

    def enter(self, user: object) -> None:
        """`user` (a module's call, a `gathered`) needs the parameters; it has to leave also where
        this raises."""
        self._users.add(user)
        if self.on_hold is not None:
            self.on_hold(self, user, True)
        self.gather()

    def leave(self, user: object) -> None:
        """`user` is done; the last one to leave releases. Idempotent."""
        self._users.discard(user)
        if self.on_hold is not None:
            self.on_hold(self, user, False)
        if not self._users:
            self.release()
            self.state.left()

    def hold(self, user: int) -> None:
        """As `enter` of a pass that is repeated without data: nothing is computed with."""
        self._held_for.add(user)

    def let_go(self, user: int) -> None:
        self._held_for.discard(user)

    def let_go_all(self) -> None:
        self._held_for.clear()

    def await_or_withhold(self) -> None:
        """An update was submitted: no parameter at home in place may show half of it."""
        if self.permanent:
            self.gather()
        elif self.state.in_place:
            self.withhold()

    @torch.inference_mode(False)
    def withhold(self) -> None:
        """Let no parameter refer to the buffer, until gathered again or (at the end) for good."""
        self._put_placeholders()

    def outdate(self) -> None:
        """An update was submitted: what was read before it is of the past."""
        self.version += 1
        self.state.outdate()

    def changed(self) -> list[int]:
        """Parameters (by index) that somebody wrote to since the last call or `note_versions`."""
        versions = [param._version for param in self.params]
        pairs = zip(versions, self._written, strict=True)
        self._written = versions
        return [index for index, (now, known) in enumerate(pairs) if now != known]

    def note_versions(self) -> None:
        """What was written up to now is known."""
        self._written = [param._version for param in self.params]

    def adopt(self) -> None:
        """Make the parameters ours: full precision values are in the state, data follows it."""
        self.residing = GroupState.GATHERED
        if self.state.in_place:
            self.residing = GroupState.RELEASED
            self.gather()
        else:
            self.release()
