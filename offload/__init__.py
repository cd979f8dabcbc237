"""Train models whose states are larger than the GPU, or larger than RAM.

    import offload

    engine = offload.initialize(model, "offload.yaml")

Nothing heavy is imported until it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from offload.process import __version__ as __version__

if TYPE_CHECKING:
    from offload.config import OffloadConfig
    from offload.engine import Engine, initialize
    from offload.engine_lookup import engine_of
    from offload.errors import (
        BudgetError,
        CheckpointError,
        ChecksumError,
        ConfigError,
        IntegrityError,
        LowMemoryError,
        ModifiedError,
        NoCheckpointError,
        NonfiniteError,
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
    from offload.inference import Dispatched, dispatch, dispatched
    from offload.integrations.transformers.compress import compress
    from offload.integrations.transformers.pretrained import from_pretrained, open_pretrained

_HOME = {
    "Dispatched": "offload.inference",
    "Engine": "offload.engine",
    "compress": "offload.integrations.transformers.compress",
    "initialize": "offload.engine",
    "OffloadConfig": "offload.config",
    "BudgetError": "offload.errors",
    "CheckpointError": "offload.errors",
    "ChecksumError": "offload.errors",
    "ConfigError": "offload.errors",
    "IntegrityError": "offload.errors",
    "LowMemoryError": "offload.errors",
    "ModifiedError": "offload.errors",
    "NoCheckpointError": "offload.errors",
    "NoSpaceError": "offload.errors",
    "NonfiniteError": "offload.errors",
    "OffloadError": "offload.errors",
    "PathError": "offload.errors",
    "RankError": "offload.errors",
    "StateError": "offload.errors",
    "StorageError": "offload.errors",
    "StuckError": "offload.errors",
    "TierFullError": "offload.errors",
    "UnsupportedError": "offload.errors",
    "dispatch": "offload.inference",
    "dispatched": "offload.inference",
    "engine_of": "offload.engine_lookup",
    "from_pretrained": "offload.integrations.transformers.pretrained",
    "open_pretrained": "offload.integrations.transformers.pretrained",
}

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ChecksumError",
    "ConfigError",
    "Dispatched",
    "Engine",
    "IntegrityError",
    "LowMemoryError",
    "ModifiedError",
    "NoCheckpointError",
    "NoSpaceError",
    "NonfiniteError",
    "OffloadConfig",
    "OffloadError",
    "PathError",
    "RankError",
    "StateError",
    "StorageError",
    "StuckError",
    "TierFullError",
    "UnsupportedError",
    "__version__",
    "compress",
    "dispatch",
    "dispatched",
    "engine_of",
    "from_pretrained",
    "initialize",
    "open_pretrained",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'offload' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
