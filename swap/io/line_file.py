"""Lines added to a file while training goes on: the model does not wait for a disk that swapping
keeps busy.

An event loop on a thread of its own writes them, in order (aiofiles): those of a tenth of a second
together, because that takes as long as a step of a small model. An error there is raised at the
next call.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import aiofiles

from offload.swap.threads.shield import uninterrupted
from offload.tiers.errors import StateError

_GATHER_S = 0.1


class LineFile:
    """Adds lines to one text file, in order. For one thread; has to be closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._turn = asyncio.Lock()  # gives way in the order of asking
        self._under_way: list[Future[None]] = []
        self._lines: list[str] = []  # that no write has taken yet
        self._taking = threading.Lock()  # ... and for their first one a write is on its way
        self._hurry = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="offload-lines", daemon=True
        )
        self._thread.start()

    @uninterrupted  # a line without a write on its way would hold up all that follow
    def append(self, line: str) -> None:
        """Write `line` soon. OSError where an earlier line could not be written."""
        if self._loop.is_closed():
            raise StateError(f"{self.path} is closed: no line can be added to it")
        self._finish([future for future in self._under_way if future.done()])
        with self._taking:
            self._lines.append(line)
            is_first = len(self._lines) == 1
        if is_first:
            self._under_way.append(asyncio.run_coroutine_threadsafe(self._write(), self._loop))

    def flush(self) -> None:
        """Wait until all lines are in the file. OSError where one could not be written."""
        self._loop.call_soon_threadsafe(self._hurry.set)
        try:
            self._finish(list(self._under_way))
        finally:
            self._loop.call_soon_threadsafe(self._hurry.clear)

    def close(self) -> None:
        """Call `flush`, and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        try:
            self.flush()
        finally:
            ended = self._loop.shutdown_default_executor()
            asyncio.run_coroutine_threadsafe(ended, self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _finish(self, futures: list[Future[None]]) -> None:
        for future in futures:
            self._under_way.remove(future)
            future.result()

    async def _write(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), _GATHER_S)
        with self._taking:
            lines, self._lines = self._lines, []
        async with self._turn, aiofiles.open(self.path, "a", encoding="utf-8") as file:
            await file.write("".join(f"{line}\n" for line in lines))
