"""Values for a group's parameters: the model's own, freshly initialised, or from safetensors.

A model built on the meta device has shapes and no values. Each module with parameters of its own is
given real memory, one group at a time, and initialises itself (`reset_parameters`, or the model's
`_init_weights` as Hugging Face models have it) under a seed made from the run's seed and the
module's name: the values do not depend on grouping, order or placement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.tiers.errors import CheckpointError, ConfigError, UnsupportedError
from offload.zero.layout import ParamSpec

Values = Callable[[ParamSpec], torch.Tensor]


class MetaInitialiser:
    """Initialises the modules of a meta-device model one by one."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model = model
        self._seed = seed
        self._owner: dict[int, nn.Module] = {}  # the first module that has a parameter
        self._meta: dict[int, dict[str, nn.Parameter]] = {}  # a module's own, before `make_real`
        for module in model.modules():
            own = dict(module.named_parameters(recurse=False))
            self._meta[id(module)] = own
            for param in own.values():
                self._owner.setdefault(id(param), module)
        self._names = {id(module): name for name, module in model.named_modules()}

    def values(self, params: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """Real values for `params` (name -> meta parameter, all of one group), in RAM."""
        modules = {id(m): m for m in (self._owner[id(p)] for p in params.values())}
        values: dict[int, torch.Tensor] = {}
        with torch.random.fork_rng(devices=[]):
            for module in modules.values():
                values.update(self._initialise(module))
        return {name: values[id(param)] for name, param in params.items()}

    def _initialise(self, module: nn.Module) -> dict[int, torch.Tensor]:
        """The values of a module's own parameters, by id of the meta parameter."""
        own = dict(module.named_parameters(recurse=False))
        meta = self._meta[id(module)]
        buffers = dict(module.named_buffers(recurse=False))
        module._parameters.update({k: _empty_like(meta[k]) for k in own})
        module._buffers.update({k: _real(b) for k, b in buffers.items()})
        try:
            self._reset(module)
            return {id(meta[k]): module._parameters[k].detach() for k in own}  # type: ignore[union-attr]
        finally:
            module._parameters.update(own)

    def _reset(self, module: nn.Module) -> None:
        name = self._names[id(module)]
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        initialise = getattr(self._model, "_init_weights", None)
        reset = getattr(module, "reset_parameters", None)
        with torch.no_grad():
            if callable(initialise):
                initialise(module)
            elif callable(reset):
                reset()
            else:
                raise UnsupportedError(
                    f"{name or 'the model'} ({type(module).__name__}) is on the meta device and "
                    "has parameters but no reset_parameters(); give it one, build the model on "
                    "the CPU, or pass weights= with safetensors files"
                )

    def finish_buffers(self) -> None:
        """Initialise modules that have meta buffers and no parameters."""
        for module in self._model.modules():
            has_params = next(module.parameters(recurse=False), None) is not None
            if any(b.is_meta for b in module.buffers(recurse=False)) and not has_params:
                module._buffers.update(
                    {k: _real(b) for k, b in module.named_buffers(recurse=False)}
                )
                with torch.random.fork_rng(devices=[]):
                    self._reset(module)


def _empty_like(param: nn.Parameter) -> nn.Parameter:
    real = torch.empty(param.shape, dtype=param.dtype, device="cpu")
    return nn.Parameter(real, requires_grad=param.requires_grad)


def _real(buffer: torch.Tensor | None) -> torch.Tensor | None:
    if buffer is None or not buffer.is_meta:
        return buffer
    return torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")


def make_real(
    model: nn.Module, dtype: torch.dtype, device: torch.device
) -> dict[int, nn.Parameter]:
    """Swap every meta parameter for one on `device` without memory of its own.

    Returns new parameters by id of the old: whoever held the old ones translates. The values follow
    when the groups are loaded.
    """
    new: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if param.is_meta:
                if id(param) not in new:
                    new[id(param)] = _placeholder(param, dtype, device)
                module._parameters[name] = new[id(param)]
    return new


def _placeholder(param: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    kind = dtype if param.is_floating_point() else param.dtype
    one = torch.zeros((), dtype=kind, device=device)
    return nn.Parameter(one.expand(param.shape), requires_grad=param.requires_grad)


class SafetensorsWeights:
    """Weights in one safetensors file, or in all of a folder, read tensor by tensor."""

    def __init__(self, path: str | Path) -> None:
        from safetensors import safe_open

        self._files: dict[str, Any] = {}
        for file in _files_of(Path(path)):
            try:
                handle = safe_open(str(file), framework="pt", device="cpu")
            except Exception as error:
                raise CheckpointError(f"{file} is no safetensors file: {error}") from error
            for name in handle.keys():  # noqa: SIM118 - safe_open is no mapping
                self._files[name] = handle

    def find(self, names: tuple[str, ...]) -> torch.Tensor | None:
        for name in names:
            if name in self._files:
                tensor: torch.Tensor = self._files[name].get_tensor(name)
                return tensor
        return None

    def get(self, spec: ParamSpec) -> torch.Tensor:
        """CheckpointError if the tensor is missing or has another shape."""
        tensor = self.find(spec.names)
        if tensor is None:
            raise CheckpointError(f"weights: no tensor {' or '.join(spec.names)} in the files")
        if tensor.shape != spec.shape:
            raise CheckpointError(
                f"weights: {spec.name} has shape {tuple(tensor.shape)}, "
                f"in the model {tuple(spec.shape)}"
            )
        return tensor


def _files_of(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"weights: {path} is no safetensors file and no folder with any")
    yield from files
