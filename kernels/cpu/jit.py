"""The compilation of kernels: without the GIL, lazily, and kept on disk between runs.

Numba keeps compiled code beside the source, or in the user's cache folder where that one is
read-only, or in NUMBA_CACHE_DIR. It looks the code up by the source file of the compiled function
and by what that function closes over, and knows nothing of files that an intrinsic calls. So every
kernel here closes over a plan: an integer whose low bits say which variant to emit and whose high
bits are a digest of the emitting sources. A new version of those never runs old code.

Each variant has cache files of its own: Numba numbers those of one function in an index that it
changes without a lock, so of two variants that two processes compile at once, one would be kept
as the other, and later processes would run it.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

PLAN_BITS = 14  # beside 48 bits of digest: the sum fits an int64

Kernel = Callable[..., Any]
# Called with the types of the arguments: the signature of an intrinsic that only writes.
returns_nothing = types.void


def digest(source: str, *others: str) -> int:
    """48 bits of a digest over an emitting source file and the files it rests on.

    `others` are paths below `kernels/`; files that all emitters rest on are included anyway.
    """
    kernels = Path(__file__).parents[1]
    state = hashlib.sha256()
    names = ("cpu/jit.py", "cpu/lanes.py", "floats.py", *others)
    for path in (Path(source), *(kernels / name for name in names)):
        state.update(path.read_bytes())
    return int.from_bytes(state.digest()[:6], "big")


def plan(variant: int, sources_digest: int) -> int:
    """The integer that a kernel closes over."""
    assert 0 <= variant < 1 << PLAN_BITS
    return sources_digest << PLAN_BITS | variant


def variant_of(plan_type: types.Type) -> int | None:
    """The variant in a plan's Numba type; None unless the type is a literal, as Numba asks."""
    if not isinstance(plan_type, types.IntegerLiteral):
        return None
    return int(plan_type.literal_value) & ((1 << PLAN_BITS) - 1)


def compiled(function: Callable[..., Any], cache: bool = True) -> Kernel:
    """`function`, which closes over plans, compiled at its first call, cached where some folder can
    be written."""
    variants = (cell.cell_contents & ((1 << PLAN_BITS) - 1) for cell in function.__closure__ or ())
    function.__qualname__ += "".join(f"_{variant}" for variant in variants)
    try:
        return _njit(function, cache)
    except RuntimeError:  # no folder for the cache: compile in every process
        return _njit(function, cache=False)


# Emits the work of a variant on three arrays (their structures, with `data` and `nitems`), over a
# range of whatever its kernels count.
Emit = Callable[[ir.IRBuilder, int, Any, Any, Any], None]

_emitters: dict[int, Emit] = {}  # by the digest of their sources


def kernels_of(emit: Emit, sources_digest: int) -> Callable[[int], Kernel]:
    """A function of a variant, which returns kernel(a, b, c, lo, hi)."""
    _emitters[sources_digest] = emit

    @cache
    def kernel_of(variant: int) -> Kernel:
        made = plan(variant, sources_digest)

        def kernel(a, b, c, lo, hi):  # type: ignore[no-untyped-def]
            _emitted(made, a, b, c, lo, hi)

        kernel.__qualname__ = f"{emit.__module__}.{emit.__qualname__}"
        return compiled(kernel)

    return kernel_of


@intrinsic(prefer_literal=True)
def _emitted(typing, plan, a, b, c, lo, hi):  # type: ignore[no-untyped-def]
    variant = variant_of(plan)
    if variant is None:
        return None
    write = _emitters[int(plan.literal_value) >> PLAN_BITS]

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        arrays = [
            context.make_array(kind)(context, builder, arg)
            for kind, arg in zip(signature.args[1:4], args[1:4], strict=True)
        ]
        write(builder, variant, arrays, *integers(context, builder, signature, args, 4, 6))
        return context.get_dummy_value()

    return returns_nothing(plan, a, b, c, lo, hi), emit


def pointers(
    context: Any, builder: ir.IRBuilder, signature: Any, args: Any, first: int, end: int
) -> list[Any]:
    """Data pointers of the array arguments first .. end of an intrinsic."""
    return [
        context.make_array(signature.args[place])(context, builder, args[place]).data
        for place in range(first, end)
    ]


def integers(
    context: Any, builder: ir.IRBuilder, signature: Any, args: Any, first: int, end: int
) -> list[Any]:
    """The integer arguments first .. end of an intrinsic, as int64."""
    return [
        context.cast(builder, args[place], signature.args[place], types.int64)
        for place in range(first, end)
    ]


def _njit(function: Callable[..., Any], cache: bool) -> Kernel:
    options = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
    kernel: Kernel = njit(cache=cache, no_cfunc_wrapper=True, **options)(function)
    return kernel
