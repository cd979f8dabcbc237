"""The memory bus: a loop with given traffic and nothing that takes time besides.

Like STREAM (McCalpin, 1995), but over any number of arrays of any widths at once, some read and
some read and written back, as an optimizer's pass over its states does. Written in C and compiled
here.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import numpy as np

from offload.bench.record import seconds_of
from offload.planning.machine.optimizer_variants import PLAIN, SPLIT, Array, Arrays, Stream
from offload.swap.threads.worker import ParallelRunner
from offload.tiers.errors import UnsupportedError

GROUP = 64  # parameters per turn of the loop: whole cache lines of every array, 1-byte ones too
_LINE_NBYTES = 64
_COMPILE_TIMEOUT_S = 60.0

# z is zero, which the compiler cannot know: the values stay, the traffic and one operation too.
_SOURCE = """
typedef unsigned long long V __attribute__((vector_size(64), aligned(64)));
void bus(char *const *a, long lo, long hi, const V *zero, V *sink) {{
  const V z = *zero; V t = z;
{pointers}
  for (long i = lo; i < hi; i++) {{
{body}
  }}
  *sink = t;
}}
"""


class BusLoop:
    """One pass over `arrays`, shared among the runner's threads as an optimizer's pass is."""

    def __init__(
        self, streams: Sequence[Stream], arrays: Sequence[Array], runner: ParallelRunner
    ) -> None:
        self._runner = runner
        # Side streams, such as one scale per 256 parameters, are a thousandth: left out.
        wide = [
            (stream, array)
            for stream, array in zip(streams, arrays, strict=True)
            if stream.elements_each == 1
        ]
        self.traffic = sum(stream.traffic for stream, _ in wide)  # bytes per parameter
        self._kept = [array for _, array in wide]  # alive as long as their addresses are used
        self._groups = self._kept[0].size // GROUP
        self._addresses = (ctypes.c_void_p * len(wide))(*(a.ctypes.data for a in self._kept))
        self._zero = _line()
        widths = tuple(stream.itemsize for stream, _ in wide)
        updated = tuple(stream.updated for stream, _ in wide)
        self._function = _compiled(widths, updated)

    @property
    def nbytes(self) -> float:
        """Bytes of one pass."""
        return self.traffic * self._groups * GROUP

    def __call__(self) -> None:
        self._runner(self._pass, self._groups)

    def _pass(self, lo: int, hi: int) -> None:
        sink = _line()
        self._function(self._addresses, lo, hi, self._zero.ctypes.data, sink.ctypes.data)

    def speed(self) -> float:
        """Measure the bytes per second of one pass."""
        return self.nbytes / seconds_of(self)


def optimizer_loop(precision: str, numel: int, threads: int, opened: ExitStack) -> BusLoop:
    """Return a loop with the traffic of the optimizer that a precision calls for, over `numel`
    parameters; its threads are closed with `opened`. Blocks for a second."""
    streams = (PLAIN if precision == "fp32" else SPLIT).streams
    arrays = Arrays(numel, streams)
    runner = ParallelRunner(threads, min_share=1)
    opened.callback(runner.close)
    return BusLoop(streams, [arrays[stream] for stream in streams], runner)


def _line() -> Array:
    """64 zeroed bytes on a cache line's boundary."""
    raw = np.zeros(2 * _LINE_NBYTES, np.uint8)
    start = -raw.ctypes.data % _LINE_NBYTES
    return raw[start : start + _LINE_NBYTES]


@cache
def _compiled(widths: tuple[int, ...], updated: tuple[bool, ...]) -> Callable[..., None]:
    """The C loop for arrays of these bytes per parameter. UnsupportedError without a compiler."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None or shutil.which(compiler) is None:
        raise UnsupportedError(
            "the memory bus is measured by a loop in C, and no C compiler was found: install gcc, "
            "or name a compiler in the variable CC"
        )
    with tempfile.TemporaryDirectory(prefix="offload-bench-") as folder:
        source, library = Path(folder) / "bus.c", Path(folder) / "bus.so"
        source.write_text(_source(widths, updated))
        command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", str(source)]
        done = subprocess.run(
            [*command, "-o", str(library)], capture_output=True, check=False,
            timeout=_COMPILE_TIMEOUT_S,
        )  # fmt: skip
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip()[-400:]
            raise UnsupportedError(f"{compiler} does not compile the loop for the bus: {said}")
        function = ctypes.CDLL(str(library)).bus  # stays loaded when the file is gone
    function.argtypes = (
        ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p,
    )  # fmt: skip
    function.restype = None
    called: Callable[..., None] = function
    return called


def _source(widths: Sequence[int], updated: Sequence[bool]) -> str:
    pointers, body = [], []
    for index, (width, both) in enumerate(zip(widths, updated, strict=True)):
        const = "" if both else "const "
        pointers.append(f"  {const}V *p{index} = ({const}V *)a[{index}];")
        for line in range(width * GROUP // _LINE_NBYTES):
            at = f"p{index}[i * {width * GROUP // _LINE_NBYTES} + {line}]"
            body.append(f"    {at} ^= z;" if both else f"    t ^= {at};")
    return _SOURCE.format(pointers="\n".join(pointers), body="\n".join(body))
