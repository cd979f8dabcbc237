"""PEFT's adapters around an engine's model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from offload.engine import Engine


def is_adapted(model: nn.Module) -> bool:
    """Whether `model` is one of PEFT's, whose files have the adapters alone."""
    peft = sys.modules.get("peft")  # not imported: no model of it
    return peft is not None and isinstance(model, peft.PeftModel)


def adapter_values(engine: Engine) -> dict[str, Tensor]:
    """The part of the model's state dict that PEFT saves. PEFT itself picks it, out of tensors
    without values: the whole state dict is all of the model in RAM."""
    from peft import get_peft_model_state_dict

    model = engine.module
    tensors = model.state_dict(keep_vars=True)
    probes = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in tensors.items()
    }
    picked: set[int] = set()
    adapters: Any = model.peft_config
    for adapter in adapters:
        found = get_peft_model_state_dict(model, state_dict=probes, adapter_name=adapter)
        picked |= set(map(id, found.values()))
    return {
        name: _value(engine, tensors[name]) for name, probe in probes.items() if id(probe) in picked
    }


def _value(engine: Engine, tensor: Tensor) -> Tensor:
    found = engine.runtime.group_of(tensor)
    return tensor if found is None else engine.values.give_out(tensor)  # type: ignore[arg-type]
