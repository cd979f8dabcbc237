"""Tensors without values that claim a device, so that a model's own code runs without computing.

A meta tensor has a shape, a type and a storage of a given size, but it reports the device `meta`,
and code that checks the device takes another path: `scaled_dot_product_attention` then uses no
fused kernel and saves the whole matrix of scores. The tensors here are therefore meta tensors that
claim a device. torch's FakeTensor does the same, but importing it takes longer than a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offload.tiers.errors import UnsupportedError
from offload.zero.recompute.block_state import ValuesUnknown

_META = torch.device("meta")
_CPU = torch.device("cpu")
# Whole numbers made from nothing else (positions, masks) are computed up to this many elements:
# code asks them questions, like whether any position is masked.
_MOST_KNOWN_NUMEL = 1 << 16
_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default  # autograd asks it more often than anything is computed
_DETACH = _aten.detach.default
_NORMS = frozenset({_aten.native_layer_norm.default, _aten.native_group_norm.default})
# What they give depends on values.
_READS = frozenset({_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default})


class ValuelessTensor(ValuesUnknown, torch.Tensor):
    """A shape, a type, strides and a storage; `known` has the values where code may need them."""

    owner: WithoutValues
    known: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, meta: torch.Tensor, owner: WithoutValues, known: torch.Tensor | None = None
    ) -> ValuelessTensor:
        made: ValuelessTensor = torch.Tensor._make_subclass(
            cls, meta, False, dispatch_device=True, device_for_backend_keys=owner.device
        )
        made.owner = owner
        made.known = known
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.owner.device

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def tolist(self) -> Any:
        """Return the known values as nested lists; torch has no `tolist` for subclasses."""
        return self.owner.read(self, "tolist", self.known).tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE:
            return args[0].owner.device
        return NotImplemented  # the mode is not active


class WithoutValues(TorchDispatchMode):
    """A mode in which operations work on shapes alone and make tensors that claim the CPU."""

    device = _CPU

    def __init__(self, kernels: str = "cpu") -> None:
        """`kernels` is the device whose kernels are simulated, cpu or cuda. Tensors never claim
        cuda: torch may be built without it, and its autograd needs an existing device."""
        super().__init__()
        self.kernels = kernels

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # importing what is skipped takes longer than a trace

    def tensor_like(
        self, tensor: torch.Tensor, dtype: torch.dtype | None = None
    ) -> ValuelessTensor:
        """Return a tensor of the same shape and strides with its own storage. For use outside."""
        meta = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=_META
        )
        return ValuelessTensor(meta, self)

    def adopted(self, tensor: torch.Tensor) -> ValuelessTensor:
        """Return the tensor without its values, unless code may need them. For use outside."""
        if isinstance(tensor, ValuelessTensor):
            return tensor
        made = self.tensor_like(tensor)
        if not tensor.is_meta and tensor.numel() <= _MOST_KNOWN_NUMEL:
            made.known = tensor
        return made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE:
            return self.device
        if func is _DETACH and isinstance(args[0], ValuelessTensor):
            return ValuelessTensor(self._meta(args[0]), self, args[0].known)
        kwargs = dict(kwargs or {})
        inputs = list(tensors_of((args, tuple(kwargs.values()))))
        if func in _READS:
            known = self._known_result(func, inputs, args, kwargs)
            return self._wrapped(self.read(args[0], func, known), known, {})
        if func is _aten.bincount.default:
            return self._counted(*args, **kwargs)
        if func.overloadpacket is _aten.arange:  # small, and on meta it is Python
            kwargs["device"] = _CPU
            made = func(*args, **kwargs)
            return self._wrapped(made, None if made.is_floating_point() else made, {})
        given = args, dict(kwargs)
        if "device" in kwargs or not inputs:
            kwargs["device"] = _META
        if torch.Tag.inplace_view in func.tags:
            return self._changed_view(func, args, kwargs)
        metas = {id(x): self._meta(x) for x in inputs}
        place = {id(metas[id(x)]): x for x in inputs}
        args = mapped(args, lambda x: metas[id(x)])
        kwargs = {key: mapped(value, lambda x: metas[id(x)]) for key, value in kwargs.items()}
        result = _run_on_meta(func, args, kwargs, self.kernels)
        known = None
        if isinstance(result, torch.Tensor) and result.numel() <= _MOST_KNOWN_NUMEL:
            known = self._known_result(func, inputs, *given)
        return self._wrapped(result, known, place)

    def _changed_view(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run `set_` and similar operations, which change the tensor's own shape or storage."""
        with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
            torch._C._set_meta_in_tls_dispatch_include(True)
            return func(*args, **kwargs)

    def _meta(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a meta tensor over the tensor's storage."""
        if not isinstance(tensor, ValuelessTensor):
            if tensor.is_meta:
                return tensor
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META
            )
        meta = torch.empty(0, dtype=tensor.dtype, device=_META)
        return meta.set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )

    def read(self, tensor: torch.Tensor, func: Any, known: Any) -> Any:
        """Return the known value. Raise UnsupportedError if there is none."""
        if known is None:
            raise UnsupportedError(
                f"its code depends on values ({func} of a tensor of shape {tuple(tensor.shape)}), "
                "and a count without values has none"
            )
        return known

    def _counted(
        self, tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
    ) -> torch.Tensor:
        """Compute `bincount`. Unknown values are assumed to be spread evenly, so that a layer of
        experts that counts its tokens sees balanced routing."""
        if _is_known(tensor) and weights is None:
            counts = torch.bincount(getattr(tensor, "known", tensor), minlength=minlength)
        else:
            if weights is not None or minlength < 1:
                self.read(tensor, _aten.bincount.default, None)
            most = -(-tensor.numel() // minlength)
            counts = torch.full((minlength,), most)
            counts[tensor.numel() - (most - 1) * minlength :] -= 1
        made: torch.Tensor = self._wrapped(counts, counts, {})
        return made

    def _wrapped(self, result: Any, known: Any, given: dict[int, torch.Tensor]) -> Any:
        """Wrap the tensors of a result as `ValuelessTensor`; `given` maps those that came in."""
        if isinstance(result, torch.Tensor):
            found = given.get(id(result))
            if found is None:
                found = ValuelessTensor(result if result.is_meta else self._meta(result), self)
            if isinstance(found, ValuelessTensor):
                found.known = known if isinstance(known, torch.Tensor) else None
            return found
        if isinstance(result, (tuple, list)):
            return type(result)(self._wrapped(each, None, given) for each in result)
        return result

    def _known_result(
        self, func: Any, inputs: Sequence[torch.Tensor], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of an operation on known whole numbers; None if values are unknown."""
        if inputs:
            if not all(map(_is_known, inputs)):
                return None
        elif not _makes_whole_numbers(func, kwargs):
            return None
        if torch.Tag.nondeterministic_seeded in func.tags:
            return None
        args = mapped(args, lambda x: getattr(x, "known", x))
        kwargs = {key: mapped(x, lambda x: getattr(x, "known", x)) for key, x in kwargs.items()}
        if "device" in kwargs or not inputs:
            kwargs["device"] = _CPU
        return func(*args, **kwargs)


def tensors_of(values: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in nested tuples and lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_of(value)


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Apply `change` to every tensor in nested tuples and lists."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(each, change) for each in value)
    return value


def _is_known(tensor: torch.Tensor) -> bool:
    known = tensor.known if isinstance(tensor, ValuelessTensor) else tensor
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return known is not None and (whole or tensor.numel() == 1)


def _makes_whole_numbers(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation without tensor inputs makes whole numbers, as for masks and lengths."""
    dtype = kwargs.get("dtype")
    makes = func._schema.name in ("aten::zeros", "aten::ones", "aten::full")
    return makes and dtype is not None and not dtype.is_floating_point


def _run_on_meta(func: Any, args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Any:
    """Return meta tensors like those of the kernel of `func` on `device` (cpu or cuda)."""
    if func is _aten._grouped_mm.default:
        return _grouped_mm(*args[:3], **kwargs)
    result = func(*args, **kwargs)
    if func in _NORMS and device == "cpu":
        return _with_cpu_statistics(args, result)
    return result


def _with_cpu_statistics(args: Sequence[Any], result: Any) -> Any:
    """Convert the mean and deviation that a norm saves: they are fp32 on a GPU, as the meta kernel
    returns, but of the input's type on a CPU, unless the weight has another type."""
    source, weights = args[0], [x for x in args[1:] if isinstance(x, torch.Tensor)]
    if any(x.dtype is not source.dtype for x in weights):
        return result
    output, *statistics = result
    return (output, *(each.to(source.dtype) for each in statistics))


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor:
    """Return the result of a grouped product in any type; the meta kernel accepts only bf16."""
    dtype = kwargs.get("out_dtype") or a.dtype
    shape: tuple[int, ...] = (a.shape[-2], b.shape[-1])
    if a.dim() == b.dim():  # matrices cut along what they share, or a product for each
        assert offs is not None or a.dim() == 3, "the kernel says so, too"
        shape = (a.shape[0] if offs is None else offs.shape[0], *shape)
    return a.new_empty(shape, dtype=dtype)
