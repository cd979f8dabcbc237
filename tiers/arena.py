"""An exact-size allocator of one address range (best fit, neighbours coalesce).

Sizes are rounded to a page and never to a power of two: a caching allocator's size classes can
waste up to half of a pinned pool. Models repeat a few sizes, so best fit refills its own holes.
"""

import bisect

from offload.tiers.tier import PAGE_NBYTES
from offload.tiers.units import round_up


class Arena:
    """Offsets in `[0, nbytes)`. Holds no memory, is not thread-safe."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // PAGE_NBYTES * PAGE_NBYTES
        self._free_offsets: list[int] = [0] if self.nbytes else []  # sorted
        self._free_sizes: dict[int, int] = {0: self.nbytes} if self.nbytes else {}
        self._used: dict[int, int] = {}
        self.used_nbytes = 0
        self.high_water_nbytes = 0  # end of the highest range ever used

    @property
    def largest_free_nbytes(self) -> int:
        return max(self._free_sizes.values(), default=0)

    def allocate(self, nbytes: int, end: int | None = None) -> int | None:
        """The offset of a free range of at least `nbytes` (at least one page) that ends at `end`
        at the latest, or None."""
        size = round_up(max(nbytes, 1), PAGE_NBYTES)
        last = self.nbytes - size if end is None else end - size
        best: int | None = None
        for offset in self._free_offsets:
            if offset > last:
                break
            hole = self._free_sizes[offset]
            if hole >= size and (best is None or hole < self._free_sizes[best]):
                best = offset
        if best is None:
            return None
        self._take(best, size)
        return best

    def _take(self, offset: int, size: int) -> None:
        hole = self._free_sizes.pop(offset)
        index = bisect.bisect_left(self._free_offsets, offset)
        if hole == size:
            del self._free_offsets[index]
        else:
            self._free_offsets[index] = offset + size
            self._free_sizes[offset + size] = hole - size
        self._used[offset] = size
        self.used_nbytes += size
        self.high_water_nbytes = max(self.high_water_nbytes, offset + size)

    def free_ranges(self) -> list[tuple[int, int]]:
        """The start and stop of each free range, in order."""
        return [(start, start + self._free_sizes[start]) for start in self._free_offsets]

    def is_free(self, start: int, stop: int) -> bool:
        before = bisect.bisect_right(self._free_offsets, start) - 1
        if before < 0:
            return False
        offset = self._free_offsets[before]
        return stop <= offset + self._free_sizes[offset]

    def size_of(self, offset: int) -> int:
        """Bytes of the range allocated at `offset`. KeyError if there is none."""
        return self._used[offset]

    def free(self, offset: int) -> int:
        """Give a range back; returns its size. KeyError if it was not allocated."""
        size = self._used.pop(offset)
        self.used_nbytes -= size
        index = bisect.bisect_left(self._free_offsets, offset)
        start, end = offset, offset + size
        if index < len(self._free_offsets) and self._free_offsets[index] == end:
            end += self._free_sizes.pop(self._free_offsets.pop(index))
        if index > 0:
            before = self._free_offsets[index - 1]
            if before + self._free_sizes[before] == start:
                start = before
                del self._free_offsets[index - 1]
                index -= 1
        self._free_offsets.insert(index, start)
        self._free_sizes[start] = end - start
        return size

    def check(self) -> None:
        """Raise ValueError unless used and free ranges tile the arena exactly."""
        ranges = sorted([*self._used.items(), *self._free_sizes.items()])
        position = 0
        for offset, size in ranges:
            if offset != position:
                raise ValueError(f"arena: gap or overlap at {position}, next range at {offset}")
            position = offset + size
        if position != self.nbytes:
            raise ValueError(f"arena: ranges end at {position}, arena at {self.nbytes}")
        if sum(self._used.values()) != self.used_nbytes:
            raise ValueError("arena: used bytes do not add up")
