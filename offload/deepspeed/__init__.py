"""DeepSpeed's interface over an offload engine: `import offload.deepspeed as deepspeed`.

    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config="ds_config.json"
    )
    for batch in loader:
        engine.backward(engine(batch))
        engine.step()

`deepspeed.zero` has what such loops use, `deepspeed.comm` is torch.distributed. docs/deepspeed.md
lists what is here, and says what the keys of a configuration become.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload.deepspeed.engine import EngineModule as DeepSpeedEngine
    from offload.deepspeed.start import add_config_arguments, init_distributed, initialize

_MODULES = {"zero": "offload.deepspeed.zero", "comm": "torch.distributed"}
_HOME = {
    "initialize": ("start", "initialize"),
    "DeepSpeedEngine": ("engine", "EngineModule"),
    "init_distributed": ("start", "init_distributed"),
    "add_config_arguments": ("start", "add_config_arguments"),
}
__all__ = ["DeepSpeedEngine", "add_config_arguments", "init_distributed", "initialize"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(import_module(f"offload.deepspeed.{module}"), attribute)
