"""Parameters that are DTensors: this rank has the local part that tensor parallelism gave it.

    model       DTensor     whole shape, device mesh, placements; what modules compute with
    group       its local   a view of the flat buffer, as `param.data` is for a plain parameter

All other modules count, move and update local tensors, and know no meshes: two ranks with different
parts of one parameter own different parameters. Plain tensors pass unchanged, without an import of
`torch.distributed.tensor`.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from offload.zero.tensors.paged import PagedTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    if type(tensor) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # making one imports it
    # without the class another thread is still importing it, and there is none yet
    dtensor = getattr(module, "DTensor", None)
    return dtensor is not None and isinstance(tensor, dtensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, without a graph; waits if a collective is still to
    bring it. A plain tensor is returned as it is."""
    if not is_dtensor(tensor):
        return tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    local: torch.Tensor = tensor._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def memory_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that holds the memory of a tensor's values; None if it has no memory of its
    own (the result of a collective in progress, values in a tier or nowhere, other wrappers)."""
    if is_dtensor(tensor):
        tensor = tensor._local_tensor
    has_none: bool = isinstance(tensor, FakeTensor | PagedTensor)
    has_none = has_none or is_traceable_wrapper_subclass(tensor)
    return None if has_none else tensor


def hold(param: torch.Tensor, values: torch.Tensor) -> None:
    """Let a parameter read its values from `values`, of the shape of `local_of(param)`. Their dtype
    becomes the parameter's."""
    if not is_dtensor(param):
        param.data = values
        return
    if param.dtype is not values.dtype:
        param._spec = _spec_of(param, values.dtype)
        param.data = rebuilt(values, param._spec)  # the format that the wrapper shows
    param._local_tensor = values


def forget_values(tensor: torch.Tensor) -> None:
    """Let `tensor` hold no memory; it keeps sharing its version counter."""
    if is_dtensor(tensor):
        tensor._local_tensor = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    else:
        tensor.data = _empty(tensor.dtype, tensor.device)


@functools.cache
def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an empty tensor, the same for all that forget: they share no bytes."""
    with torch.inference_mode(False), _disable_current_modes():
        return torch.empty(0, dtype=dtype, device=device)


def rebuilt(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor without a graph around a local tensor."""
    from torch.distributed.tensor import DTensor

    return DTensor(local, spec, requires_grad=False)


def like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return `local` as a part of a tensor that is spread over ranks as `param` is."""
    return rebuilt(local, _spec_of(param, local.dtype)) if is_dtensor(param) else local


def _spec_of(param: DTensor, dtype: torch.dtype) -> DTensorSpec:
    spec = param._spec
    assert spec.tensor_meta is not None, "of a tensor with values"
    return replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))


@torch.no_grad()
def spread_as(param: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of `tensor`, spread as `param` is: a gradient may come as sums to be
    added up (Partial) or in other shards. A collective of the mesh's ranks if it does."""
    if not is_dtensor(param) or not is_dtensor(tensor):
        return local_of(tensor)
    if tensor.placements != param.placements:
        tensor = tensor.redistribute(param.device_mesh, param.placements)
    return local_of(tensor)
