"""Module hooks: gather before a unit's forward, release after it.

The outermost unit being called opens a *session*: saved tensors become handles, and parameters that
are used outside their own module's forward (a tied head written as `F.linear(x, embed.weight)`,
attention that reads its projection's weight) stay gathered until the session ends. In a backward
pass (recomputation by a checkpoint) the handles stay off: the recomputed tensors are the
checkpoint's to hold, and they are needed at once.

A call leaves the groups it entered however it ends: hooks with `always_call` run after an Exception
only, so a guard around the call handles KeyboardInterrupt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules import module as _of_all
from torch.utils.hooks import RemovableHandle

from offload.swap.threads.shield import defer_signals, ending_with, interrupted_in_waits
from offload.tiers.errors import UnsupportedError
from offload.zero.groups.group import NO_COPIES, ParamGroup
from offload.zero.groups.parameter_grouping import WITHOUT_FORWARD, Unit
from offload.zero.hooks import compilers
from offload.zero.hooks.compilers import break_graph, uncompiled
from offload.zero.hooks.handles import HandleTable, Session, in_backward, leave_checkpoints
from offload.zero.hooks.one_thread import OneThread
from offload.zero.hooks.transforms import refuse_transforms

_log = logging.getLogger("offload")

# Modules that compute in another way where one of their parameters is no plain tensor.
_ASK_FOR_CLASSES = nn.TransformerEncoder | nn.TransformerEncoderLayer | nn.MultiheadAttention


class UnitHooks:
    """The hooks of all units of one model. Not for use by several threads at once."""

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], groups: Sequence[ParamGroup],
        handles: HandleTable, use: Callable[[ParamGroup], None],
        written: Callable[[ParamGroup, list[int]], None], begin_forward: Callable[[int], None],
        owner: object, one_thread: OneThread, parts: Sequence[nn.Module] = (),
    ) -> None:  # fmt: skip
        """`written` is told which parameters a forward wrote to (`nn.Embedding(max_norm=...)`),
        `begin_forward` that the whole model is called, outside of any backward pass, or one of
        `parts`, which are called in its place: the number of that part. The hooks, and so the
        model, keep their `owner`."""
        self._groups = groups
        self._written = written
        self._handles = handles
        self._use = use
        self._begin_forward = begin_forward
        self._parts = {id(module): n for n, part in enumerate(parts) for module in part.modules()}
        self._part = 0  # called last
        self._owner = owner
        self._one_thread = one_thread
        self._calls: list[_Call] = []  # under way, the outermost first
        self._guards: list[_Guard] = []
        self._after = _Hook(lambda compiling, module, *_: self._return(module), owner)
        self._where = {id(param): group for group in groups for param in group.params}
        _leave_the_fast_path(model)
        hooked = {id(unit.module) for unit in units}
        wholes = [*_whole_models(model, hooked), *parts]
        self._whole = {id(whole._forward_pre_hooks) for whole in wholes}  # copies share them
        for whole in wholes:
            if id(whole) not in hooked:
                self._install(whole, [])  # the whole model's forward is one session
                hooked.add(id(whole))
        for unit in units:
            of_unit = [groups[index] for index in unit.groups]
            self._install(unit.module, of_unit, is_expert=bool(unit.table))
        for unit, inner in _inner_modules(units):
            of_unit = [groups[index] for index in unit.groups]
            owners = dict.fromkeys(self._where.get(id(param)) for param in inner.parameters())
            needed = [group for group in owners if group in of_unit]
            self._install(inner, needed, is_expert=bool(unit.table), is_inner=True)

    @staticmethod
    def owner_of(module: nn.Module) -> object | None:
        """The owner of the hooks of this library on a module; None if there are none."""
        hooks = module._forward_pre_hooks.values()
        return next((hook.owner for hook in hooks if isinstance(hook, _Hook)), None)

    def _install(
        self, module: nn.Module, groups: list[ParamGroup], *, is_expert: bool = False,
        is_inner: bool = False,
    ) -> None:  # fmt: skip
        """Install hooks on a module, which needs `groups` while it is called. A module within a
        unit (`is_inner`) may be called by a method of the unit, by the user, or in a backward pass,
        to be computed again; while the unit is called its hooks have nothing to do."""
        if is_inner and not groups:
            return  # the units in it have hooks of their own
        within: list[_Guard] | None = None  # of modules in this one, when it is compiled

        def needs_nothing() -> bool:
            return is_inner and all(group.is_entered for group in groups)

        def begin(compiling: bool, module: nn.Module, args: Any) -> None:
            nonlocal within
            if compiling and within is None:
                inside = {id(each) for each in module.modules()} - {id(module)}
                within = [guard for guard in self._guards if id(guard.module) in inside]
            compiled = within if compiling and within else ()
            if compiled or not needs_nothing():
                self._begin(module, groups, is_expert=is_expert, compiled=compiled)

        hooks = _Hook(begin, self._owner), self._after
        registered = [
            module.register_forward_pre_hook(hooks[0], prepend=True),
            module.register_forward_hook(hooks[1], always_call=True),
        ]
        self._guards.append(
            _Guard(module, self._calls, self._end, *hooks, registered, needs_nothing)
        )

    @interrupted_in_waits
    def _begin(
        self, module: nn.Module, groups: Sequence[ParamGroup], *, is_expert: bool = False,
        compiled: Sequence[_Guard] = (),
    ) -> None:  # fmt: skip
        """Begin a call. The hooks of the modules that are `compiled` with this one would end its
        graph: those that have nothing to do are away until the call ends."""
        refuse_transforms()
        self._one_thread.__enter__()
        call = _Call(module=module)
        outermost = not self._calls
        self._calls.append(call)
        if outermost:
            if not in_backward():
                self._begin_pass(module)
            call.session = Session(self._handles)
            call.session.open()
        if is_expert:
            call.expert = self._handles.of_expert()
            call.expert.__enter__()
        self._enter(groups, call, calls=True)
        for guard in compiled:
            if guard.needs_no_hooks() and guard.take_hooks():
                call.unhooked.append(guard)

    def _begin_pass(self, module: nn.Module) -> None:
        """Begin a pass if the whole model is called, or a part. A part's methods (`vae.decode`)
        call modules in it: that is a pass if another part was called before."""
        part = self._parts.get(id(module), self._part)
        if id(module._forward_pre_hooks) in self._whole or part != self._part:
            self._part = part
            self._begin_forward(part)

    def _return(self, module: nn.Module) -> None:
        # a user's hook in front of `before` may have raised, or another thread be inside: then this
        # call has not begun
        call = self._calls[-1] if self._calls else None
        if call is not None and call.module is module and call.thread == get_ident():
            self._close(call)

    @defer_signals
    def _close(self, call: _Call) -> None:
        call.leave_expert()
        if call.session is not None:
            call.session.close()
            call.session = None
        self._end(len(self._calls) - 1)

    @defer_signals
    def _end(self, outer: int) -> None:
        """End all calls but the first `outer` ones, at any stage. May be called again."""
        while len(self._calls) > outer:
            call = self._calls[-1]
            if call.thread != get_ident():  # this call was refused
                return
            while call.unhooked:
                call.unhooked.pop().put_hooks()
            while call.experts:
                self._end_expert(call.experts[-1], [call])
            call.leave_expert()
            if call.session is not None:
                call.session.abandon()
            self._leave(call)
            self._calls.pop()
            self._one_thread.__exit__()

    @interrupted_in_waits
    def _enter(self, groups: Sequence[ParamGroup], user: _User, *, calls: bool = False) -> None:
        """Enter groups. `_leave` must follow, also if this raises."""
        for group in groups:
            self._use(group)
            user.groups.append(group)
            group.enter(user, calls=calls)
            if group.is_gathered:
                self._handles.note(group)

    @defer_signals
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
    def expert(self, group: ParamGroup) -> Iterator[None]:
        """Hold a group around the computation of one expert that is no module. The remains of an
        interrupt end with the call that it is in."""
        user = _User()
        calls = self._calls[-1:]
        for call in calls:
            call.experts.append(user)
        with ending_with(lambda: self._end_expert(user, calls)):
            self._begin_expert(group, user)
            yield

    @interrupted_in_waits
    def _begin_expert(self, group: ParamGroup, user: _User) -> None:
        user.expert = self._handles.of_expert()
        user.expert.__enter__()
        self._enter([group], user)

    @defer_signals
    def _end_expert(self, user: _User, calls: Sequence[_Call]) -> None:
        user.leave_expert()
        self._leave(user)
        for call in calls:
            if user in call.experts:
                call.experts.remove(user)

    def join_call(self, groups: Sequence[ParamGroup]) -> bool:
        """Let the outermost call under way use `groups`, too; what a call has left
        quantized is dequantized until that call ends. False if there is none."""
        if not self._calls:
            return False
        refuse_transforms()
        for group in groups:
            if group.is_left_quantized:
                self._dequantize(group)
            else:
                self._enter([group], self._calls[0])
        return True

    @interrupted_in_waits  # half gathered, a group would not be released
    def _dequantize(self, group: ParamGroup) -> None:
        group.gather()
        self._handles.note(group)

    @contextmanager
    def computing(self, unit: Unit) -> Iterator[None]:
        """Wrap a unit's own forward, for a caller that runs it without calling the module."""
        outer = len(self._calls)
        with ending_with(lambda: self._end(outer)):
            self._begin(unit.module, [self._groups[index] for index in unit.groups])
            yield

    def remove(self) -> None:
        """Restore the modules and torch's stacks, also during a call."""
        for call in self._calls:
            if call.session is not None:
                call.session.abandon()
            for guard in call.unhooked:
                guard.put_hooks()
        self._calls.clear()
        for guard in self._guards:
            guard.remove()


def _leave_the_fast_path(model: nn.Module) -> None:
    """Let PyTorch's encoders and attention compute as they do while they train, in the whole
    process: their fast path asks for parameters before anything fetches them."""
    asks = any(isinstance(module, _ASK_FOR_CLASSES) for module in model.modules())
    if asks and torch.backends.mha.get_fastpath_enabled():
        torch.backends.mha.set_fastpath_enabled(False)
        _log.info(
            "nn.TransformerEncoder and nn.MultiheadAttention no longer take their fast path in "
            "eval(), in this process: torch.backends.mha.set_fastpath_enabled(False)"
        )


def _whole_models(model: nn.Module, units: Set[int]) -> Iterator[nn.Module]:
    """Yield the model and, if it only wraps another one that is no unit (by id), that one's: PEFT's
    `generate` calls the inner model alone."""
    yield model
    inner = [each for each in model.children() if next(each.parameters(), None) is not None]
    wraps = len(inner) == 1 and not isinstance(inner[0], WITHOUT_FORWARD)
    if wraps and not {id(model), id(inner[0])} & units:
        yield from _whole_models(inner[0], units)


def _inner_modules(units: Sequence[Unit]) -> Iterator[tuple[Unit, nn.Module]]:
    """Yield modules with parameters inside of units, each once, with their innermost unit."""
    seen = {id(unit.module) for unit in units}
    for unit in sorted(units, key=lambda unit: -unit.name.count(".") if unit.name else 1):
        for inner in unit.module.modules():
            if id(inner) not in seen and next(inner.parameters(), None) is not None:
                seen.add(id(inner))
                yield unit, inner


class _Hook:
    """A hook of this library on a module: copying or pickling it with the module raises."""

    __slots__ = ("_function", "owner")  # the function is told first whether code is compiled

    def __init__(self, function: Callable[..., None], owner: object) -> None:
        self._function = uncompiled(function)
        self.owner = owner

    @break_graph
    def __call__(self, *args: Any) -> None:
        self._function(compilers.is_active(), *args)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(NO_COPIES)


@dataclass(slots=True, eq=False)
class _Guard:
    """Around a module's call: ends the calls that began inside, also after an interrupt.

    Installed in the attribute that `Module.compile` uses for the compiled call, which copies and
    pickles leave out. A module that is compiled later has only its hooks (or none, and fetches each
    parameter where it is used), and torch.compile goes past the call of a module without hooks, to
    its forward: so there are both.
    """

    module: nn.Module
    calls: Sequence[_Call]  # under way
    end: Callable[[int], None]  # is given how many were under way before this one
    before: _Hook  # the hooks around the module's forward
    after: _Hook
    registered: Sequence[RemovableHandle]  # the same two, with the module
    needs_no_hooks: Callable[[], bool]  # they have nothing to do in the call that begins
    installed: Callable[..., Any] | None = field(init=False)  # the compiled call, if there was one
    call: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        self.installed = self.module._compiled_call_impl
        self.call = self.installed or self.module._call_impl
        self.module._compiled_call_impl = self

    @break_graph
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_bare():
            if self.needs_no_hooks():
                return self._ending_calls(self.module.forward, args, kwargs)
            return self._ending_calls(self._between_hooks, (args, kwargs), {})
        return self._ending_calls(self.call, args, kwargs)

    @property
    def __self__(self) -> nn.Module:
        return self.module

    def __func__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a copy of the module that has its hooks: accelerate's `compile_regions` makes one,
        and gives it the methods among the module's attributes, which it knows by `__self__`."""
        return self._ending_calls(module._call_impl, args, kwargs)

    @break_graph
    def _ending_calls(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        outer = len(self.calls)
        try:
            return run(*args, **kwargs)
        except BaseException as error:
            leave_checkpoints(error)
            raise
        finally:
            try:
                if len(self.calls) > outer:
                    self.end(outer)
            except KeyboardInterrupt:  # it may have come just before that had begun
                self.end(outer)
                raise

    @break_graph
    def _between_hooks(self, args: Any, kwargs: Any) -> Any:
        """Call a forward between its hooks as torch does, which takes longer than a small layer."""
        result = None
        try:
            self.before(self.module, args)
            result = self.module.forward(*args, **kwargs)
        except Exception:
            self.after(self.module, args, result)
            raise
        self.after(self.module, args, result)
        return result

    @break_graph
    def _is_bare(self) -> bool:
        """Return whether a call is its forward between these two hooks, without hooks of others, a
        compiler or a tracer."""
        module = self.module
        return self.installed is None and not (
            len(module._forward_pre_hooks) > 1
            or len(module._forward_hooks) > 1
            or module._backward_hooks
            or module._backward_pre_hooks
            or _of_all._has_any_global_hook()
            or torch._C._get_tracing_state()
            or compilers.is_active()
        )

    def take_hooks(self) -> bool:
        """Leave the module without hooks, which torch.compile sees through. False if it has hooks
        of others, too: their order would be another one afterwards."""
        module, (before, after) = self.module, self.registered
        alone = [before.id], [after.id]
        if (list(module._forward_pre_hooks), list(module._forward_hooks)) != alone:
            return False
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
        return True

    def put_hooks(self) -> None:
        """Put back what `take_hooks` took, before the hooks that came meanwhile."""
        hooks: Any  # ordered, whatever torch says
        for hooks, handle, hook in (
            (self.module._forward_pre_hooks, self.registered[0], self.before),
            (self.module._forward_hooks, self.registered[1], self.after),
        ):
            hooks[handle.id] = hook
            hooks.move_to_end(handle.id, last=False)

    def remove(self) -> None:
        for handle in self.registered:
            handle.remove()
        if self.module._compiled_call_impl is self:
            del self.module._compiled_call_impl  # the module's own: the class has one, too
            if self.installed is not None:
                self.module._compiled_call_impl = self.installed


@dataclass(slots=True, eq=False, kw_only=True)
class _User:
    """A user of groups: it enters them and has to leave them."""

    groups: list[ParamGroup] = field(default_factory=list)
    expert: AbstractContextManager[None] | None = None  # around the computation of one

    def leave_expert(self) -> None:
        if self.expert is not None:
            expert, self.expert = self.expert, None
            expert.__exit__(None, None, None)


@dataclass(slots=True, eq=False, kw_only=True)
class _Call(_User):
    """A module's call under way. The outermost one has the session and the strays."""

    module: nn.Module
    thread: int = field(default_factory=get_ident)
    session: Session | None = None
    experts: list[_User] = field(default_factory=list)  # within it
    unhooked: list[_Guard] = field(default_factory=list)  # inner modules, while it is compiled
