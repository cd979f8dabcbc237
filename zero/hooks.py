"""Module hooks: gather before a unit's forward, release after it.

The outermost unit being called opens a *session*: saved tensors become handles, and parameters that
are used outside their own module's forward (a tied head written as `F.linear(x, embed.weight)`,
attention that reads its projection's weight) are gathered when a torch function gets them and stay
until the session ends. In a backward pass (recomputation by a checkpoint) the handles stay off:
the recomputed tensors are the checkpoint's to hold, and they are needed at once.

Whatever ends a call, it gives back what it has entered: hooks with `always_call` run after an
Exception alone, a KeyboardInterrupt is met by a guard around the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.tiers.errors import StateError
from offload.zero.discovery import Unit
from offload.zero.group import GroupState, ParamGroup
from offload.zero.handles import HandleTable
from offload.zero.session import Session, in_backward, take_off_dead_modes


class UnitHooks:
    """The hooks of all units of one model. Not for use by several threads at once."""

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], groups: Sequence[ParamGroup],
        handles: HandleTable, use: Callable[[ParamGroup], None],
        written: Callable[[ParamGroup, list[int]], None], begin_forward: Callable[[], None],
    ) -> None:  # fmt: skip
        """`written` is told which parameters a forward wrote to (`nn.Embedding(max_norm=...)`),
        `begin_forward` that the whole model is called, outside of any backward pass."""
        self._model = model
        self._groups = groups
        self._written = written
        self._handles = handles
        self._use = use
        self._begin_forward = begin_forward
        self._calls: list[_Call] = []  # under way, the outermost first
        self._group_of = {
            id(param): group for group in groups for param in group.params
            if not group.permanent
        }  # fmt: skip
        self._removable: list[RemovableHandle | _Guard] = []
        if all(unit.module is not model for unit in units):
            self._install(Unit("", model))  # the whole model's forward is one session
        for unit in units:
            self._install(unit)
        for unit, inner in _inner_modules(units):
            self._install_inner(unit, inner)

    @staticmethod
    def had_an_engine(model: nn.Module) -> bool:
        """Whether some engine, open or closed, has this model's parameters."""
        hooks = (h for module in model.modules() for h in module._forward_pre_hooks.values())
        return any(getattr(hook, "__module__", "") == __name__ for hook in hooks)

    @staticmethod
    def forbid(units: Sequence[Unit]) -> None:
        """The parameters are gone: calling a unit says so."""

        def refuse(module: nn.Module, args: Any) -> None:
            raise StateError(
                "the engine is closed and this model's parameters went with it; build the model "
                "anew (engine.save_checkpoint or state_dict before close keep them)"
            )

        for unit in units:
            unit.module.register_forward_pre_hook(refuse, prepend=True)

    def _install(self, unit: Unit) -> None:
        groups = [self._groups[index] for index in unit.groups]

        def before(module: nn.Module, args: Any) -> None:
            self._begin(module, groups)

        self._register(unit.module, before)

    def _install_inner(self, unit: Unit, inner: nn.Module) -> None:
        """A module within a unit, called in backward on its own: a checkpoint around a part of the
        unit computes that part again, when the unit itself has been released."""
        groups = [self._groups[index] for index in unit.groups]

        def before(module: nn.Module, args: Any) -> None:
            if in_backward() and not all(group.in_use for group in groups):
                self._begin(module, groups)

        self._register(inner, before)

    def _register(self, module: nn.Module, before: Callable[[nn.Module, Any], None]) -> None:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            # a hook that a user put in front of `before` may have raised: nothing has begun then
            if self._calls and self._calls[-1].module is module:
                call = self._calls[-1]
                if call.session is not None:
                    call.session.close()
                    call.session = None
                self._end(len(self._calls) - 1)

        self._removable.append(module.register_forward_pre_hook(before, prepend=True))
        self._removable.append(module.register_forward_hook(after, always_call=True))
        self._removable.append(_Guard(module, self._calls, self._end))

    def _begin(self, module: nn.Module, groups: Sequence[ParamGroup]) -> None:
        call = _Call(module=module)
        outermost = not self._calls
        self._calls.append(call)
        if outermost:
            if module is self._model and not in_backward():
                self._begin_forward()
            gather_strays = self._gather_strays if self._group_of else None
            call.session = Session(self._handles, gather_strays)
            call.session.open()
        self._enter(groups, call)

    def _end(self, outer: int) -> None:
        """End all calls but the `outer` first ones, however far they got. May be cut short and
        called again."""
        while len(self._calls) > outer:
            call = self._calls[-1]
            if call.session is not None:
                call.session.abandon()
            self._leave(call)
            self._calls.pop()

    def _enter(self, groups: Sequence[ParamGroup], user: _User) -> None:
        """To be followed by `_leave`, also where this raises."""
        for group in groups:
            self._use(group)
            user.groups.append(group)
            group.enter(user)
            self._handles.note(group)

    def _leave(self, user: _User) -> None:
        while user.groups:
            group = user.groups[-1]
            try:
                changed = group.changed()
                if changed:
                    self._written(group, changed)
            finally:
                group.leave(user)
            user.groups.pop()

    @contextmanager
    def held(self, groups: Sequence[ParamGroup]) -> Iterator[None]:
        """`groups` are gathered and stay so inside."""
        user = _User()
        try:
            self._enter(groups, user)
            yield
        finally:
            self._leave(user)

    def _gather_strays(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, nn.Parameter):
                group = self._group_of.get(id(value))
                if group is not None and group.residing is GroupState.RELEASED:
                    self._enter([group], self._calls[0])
            elif isinstance(value, (list, tuple)):
                self._gather_strays(value)

    def remove(self) -> None:
        """Leave the modules and torch's stacks as they were, also amid a call: what its groups
        hold is of no use any more."""
        for call in self._calls:
            if call.session is not None:
                call.session.abandon()
        take_off_dead_modes()
        self._calls.clear()
        for each in self._removable:
            each.remove()


def _inner_modules(units: Sequence[Unit]) -> Iterator[tuple[Unit, nn.Module]]:
    """Modules with parameters inside of a unit, each once, with the innermost unit around it."""
    seen = {id(unit.module) for unit in units}
    for unit in sorted(units, key=lambda unit: -unit.name.count(".") if unit.name else 1):
        for inner in unit.module.modules():
            if id(inner) not in seen and next(inner.parameters(), None) is not None:
                seen.add(id(inner))
                yield unit, inner


class _Guard:
    """Around a module's call: what began in it has ended after it, whatever it raised.

    Installed where `Module.compile` puts what is called instead of the module; copies and pickles
    leave that out. Who compiles the module later has its hooks alone.
    """

    def __init__(
        self, module: nn.Module, calls: Sequence[_Call], end: Callable[[int], None]
    ) -> None:
        """`end` is told how many of `calls` were under way before this one."""
        self._module = module
        self._calls = calls
        self._end = end
        self._installed = module._compiled_call_impl
        self._call: Callable[..., Any] = self._installed or module._call_impl
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer = len(self._calls)
        try:
            return self._call(*args, **kwargs)
        finally:
            self._end(outer)

    def remove(self) -> None:
        if self._module._compiled_call_impl is self:
            self._module._compiled_call_impl = self._installed


@dataclass(slots=True, eq=False, kw_only=True)
class _User:
    """Who needs groups, and has to leave them."""

    groups: list[ParamGroup] = field(default_factory=list)


@dataclass(slots=True, eq=False, kw_only=True)
class _Call(_User):
    """A module's call under way. The outermost one has the session and the strays."""

    module: nn.Module
    session: Session | None = None
