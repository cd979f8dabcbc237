"""A parameter while its values are not in memory: the same object, of a class that fetches them.

A released parameter keeps its identity, shape and hooks; its data is a placeholder and its class a
subclass of its own, whose `__torch_function__` sees every use:

    metadata                    shape, dtype, .grad, hooks: answered as they are
    packed (packed.py)          in a graph its rows as one tensor, where gradients come to the rows
    while a module is called    its group is gathered, and stays until the outermost call returns (a
                                tied head written as `F.linear(x, embed.weight)`)
    ... that left it quantized  few tokens are multiplied as it is stored (quantized_ops.py),
                                else the group is dequantized, until that call returns
    in a graph                  gathered for that operation; what it saves becomes handles, and what
                                would be a view of the values is a copy
    otherwise                   it acts as a `PagedTensor`: read when needed, written through,
                                masters included
    copied or pickled           its values; a module of the model refuses to be pickled

What reads it below Python comes here, too (placeholders.py).

A gathered parameter that will be released has a class that notes when its `.data` is taken, for
autograd does not count what is written through that; one that stays has its own class.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, cast

import torch
from torch import nn

from offload.tiers.errors import StateError, UnsupportedError
from offload.zero.experts.packed import PackedParam
from offload.zero.groups.group import Classes, ParamGroup
from offload.zero.groups.shared_views import check_format
from offload.zero.groups.weight_quantizer import WeightQuantizer
from offload.zero.hooks.compilers import uncompiled
from offload.zero.hooks.handles import HandleTable, Session
from offload.zero.hooks.quantized_ops import StoredParam, compute
from offload.zero.hooks.transforms import in_transform, refuse_in_transforms
from offload.zero.tensors.local_tensors import is_dtensor
from offload.zero.tensors.paged import (
    MAKE_ANOTHER,
    SHARE_DATA,
    Operation,
    PagedTensor,
    from_start,
    mapped,
    name_of,
    tensors_in,
)
from offload.zero.tensors.placeholders import exchanging, placeholder

# Of a parameter's methods, those that need no values.
_METADATA = MAKE_ANOTHER | {
    "size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "is_complex",
    "is_signed", "element_size", "ndimension", "nelement", "requires_grad_", "__len__",
    "register_hook", "register_post_accumulate_grad_hook", "retain_grad",
    "storage_offset", "is_same_size", "__hash__", "get_device", "is_inference", "is_pinned",
    "is_shared", "_has_compatible_shallow_copy_type", "__dir__", "__format__",
}  # fmt: skip
# ... and what asks for their memory, which outlives no operation
_NEVER_IN_A_GRAPH = frozenset(
    {
        "detach", "numpy", "tolist", "__repr__", "new", "new_tensor", "data_ptr", "const_data_ptr",
        "untyped_storage", "storage", "_typed_storage", "storage_type", "share_memory_",
    }
)  # fmt: skip
_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})
_VALUE_PROPERTIES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
Function = Callable[..., Any]
_DATA: Any = torch.Tensor.__dict__.get("data") or torch._C.TensorBase.data


class Values(Protocol):
    """Access to parameters of a group from outside of the model: what `WeightValues` has."""

    def reading(self, params: Sequence[nn.Parameter]) -> AbstractContextManager[None]: ...
    def gathered(self, params: Sequence[nn.Parameter]) -> AbstractContextManager[None]: ...
    def adopt_changes(self) -> None: ...
    def adopt_written(self, group: ParamGroup, indices: Sequence[int]) -> None: ...


class ReleasedParameters:
    """Handles the uses of one model's released parameters. For the thread of the model."""

    def __init__(
        self, find: Callable[[nn.Parameter], tuple[ParamGroup, int] | None],
        packed_of: Callable[[nn.Parameter], PackedParam | None],
    ) -> None:  # fmt: skip
        self._find = find
        self._packed_of = packed_of
        self._classes: dict[type, Classes] = {}
        self._released: dict[type, type] = {}  # class of released ones -> their own
        self._sources: weakref.WeakSet[ParameterSource] = weakref.WeakSet()
        self.closed: str | None = None  # the StateError of a use, once the values are gone
        # set by `connect`; before that nothing is released
        self._handles: HandleTable
        self._join_call: Callable[[Sequence[ParamGroup]], bool]
        self._values: Values

    def connect(
        self, handles: HandleTable, join_call: Callable[[Sequence[ParamGroup]], bool],
        values: Values,
    ) -> None:  # fmt: skip
        """`join_call` lets the call under way gather groups until it ends; False without one."""
        self._handles, self._join_call, self._values = handles, join_call, values

    def classes_of(self, kind: type) -> Classes:
        """Return the classes of parameters that are a `kind` by themselves."""
        if kind not in self._classes:
            released = self._make_released(kind)
            self._released[released] = kind
            self._classes[kind] = Classes(kind, released, self._make_gathered(kind))
        return self._classes[kind]

    def _make_released(self, kind: type) -> type:
        @uncompiled
        def torch_function(
            cls: type, function: Function, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return self._use(function, args, kwargs or {})

        def deepcopy(param: Any, memo: dict[int, Any]) -> Any:
            """Return an ordinary parameter with the same values."""
            if id(param) not in memo:
                memo[id(param)] = kind(param.data.clone(), param.requires_grad)
            return memo[id(param)]

        def set_(param: Any, *given: Any) -> Any:
            """Call `set_`, which does not come to `__torch_function__`. With anything but a tensor
            it names a memory, which is refused below Python."""
            if len(given) != 1 or not isinstance(given[0], torch.Tensor):
                return kind.set_(param, *given)  # type: ignore[attr-defined]
            self._assign(param, given[0])
            return param

        body = {
            "__torch_function__": classmethod(torch_function), "__deepcopy__": deepcopy,
            "set_": set_, "use_below_python": staticmethod(self._use_below),
            "why_closed": staticmethod(lambda: self.closed),
        }  # fmt: skip
        return _subclass(kind, body)

    def _make_gathered(self, kind: type) -> type:
        if "_local_tensor" in dir(kind):
            return kind  # a DTensor: its values are another tensor's

        def data(param: Any) -> torch.Tensor:
            place = self._find(param)
            if place is not None and place[0].is_gathered:
                place[0].writes.watch(place[1])
            taken: torch.Tensor = _DATA.__get__(param)
            return taken

        def deepcopy(param: Any, memo: dict[int, Any]) -> Any:
            copied = kind.__deepcopy__(param, memo)  # type: ignore[attr-defined]
            copied.__class__ = kind
            return copied

        body = {"data": property(data, _DATA.__set__), "__deepcopy__": deepcopy}
        return _subclass(kind, body)

    def _use(self, function: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = getattr(function, "__name__", "")
        if name == "__set__" and _property(function) == "data":
            return self._assign(args[0], args[1])
        if _changes_nothing(name, args, kwargs):
            return args[0]  # the operations below are asked for more, and would read it
        if _needs_no_values(function, name, args, kwargs):
            if name in _HOOKS and self._packed_of(args[0]) is not None:
                raise UnsupportedError(
                    f"{self._name_of(args[0])}.{name}(): its gradient comes in rows, one per "
                    "expert that had tokens; read or change param.grad after backward"
                )
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        return self._use_values(function, name, args, kwargs)

    def _use_below(self, operation: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operation that reads parameters below Python, or needs no values."""
        if operation is SHARE_DATA and args[0] is not args[1] and type(args[1]) in self._released:
            raise UnsupportedError(
                f"tensor.data = {self._name_of(args[1])}: its values have no memory of their own, "
                "they may be in any tier; use .detach().clone(), or `with "
                "engine.gathered(parameter):`"
            )
        name = name_of(operation)
        if _needs_no_values(operation, name, args, kwargs):
            with torch._C.DisableTorchFunctionSubclass(), exchanging():
                return operation(*args, **kwargs)
        return self._use_values(operation, name, args, kwargs)

    def _use_values(
        self, function: Function, name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        released = (p for p in tensors_in([args, kwargs]) if type(p) in self._released)
        params = list({id(p): cast(nn.Parameter, p) for p in released}.values())
        self._check(params)
        if any(self._packed_of(param) is not None for param in params):
            return self._with_packed(function, name, args, kwargs, params)
        if function is torch.autograd.grad:
            return self._differentiate(function, params, args, kwargs)
        if name == "as_strided":
            function = functools.partial(_as_strided, function)
        groups = list(dict.fromkeys(self._place_of(param)[0] for param in params))
        is_quantized = all(group.is_left_quantized for group in groups)
        if is_quantized and not torch.is_grad_enabled() and not in_transform():
            result = compute(function, name, args, kwargs, self._stored)
            if result is not NotImplemented:
                return result
        if self._join_call(groups):
            return function(*args, **kwargs)
        if _is_in_graph(params, name, function):
            return self._in_graph(function, name, args, kwargs, params)
        return self._paged(function, args, kwargs, params)

    def _place_of(self, param: nn.Parameter) -> tuple[ParamGroup, int]:
        place = self._find(param)
        assert place is not None, "released parameters are managed ones"
        return place

    def _name_of(self, param: nn.Parameter) -> str:
        packed = self._packed_of(param)
        if packed is not None:
            return packed.name
        group, index = self._place_of(param)
        return group.layout.params[index].name

    def _check(self, params: Sequence[nn.Parameter]) -> None:
        if self.closed is not None:
            raise StateError(f"{self._name_of(params[0])}: {self.closed}")
        for param in params:
            if self._packed_of(param) is None and self._find(param) is None:
                raise UnsupportedError(
                    f"a parameter of {tuple(param.shape)} has the class of one in tiers and is "
                    "none: other code put it in its place (accelerate's cpu_offload and "
                    "dispatch_model do so); leave the parameters of a model in tiers as they are"
                )

    def _stored(self, value: Any) -> StoredParam | None:
        """Return the stored bytes of a released parameter of a quantized group; else None."""
        if type(value) not in self._released:
            return None
        group, index = self._place_of(value)
        quantizer, stored = group.state.quantized()
        assert isinstance(quantizer, WeightQuantizer), "of frozen weights"
        part = quantizer.layout.parts[index]
        return StoredParam(part, stored[part.stored], quantizer, group.dtype)

    def hide(self, packed: PackedParam, dtype: torch.dtype, device: torch.device) -> None:
        """Let a packed parameter be a placeholder, whose rows have the values."""
        param = packed.param
        with (
            torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), exchanging(),
        ):  # fmt: skip
            param.__class__ = self.classes_of(packed.own_class).released
            param.data = placeholder(param.shape, dtype, device)

    def _with_packed(
        self, function: Function, name: str, args: Sequence[Any], kwargs: dict[str, Any],
        params: Sequence[nn.Parameter],
    ) -> Any:  # fmt: skip
        packed = {id(param): self._packed_of(param) for param in params}
        first = next(each for each in packed.values() if each is not None)
        if function is torch.autograd.grad:
            raise UnsupportedError(
                f"torch.autograd.grad of {first.name}: its rows are parameters of their own, so it "
                "is in no graph; call backward() and read .grad"
            )
        is_initialiser = getattr(function, "__module__", "") == nn.init.__name__
        if is_initialiser or not _is_in_graph(params, name, function):
            return self._paged(function, args, kwargs, params)
        if (name.endswith("_") and not name.endswith("__")) or "out" in kwargs:
            raise RuntimeError(
                f"{first.name}: a leaf Variable that requires grad is being used in an in-place "
                "operation; write within torch.no_grad()"
            )

        def whole(value: Any) -> Any:
            its = packed.get(id(value))
            return value if its is None else torch.stack(list(its.rows))

        return function(*mapped(args, whole), **mapped(kwargs, whole))

    def _in_graph(
        self, function: Function, name: str, args: Any, kwargs: Any, params: Sequence[nn.Parameter]
    ) -> Any:
        """Run an operation that autograd records: parameters get its gradient as always."""
        refuse_in_transforms(self._name_of(params[0]))
        with self._values.reading(params):
            for param in params:
                self._handles.note(self._place_of(param)[0])
            session = Session(self._handles)
            session.open()
            try:
                result = function(*args, **kwargs)
                if _asks_for_its_node(name, args):
                    return result  # a view: its values stay in memory for as long as it lives
                return mapped(result, lambda value: self._apart(value, params))
            finally:
                session.close()

    def _apart(self, value: Any, params: Sequence[nn.Parameter]) -> Any:
        """Return `value` as something that outlives the values it may be a view of."""
        if not isinstance(value, torch.Tensor) or any(value is param for param in params):
            return value
        return value.clone() if self._handles.group_of(value) is not None else value

    def _paged(
        self, function: Function, args: Any, kwargs: Any, params: Sequence[nn.Parameter]
    ) -> Any:
        if any(is_dtensor(param) for param in params):
            with self._values.gathered(params):
                for param in params:
                    self._handles.note(self._place_of(param)[0])
                result = function(*args, **kwargs)
                return mapped(result, lambda value: self._apart(value, params))
        name = getattr(function, "__name__", "")
        detached = _property(function) == "data" or (torch.is_grad_enabled() and name != "__repr__")
        paged = {id(param): self._as_paged(param, detached=detached) for param in params}
        owners = {id(paged[id(param)]): param for param in params}

        def outward(value: Any) -> Any:
            return paged.get(id(value), value)

        # torch's own methods would take the address of the values
        if args and type(args[0]) in self._released:
            function = vars(PagedTensor).get(name, function)
        result = function(*mapped(args, outward), **mapped(kwargs, outward))
        return owners.get(id(result), result)

    def _as_paged(self, param: nn.Parameter, *, detached: bool = True) -> PagedTensor:
        name = self._name_of(param)
        source = ParameterSource(self._values, param, name)
        self._sources.add(source)
        shape = torch.empty(param.shape, dtype=param.dtype, device=torch.device("meta"))
        requires_grad = not detached and param.requires_grad
        return PagedTensor(source, shape, param.device, requires_grad=requires_grad)

    def _differentiate(
        self, function: Function, params: Sequence[nn.Parameter], args: Any, kwargs: Any
    ) -> Any:
        """Run `torch.autograd.grad` of parameters, which needs their place in the graph, no values.
        It would come here again for ever, and what runs within it must come here."""
        released = [(param, type(param)) for param in params]
        for param, kind in released:
            param.__class__ = self._released[kind]
        try:
            return function(*args, **kwargs)
        finally:
            for param, kind in released:
                if not self._place_of(param)[0].is_gathered:  # meanwhile
                    param.__class__ = kind

    def _assign(self, param: nn.Parameter, value: Any) -> None:
        """Set `param.data = value`."""
        if value is param:
            return
        self._check([param])
        check_format(self._name_of(param), value, param.shape, param.dtype, param.device)
        self.check_assigned(param, value)
        with torch.no_grad():
            for each in list(self._sources):
                each.part_from(param)
            self._as_paged(param).copy_(value)

    def check_assigned(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Raise UnsupportedError if `value`, which `param.data` is set to, has memory of a
        parameter in tiers: each has values of its own there."""
        if isinstance(value, PagedTensor):
            source = value.source
            is_shared = isinstance(source, ParameterSource) and source.param is not param
        else:
            is_shared = type(value) in self._released or self._handles.group_of(value) is not None
        if is_shared:
            raise UnsupportedError(
                f"{self._name_of(param)}.data was given memory of a parameter; in tiers each has "
                "values of its own, and a write to one would not show in the other; give it a copy "
                "(.data = other.data.clone()), or tie them before offload.initialize or "
                "offload.dispatch (module.weight = other.weight)"
            )


class ParameterSource:
    """The values of one released parameter, for a PagedTensor: until `param.data` is set, after
    which it goes on with those from before, as what refers to the memory from before does."""

    def __init__(self, values: Values, param: nn.Parameter, name: str) -> None:
        self._values = values
        self.param = param
        self._parted: torch.Tensor | None = None
        self.name = name

    def part_from(self, param: nn.Parameter) -> None:
        """Keep the present values: `param.data` is about to become another tensor."""
        if param is self.param and self._parted is None:
            with self.reading() as values:
                self._parted = values.clone()

    @contextmanager
    def reading(self) -> Iterator[torch.Tensor]:
        if self._parted is not None:
            yield self._parted
            return
        with self._values.reading([self.param]):
            yield self.param.detach()

    @contextmanager
    def writing(self) -> Iterator[torch.Tensor]:
        if self._parted is not None:
            yield self._parted
            return
        with self._values.gathered([self.param]):
            yield self.param.detach()

    def answer(self, operation: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return NotImplemented


def why_closed(param: nn.Parameter) -> str | None:
    """Return what is said of a parameter whose tiers are closed; None for any other."""
    asked = getattr(type(param), "why_closed", None)
    return None if asked is None else asked()


def is_released(param: nn.Parameter) -> bool:
    """Return whether a parameter is, or will be again, of a class that fetches its values."""
    return type(param).__module__ == __name__


def _subclass(kind: type, body: dict[str, Any]) -> type:
    made: type = type(kind)(kind.__name__, (kind,), {**body, "__slots__": ()})
    return made


def _property(function: Function) -> str:
    return str(getattr(getattr(function, "__self__", None), "__name__", ""))


def _needs_no_values(
    function: Function, name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> bool:
    if name in ("__get__", "__set__", "__delete__"):
        return _property(function) not in _VALUE_PROPERTIES
    if name == "type":  # a question without an argument
        return len(args) == 1 and not kwargs
    return name in _METADATA or _changes_nothing(name, args, kwargs)


def _changes_nothing(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a call changes nothing: `param.to(device)`, `.float()` and the like if it is
    there and so already; a copy of a parameter into itself."""
    if name == "copy_":  # onto itself: modules that load the engine's state dict do so
        return len(args) == 2 and args[0] is args[1] and not kwargs
    if name not in ("to", "cpu", "float", "half", "bfloat16"):
        return False
    param, *rest = args
    dtypes = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}
    rest += kwargs.values()
    asked = [*rest, dtypes[name]] if name in dtypes else [*rest, "cpu"] if name == "cpu" else rest
    return all(
        each is None or each is False or each == param.dtype or _is_here(each, param)
        for each in asked
    )


def _as_strided(function: Function, param: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call `as_strided` with offsets from the parameter's start, not from that of its memory."""
    return function(param, *from_start(int(param.storage_offset()), *args, **kwargs))


def _is_here(value: Any, param: torch.Tensor) -> bool:
    if not isinstance(value, (str, torch.device)):
        return False
    device = torch.device(value)
    return device.type == param.device.type and device.index in (None, param.device.index)


def _is_in_graph(params: Sequence[nn.Parameter], name: str, function: Function) -> bool:
    if not torch.is_grad_enabled() or name in _NEVER_IN_A_GRAPH:
        return False
    if name == "__get__" and _property(function) == "data":
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return any(param.requires_grad for param in params)


def _asks_for_its_node(name: str, args: Sequence[Any]) -> bool:
    """Return whether an operation is used to find the node that accumulates a parameter's gradient,
    `p.expand_as(p).grad_fn.next_functions[0][0]` (DDP, Megatron and torch's pipelines do that):
    nothing may come in between."""
    return name in ("expand_as", "view_as") and len(args) == 2 and args[0] is args[1]
