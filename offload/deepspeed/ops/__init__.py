"""DeepSpeed's optimizers by their names: `adam`."""

from __future__ import annotations

from typing import Any

from offload.deepspeed.unsupported_names import left_out


def __getattr__(name: str) -> Any:
    raise left_out("offload.deepspeed.ops", name)
