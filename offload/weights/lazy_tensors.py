"""Tensors whose values stay in a file until they are asked for.

    stored      bytes of a safetensors file
    matrix      several tensors in such files, which are dequantized (`offload.quantized`)
    moved       what an operation makes of them that only moves or casts elements (`torch.stack` of
                the experts of a checkpoint, `.to(dtype)`): noted, done when values are asked for
    all else    (a norm, a copy into an ordinary tensor) reads the values then and there

So a library may build a model out of them in its own way, and the model's states are read group by
group when `offload.initialize` asks for them; `lazy[3]` of stacked experts reads the fourth alone.
Writing to one is an error. The idea is that of torchdistx's deferred initialisation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from offload.checkpoint.format.reader import CheckpointReader
from offload.quantized.matrix import Matrix, Stack
from offload.quantized.reading import matrices_of
from offload.tiers.errors import CheckpointError, UnsupportedError
from offload.weights.tensor_file import Stored, check_range, check_shape, stored_tensors
from offload.zero.groups.parameter_grouping import managed

aten = torch.ops.aten
# These put elements elsewhere or cast them, and compute nothing.
_MOVING = frozenset({
    "alias", "cat", "clone", "detach", "expand", "flip", "permute", "reshape", "select", "slice",
    "split", "split_with_sizes", "squeeze", "stack", "t", "_to_copy", "transpose", "unbind",
    "unsafe_split", "_unsafe_view", "unsqueeze", "view",
})  # fmt: skip
# These look at memory.
_OF_MEMORY = frozenset({
    "__array__", "__dlpack__", "data_ptr", "numpy", "storage", "tolist", "untyped_storage",
})  # fmt: skip
_HINT = (
    "whose values are still in files: call offload.initialize(model, config) first, or take "
    "weight.value(), an ordinary tensor"
)


# ------------------------------------------------------------------------------ where values are
@dataclass(frozen=True, slots=True)
class _Moved:
    """One result of an operation, by `number` if it has several. `args` hold sources of tensors."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    number: int | None
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, *, rounded: bool) -> torch.Tensor:
        """Read the values, into memory of their own or shared with nothing that is written to.

        If not `rounded`, they are as precise as in the files, even where a cast would have lost
        bits."""
        if self.func is aten._to_copy.default:
            source = self.args[0]
            if not rounded and _loses_bits(source.dtype, self.dtype):
                exact: torch.Tensor = source.read(rounded=False)
                return exact
            rounded = True  # what is cast to a wider format shows what was lost before
        args, kwargs = pytree.tree_map(
            lambda value: value.read(rounded=rounded) if isinstance(value, Source) else value,
            (self.args, self.kwargs),
        )
        made: Any = self.func(*args, **kwargs)
        # the others' memory is freed
        result: torch.Tensor = made if self.number is None else made[self.number].clone()
        return result


Source = Stored | Matrix | _Moved  # of a lazy tensor's values


def _row(source: Source, number: int) -> Source:
    """Return the source of row `number` of the first dimension. It reads no more than the row is
    made of, if the operations on the whole can be applied to the row."""
    number %= source.shape[0]
    if isinstance(source, Stored):
        return source.row(number)
    if isinstance(source, Stack):
        return source.each[number]
    row = _row_of_moved(source, number) if isinstance(source, _Moved) else None
    if row is None:
        shape = source.shape[1:]
        return _Moved(aten.select.int, (source, 0, number), {}, None, source.dtype, shape)
    return row


def _row_of_moved(moved: _Moved, number: int) -> Source | None:
    """Return the source of a row; None if the whole result is needed for it."""
    name, ndim = moved.func._schema.name.rpartition("::")[2], len(moved.shape)
    of, *rest = moved.args

    def made(func: Any, *args: Any) -> _Moved:
        return replace(moved, func=func, args=args, shape=moved.shape[1:])

    if name in ("alias", "clone", "detach", "_to_copy"):
        kinds = (None, torch.preserve_format, torch.contiguous_format)
        is_plain = moved.kwargs.get("memory_format") in kinds
        return made(moved.func, _row(of, number), *rest) if is_plain else None
    if name in ("cat", "stack"):
        dim = (rest[0] if rest else moved.kwargs.get("dim", 0)) % ndim
        if dim:
            rows = [_row(each, number) for each in of]
            return replace(made(moved.func, rows, dim - 1), kwargs={})
        for each in of:
            count = 1 if name == "stack" else each.shape[0]
            if number < count:
                row = each if name == "stack" else _row(each, number)
                # tensors of narrower formats are cast
                return row if row.dtype == moved.dtype else _Moved(
                    aten._to_copy.default, (row,), {"dtype": moved.dtype}, None, moved.dtype,
                    row.shape,
                )  # fmt: skip
            number -= count
    if name == "transpose":
        dims = [dim % ndim for dim in rest]
        return made(moved.func, _row(of, number), *(dim - 1 for dim in dims)) if all(dims) else None
    if name in ("view", "reshape", "_unsafe_view") and of.shape[:1] == moved.shape[:1]:
        return made(aten.reshape.default, _row(of, number), list(moved.shape[1:]))
    if name in ("slice", "split", "split_with_sizes"):
        at = 0 if name == "slice" else 1  # of the dimension
        dim = (rest[at] if len(rest) > at else 0) % ndim
        if dim:
            return made(moved.func, _row(of, number), *rest[:at], dim - 1, *rest[at + 1 :])
    return None


def _loses_bits(before: torch.dtype, after: torch.dtype) -> bool:
    """Return whether a cast may lose bits: to another format of at most as many bits, from one that
    fp32 holds exactly."""
    both = before.is_floating_point and after.is_floating_point
    return both and before != after and after.itemsize <= before.itemsize <= 4


# ---------------------------------------------------------------------------------- the tensor
class LazyTensor(torch.Tensor):
    """A tensor on the CPU that holds the source of its values, and no values."""

    source: Source
    like: torch.Tensor  # on the meta device; shares its storage where this one is a view

    @staticmethod
    def __new__(cls, source: Source, like: torch.Tensor | None = None) -> LazyTensor:
        """`like` (on the meta device) has its shape, strides and offset."""
        if like is None:
            like = torch.empty(source.shape, dtype=source.dtype, device="meta")
        # To torch it is on the meta device, and only says that it is on the CPU: else torch would
        # do `ordinary.data = lazy` without a call to this class, and crash when that is read.
        made: LazyTensor = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), storage_offset=like.storage_offset(),
            dtype=like.dtype, device=torch.device("meta"), dispatch_device=True,
        )  # fmt: skip
        made.source, made.like = source, like
        return made

    def value(self) -> torch.Tensor:
        """Return the values, read now, as an ordinary tensor."""
        return self.source.read(rounded=True)

    def row(self, number: int) -> LazyTensor:
        """Return row `number` of the first dimension. Only the values of that row are read."""
        row = self[number]
        assert isinstance(row, LazyTensor), "it was only moved"
        return row

    def checked(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, number: int | None = None
    ) -> torch.Tensor:
        """Return the values for a parameter of this name and shape, or for row `number` of it,
        without reading other rows, as precise as the files have them.

        Raises CheckpointError for another shape, for numbers that are not floating-point, and for a
        value that `dtype` cannot hold."""
        check_shape(name, tuple(self.shape), shape)
        if not self.is_floating_point():
            raise CheckpointError(
                f"weights: {name} is {self.dtype} in the files, and a floating point parameter in "
                "the model; convert it (dequantize it) first"
            )
        asked = self if number is None else self.row(number)
        tensor = asked.source.read(rounded=False)
        check_range(name, tensor, dtype)
        return tensor

    def pieces(self, numel: int) -> Iterator[torch.Tensor]:
        """Yield the values in order, 1D, `numel` at a time, read so if nothing was done to them."""
        source = self.source
        if isinstance(source, Stored):
            yield from source.pieces(numel)
        else:
            yield from self.value().reshape(-1).split(numel)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _OF_MEMORY and isinstance(args[0], LazyTensor):
            raise UnsupportedError(f"{name}() of a weight {_HINT}")
        with torch._C.DisableTorchFunctionSubclass():
            if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
                return _set_data(*args)
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return torch.device("cpu")
        if _moves(func, args, kwargs):
            return _moved(func, args, kwargs)
        _refuse_writes(func, args, kwargs)
        args, kwargs = pytree.tree_map_only(LazyTensor, LazyTensor.value, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyTensor({tuple(self.shape)}, {self.dtype}, not loaded yet)"

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyTensor:
        if id(self) not in memo:
            like = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
            made = LazyTensor(self.source, like)
            vars(made).update((k, v) for k, v in vars(self).items() if k not in _OWN_ATTRIBUTES)
            vars(made).update(_is_param=getattr(self, "_is_param", False))
            memo[id(self)] = made.requires_grad_(self.requires_grad)
        copied: LazyTensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(f"pickle of a weight {_HINT}")


def _moves(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if func._schema.name.rpartition("::")[2] not in _MOVING or func._schema.is_mutable:
        return False
    if torch.device(kwargs.get("device") or "cpu").type != "cpu":
        return False
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    return all(isinstance(tensor, LazyTensor) for tensor in tensors)


def _moved(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    metas = pytree.tree_map_only(LazyTensor, lambda each: each.like, (args, kwargs))
    shapes = func(*metas[0], **metas[1])
    inputs, others = pytree.tree_map_only(LazyTensor, lambda each: each.source, (args, kwargs))

    def made(shape: torch.Tensor, number: int | None) -> LazyTensor:
        if func is aten.select.int and args[1] == 0:
            return LazyTensor(_row(inputs[0], args[2]), shape)
        source = _Moved(func, inputs, others, number, shape.dtype, tuple(shape.shape))
        return LazyTensor(source, shape)

    if isinstance(shapes, torch.Tensor):
        return made(shapes, None)
    return [made(shape, number) for number, shape in enumerate(shapes)]


def _refuse_writes(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            if any(isinstance(each, LazyTensor) for each in pytree.tree_leaves(value)):
                raise UnsupportedError(
                    "writing to a weight whose values are still in files: bring it into RAM first, "
                    "with weight.data = weight.value(), or write inside engine.gathered(weight)"
                )


def _set_data(tensor: LazyTensor, new: torch.Tensor) -> None:
    """Set `tensor.data = new`. With an ordinary tensor's values it becomes an ordinary one."""
    if isinstance(new, LazyTensor):
        torch.Tensor.data.__set__(tensor, new)  # type: ignore[attr-defined]
        tensor.source, tensor.like = new.source, new.like
        return
    other: torch.Tensor = new.detach()
    if getattr(tensor, "_is_param", False):
        other = nn.Parameter(other, requires_grad=tensor.requires_grad)
    vars(other).update((k, v) for k, v in vars(tensor).items() if k not in _OWN_ATTRIBUTES)
    _swap(tensor, other)


# -------------------------------------------------------------------------------- in a model
class LazyWeights:
    """The lazy parameters of a model, taken out of it: parameters on the meta device are there
    instead. The same objects: references to them stay valid. What shared memory with a trained one
    shares a storage on the meta device, which is refused afterwards."""

    def __init__(self, model: nn.Module, only: torch.dtype | None = None) -> None:
        """`only`: parameters in other formats are read now, and stay in the model."""
        self._taken: dict[int, tuple[torch.Tensor, LazyTensor]] = {}
        self._given: dict[int, LazyTensor] = {}  # in place of the values of these parameters
        params = [param for param in model.parameters() if isinstance(param, LazyTensor)]
        buffers = [each for each in model.buffers() if isinstance(each, LazyTensor)]
        trained = {param.like.untyped_storage()._cdata for param in params if param.requires_grad}
        made = {
            id(buffer): buffer.like if buffer.like.untyped_storage()._cdata in trained
            else buffer.value() for buffer in buffers
        }  # fmt: skip
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if isinstance(buffer, LazyTensor):
                    module._buffers[name] = made[id(buffer)]
        for param in params:
            self._take(param, is_managed=managed(param, only))

    def _take(self, param: Any, *, is_managed: bool) -> None:
        values = param.like if is_managed else param.value()
        other: Any = nn.Parameter(values, requires_grad=param.requires_grad)
        vars(other).update((k, v) for k, v in vars(param).items() if k not in _OWN_ATTRIBUTES)
        _swap(param, other)  # now `other` is the lazy one
        if is_managed:
            self._taken[id(param)] = param, other

    def __enter__(self) -> LazyWeights:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Put the lazy parameters back after an error, if nothing has taken their place yet."""
        for param, lazy in self._taken.values():
            if kind is not None and param.is_meta:
                _swap(param, lazy)

    def give(self, param: nn.Parameter, values: LazyTensor) -> None:
        """Let a parameter begin with these values."""
        self._given[id(param)] = values

    def __contains__(self, param: object) -> bool:
        return id(param) in self._given or id(param) in self._taken

    def __len__(self) -> int:
        return len(self._given) + len(self._taken)

    def get(self, param: torch.Tensor) -> LazyTensor | None:
        """Return the lazy tensor that a parameter was, or was given; None for any other one."""
        if id(param) in self._given:
            return self._given[id(param)]
        taken = self._taken.get(id(param))
        return None if taken is None else taken[1]


_OWN_ATTRIBUTES = frozenset({"source", "like", "_is_param"})


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange the contents of two objects as torch.utils.swap_tensors does, which refuses tensors
    with weak references: these refer to the object, which stays."""
    torch._C._swap_tensor_impl(one, other)
    one.__class__, other.__class__ = other.__class__, one.__class__
    for key in {*vars(one), *vars(other)}:
        values = vars(one).pop(key, None), vars(other).pop(key, None)
        for tensor, value in zip((other, one), values, strict=True):
            if value is not None:
                vars(tensor)[key] = value


# -------------------------------------------------------------------------------- in files
def checked_tensors(reader: CheckpointReader) -> dict[str, LazyTensor]:
    """Return the parameters and persistent buffers of a checkpoint by all their names, until
    `reader` is closed. What is read of them is compared with its hash. Raises CheckpointError if a
    file of them is missing or damaged, and StorageError."""
    tensors: dict[str, LazyTensor] = {}
    for names, stored in reader.weights():
        tensor = LazyTensor(Stored(reader.path / stored.file, reader.read_into, stored))
        tensors |= dict.fromkeys(names, tensor)
    return tensors


def lazy_tensors(
    files: Iterable[Path], quantization: Mapping[str, Any] | None = None,
    transposed: Collection[str] = (),
) -> dict[str, LazyTensor]:  # fmt: skip
    """Return every tensor of safetensors files. Those that are stored quantized, as `quantization`
    (of config.json) says, have their values, under the names of the weights. The weights in
    `transposed` have the columns first.

    Raises CheckpointError for a name that two files have, and for parts that do not fit together or
    that `quantization` does not describe; UnsupportedError for a format that is not read.
    """
    stored = stored_tensors(files)
    matrices = matrices_of(stored, quantization)  # taken out of `stored`
    sources: dict[str, Source] = {**stored, **matrices}
    tensors = {name: LazyTensor(source) for name, source in sources.items()}
    for name, matrix in matrices.items():
        if name in transposed or (isinstance(matrix, Stack) and matrix.transposed):
            tensors[name] = tensors[name].mT.contiguous()  # type: ignore[assignment]
    return tensors
