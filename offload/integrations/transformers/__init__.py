"""transformers: its Trainer through an engine, models of its folders, and text that they generate.

    from offload.integrations.transformers import OffloadTrainer

trainer        OffloadTrainer, OffloadMixin; its optimizer, arguments and callback
pretrained     models from a folder that are never whole in RAM; loading into one, saving from one
hub_format     names and conversions of files on the hub; folders quantized to 8 and 4 bits
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload.integrations.transformers.trainer import OffloadMixin, OffloadTrainer
    from offload.integrations.transformers.trainer_watch import WatchCallback

__all__ = ["OffloadMixin", "OffloadTrainer", "WatchCallback"]


def __getattr__(name: str) -> Any:
    """Import Trainer when one of these names is asked for: models need none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("offload.integrations.transformers.trainer"), name)
