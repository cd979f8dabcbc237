"""Placeholders, the data of released parameters: tensors that no operation can read.

`__torch_function__` sees the uses that come through Python (released.py). What reads a tensor
below it (`torch.tensor(p)`, `torch.asarray(p, copy=True)`, `torch.func`, nested tensors) comes to
PyTorch's dispatcher, where a placeholder has one key more than a tensor with values:

    key         DeferredInit, meant for tensors whose values come later; nothing in PyTorch uses it,
                and an operation on tensors without it does not notice
    kernel      one for all operations: a released parameter is used as if the call had come through
                Python, any other tensor over a placeholder (`x.data = p`) is refused
    `.data`     setting it copies the keys, so a gathered parameter has none of this; only
                `exchanging` may set one to a placeholder

It has the sizes and strides of the values, and no memory. An address is asked for without the
dispatcher: PyTorch refuses a placeholder's.
"""

import functools
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch

from offload.tiers.errors import UnsupportedError
from offload.zero.tensors.paged import MAKE_ANOTHER, SHARE_DATA, Operation, name_of, tensors_in

_KEY = torch._C._dispatch_key_parse("DeferredInit")
_KEYS = torch._C.DispatchKeySet(_KEY)
_KEYS_OF_WRAPPERS = _KEYS.add(torch._C.DispatchKey.Python)


class _WithKey(torch.Tensor):
    """A tensor with a key of one's choice, which PyTorch makes for wrappers only."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a placeholder takes its .data, and nothing else is done with it")


@functools.lru_cache(maxsize=256)  # released parameters of one shape have one between them
def placeholder(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Sizes and strides of a contiguous tensor, over a storage without memory."""
    _listen()
    shapes = torch.empty(shape, dtype=dtype, device=torch.device("meta"))
    wrapper = torch.Tensor._make_wrapper_subclass(
        _WithKey, shapes.shape, shapes.stride(), dtype=dtype, device=device, storage_size=0,
        _extra_dispatch_keys=_KEYS,
    )  # fmt: skip
    made = torch.empty(0, dtype=dtype, device=device)
    with torch._C._ExcludeDispatchKeyGuard(_KEYS_OF_WRAPPERS):
        made.data = wrapper
    torch._C._set_throw_on_mutable_data_ptr(made)
    return made


def exchanging() -> AbstractContextManager[Any]:
    """Inside, `.data` may become a placeholder, or values in place of one, and operations that
    need no values run on placeholders."""
    guard: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(_KEYS)
    return guard


@functools.cache
def _listen() -> torch.library.Library:
    library = torch.library.Library("_", "IMPL")
    library.fallback(_use, "DeferredInit")
    return library


def _use(operation: Operation, *args: Any, **kwargs: Any) -> Any:
    """Run an operation with placeholders among its arguments."""
    tensors = [t for t in tensors_in([args, kwargs]) if torch._C._dispatch_keys(t).has(_KEY)]
    for tensor in tensors:
        # of the class of released parameters
        use = getattr(type(tensor), "use_below_python", None)
        if use is not None:
            return use(operation, args, kwargs)
    if name_of(operation) in MAKE_ANOTHER or operation is SHARE_DATA:
        with exchanging():
            return operation(*args, **kwargs)
    raise UnsupportedError(
        f"{operation} of a tensor over a parameter's placeholder, {tuple(tensors[0].shape)}: its "
        "values are in the tiers of offload; take them from the parameter, with "
        "p.detach().clone(), or within engine.gathered(p)"
    )
