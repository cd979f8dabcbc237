"""Parameters that are views of one memory without being one object.

Each parameter gets a place of its own in its group's buffer, so a write to one would not show in
the other any more. One object in several places is a tied weight and needs nothing of this.
Views share memory where the ranges from their first to behind their last byte overlap: columns of
one matrix do, rows and chunks do not.
"""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import nn

from offload.tiers.errors import UnsupportedError
from offload.zero.tensors.local_tensors import memory_of


def refuse_shared_views(model: nn.Module) -> None:
    """Raise UnsupportedError for two parameters, or a parameter and a buffer, that overlap in
    memory; on the meta device, where each would get values of its own, also for two buffers. Parts
    of one memory that are apart are fine."""
    for a, b in _overlapping(model):
        raise UnsupportedError(
            f"{a.name} and {b.name} have the same memory, or a part of it, and a write to one "
            "would not show in the other any more; to tie parameters, let both be one object "
            "(module.weight = other.weight), otherwise give one of them a copy (.clone())"
        )


class _View:
    """A tensor of the model that has memory, and the addresses of its first and behind its last
    byte: on the meta device, where there are none, within its storage."""

    def __init__(self, name: str, tensor: torch.Tensor, memory: torch.Tensor) -> None:
        self.name = name
        self.is_parameter = isinstance(tensor, nn.Parameter)
        self.is_meta = memory.is_meta
        self.storage = memory.untyped_storage()._cdata if self.is_meta else 0
        offset = int(memory.storage_offset()) * memory.element_size()
        self.bytes = _bytes_of(memory, offset if self.is_meta else memory.data_ptr())


def _bytes_of(tensor: torch.Tensor, start: int) -> range:
    """Return the addresses that a strided tensor lies in, whose first byte is at `start`."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return range(start, start + (last + 1) * tensor.element_size() if tensor.numel() else start)


def covers(own: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether `other`, as long as `own`, lies in the memory of `own` alone."""
    return _bytes_of(other, other.data_ptr()) == _bytes_of(own, own.data_ptr())


def _overlapping(model: nn.Module) -> Iterator[tuple[_View, _View]]:
    """Yield pairs that overlap, one of them a parameter or on the meta device."""
    active: list[_View] = []
    for view in sorted(_views(model), key=lambda view: (view.storage, view.bytes.start)):
        active = [
            each for each in active
            if each.storage == view.storage and each.bytes.stop > view.bytes.start
        ]  # fmt: skip
        asked = view.is_parameter or view.is_meta
        yield from ((each, view) for each in active if asked or each.is_parameter)
        active.append(view)


def _views(model: nn.Module) -> Iterator[_View]:
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        memory = memory_of(tensor)
        if memory is None or isinstance(tensor, nn.parameter.UninitializedBuffer):
            continue
        if memory.layout is torch.strided and memory.numel():
            yield _View(name, tensor, memory)


def check_format(
    name: str, given: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    """Raise UnsupportedError if a parameter's `.data` was set to a tensor of another format."""
    if (tuple(given.shape), given.dtype, given.device) != (tuple(shape), dtype, device):
        raise UnsupportedError(
            f"{name}.data was set to {tuple(given.shape)}, {given.dtype} on {given.device}, and is "
            f"{tuple(shape)}, {dtype} on {device} in its tiers; change the model before "
            "offload.initialize or offload.dispatch, or precision: and device: in the configuration"
        )
