"""Every error a user can meet; the tree is described in `offload.tiers.errors`."""

from offload.tiers.errors import (
    BudgetError,
    CheckpointError,
    ChecksumError,
    ConfigError,
    DtypeError,
    IntegrityError,
    ModifiedError,
    NoSpaceError,
    OffloadError,
    PathError,
    RankError,
    StateError,
    StorageError,
    StuckError,
    TierFullError,
    UnsupportedError,
)

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ChecksumError",
    "ConfigError",
    "DtypeError",
    "IntegrityError",
    "ModifiedError",
    "NoSpaceError",
    "OffloadError",
    "PathError",
    "RankError",
    "StateError",
    "StorageError",
    "StuckError",
    "TierFullError",
    "UnsupportedError",
]
