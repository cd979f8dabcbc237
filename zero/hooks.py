"""Module hooks: gather before a unit's forward, release after it.

The outermost unit being called opens a *session*: saved tensors become handles, and parameters that
are used outside their own module's forward (a tied head written as `F.linear(x, embed.weight)`,
attention that reads its projection's weight) are gathered when a torch function gets them and stay
until the session ends. In a backward pass (recomputation by a checkpoint) the handles stay off:
the recomputed tensors are the checkpoint's to hold, and they are needed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from offload.tiers.errors import StateError
from offload.zero.discovery import Unit
from offload.zero.group import GroupState, ParamGroup
from offload.zero.handles import HandleTable

# Reading these of a parameter needs no values.
_METADATA = frozenset(
    {
        "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "element_size",
        "ndimension", "nelement", "requires_grad_", "data_ptr", "is_contiguous", "__len__",
        "register_hook", "register_post_accumulate_grad_hook", "storage_offset", "is_same_size",
        "__hash__", "__repr__", "__deepcopy__", "get_device", "type",
    }
)  # fmt: skip
_VALUE_PROPERTIES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})


class UnitHooks:
    """The hooks of all units of one model. Not for use by several threads at once."""

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], groups: Sequence[ParamGroup],
        handles: HandleTable, use: Callable[[ParamGroup], None],
        written: Callable[[ParamGroup, list[int]], None],
    ) -> None:  # fmt: skip
        """`written` is told which parameters a forward wrote to (`nn.Embedding(max_norm=...)`)."""
        self._groups = groups
        self._written = written
        self._handles = handles
        self._use = use
        self._sessions: list[_Session | None] = []  # one entry per unit call under way
        self._group_of = {
            id(param): group for group in groups for param in group.params
            if not group.permanent
        }  # fmt: skip
        self._removable: list[RemovableHandle] = []
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
        entered: list[bool] = []

        def before(module: nn.Module, args: Any) -> None:
            entered.append(False)
            self._open_session()
            self._enter(groups)
            entered[-1] = True

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if entered.pop():
                for group in reversed(groups):
                    changed = group.changed()
                    if changed:
                        self._written(group, changed)
                    group.leave()
            self._close_session()

        module = unit.module
        self._removable.append(module.register_forward_pre_hook(before, prepend=True))
        self._removable.append(module.register_forward_hook(after, always_call=True))

    def _install_inner(self, unit: Unit, inner: nn.Module) -> None:
        """A module within a unit, called in backward on its own: a checkpoint around a part of the
        unit computes that part again, when the unit itself has been released."""
        groups = [self._groups[index] for index in unit.groups]
        entered: list[bool] = []

        def before(module: nn.Module, args: Any) -> None:
            alone = torch._C._current_graph_task_id() != -1 and not all(g.in_use for g in groups)
            entered.append(False)
            if alone:
                self._open_session()
                self._enter(groups)
                entered[-1] = True

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if entered and entered.pop():
                for group in reversed(groups):
                    group.leave()
                self._close_session()

        self._removable.append(inner.register_forward_pre_hook(before, prepend=True))
        self._removable.append(inner.register_forward_hook(after, always_call=True))

    def _enter(self, groups: Sequence[ParamGroup]) -> None:
        for count, group in enumerate(groups):
            try:
                self._use(group)
                group.enter()
                self._handles.note(group)
            except BaseException:
                for done in groups[:count]:
                    done.leave()
                raise

    @contextmanager
    def held(self, groups: Sequence[ParamGroup]) -> Iterator[None]:
        """`groups` are gathered and stay so inside."""
        self._enter(groups)
        try:
            yield
        finally:
            for group in reversed(groups):
                group.leave()

    def _open_session(self) -> None:
        outermost = not self._sessions
        self._sessions.append(None)
        if outermost:
            session = _Session(self._handles, self._gather_strays if self._group_of else None)
            self._sessions[0] = session

    def _close_session(self) -> None:
        session = self._sessions.pop()
        if session is not None:
            session.close()

    def _gather_strays(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, nn.Parameter):
                group = self._group_of.get(id(value))
                if group is not None and group.residing is GroupState.RELEASED:
                    self._adopt_stray(group)
            elif isinstance(value, (list, tuple)):
                self._gather_strays(value)

    def _adopt_stray(self, group: ParamGroup) -> None:
        session = self._sessions[0]
        assert session is not None, "a function mode without its session"
        self._enter([group])
        session.strays.append(group)

    def remove(self) -> None:
        for handle in self._removable:
            handle.remove()


def _inner_modules(units: Sequence[Unit]) -> Iterator[tuple[Unit, nn.Module]]:
    """Modules with parameters inside of a unit, each once, with the innermost unit around it."""
    seen = {id(unit.module) for unit in units}
    for unit in sorted(units, key=lambda unit: -unit.name.count(".") if unit.name else 1):
        for inner in unit.module.modules():
            if id(inner) not in seen and next(inner.parameters(), None) is not None:
                seen.add(id(inner))
                yield unit, inner


class _Session:
    """From the outermost unit's call to its return."""

    def __init__(
        self, handles: HandleTable, gather_strays: Callable[[Iterable[Any]], None] | None
    ) -> None:
        self.strays: list[ParamGroup] = []
        self._stack = ExitStack()
        in_backward = torch._C._current_graph_task_id() != -1
        self._stack.enter_context(handles.views() if in_backward else handles.hooks())
        if gather_strays is not None:
            self._stack.enter_context(_StrayMode(gather_strays))

    def close(self) -> None:
        self._stack.close()
        for group in self.strays:
            group.leave()


class _StrayMode(TorchFunctionMode):
    """Shows every torch function's arguments to `gather` before the function runs."""

    def __init__(self, gather: Callable[[Iterable[Any]], None]) -> None:
        super().__init__()
        self._gather = gather

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _reads_values(func):
            self._gather(args)
            if kwargs:
                self._gather(kwargs.values())
        return func(*args, **kwargs)


def _reads_values(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") in _VALUE_PROPERTIES  # type: ignore[attr-defined]
    return name not in _METADATA and name != "__set__"
