"""Linux native asynchronous I/O by way of the `libaio` package (`pip install offload[aio]`).

The threads of `ThreadsBackend`, each of which submits its piece to the kernel and waits for its
completion there, instead of calling `preadv` or `pwritev`.
"""

import errno
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from offload.swap.io.io_backend import IO_BLOCK_NBYTES
from offload.swap.io.io_watch import TIMEOUT_S
from offload.swap.io.threads_backend import WORKERS, ThreadsBackend
from offload.tiers.errors import UnsupportedError


def import_libaio() -> Any:
    """Import the `libaio` module. Raises UnsupportedError saying what is missing."""
    try:
        import libaio
    except ImportError as error:
        raise UnsupportedError(
            f"nvme.backend: libaio is not installed ({error}); pip install 'offload[aio]', or set "
            "nvme.backend: threads, which is as fast"
        ) from error
    except OSError as error:  # the package is there, the system library is not
        raise UnsupportedError(
            f"nvme.backend: the system library libaio is missing ({error}); install libaio1 "
            "(Debian: libaio1t64), or set nvme.backend: threads, which is as fast"
        ) from error
    return libaio


class LibaioBackend(ThreadsBackend):
    """`workers` requests in the kernel at a time, each in a context of its own."""

    name = "libaio"

    def __init__(
        self, *, workers: int = WORKERS, io_block_nbytes: int = IO_BLOCK_NBYTES,
        timeout_s: float = TIMEOUT_S,
    ) -> None:  # fmt: skip
        """Raises UnsupportedError if the package, the library or kernel contexts are missing."""
        self._libaio = aio = import_libaio()
        self._contexts = [self._open_context() for _ in range(workers)]  # those that no thread uses
        super().__init__(
            workers=workers, io_block_nbytes=io_block_nbytes, timeout_s=timeout_s,
            preadv=partial(self._move_block, aio.AIOBLOCK_MODE_READ),
            pwritev=partial(self._move_block, aio.AIOBLOCK_MODE_WRITE),
        )  # fmt: skip

    def _open_context(self) -> Any:
        try:
            return self._libaio.AIOContext(1)
        except OSError as error:
            raise UnsupportedError(
                f"nvme.backend: libaio cannot have another kernel request ({_reason(error)}); "
                "raise /proc/sys/fs/aio-max-nr, or set nvme.backend: threads"
            ) from error

    def _move_block(
        self, mode: Any, fd: int, buffers: Sequence[memoryview], offset_bytes: int
    ) -> int:
        """Submit one block and wait for it. Returns the number of bytes moved, raises OSError.

        A context that does not return its block stays with the thread that waits for it: to destroy
        it would wait for the block, too.
        """
        context = self._contexts.pop()
        block = self._libaio.AIOBlock(mode, fd, list(buffers), offset_bytes)
        try:
            context.submit([block])
        except OSError as error:
            self._contexts.append(context)
            raise OSError(error.errno, _reason(error)) from error
        result = _await_block(context)
        self._contexts.append(context)
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result

    def _stop(self) -> None:
        super()._stop()
        for context in self._contexts:
            context.close()


def _await_block(context: Any) -> int:
    """The result of the block that is in the context: bytes, or -errno."""
    while True:
        try:
            ((_, result, _),) = context.getEvents(1, 1)
        except OSError as error:
            if error.errno != errno.EINTR:
                raise
        else:
            return int(result)


def _reason(error: OSError) -> str:
    """The kernel's words for an error of libaio, which has the function's name instead."""
    return os.strerror(abs(error.errno or 0))
