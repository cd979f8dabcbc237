"""DeepSpeed's interface over an offload engine: `import offload.deepspeed as deepspeed`.

    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config="ds_config.json"
    )
    for batch in loader:
        engine.backward(engine(batch))
        engine.step()

`deepspeed.zero`, `.utils`, `.comm`, `.accelerator` and `.ops.adam` have what such loops use.
docs/deepspeed.md lists it, and says what the keys of a configuration become.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload.deepspeed.comm import init_distributed
    from offload.deepspeed.engine import EngineModule as DeepSpeedEngine
    from offload.deepspeed.start import add_config_arguments, initialize
    from offload.deepspeed.utils import log_dist, logger

_MODULES = {"zero", "utils", "comm", "accelerator", "ops"}
_HOME = {
    "initialize": ("start", "initialize"),
    "DeepSpeedEngine": ("engine", "EngineModule"),
    "init_distributed": ("comm", "init_distributed"),
    "add_config_arguments": ("start", "add_config_arguments"),
    "get_accelerator": ("accelerator", "get_accelerator"),
    "log_dist": ("utils", "log_dist"),
    "logger": ("utils", "logger"),
}

__all__ = [
    "DeepSpeedEngine", "add_config_arguments", "init_distributed", "initialize", "log_dist",
    "logger",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"offload.deepspeed.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(import_module(f"offload.deepspeed.{module}"), attribute)
