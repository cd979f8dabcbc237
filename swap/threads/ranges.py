"""Named ranges for `torch.profiler`. While no profiler runs, only a flag is read.

The flag is the process's: `_profiler_enabled()` covers the calling thread only, and is False on
every one while a profiler records all of them. By default a profiler sees the thread that started
it, and backward; with `profile_all_threads` in its `experimental_config` it sees ours.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

_NOTHING = nullcontext()


@functools.cache
def _torch() -> Any:
    from torch.autograd import profiler  # memest plans with these modules and without it

    return profiler


def profiled(name: str) -> AbstractContextManager[Any]:
    """A context around a phase, which the profiler shows as `offload: NAME`."""
    profiler = _torch()
    if not profiler._is_profiler_enabled:
        return _NOTHING
    shown: AbstractContextManager[Any] = profiler.record_function(f"offload: {name}")
    return shown
