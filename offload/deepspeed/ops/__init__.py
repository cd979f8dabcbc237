"""DeepSpeed's optimizers by their names. They hold numbers: `initialize` takes offload's rule."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from offload.deepspeed.hints import missing_name


def __getattr__(name: str) -> Any:
    if name not in ("adam", "lion", "adagrad"):
        raise AttributeError(missing_name("offload.deepspeed.ops", name))
    return import_module(f"offload.deepspeed.ops.{name}")
