"""Tracing without importing torch's compiler, whose import takes longer than a whole trace.

torch imports parts of its compiler at the first call of a function that the compiler must skip
(checkpoints, reference kernels), to register it, and when a shape, which may be symbolic, is
checked. Unless these modules are imported already, empty stand-ins answer such calls; everything
else that is requested of them comes from the real modules.
"""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

_TOLD = "__dynamo_disable"  # where torch keeps what it was given for a function


@contextmanager
def without_compiler() -> Iterator[None]:
    """Keep torch's compiler from being imported inside, unless it is used; restore all afterwards.

    The code inside must not import further parts of torch: they would keep the stand-ins.
    """
    with ExitStack() as stack:
        for kind in (_Dynamo, _SymbolicShapes, _Sympy, _SympyFunctions):
            if kind.NAME not in sys.modules:
                stack.callback(kind().remove)
        yield


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Like `without_compiler`, but replace only Dynamo, in code for which torch may import DTensor
    (at the first tensor of a subclass) and symbolic shapes, which import nothing of Dynamo."""
    with ExitStack() as stack:
        if _Dynamo.NAME not in sys.modules:
            stack.callback(_Dynamo().remove)
        yield


class _InItsPlace(ModuleType):
    """A stand-in for a module, replaced by the real one when an attribute that it lacks is
    accessed."""

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


class _Dynamo(_InItsPlace):
    NAME = "torch._dynamo"

    def __init__(self) -> None:
        super().__init__()
        self._told: list[Any] = []
        self.config = SimpleNamespace(error_on_nested_fx_trace=True)  # what checkpoints read

    def disable(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._told.append(function)
        return function

    def remove(self) -> None:
        super().remove()
        for function in self._told:
            vars(function).pop(_TOLD, None)
        self._told.clear()


class _SymbolicShapes(_InItsPlace):
    """Stand-ins for the functions by which reference kernels query sizes, here all numbers."""

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
    """Stand-in for sympy, in which no number is an expression."""

    NAME = "sympy"

    class Basic:
        pass


class _SympyFunctions(_InItsPlace):
    NAME = "torch.utils._sympy.functions"
    Max = staticmethod(max)
