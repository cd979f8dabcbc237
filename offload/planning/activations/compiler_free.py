"""A trace compiles nothing, and importing torch's compiler takes longer than all of it.

torch imports parts of the compiler when a function is first called that it is not to look into
(checkpoints, references of kernels), to tell it so, or when a shape is checked, which may be a
symbol there. Where they are not imported anyway, empty modules in their places answer that;
whatever else is asked of them is answered by the real ones.
"""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

_TOLD = "__dynamo_disable"  # where torch keeps what it was given for a function


@contextmanager
def without_compiler() -> Iterator[None]:
    """Inside, torch's compiler is imported only where it is used. Afterwards all is as before.

    For code that imports no further part of torch: that part would keep what stands here.
    """
    with ExitStack() as stack:
        for kind in (_Dynamo, _SymbolicShapes, _Sympy, _SympyFunctions):
            if kind.NAME not in sys.modules:
                stack.callback(kind().remove)
        yield


@contextmanager
def without_dynamo() -> Iterator[None]:
    """As `without_compiler`, for code that torch may import its DTensors in (at the first tensor
    of a subclass, and symbolic shapes with them): only Dynamo, which these import nothing of, is
    left out."""
    with ExitStack() as stack:
        if _Dynamo.NAME not in sys.modules:
            stack.callback(_Dynamo().remove)
        yield


class _InItsPlace(ModuleType):
    """A module that gives way to the real one when it is asked for what it does not have."""

    NAME = ""

    def __init__(self) -> None:
        super().__init__(self.NAME)
        sys.modules[self.NAME] = self

    def __getattr__(self, name: str) -> Any:
        if name in ("__path__", "__spec__", "__file__"):
            raise AttributeError(name)
        self.remove()
        return getattr(importlib.import_module(self.NAME), name)

    def remove(self) -> None:
        if sys.modules.get(self.NAME) is self:
            del sys.modules[self.NAME]


class _Config:
    """Of the compiler; what checkpoints read has its default."""

    error_on_nested_fx_trace = True

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch._dynamo.config"), name)


class _Dynamo(_InItsPlace):
    NAME = "torch._dynamo"

    def __init__(self) -> None:
        super().__init__()
        self._told: list[Any] = []

        self.config = _Config()

    def disable(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._told.append(function)
        return function

    def remove(self) -> None:
        super().remove()
        for function in self._told:
            vars(function).pop(_TOLD, None)
        self._told.clear()


class _SymbolicShapes(_InItsPlace):
    """What kernels' references ask about sizes, all of which are numbers here."""

    NAME = "torch.fx.experimental.symbolic_shapes"

    def __init__(self) -> None:
        super().__init__()
        for name in (
            "expect_true", "guard_or_false", "guard_or_true", "statically_known_true",
            "guard_size_oblivious",
        ):  # fmt: skip
            setattr(self, name, bool)
        self.sym_eq = operator.eq
        self.sym_and = lambda *conditions: all(conditions)
        self.sym_or = lambda *conditions: any(conditions)
        self.is_nested_int = lambda number: False
        self.has_guarding_hint = self.has_hint = lambda number: True
        self.guarding_hint_or_throw = self.guard_int = lambda number: number
        self.size_hint = lambda number, fallback=None: number  # torch 2.11
        self.free_unbacked_symbols = lambda *values: frozenset[Any]()


class _Sympy(_InItsPlace):
    """No number is an expression."""

    NAME = "sympy"

    class Basic:
        pass


class _SympyFunctions(_InItsPlace):
    NAME = "torch.utils._sympy.functions"
    Max = staticmethod(max)
