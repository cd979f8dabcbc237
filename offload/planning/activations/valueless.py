"""Tensors without values that claim the CPU, so that a model's own code runs without computing.

They are those of torch's `FakeTensorMode`, which imports torch's compiler: `Baseline.that_plans`
counts it. They never claim a GPU, which a build of torch for CPUs does not survive; what kernels do
otherwise on one is put in here and in `cuda_choices`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from offload.zero.groups.parameter_grouping import managed

_CPU = torch.device("cpu")
_aten = torch.ops.aten


class WithoutValues(FakeTensorMode):
    """A mode in which operations work on shapes alone and make tensors that claim the CPU."""

    def __init__(self, *, gpu: bool = False) -> None:
        """`gpu`: the kernels of a GPU are simulated instead of those of a CPU."""
        super().__init__(allow_non_fake_inputs=True)
        self._gpu = gpu

    def tensor_like(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor of the same shape and strides with its own storage."""
        with self:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=_CPU
            )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten._grouped_mm.default:
            return self._grouped_mm(*args[:3], **kwargs)
        result: Any = super().__torch_dispatch__(func, types, args, kwargs)
        if func is _aten.native_layer_norm.default and self._gpu:
            output, *statistics = result  # of the input's type on a CPU alone
            return (output, *(self.tensor_like(each, torch.float32) for each in statistics))
        return result

    def _grouped_mm(
        self, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Return the result of a grouped product in any type; the meta kernel accepts only bf16."""
        dtype = kwargs.get("out_dtype") or a.dtype
        shape: tuple[int, ...] = (a.shape[-2], b.shape[-1])
        if a.dim() == b.dim():  # matrices cut along what they share, or a product for each
            assert offs is not None or a.dim() == 3, "the kernel says so, too"
            shape = (a.shape[0] if offs is None else offs.shape[0], *shape)
        with self:
            return a.new_empty(shape, dtype=dtype)


@contextmanager
def valueless(model: nn.Module, values: WithoutValues, dtype: torch.dtype) -> Iterator[None]:
    """Replace parameters and buffers by valueless ones of the types that the engine would use."""
    made: dict[int, torch.Tensor] = {}

    def exchanged(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            if isinstance(tensor, nn.Parameter):
                kind = dtype if managed(tensor) else tensor.dtype
                new = values.tensor_like(tensor.detach(), kind)
                with values:
                    made[id(tensor)] = nn.Parameter(new, requires_grad=tensor.requires_grad)
            else:
                made[id(tensor)] = values.tensor_like(tensor)
        return made[id(tensor)]

    before = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    try:
        for module, parameters, buffers in before:
            both: Any = ((module._parameters, parameters), (module._buffers, buffers))
            for own, tensors in both:
                own.update({k: exchanged(t) for k, t in tensors.items() if t is not None})
        with unpacked_sequences():
            yield
    finally:
        for module, parameters, buffers in before:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


@contextmanager
def unpacked_sequences() -> Iterator[None]:
    """Let transformers know that no row holds several sequences: it finds that out by the values of
    positions, and makes a mask for several ones where it cannot see them."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    if masks is None:
        yield
        return
    own = masks.find_packed_sequence_indices
    masks.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = own
