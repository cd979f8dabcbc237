"""The state of modules beside the parameters in tiers: buffers, integer parameters, extra state,
and other entries of their state dicts.

The modules are asked for it, and given it back, as by `torch.save(model.state_dict())` and
`model.load_state_dict(...)`. So their own methods and hooks may save what is no buffer, rename a
key, or resize a buffer before its values are copied. In these state dicts a parameter in tiers
stands for itself: none is read or written.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offload.checkpoint.format.user_state import DTYPE_NAMES
from offload.tiers.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from offload.models.trained import Trained

_log = logging.getLogger("offload")
_EXTRA = "_extra_state"  # torch's key for what `get_extra_state()` returns


@dataclass(frozen=True)
class ModuleState:
    """The state that the modules of an engine's model saved."""

    tensors: dict[str, torch.Tensor]  # the live ones, by their key
    values: dict[str, Any]  # other entries, by their key: extra state, for instance

    @classmethod
    def of(cls, engine: Trained) -> ModuleState:
        """The modules' state now, under the keys of their state dicts.

        UnsupportedError for a tensor that no safetensors file can have."""
        tensors: dict[str, torch.Tensor] = {}
        values: dict[str, Any] = {}
        for key, value in _state_dict(engine).items():
            if not _is_in_tiers(engine, value):
                # an extra state is no weight, also if it is a tensor
                is_extra = key.rpartition(".")[2] == _EXTRA
                is_buffer = isinstance(value, torch.Tensor) and not is_extra
                (tensors if is_buffer else values)[key] = value
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPE_NAMES or tensor.layout is not torch.strided:
                raise UnsupportedError(
                    f"buffer {name} ({tensor.dtype}, {tensor.layout}) cannot be in a safetensors "
                    "file; register it with persistent=False and rebuild it in the model's code"
                )
        return cls(tensors, values)


def _state_dict(engine: Trained) -> Mapping[str, Any]:
    """The model's state dict. Its own `state_dict`, which takes what PyTorch's does, is called only
    if it has a `load_state_dict` too: one that selects what a file gets is not what a run resumes
    from."""
    model = engine.module
    with engine.state_dicts.parameters_left():
        if type(model).load_state_dict is nn.Module.load_state_dict:
            return nn.Module.state_dict(model, keep_vars=True)
        return model.state_dict(keep_vars=True)


def _in_tiers(engine: Trained) -> set[str]:
    named = engine.module.named_parameters(remove_duplicate=False)
    return {name for name, param in named if _is_in_tiers(engine, param)}


def _is_in_tiers(engine: Trained, value: object) -> bool:
    is_param = isinstance(value, nn.Parameter)
    return is_param and engine.store.spec_of(value) is not None  # type: ignore[arg-type]


class ModuleLoading:
    """Loads into the modules of an engine's model the state that modules like them have saved."""

    def __init__(self, engine: Trained, path: Path, saved: ModuleState) -> None:
        """`path` is named in errors. Raises CheckpointError if a buffer has another dtype."""
        self._engine = engine
        self._path = path
        self._tensors = saved.tensors
        now = _state_dict(engine)
        self._check_formats(now)
        own = {key: value for key, value in now.items() if _is_in_tiers(engine, value)}
        self._entries: dict[str, Any] = own | saved.tensors | saved.values
        # of the modules as they are: a checkpoint does not keep the versions of state dicts
        self._metadata: Any = getattr(now, "_metadata", {})

    def apply(self) -> None:
        """Load the state. Raises CheckpointError if the modules refuse it: they may have loaded a
        part of it then."""
        model, in_tiers = self._engine.module, _in_tiers(self._engine)
        try:
            self._load()
        except Exception as error:
            text = " ".join(str(error).split()).removesuffix(".")
            raise CheckpointError(
                f"{self._path} is of another model, load_state_dict() raises "
                f"{type(error).__name__}: {text:.600}; build the model as it was saved"
            ) from error
        self._check_formats(_state_dict(self._engine))  # hooks may have exchanged buffers
        replaced = sorted(in_tiers - _in_tiers(self._engine))
        if replaced:
            raise CheckpointError(
                f"{self._path} was not loaded: {type(model).__name__}.load_state_dict() puts "
                f"another parameter in the place of {replaced[0]}, whose values are in tiers; "
                "build the model with parameters of the shapes that were saved"
            )

    def _load(self) -> None:
        entries = {}
        for key, value in self._entries.items():
            is_saved = isinstance(value, torch.Tensor) and not _is_in_tiers(self._engine, value)
            entries[key] = value.clone() if is_saved else value
        given: Any = OrderedDict(entries)
        given._metadata = self._metadata
        model = self._engine.module
        pardon = model.register_load_state_dict_post_hook(self._pardon)
        try:
            with self._engine.state_dicts.parameters_left(loading=True):
                model.load_state_dict(given)
        finally:
            pardon.remove()

    def _pardon(self, module: nn.Module, keys: Any) -> None:
        """Warn where a module's extra state is missing: it was no plain value."""
        for key in [key for key in keys.missing_keys if key.rpartition(".")[2] == _EXTRA]:
            keys.missing_keys.remove(key)
            _log.warning("%s has no %s: that module goes on as it is", self._path, key)

    def _check_formats(self, now: Mapping[str, Any]) -> None:
        """Raise CheckpointError if a dtype differs: values must not be rounded silently."""
        for name, saved in self._tensors.items():
            here = now.get(name)
            if not isinstance(here, torch.Tensor) or here.shape != saved.shape:
                continue
            if here.dtype != saved.dtype:
                raise CheckpointError(
                    f"{self._path} was not loaded: buffer {name} is {saved.dtype} there, and "
                    f"{here.dtype} in the model; build the model as it was saved"
                )
