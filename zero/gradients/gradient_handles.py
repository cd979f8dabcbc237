"""The handle that users find in `param.grad`: it stands for the gradient accumulated in the tiers.

    backward          autograd's gradient goes into the accumulator, `param.grad` is a handle
    a second pass     autograd adds to `param.grad`, in place: into the accumulator
    vector_norm       from the sums of squares that the copy into the accumulator made
    mul_(scalar)      kept as a factor for the coming update
    zero_             the gradient exists and is zero
    grad = None       the gradient is dropped at the next `collect` or forward:
                      setting an attribute tells no one
    grad = tensor     it stays there, autograd adds to it, and the step takes its values in
    anything else     reads the accumulator, or writes it

`param.grad` alone says what the gradient is, as in PyTorch; the accumulator holds the value of the
current handle. One that the user keeps after the gradient was cleared has no value any more. The
next handle is made then, and not in the next backward: small objects allocated between large
gradients would keep the C library's heap from returning those.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from offload.kernels.bits import DTYPE_OF
from offload.tiers.errors import StateError, UnsupportedError
from offload.zero.gradients.norms import Place
from offload.zero.hooks.handles import in_backward
from offload.zero.ranks.rank_work import RankWork
from offload.zero.ranks.reduction import ReducedGradients
from offload.zero.step.optimizer_state import OptimizerState
from offload.zero.step.stepper import Stepper
from offload.zero.tensors.local_tensors import is_dtensor, like, local_of, spread_as
from offload.zero.tensors.paged import Operation, PagedTensor

aten = torch.ops.aten
_FP32_MAX = torch.finfo(torch.float32).max
CLEARED = "it was cleared; .clone() it before"
T = TypeVar("T")


def there(reference: weakref.ref[T]) -> T:
    """Return what a gradient's handle refers to. Raises StateError if the engine was dropped."""
    referent = reference()
    if referent is None:
        raise StateError(
            "a gradient whose engine is gone has no value any more; .clone() it before"
        )
    return referent


class WholeGradients(Protocol):
    """The gradients of packed parameters, whose rows are parameters with handles: what
    `PackedGradients` has."""

    def prepare(self) -> None: ...
    def arrived(self, row: torch.Tensor) -> None: ...
    def follow(self) -> None: ...
    def forget(self, why: str) -> None: ...


class GradientSource:
    """One parameter's gradient, from the pass that began it until it is cleared.

    It keeps no model: the garbage collector does not see that a parameter has it in `.grad`, and
    would take what it keeps for used."""

    __slots__ = ("__weakref__", "_table", "key", "used_up", "zeroed")

    def __init__(self, table: GradientHandles, key: Place) -> None:
        self._table = weakref.ref(table)
        self.key = key
        self.zeroed = False  # it is zero, and the accumulator has nothing of it
        self.used_up: str | None = None  # why its value is gone

    @property
    def table(self) -> GradientHandles:
        return there(self._table)

    @property
    def state(self) -> OptimizerState:
        return self.table.states[self.key[0]]

    @property
    def index(self) -> int:
        return self.key[1]

    @property
    def param(self) -> nn.Parameter:
        return self.table.params[self.key]

    @property
    def name(self) -> str:
        return f"{self.state.group.layout.params[self.index].name}.grad"

    @contextmanager
    def reading(self) -> Iterator[torch.Tensor]:
        yield self.table.value_of(self)

    @contextmanager
    def writing(self) -> Iterator[torch.Tensor]:
        table = self.table
        value = table.value_of(self)
        yield value
        table.write(self, value)

    def answer(self, operation: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        rule = _RULES.get(operation)
        return NotImplemented if rule is None else rule(self, self.table, args, kwargs)


class GradientHandles:
    """The gradients of one model, as `param.grad` shows them. For the thread of the model and the
    thread that runs backward."""

    def __init__(
        self, states: Sequence[OptimizerState], stepper: Stepper, rank_work: RankWork,
        arrive: Callable[[OptimizerState, int, torch.Tensor], None],
        check_process: Callable[[], None],
    ) -> None:  # fmt: skip
        """`arrive` takes a gradient of one parameter into its accumulator; `check_process` raises
        in a forked child."""
        self.states = states
        self._stepper = stepper
        self._rank_work = rank_work
        self._arrive = arrive
        self._check_process = check_process
        self._sources: dict[Place, GradientSource] = {}  # of the accumulated gradients
        self._handles: dict[Place, PagedTensor] = {}  # of these, and of gradients to come
        self.params: dict[Place, nn.Parameter] = {
            (state.group.index, index): param
            for state in states
            for index, param in enumerate(state.group.params)
            if state.group.layout.params[index].trainable
        }
        stepper.on_used_up = self._let_go
        self._places = {id(param): key for key, param in self.params.items()}
        self.packed: WholeGradients  # set when they are made
        self._set: dict[Place, int] = {}  # addresses of tensors that users have put there
        self._taken: set[Place] = set()  # the accumulators hold those tensors' values
        self._agreed = False  # all ranks know which gradients there are

    # ---------------------------------------------------------------- from autograd
    def is_current(self, key: Place, gradient: torch.Tensor | None) -> bool:
        """Return whether `gradient` is the handle of a parameter's accumulated gradient."""
        return key in self._sources and gradient is self._handles[key]

    def is_set(self, key: Place, gradient: torch.Tensor) -> bool:
        """Return whether `gradient` is a user's tensor to which autograd has added."""
        return key in self._set and self._set[key] == local_of(gradient).data_ptr()

    def note_set(self) -> None:
        """Note, before a pass, the parameters whose `.grad` is a user's tensor. It stays there, as
        in torch: it may be a view of a buffer that the user zeroes or accumulates in."""
        self.packed.follow()
        with torch._C.DisableTorchFunctionSubclass():
            gradients = ((key, param.grad) for key, param in self.params.items())
            self._set = {
                key: local_of(gradient).data_ptr() for key, gradient in gradients
                if gradient is not None and not isinstance(gradient, PagedTensor)
            }  # fmt: skip

    def take(self, state: OptimizerState, index: int, gradient: torch.Tensor) -> None:
        """Take `gradient` from autograd, for a parameter whose `.grad` was None."""
        key = state.group.index, index
        if isinstance(gradient, PagedTensor):  # a view of a handle, set as `.grad`
            gradient = gradient.values()  # while its source has some
        if key in self._sources or state.gradients.passes[index]:
            self._forget([key])
        self._arrive(state, index, gradient)
        self._agreed = False
        self._put(key)
        self.packed.arrived(self.params[key])

    def add(self, source: GradientSource, gradient: torch.Tensor) -> None:
        """Add a gradient, from autograd or the user, to an existing one."""
        self._arrive(source.state, source.index, gradient)
        source.zeroed = False
        self._agreed = False

    def prepare(self) -> None:
        for key, param in self.params.items():
            self._handles[key] = self._made(key)
            param.grad = None
        self.packed.prepare()

    def _made(self, key: Place) -> PagedTensor:
        """Return a handle for the next gradient of a parameter."""
        param = self.params[key]
        source = GradientSource(self, key)
        return PagedTensor(source, _without_values(param.shape, param.dtype), param.device)

    def _put(self, key: Place) -> GradientSource:
        """Let a parameter have a gradient, whose handle is its `.grad`."""
        if key not in self._handles:
            self._handles[key] = self._made(key)
        handle = self._handles[key]
        assert isinstance(handle.source, GradientSource), "made above"
        self._sources[key] = handle.source
        with torch._C.DisableTorchFunctionSubclass():  # a released parameter has its own
            self.params[key].grad = handle
        return handle.source

    # ---------------------------------------------------------------- what users did to `.grad`
    def drop_cleared(self) -> None:
        """Forget gradients whose `param.grad` was set to None.

        Raises StateError if an update has begun with one.
        """
        self.packed.follow()
        there = [*self._sources, *self._taken]
        with torch._C.DisableTorchFunctionSubclass():
            gone = [key for key in there if self.params[key].grad is None]
        if there and len(gone) == len(there):
            self._part(gone)
            self._stepper.zero_grad()
            self._taken.clear()
            self._agreed = False
        else:
            self._forget(sorted(gone))  # in the same order on all ranks

    def collect(self) -> None:
        """Before a step, drop gradients that users cleared, and take in those that users set."""
        self.drop_cleared()
        with torch._C.DisableTorchFunctionSubclass():
            gradients = {key: param.grad for key, param in self.params.items()}
        for key, gradient in gradients.items():
            if gradient is not None and not self.is_current(key, gradient):
                self._take_set(key, gradient)
        for key in list(self._sources):
            source = self._sources[key]
            if source.zeroed:
                self._keep_zeros(source)

    def _keep_zeros(self, source: GradientSource) -> None:
        gradients = source.state.gradients
        if isinstance(gradients, ReducedGradients):  # other ranks' may be more than zero
            spec = source.state.group.layout.params[source.index]
            zeros = torch.zeros(spec.shape, dtype=source.param.dtype, device=source.param.device)
            gradients.keep(source.index, zeros)
            source.zeroed = False
            self._stepper.changed()
        else:
            self.write(source, self.value_of(source))

    def _take_set(self, key: Place, gradient: torch.Tensor) -> None:
        value = gradient.values() if isinstance(gradient, PagedTensor) else gradient.detach()
        state, index = self.states[key[0]], key[1]
        self._refuse_ahead(state, index)
        if state.group.ep_size > 1:
            raise UnsupportedError(
                f"{state.group.layout.params[index].name}.grad was set to a tensor, which may be "
                "this rank's sum or the average over all ranks: experts that are spread over ranks "
                "take changes in place alone (p.grad.mul_(...), p.grad.copy_(...))"
            )
        state.group.pending_update.wait()  # the last step's, which still reads the old gradient
        self._forget([key])
        local = spread_as(self.params[key], value)
        if isinstance(state.gradients, ReducedGradients):
            state.gradients.keep(index, local)  # it is reduced in the step, with other ranks'
        else:
            state.gradients.add(index, local)
            state.gradients.close()
        self._stepper.changed()
        self._agreed = False
        if isinstance(gradient, PagedTensor):
            self._put(key)
        else:
            self._taken.add(key)

    def complete(self) -> None:
        """Give every parameter with a gradient on any rank one here, after ranks have agreed."""
        if not self._rank_work.reductions.has_others:
            return
        for state in self.states:
            for index, passes in enumerate(state.gradients.passes):
                key = state.group.index, index
                if passes and key not in self._sources and self.params[key].grad is None:
                    self._put(key)
                    self.packed.arrived(self.params[key])

    def clear(self, why: str) -> None:
        self._let_go(range(len(self.states)), why)

    def _let_go(self, groups: Sequence[int], why: str) -> None:
        wanted = set(groups)
        for key in [key for key in self._sources if key[0] in wanted]:
            if self.is_current(key, self.params[key].grad):
                self.params[key].grad = None
            self._sources.pop(key).used_up = why
            self._handles.pop(key)
        self.packed.forget(why)

    def _forget(self, keys: Sequence[Place]) -> None:
        """Drop these parameters' accumulated gradients, which users cleared."""
        self._part(keys)
        by_group: dict[int, list[int]] = {}
        for key in keys:
            self._taken.discard(key)
            if self.states[key[0]].gradients.passes[key[1]]:
                by_group.setdefault(key[0], []).append(key[1])
        for group, indices in by_group.items():
            self._stepper.drop(self.states[group], indices)

    def _part(self, keys: Sequence[Place]) -> None:
        """Separate cleared gradients' handles from the accumulators. Using such a handle, or a view
        of one, raises an error from then on."""
        for key in keys:
            if key in self._sources:
                self._sources.pop(key).used_up = CLEARED
                self._handles[key] = self._made(key)

    # ---------------------------------------------------------------- rows of packed parameters
    def source_of(self, row: torch.Tensor) -> GradientSource | None:
        """Return the source of a row's accumulated gradient; None if it has none."""
        return self._sources.get(self._places[id(row)])

    def norm_of(self, sources: Sequence[GradientSource]) -> torch.Tensor:
        """Return the 2-norm of a whole gradient, of all rows of a packed one, 0-dim, fp32."""
        for source in sources:
            self._check(source)
            self._agree(source)
        there = [source.key for source in sources if not source.zeroed]
        device = sources[0].state.group.device
        if not there:
            return torch.zeros((), device=device)
        return self._stepper.norms.of(there, self._stepper.loss_scale_of_gradients).to(device)

    def value(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return a copy of a parameter's gradient, in the accumulator's format and on the
        parameter's device; None if it has none, or an update in backward has used it up."""
        self.drop_cleared()
        gradient = param.grad
        if gradient is None:
            return None
        key = self._places.get(id(param))
        if key is None or not self.is_current(key, gradient):
            return gradient.clone()
        source = self._sources[key]
        return None if self._is_spent(source) else self._read(source)

    def value_of(self, source: GradientSource) -> torch.Tensor:
        """Return a copy, in the parameter's format."""
        self._check(source)
        if self._is_spent(source):
            raise StateError(
                f"{source.name} has no value any more: optimizer.in_backward has updated with it, "
                "and gave its memory back (its norm is known); set in_backward: false to read "
                "gradients"
            )
        return self._read(source).to(source.param.dtype)

    def _is_spent(self, source: GradientSource) -> bool:
        source.state.group.pending_update.wait()  # it may be about to read the gradient
        return bool(source.state.gradients.spent)

    def _read(self, source: GradientSource) -> torch.Tensor:
        state, index = source.state, source.index
        spec = state.group.layout.params[index]
        self._agree(source)
        if source.zeroed:
            return like(source.param, torch.zeros(spec.shape, device=state.group.device))
        gradients = state.gradients
        if isinstance(gradients, ReducedGradients):
            gradient: torch.Tensor | None = self._whole(gradients, state, index)
        else:
            gradient = gradients.read(index)
        assert gradient is not None, "there is a handle of it"
        gradient = gradient.to(state.group.device)  # the accumulator may be in another memory
        scale = self._stepper.loss_scale_of_gradients
        return like(source.param, gradient if scale == 1.0 else gradient.float() / scale)

    def _whole(
        self, gradients: ReducedGradients, state: OptimizerState, index: int
    ) -> torch.Tensor:
        """Return the whole gradient, from all ranks' parts."""
        gradients.landed.wait()
        mine = gradients.read(index)
        spec = state.group.layout.params[index]
        whole = torch.zeros(spec.numel, dtype=torch.float32, device=state.group.device)
        if mine is not None:
            start = state.parts[index].start
            whole[start : start + mine.numel()] = mine.reshape(-1)
        name = f"{spec.name}.grad"
        combined = self._rank_work.of(state.group.ep_size).combine(whole, name)
        return combined.to(DTYPE_OF[gradients.format]).view(spec.shape)

    def write(self, source: GradientSource, value: torch.Tensor) -> None:
        """Let `value`, of the parameter's shape, be the gradient."""
        self._check_writable(source)
        self._agree(source)
        state, index = source.state, source.index
        state.group.pending_update.wait()
        local, scale = spread_as(source.param, value), self._stepper.loss_scale_of_gradients
        state.gradients.write(index, local if scale == 1.0 else local.float() * scale)
        source.zeroed = False
        self._note(source, "is written")
        self._stepper.changed()

    def _note(self, source: GradientSource, what: str) -> None:
        if self._is_shared(source.key):
            work = self._rank_work.of(source.state.group.ep_size)
            work.note(f"{source.name} {what}")

    def scale(self, source: GradientSource, factor: float) -> None:
        if factor == 1.0:  # clipping to infinity only asks for the norm
            self._check(source)
            return
        self._check_writable(source)
        self._agree(source)
        # updates take numbers of fp32, and zero times another is NaN
        if not abs(factor * source.state.gradients.factor(source.index)) <= _FP32_MAX:
            self.write(source, self.value_of(source) * factor)
        elif not source.zeroed:
            source.state.gradients.scale(source.index, factor)
            self._note(source, f"times {factor}")
            self._stepper.changed()

    def zero(self, source: GradientSource) -> None:
        self._check_writable(source)
        # other ranks may have added to what is zero here
        if not source.zeroed or self._is_shared(source.key):
            source.zeroed = True  # first: an interrupt must not leave it without a value
            self._stepper.drop(source.state, [source.index])

    def _is_shared(self, key: Place) -> bool:
        """Return whether other ranks have gradients of this parameter, too."""
        return isinstance(self.states[key[0]].gradients, ReducedGradients)

    def _agree(self, source: GradientSource) -> None:
        """Reduce these gradients, on several ranks. All ranks must call it, and do, for they run
        the same program."""
        if self._agreed or not self._is_shared(source.key):
            return
        self._stepper.agree("a use of param.grad", source.name)
        shared = [key for key in self.params if self._is_shared(key)]
        here = [int(key in self._sources) for key in shared]
        missing = self._rank_work.exchange(here, "which parameters have gradients")
        if (missing != missing[0]).any():
            column = int((missing != missing[0]).any(axis=0).argmax())
            key = shared[column]
            name = self.states[key[0]].group.layout.params[key[1]].name
            without = [rank for rank, row in enumerate(missing) if not row[column]]
            raise UnsupportedError(
                f"{name} has a gradient on some ranks and none on others ({without}), so what they "
                "compute from their gradients would differ; set clip_grad_norm: in the "
                "configuration, which counts all ranks' gradients, or let every rank use the same "
                "parameters"
            )
        self._agreed = True
        for source in self._sources.values():
            if source.state.gradients.passes[source.index]:
                source.zeroed = False  # some rank has added to it

    def _check(self, source: GradientSource) -> None:
        if source.used_up is not None:
            raise StateError(f"{source.name} has no value any more: {source.used_up}")
        self._check_process()

    def _check_writable(self, source: GradientSource) -> None:
        self._check(source)
        self._refuse_ahead(source.state, source.index)

    def _refuse_ahead(self, state: OptimizerState, index: int) -> None:
        if self._stepper.policy.in_backward:
            name = state.group.layout.params[index].name
            raise StateError(
                f"{name}.grad cannot be changed: optimizer.in_backward updates parameters while "
                "backward runs, with gradients as they come; set in_backward: false to clip or "
                "scale gradients"
            )


@functools.lru_cache(maxsize=4096)  # one for all blocks; a third of the time of a handle
def _without_values(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=torch.device("meta"))


def _norm(s: GradientSource, table: GradientHandles, args: Any, kwargs: Any) -> Any:
    order = args[0] if args else kwargs.get("ord", kwargs.get("p", 2))
    rest = [*args[1:], *(v for k, v in kwargs.items() if k not in ("ord", "p"))]
    if order != 2 or any(each not in (None, False, [], torch.float32) for each in rest):
        return NotImplemented
    return table.norm_of([s])


def _mul(s: GradientSource, table: GradientHandles, args: Any, kwargs: Any) -> Any:
    factor = _scalar(args[0])
    if factor is None:
        return NotImplemented
    table.scale(s, factor)
    return s


def _div(s: GradientSource, table: GradientHandles, args: Any, kwargs: Any) -> Any:
    divisor = _scalar(args[0])
    if not divisor or kwargs:
        return NotImplemented
    table.scale(s, 1.0 / divisor)
    return s


def _scalar(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        one = value.numel() == 1 and value.dim() <= 1 and not is_dtensor(value)
        return float(value) if one else None
    return float(value) if isinstance(value, (int, float)) else None


def _zero(s: GradientSource, table: GradientHandles, args: Any, kwargs: Any) -> Any:
    table.zero(s)
    return s


def _add(s: GradientSource, table: GradientHandles, args: Any, kwargs: Any) -> Any:
    other = args[0]
    if not in_backward() or not isinstance(other, torch.Tensor) or kwargs.get("alpha", 1) != 1:
        return NotImplemented
    if isinstance(other, PagedTensor) or other.shape != s.param.shape:
        return NotImplemented
    table.add(s, other)
    return s


_RULES: dict[Operation, Callable[[GradientSource, GradientHandles, Any, Any], Any]] = {
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten.mul_.Tensor: _mul,
    aten.mul_.Scalar: _mul,
    aten.div_.Tensor: _div,
    aten.div_.Scalar: _div,
    aten.zero_.default: _zero,
    aten.add_.Tensor: _add,
}
