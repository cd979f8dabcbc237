"""The error tree. Every error a user can meet is an `OffloadError`:

    OffloadError
    ├── ConfigError             a key, value or combination of the configuration (exit code 2)
    │   └── PathError           a path that is missing, not writable, full or unsafe
    ├── BudgetError             a byte budget that cannot work
    │   └── TierFullError       ... found out while running
    ├── StorageError            a read or write that failed: path, offset, bytes, errno
    │   ├── NoSpaceError        ... because the device is full
    │   ├── StuckError          ... because the device does not answer
    │   └── ChecksumError       ... because what was read is not what was written
    ├── CheckpointError         a checkpoint that is missing, torn or of another model
    │   └── NoCheckpointError   ... or what was named is none at all; a PathError, too
    ├── UnsupportedError        a combination that does not work (yet)
    ├── StateError              calls in an order that cannot work
    │   └── ModifiedError       ... what backward needs was changed in place; a RuntimeError, too
    ├── NonfiniteError          steps in a row were skipped for infinite or NaN gradients
    ├── RankError               a collective that failed: of what, and which ranks are missing
    └── IntegrityError          the runtime's accounting is wrong: a bug, please report it

Each message says what, which, how much and what to do.
"""

from offload.tiers.units import format_bytes, in_one_unit

__all__ = [
    "BudgetError", "CheckpointError", "ChecksumError", "ConfigError", "IntegrityError",
    "ModifiedError", "NoCheckpointError", "NoSpaceError", "NonfiniteError",
    "OffloadError", "PathError", "RankError", "StateError", "StorageError", "StuckError",
    "TierFullError", "UnsupportedError",
]  # fmt: skip


class OffloadError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(OffloadError):
    """A key, value or combination of the configuration cannot be used."""


class PathError(ConfigError):
    """A path is missing, not writable, full, or open to other users."""


class BudgetError(OffloadError):
    """A byte budget cannot hold what has to be in it."""


class TierFullError(BudgetError):
    """A tier has no room left for a lease or an extent.

    `tier` and `owner` (what needs the room) are names; `needed_nbytes`, `free_nbytes` and
    `budget_nbytes` bytes.
    """

    def __init__(
        self, tier: str, owner: str, needed_nbytes: int, free_nbytes: int, budget_nbytes: int,
        remedy: str,
    ) -> None:  # fmt: skip
        self.tier = tier
        self.owner = owner
        self.needed_nbytes = needed_nbytes
        self.free_nbytes = free_nbytes
        self.budget_nbytes = budget_nbytes
        needed, free = in_one_unit(needed_nbytes, free_nbytes)
        super().__init__(
            f"{tier} tier full: {owner} needs {needed}, {free} of {format_bytes(budget_nbytes)} "
            f"free; {remedy}"
        )


class StorageError(OffloadError):
    """A read or write of a swap file or checkpoint failed.

    `path`, `offset_bytes` and `nbytes` say which, `errno` is the system's number, or None.
    """

    def __init__(
        self, message: str, *, path: str = "", offset_bytes: int = 0, nbytes: int = 0,
        errno: int | None = None,
    ) -> None:  # fmt: skip
        self.path = path
        self.offset_bytes = offset_bytes
        self.nbytes = nbytes
        self.errno = errno
        super().__init__(message)


class NoSpaceError(StorageError):
    """The file system has no room left (ENOSPC, EDQUOT)."""


class StuckError(StorageError):
    """Nothing has ended on a path for a long time. `seconds`: how long the call has taken that is
    named; it may return yet, and its memory is not used again."""

    def __init__(
        self, message: str, *, path: str = "", offset_bytes: int = 0, nbytes: int = 0,
        seconds: float = 0.0,
    ) -> None:  # fmt: skip
        self.seconds = seconds
        super().__init__(message, path=path, offset_bytes=offset_bytes, nbytes=nbytes)


class ChecksumError(StorageError):
    """A block read back differs from the block that was written."""


class CheckpointError(OffloadError):
    """A checkpoint is missing, incomplete, damaged or made for another model."""


class NoCheckpointError(CheckpointError, PathError):
    """The path that was named as a checkpoint does not exist, or is something else."""


class UnsupportedError(OffloadError):
    """A combination that is not supported; the message names it and the way round."""


class StateError(OffloadError):
    """A call at a moment when it cannot work (closed engine, missing backward, ...)."""


class ModifiedError(StateError, RuntimeError):
    """A value that backward needs was changed in place. Torch raises a RuntimeError, too."""


class NonfiniteError(OffloadError):
    """Too many steps in a row were skipped for training to continue (`max_skipped_steps`).

    `skipped_steps` were skipped in a row; `parameters` had non-finite gradients in the last one, in
    the model's order. Nothing is lost: states are as they were before those steps.
    """

    def __init__(self, message: str, *, skipped_steps: int, parameters: tuple[str, ...]) -> None:
        self.skipped_steps = skipped_steps
        self.parameters = parameters
        super().__init__(message)


class RankError(OffloadError):
    """A collective of several ranks did not end, or failed.

    `ranks` are missing, behind, or diverged; empty where that is not known.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        self.ranks = ranks
        super().__init__(message)


class IntegrityError(OffloadError):
    """The ledger does not balance. Never the user's fault."""
