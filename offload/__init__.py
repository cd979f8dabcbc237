"""Train models whose states are larger than the GPU, or larger than RAM.

    import offload

    engine = offload.initialize(model, "offload.yaml")

Nothing heavy is imported until it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from offload.process import __version__ as __version__
from offload.tiers import errors as _errors
from offload.tiers.errors import *  # noqa: F403

if TYPE_CHECKING:
    from offload.config import OffloadConfig
    from offload.engine import Engine, initialize
    from offload.engine_lookup import engine_of
    from offload.inference import Dispatched, dispatch, dispatched
    from offload.integrations.transformers.compress import compress
    from offload.integrations.transformers.pretrained import from_pretrained, open_pretrained

_HOME = {
    "Dispatched": "offload.inference",
    "Engine": "offload.engine",
    "compress": "offload.integrations.transformers.compress",
    "initialize": "offload.engine",
    "OffloadConfig": "offload.config",
    "dispatch": "offload.inference",
    "dispatched": "offload.inference",
    "engine_of": "offload.engine_lookup",
    "from_pretrained": "offload.integrations.transformers.pretrained",
    "open_pretrained": "offload.integrations.transformers.pretrained",
}

__all__ = [
    "Dispatched",
    "Engine",
    "OffloadConfig",
    "__version__",
    "compress",
    "dispatch",
    "dispatched",
    "engine_of",
    "from_pretrained",
    "initialize",
    "open_pretrained",
]
__all__ += _errors.__all__


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'offload' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
