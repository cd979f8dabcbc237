"""PEFT's adapters around an engine's model: saving them without the whole model in RAM."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from offload.engine import Engine


def is_adapted(model: nn.Module) -> bool:
    """Whether `model` is one of PEFT's, whose files have the adapters alone."""
    peft = sys.modules.get("peft")  # not imported: no model of it
    return peft is not None and isinstance(model, peft.PeftModel)


class AdapterSave:
    """Replaces a PeftModel's `save_pretrained`, with the same arguments, until the engine is
    closed: it passes the tensors to save, instead of asking the model for its full state dict."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        own: Any = engine.module.save_pretrained
        self._own: Callable[..., Any] = own

    @staticmethod
    def install(engine: Engine) -> None:
        """Replace the method of an engine's model, if it is one of PEFT's."""
        model = engine.module
        if is_adapted(model) and "save_pretrained" not in vars(model):
            vars(model)["save_pretrained"] = AdapterSave(engine)
            engine.before_close(lambda: vars(model).pop("save_pretrained"))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Save the adapters; see PEFT's `PeftModel.save_pretrained`."""
        if kwargs.get("state_dict") is None:
            embeddings = kwargs.get("save_embedding_layers", "auto")
            kwargs["state_dict"] = _adapter_values(self._engine, embeddings)
        self._own(*args, **kwargs)


def _adapter_values(engine: Engine, embeddings: Any) -> dict[str, Tensor]:
    """Return the part of the model's state dict that PEFT saves. PEFT itself selects it, from
    tensors without values."""
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
        values = get_peft_model_state_dict(
            model, state_dict=probes, adapter_name=adapter, save_embedding_layers=embeddings
        )
        picked |= set(map(id, values.values()))
    saved: dict[str, Any] = {name: tensors[name] for name in probes if id(probes[name]) in picked}
    return {
        name: tensor if engine.store.spec_of(tensor) is None else engine.values.give_out(tensor)
        for name, tensor in saved.items()
    }
