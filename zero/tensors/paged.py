"""A tensor whose values are in a tier: read when an operation needs them, written through.

Gradients and parameters of the model may be in any tier between steps. Users then hold a
`PagedTensor` of them (`param.grad`, `param.data`): shape, dtype and device, and a source of values.

    metadata        answered at once
    whole-tensor    a source may know the answer without the values (a norm, a scalar factor)
    a view          another PagedTensor: the source, and how to view it
    anything read   runs on the values, which are given back after it
    a write         runs on the values, and the source keeps what was written

Operations arrive at `__torch_dispatch__`, below autograd, where each one's schema says what it
reads, writes and aliases.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from offload.tiers.errors import UnsupportedError
from offload.zero.hooks.compilers import uncompiled

aten = torch.ops.aten
Operation = Any  # torch._ops.OpOverload
# These need a tensor's shape and format alone.
MAKE_ANOTHER = frozenset(
    {
        "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
        "randint_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
    }
)  # fmt: skip
# The operator of `tensor.data = other`, above __torch_dispatch__. By default the tensor would be
# left without memory, and reading it would end the process. So a PagedTensor has a dispatch key
# of its own, which nothing in PyTorch uses, and all other operations fall through.
SHARE_DATA = aten._has_compatible_shallow_copy_type.default
_KEY = "TESTING_ONLY_GenericWrapper"
_KEYS = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_KEY))


def name_of(operation: Operation) -> str:
    """Return the name of an operation without its overload."""
    return str(operation.__name__.partition(".")[0])


class Source(Protocol):
    """The source of a PagedTensor's values."""

    @property
    def name(self) -> str:
        """The name for errors."""

    def reading(self) -> AbstractContextManager[torch.Tensor]:
        """Provide the values inside; they must not be written to, and may be gone afterwards."""

    def writing(self) -> AbstractContextManager[torch.Tensor]:
        """Provide the values inside, as a tensor whose contents become the source's at the end."""

    def answer(self, operation: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation on the whole tensor, without its values; NotImplemented
        if they are needed. `args` are those after the tensor itself."""


@dataclass(frozen=True, slots=True)
class _View:
    """One step from a tensor to a view of it."""

    operation: Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pick: int | None  # index among several views that the operation returns

    def of(self, tensor: torch.Tensor, start: int) -> torch.Tensor:
        """Return the view of `tensor`; `start` is where in their storage the values begin."""
        args, kwargs = self.args, self.kwargs
        if self.operation is aten.as_strided.default:  # counts from there
            args, kwargs = from_start(start, *args, **kwargs), {}
        result = self.operation(tensor, *args, **kwargs)
        view: torch.Tensor = result if self.pick is None else result[self.pick]
        return view


def from_start(start: int, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """Return arguments of `as_strided`, with an offset that counts from `start`."""
    return size, stride, None if storage_offset is None else start + storage_offset


def _refusing(method: str) -> Any:
    """Return a method that raises UnsupportedError: it needs memory of the tensor's own."""

    def refuse(paged: PagedTensor, *_: Any, **__: Any) -> NoReturn:
        paged._refuse(f"{method}()")

    return refuse


class PagedTensor(torch.Tensor):
    """A tensor in a tier (see above). Operations on one, or with one, give plain tensors."""

    source: Source
    views: tuple[_View, ...]

    @staticmethod
    def __new__(
        cls, source: Source, like: torch.Tensor, device: torch.device,
        views: tuple[_View, ...] = (), *, requires_grad: bool = False,
    ) -> PagedTensor:  # fmt: skip
        """`like` (it may be on the meta device) has the shape, strides and dtype.

        Operations that PyTorch takes apart look at `requires_grad`, also without a graph: a product
        of more than two dimensions is then computed in another way."""
        if torch.is_inference_mode_enabled():  # it stands for a tensor that is none of inference
            with torch.inference_mode(False):
                return cls(source, like, device, views, requires_grad=requires_grad)
        _guard_data()
        made: PagedTensor = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), storage_offset=like.storage_offset(),
            dtype=like.dtype, device=device, requires_grad=requires_grad,
            _extra_dispatch_keys=_KEYS,
        )  # fmt: skip
        # else what takes the address below Python (`to_dlpack`) would read at address 0
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.source, made.views = source, views
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    @uncompiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Operation, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if operation is aten._amp_foreach_non_finite_check_and_unscale_.default:
            return _unscale(*args)
        if isinstance(first, PagedTensor):
            if not first.views:
                answer = first.source.answer(operation, args[1:], kwargs)
                if answer is not NotImplemented:
                    return first if answer is first.source else answer
            if operation is aten.detach_.default:
                return first
            if name_of(operation) in MAKE_ANOTHER:
                kwargs = {"device": first.device, **kwargs}
                return operation(_shape_of(first), *args[1:], **kwargs)
            if _gives_views(operation):
                if operation._can_decompose():
                    return _in_parts(first, operation, args, kwargs)
                return _view(first, operation, tuple(args[1:]), kwargs)
        if operation.namespace == "aten" and operation.__name__.startswith("_foreach_"):
            return _one_by_one(operation, args, kwargs)
        return _run(operation, args, kwargs)

    # ------------------------------------------------- what does not come to __torch_dispatch__
    @property
    def data(self) -> PagedTensor:
        """The tensor itself: there is no graph to be left out."""
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Set the values. Shape, format and device must be the source's; others are refused."""
        if (value.shape, value.dtype, value.device) != (self.shape, self.dtype, self.device):
            self._refuse(
                f"setting .data to {tuple(value.shape)}, {value.dtype} on {value.device}, in place"
                f" of {tuple(self.shape)}, {self.dtype} on {self.device},"
            )
        with torch.no_grad():
            self.copy_(value)

    def new(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        return self._like().new(*args, **kwargs)

    def new_tensor(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._like().new_tensor(*args, **kwargs)

    def _like(self) -> torch.Tensor:
        """Return a plain tensor: PyTorch makes none like one with a dispatch key of its own."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def values(self) -> torch.Tensor:
        """Return a copy, as a plain tensor without a graph."""
        with torch.no_grad(), _Opened(self, self.source.reading()) as values:
            return values.detach().clone()

    def numpy(self, *, force: bool = False) -> Any:
        """Return a copy, read-only: writing to it would not reach the tensor."""
        array = self.values().numpy(force=force)
        array.setflags(write=False)
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return a copy, always."""
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    def tolist(self) -> Any:
        return self.values().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.values().requires_grad_(self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.values())  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values().__reduce_ex__(protocol)

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedError(
            f"{what} of {self.source.name}: its values have no memory of their own, they may be in "
            "any tier; use .clone(), or for a parameter `with engine.gathered(parameter):`"
        )

    def __format__(self, spec: str) -> str:
        return format(self.values(), spec)

    def is_shared(self) -> bool:
        return False

    def untyped_storage(self) -> torch.UntypedStorage:
        """For torch.compile, which describes a parameter's gradient with it; otherwise refused."""
        is_traced = torch._guards.TracingContext.try_get() is not None
        return torch.UntypedStorage(0, device="meta") if is_traced else self._storage()

    apply_, map_ = _refusing("apply_"), _refusing("map_")
    data_ptr, const_data_ptr = _refusing("data_ptr"), _refusing("const_data_ptr")
    storage, _storage = _refusing("storage"), _refusing("untyped_storage")
    share_memory_, __dlpack__ = _refusing("share_memory_"), _refusing("__dlpack__")


@functools.cache
def _guard_data() -> tuple[torch.library.Library, ...]:
    every, one = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(torch.library.fallthrough_kernel, _KEY)
    one.impl(SHARE_DATA, _share_data, _KEY)
    return every, one


def _share_data(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if isinstance(other, PagedTensor) and not isinstance(tensor, PagedTensor):
        other._refuse("setting .data of another tensor to memory")
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        return bool(SHARE_DATA(tensor, other))


def _shape_of(paged: PagedTensor) -> torch.Tensor:
    """Return a tensor of its shape, strides and dtype alone."""
    shape = torch.empty_strided(
        paged.shape, paged.stride(), dtype=paged.dtype, device=torch.device("meta")
    )
    return shape.as_strided(paged.shape, paged.stride(), paged.storage_offset())


def _gives_views(operation: Operation) -> bool:
    """Return whether the result aliases an argument that is not written to."""
    schema = operation._schema
    aliases = [arg.alias_info for arg in schema.arguments if arg.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _in_parts(
    paged: PagedTensor, operation: Operation, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Decompose an operation as inference mode does not: it may give a copy (`to`)."""
    result = operation.decompose(*args, **kwargs)
    for each in result if isinstance(result, (list, tuple)) else [result]:
        if isinstance(each, PagedTensor) and paged.requires_grad:
            each.requires_grad_()
    return result


def _view(
    paged: PagedTensor, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    shapes = operation(_shape_of(paged), *args, **kwargs)

    def made(shape: torch.Tensor, pick: int | None) -> PagedTensor:
        step = _View(operation, args, kwargs, pick)
        return PagedTensor(paged.source, shape, paged.device, (*paged.views, step))

    if isinstance(shapes, torch.Tensor):
        return made(shapes, None)
    return [made(shape, pick) for pick, shape in enumerate(shapes)]


class _Opened(AbstractContextManager[torch.Tensor]):
    """The source's values, seen through a PagedTensor's views."""

    def __init__(self, paged: PagedTensor, values: AbstractContextManager[torch.Tensor]) -> None:
        self._paged = paged
        self._values = values

    def __enter__(self) -> torch.Tensor:
        tensor = self._values.__enter__()
        start = int(tensor.storage_offset()) if self._paged.views else 0
        for view in self._paged.views:
            tensor = view.of(tensor, start)
        return tensor

    def __exit__(self, *error: Any) -> Any:
        return self._values.__exit__(*error)


# What a foreach operation does to each tensor, where sources have answers to that.
_ONE = {
    "_foreach_norm": torch.linalg.vector_norm, "_foreach_zero_": torch.Tensor.zero_,
    "_foreach_mul_": torch.Tensor.mul_, "_foreach_div_": torch.Tensor.div_,
}  # fmt: skip


def _one_by_one(operation: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a foreach operation, tensor by tensor: the values of all at once might not fit."""
    count = len(args[0])
    one = _ONE.get(name_of(operation))
    results: list[Any] = []
    for number in range(count):
        lists = [isinstance(arg, (list, tuple)) and len(arg) == count for arg in args]
        own = [arg[number] if each else arg for arg, each in zip(args, lists, strict=True)]
        if one is not None:
            results.append(one(*own, **kwargs))
            continue
        own = [[arg] if each else arg for arg, each in zip(own, lists, strict=True)]
        results += _run(operation, own, kwargs) or ()
    return results if operation._schema.returns else None


def _run(operation: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values of every PagedTensor among its arguments."""
    written = {id(arg) for arg in _written(operation, args, kwargs)}
    opened: dict[int, torch.Tensor] = {}
    paged_of: dict[int, PagedTensor] = {}
    entered: list[AbstractContextManager[torch.Tensor]] = []

    def values(arg: Any) -> Any:
        if not isinstance(arg, PagedTensor):
            return arg
        if torch.Tag.inplace_view in operation.tags:
            arg._refuse(f"{operation}: another shape or memory")
        if id(arg) not in opened:
            source = arg.source
            opens = source.writing() if id(arg) in written else source.reading()
            values_of = _Opened(arg, opens)
            tensor = values_of.__enter__()
            entered.append(values_of)
            if arg.requires_grad and id(arg) not in written:
                tensor = tensor.detach().requires_grad_()
            opened[id(arg)] = tensor
            paged_of[id(opened[id(arg)])] = arg
        return opened[id(arg)]

    try:
        returned = operation(
            *(mapped(arg, values) for arg in args),
            **{key: mapped(arg, values) for key, arg in kwargs.items()},
        )
        results = _results(returned, paged_of, {_memory(each) for each in opened.values()})
    except BaseException:
        _leave(entered, *sys.exc_info())
        raise
    _leave(entered, None, None, None)
    return results


def _leave(entered: list[AbstractContextManager[torch.Tensor]], *error: Any) -> None:
    """Leave all contexts, as an `ExitStack` would, whatever one raises. But an `ExitStack` that is
    interrupted is garbage for the collector alone, and what it had not left would be in use."""
    try:
        while entered:
            entered.pop().__exit__(*error)
    except BaseException:
        _leave(entered, *sys.exc_info())
        raise


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change`, also in lists and dicts. It is not nested in `_run`: a function that calls
    itself is garbage for the collector alone, and would hold the memory of the values that it
    opened until then."""
    if isinstance(value, dict):
        return {key: mapped(each, change) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(mapped(each, change) for each in value)
    return change(value)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the values of lists, tuples and dicts."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, (list, tuple, dict)):
            yield from tensors_in(value)
        elif isinstance(value, torch.Tensor):
            yield value


def _results(result: Any, paged_of: dict[int, PagedTensor], memory: set[int]) -> Any:
    """Return the results: an argument that was written is returned as itself; views of values that
    are about to be released are copied."""
    if isinstance(result, (list, tuple)):
        return type(result)(_results(each, paged_of, memory) for each in result)
    if not isinstance(result, torch.Tensor):
        return result
    if id(result) in paged_of:
        return paged_of[id(result)]
    return result.clone() if _memory(result) in memory else result


def _memory(tensor: torch.Tensor) -> int:
    """Return which memory a tensor has; 0 for wrappers of others, and for several memories."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return tensor.untyped_storage()._cdata if is_plain else 0


def _written(
    operation: Operation, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[PagedTensor]:
    for number, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[number] if number < len(args) else kwargs.get(argument.name)
        for each in given if isinstance(given, (list, tuple)) else [given]:
            if isinstance(each, PagedTensor):
                yield each


def _unscale(
    tensors: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor
) -> None:
    """Unscale gradients, as in `GradScaler.unscale_`."""
    for tensor in tensors:
        if not bool(torch.linalg.vector_norm(tensor).isfinite()):
            found_inf.fill_(1.0)
        tensor.mul_(inverse_scale)
