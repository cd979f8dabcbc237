"""Anonymous memory of this process. Without PyTorch, which planning does without."""

import logging
import mmap
from typing import Self

_log = logging.getLogger("offload")
_MAP_NORESERVE = 0x4000  # Linux; the mmap module names it from Python 3.13 on


class AnonymousMemory(mmap.mmap):
    """Address space of `nbytes`, at least a page, private and in huge pages where the kernel has
    them; a page costs RAM when it is first touched. What Python's `mmap` maps without flags is
    shared, and its pages are small: a disk that is read into them reaches a third of its speed.

    OSError if the address space is too small.
    """

    def __new__(cls, nbytes: int) -> Self:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        return super().__new__(cls, -1, max(nbytes, mmap.PAGESIZE), flags=flags)

    def __init__(self, nbytes: int) -> None:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.advise(mmap.MADV_HUGEPAGE, "huge pages")

    def advise(self, advice: int, what: str) -> bool:
        """Give the kernel advice on all pages; False if the kernel does not support it."""
        try:
            self.madvise(advice)
        except OSError as error:
            _log.debug("not advised, %s: %s", what, error)
            return False
        return True
