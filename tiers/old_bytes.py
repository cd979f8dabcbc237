"""The bytes needed to go back behind an update that no step has decided yet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OldBytes:
    """Bytes of versions from before an update on trial, where they are kept."""

    files: int = 0
    memory: int = 0  # of the host

    def __add__(self, other: OldBytes) -> OldBytes:
        return OldBytes(self.files + other.files, self.memory + other.memory)

    def __sub__(self, other: OldBytes) -> OldBytes:
        return OldBytes(self.files - other.files, self.memory - other.memory)

    def holds(self, other: OldBytes) -> bool:
        """Whether these bytes are enough for `other`."""
        return other.files <= self.files and other.memory <= self.memory
