"""Pickles as data, by a machine that knows no function and no class: nothing can be run by one.

A pickle is a program for a machine with a stack. GLOBAL looks a function up in a module, REDUCE
calls it. Here the first makes a `Named`, which is two texts, and the second a `Made`, which notes
what would have been called with what. The reader looks for those it knows:

    torch.Size((3, 4))     Made(Named("torch", "Size"), ((3, 4),))

What comes of a pickle is bounded by its bytes. It may hold itself, and one list a thousand times:
following it needs a bound of its own (`Walk`). Opcodes that Python's pickle does not write by
itself since 2003 are unknown.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MOST_NBYTES = 64 << 20
MOST_OPCODES = 5_000_000  # with 100 bytes each, 500 MB
MOST_VALUES = 500_000  # that are no part of the metadata: numbers, names
MOST_DEPTH = 64
_MOST_NAME = 1000
_KEYS = (str, bytes, int, bool, type(None))
_MOST_KEY = 1 << 60  # beyond, millions of numbers may share one hash


@dataclass(eq=False, slots=True)
class Named:
    """A name that a pickle would have imported."""

    module: str
    name: str

    @property
    def path(self) -> tuple[str, str]:
        return self.module, self.name

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"[:120]


@dataclass(eq=False, slots=True)
class Made:
    """An object that a pickle would have made by a call, with the state put into it afterwards."""

    function: Any
    arguments: Any
    state: Any = None
    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def is_of(self, *paths: tuple[str, str]) -> bool:
        return isinstance(self.function, Named) and self.function.path in paths


@dataclass(eq=False, slots=True)
class Persistent:
    """A reference of a pickle to data kept beside it."""

    key: Any


def load(raw: bytes) -> Any:
    """The value that `raw` describes. ValueError for an incomplete pickle, or one too large."""
    check_nbytes(len(raw))
    machine, file = _Machine(), io.BytesIO(raw)
    for _ in range(MOST_OPCODES):
        code = file.read(1)
        opcode = _OPCODES.get(code)
        if opcode is None:
            raise ValueError(f"it has the opcode {code!r}, which is not read")
        if opcode.name == "STOP":
            return machine.pop()
        machine.do(opcode.name, _argument(opcode, file))
    raise ValueError(f"it has more than {MOST_OPCODES:,} opcodes")


def _argument(opcode: pickletools.OpcodeInfo, file: io.BytesIO) -> Any:
    if opcode.name == "GLOBAL":  # pickletools' own reader minds escapes, which there are none of
        return " ".join(file.readline(_MOST_NAME).decode().removesuffix("\n") for _ in range(2))
    return None if opcode.arg is None else opcode.arg.reader(file)


def check_nbytes(nbytes: int) -> None:
    """Raise ValueError for a pickle that is too long to be read."""
    if nbytes > MOST_NBYTES:
        raise ValueError(f"{nbytes:,} bytes are more than the {MOST_NBYTES:,} that any has")


_MARK = object()


class _Machine:
    """The stack and the memory of a pickle. ValueError for what does not fit."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def do(self, name: str, argument: Any) -> None:
        if name in _PUSHED:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name]())
        elif name in _ACTIONS:
            _ACTIONS[name](self, argument)

    def pop(self, kind: type | tuple[type, ...] = object) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise ValueError("its stack is empty too early")
        found = self._stack.pop()
        if not isinstance(found, kind):
            raise ValueError(f"it uses a {type(found).__name__} as something else")
        return found

    def _top(self) -> Any:
        found = self.pop()
        self._stack.append(found)
        return found

    def _marked(self) -> list[Any]:
        """The values pushed since the last mark, taken off the stack."""
        for at in range(len(self._stack) - 1, -1, -1):
            if self._stack[at] is _MARK:
                found = self._stack[at + 1 :]
                del self._stack[at:]
                return found
        raise ValueError("it has no mark")

    def mark(self, _: Any) -> None:
        self._stack.append(_MARK)

    def memoize(self, place: int | None) -> None:
        self._memo[len(self._memo) if place is None else place] = self._top()

    def recall(self, place: int) -> None:
        if place not in self._memo:
            raise ValueError("it recalls what it has not noted")
        self._stack.append(self._memo[place])

    def tuple_of(self, count: int) -> None:
        self._stack.append(tuple(reversed([self.pop() for _ in range(count)])))

    def marked_tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._marked()))

    # ---------------------------------------------------------------- containers
    def append(self, _: Any) -> None:
        self._extend([self.pop()])

    def appends(self, _: Any) -> None:
        self._extend(self._marked())

    def _extend(self, values: list[Any]) -> None:
        into = self.pop(list)
        into.extend(values)
        self._stack.append(into)

    def set_item(self, _: Any) -> None:
        value = self.pop()
        self._set([self.pop(), value])

    def set_items(self, _: Any) -> None:
        self._set(self._marked())

    def _set(self, flat: list[Any]) -> None:
        if len(flat) % 2:
            raise ValueError("it has a key without a value")
        into = self.pop((dict, Made))
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            if isinstance(into, Made):  # an OrderedDict
                into.pairs.append((key, value))
            else:
                into[_checked(key)] = value
        self._stack.append(into)

    # ---------------------------------------------------------------- objects
    def named(self, text: str) -> None:
        module, _, name = text.partition(" ")
        self._stack.append(Named(module, name))

    def stack_named(self, _: Any) -> None:
        name = self.pop(str)
        self._stack.append(Named(self.pop(str), name))

    def make(self, _: Any) -> None:
        arguments = self.pop(tuple)
        self._stack.append(Made(self.pop(Named), arguments))

    def make_with_keys(self, _: Any) -> None:
        keys, arguments = self.pop(dict), self.pop(tuple)
        self._stack.append(Made(self.pop(Named), (arguments, keys)))

    def build(self, _: Any) -> None:
        state = self.pop()
        made = self.pop(Made)
        made.state = state
        self._stack.append(made)

    def persistent(self, _: Any) -> None:
        self._stack.append(Persistent(self.pop()))


def _checked(key: Any) -> Any:
    """A checked dictionary key. Others may take for ever to hash: tuples of one tuple twice."""
    if isinstance(key, Made | Named):
        return key  # each is equal to itself alone
    if not isinstance(key, _KEYS) or (isinstance(key, int) and abs(key) > _MOST_KEY):
        raise ValueError(f"it has a {type(key).__name__} as a key, which is not read")
    return key


_PUSHED = frozenset({
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE",
    "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
})  # fmt: skip
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict,
}  # fmt: skip
_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark, "MEMOIZE": _Machine.memoize, "BINPUT": _Machine.memoize,
    "LONG_BINPUT": _Machine.memoize, "BINGET": _Machine.recall, "LONG_BINGET": _Machine.recall,
    "TUPLE": _Machine.marked_tuple, "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "APPEND": _Machine.append, "APPENDS": _Machine.appends, "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items, "GLOBAL": _Machine.named, "STACK_GLOBAL": _Machine.stack_named,
    "REDUCE": _Machine.make, "NEWOBJ": _Machine.make, "NEWOBJ_EX": _Machine.make_with_keys,
    "BUILD": _Machine.build, "BINPERSID": _Machine.persistent,
}  # fmt: skip

_SAY_NOTHING = ("PROTO", "FRAME", "STOP")
_OPCODES = {
    opcode.code.encode("latin-1"): opcode
    for opcode in pickletools.opcodes
    if opcode.name in {*_PUSHED, *_CONSTANTS, *_ACTIONS, *_SAY_NOTHING}
}


class Walk:
    """Follows what a pickle describes, to make plain values of it: how much and how deep is
    bounded. `of(made)` returns the value of a `Made` or `Named`; ValueError for an unknown one."""

    def __init__(self, of: Callable[[Any, Walk], Any]) -> None:
        self._of = of
        self._left = MOST_VALUES
        self._depth = 0

    def plain(self, value: Any) -> Any:
        """The plain value of `value`, or ValueError. A list that is there twice becomes two."""
        self._left -= 1
        if self._left < 0 or self._depth > MOST_DEPTH:
            raise ValueError("it holds itself, or more than can be followed")
        self._depth += 1
        try:
            if isinstance(value, list | tuple):
                return type(value)(self.plain(each) for each in value)
            if isinstance(value, dict):
                return dict(self.pairs(value.items()))
            if isinstance(value, Made | Named | Persistent):
                return self._of(value, self)
            return value
        finally:
            self._depth -= 1

    def pairs(self, found: Any) -> Iterator[tuple[Any, Any]]:
        for key, value in found:
            yield _checked(key), self.plain(value)
