"""Counts activations by running the model's own forward and backward without values.

    the model ── its parameters exchanged for valueless ones of the configured precision
       │
       ├─ blocks   wrapped by the runtime's own recomputation; of many identical ones a few are run
       │           and count for the others (`traced_blocks`)
       ├─ forward  every operation is seen: storages are counted from birth to death
       └─ backward the same; a parameter's gradient is taken as soon as it is there

It runs twice: as it is, and with what autograd saves leaving for another tier as
`swap/activations` would take it. Storages below torch's dispatcher (a kernel's scratch memory)
are not seen.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._mode_utils import no_dispatch

from offload.config import OffloadConfig
from offload.losses.causal_lm import ChunkedLoss
from offload.losses.tiled_mlp import tile_mlps
from offload.planning.activations.cuda_choices import choosing_for_cuda
from offload.planning.activations.facts import ActivationFacts
from offload.planning.activations.pass_watch import LiveBytes, PassWatch
from offload.planning.activations.traced_blocks import (
    CannotSkipError,
    replaced_forward,
    watched_blocks,
)
from offload.planning.activations.valueless import WithoutValues, valueless
from offload.planning.plan.estimate import Workload
from offload.planning.plan.plan import MIN_WINDOW_NBYTES
from offload.swap.activations import DEVICE_NBYTES, MIN_NBYTES, WHOLE
from offload.swap.activations.activations import span_of
from offload.tiers import accelerator
from offload.tiers.errors import OffloadError, UnsupportedError
from offload.zero.groups.parameter_grouping import Unit, group_parameters
from offload.zero.hooks.handles import HandleTable
from offload.zero.recompute.recompute import Recomputation

# Calls the model on inputs of its own making; gives the loss, or the logits.
Run = Callable[[nn.Module, Workload], Tensor]

_MIN_SLOT_NBYTES = MIN_WINDOW_NBYTES // 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def trace_activations(
    model: nn.Module, config: OffloadConfig, workload: Workload, *, device: str | None = None,
    trains: bool = True, skip: bool = True,
) -> ActivationFacts:  # fmt: skip
    """Count one forward and backward pass of `model` under `config`; of a model that does not train
    one forward in eval mode, without the cache of keys and values (`generation_facts` adds it).

    Models that take `input_ids` and `labels`, or `tokens` and `targets`, are supported. `device`
    (cpu or cuda) selects the kernels, by default `config.device`. The model, on any device, is left
    unchanged. `skip=False` runs every block.

    Raises UnsupportedError if it is not known how to call the model.
    """
    run = run_of(model, trains=trains)
    config = config.settled()
    if device is None:
        device = accelerator.default_type() if config.device == "auto" else config.device
    training = {module: module.training for module in model.modules()}
    if not trains:
        model.eval()
    try:
        units = group_parameters(model, config.groups.blocks).units
        passes = partial(_passes, model, units, config, workload, run, device, trains)
        # of copies in flight, every second block may hold more than the others
        for least in (1, 2) if skip else ():
            with suppress(CannotSkipError, LookupError):  # or blocks are called by their numbers
                return _facts(passes, trains=trains, least=least)
        return _facts(passes, trains=trains, least=None)
    except OffloadError as error:
        raise UnsupportedError(f"{type(model).__name__} cannot be traced: {error}") from error
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UnsupportedError(
            f"{type(model).__name__} cannot be traced: its code depends on values ({error.func}), "
            "and a count without values has none"
        ) from error
    finally:
        for module, was in training.items():
            module.training = was


def _facts(passes: Callable[..., PassWatch], *, trains: bool, least: int | None) -> ActivationFacts:
    here = passes(elsewhere=False, least=least)
    if not trains:
        return replace(facts_of(here, here), saved_nbytes=0)
    return facts_of(here, passes(elsewhere=True, least=least))


def facts_of(here: PassWatch, elsewhere: PassWatch) -> ActivationFacts:
    """The facts of a pass from two traces: saved tensors stay, and saved tensors move elsewhere."""
    return ActivationFacts(
        saved_nbytes=here.saved.nbytes,
        peak_nbytes=here.peak.nbytes,
        peak_elsewhere_nbytes=elsewhere.peak.nbytes,
        forward=here.forward,
        backward=here.backward,
        heap_peak_nbytes=here.peak.heap_nbytes,
        heap_peak_elsewhere_nbytes=elsewhere.peak.heap_nbytes,
    )


def _passes(
    model: nn.Module, units: Sequence[Unit], config: OffloadConfig, workload: Workload, run: Run,
    device: str, trains: bool, *, least: int | None, elsewhere: bool,
) -> PassWatch:  # fmt: skip
    """Run forward and, if the model trains, backward, and return the watch that observed them."""
    watch = PassWatch()
    values = WithoutValues(gpu=device == "cuda")
    away = SavedElsewhere(watch.live, values, in_place=device == "cpu") if elsewhere else None
    with ExitStack() as stack:
        stack.enter_context(_collector_off())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(valueless(model, values, DTYPES[config.precision]))
        if device == "cuda":
            stack.enter_context(choosing_for_cuda(model, units))
        stack.enter_context(as_the_engine(model, units, config, away))
        stack.enter_context(watched_blocks(model, units, watch, least=least))
        stack.enter_context(values)
        stack.enter_context(watch)
        stack.enter_context(torch.set_grad_enabled(trains))
        output = run(model, workload)
        watch.end_forward(output)
        if trains:
            output.backward()
    return watch


def run_of(model: nn.Module, *, trains: bool) -> Run:
    """Choose inputs by the names of forward's parameters, or raise UnsupportedError.

    The result is the loss; if the model does not train, the logits of each sequence's last token,
    or of all tokens if the model cannot omit the others.
    """
    kind, names = type(model).__name__, inspect.signature(model.forward).parameters.keys()
    if not trains and "decoder_input_ids" in names:
        raise UnsupportedError(
            f"{kind} has an encoder and a decoder: what generating takes is predicted for models "
            "of one stack alone"
        )
    inputs = next((each for each in _INPUTS if {*each[: 1 + trains]} <= names), None)
    if inputs is None:
        known = "input_ids and labels (or tokens and targets)" if trains else "input_ids or tokens"
        raise UnsupportedError(
            f"{kind}.forward takes {', '.join(sorted(names)) or 'nothing'}: what to call it with "
            f"is known for language models alone, which take {known}"
        )
    more: dict[str, Any] = {"use_cache": False} if "use_cache" in names else {}
    if not trains and "logits_to_keep" in names:
        more["logits_to_keep"] = 1

    def run(model: nn.Module, workload: Workload) -> Any:
        tokens = torch.zeros(workload.batch, workload.sequence, dtype=torch.long)
        output = model(**dict.fromkeys(inputs[: 1 + trains], tokens), **more)
        return output.loss if trains else output.logits

    return run


_INPUTS = (("tokens", "targets"), ("input_ids", "labels"))


@contextmanager
def _collector_off() -> Iterator[None]:
    """Disable the garbage collector: bytes must not depend on when cycles are collected."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def as_the_engine(
    model: nn.Module, units: Sequence[Unit], config: OffloadConfig, away: SavedElsewhere | None
) -> Iterator[None]:
    """Install what changes the live bytes as the engine does: recomputation, saved tensors that
    move elsewhere, gradients that are taken, a chunked loss."""
    with ExitStack() as stack:
        if config.loss.chunked:
            stack.callback(ChunkedLoss(model).remove)
        activations = config.placement.activations
        stack.callback(tile_mlps(model, activations.tiled_mlp))
        checkpoint = activations.checkpoint
        if checkpoint and any(unit.repeated for unit in units):
            selective = checkpoint == "selective"
            recomputation = Recomputation(units, _AllHere(), selective=selective, keeper=away)
            stack.callback(recomputation.remove)
        if away is not None:
            stack.enter_context(_leaving(model, away))
        for param in model.parameters():
            if param.requires_grad:
                hook = param.register_post_accumulate_grad_hook(_take_gradient)
                stack.callback(hook.remove)
        yield


class _AllHere:
    """The parameter source of a trace: all parameters are always in place."""

    def computing(self, unit: Unit) -> AbstractContextManager[None]:
        return nullcontext()

    def versions(self, unit: Unit) -> tuple[int, ...]:
        return ()


def _take_gradient(param: Tensor) -> None:
    param.grad = None


def _leaving(model: nn.Module, away: SavedElsewhere) -> AbstractContextManager[None]:
    """Hand the tensors that autograd saves during the model's forward to `away`."""
    handles = HandleTable(lambda group: None, away)
    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with handles.hooks():
            return own(*args, **kwargs)

    return replaced_forward(model, forward)


# ---------------------------------------------------------------- saved tensors in another tier
# Simulated without moving, by the rules of `swap/activations`: storages of 128 KiB and more move
# whole, each once, unless only a small part of one is saved; inputs, parameters and buffers stay.
# What comes back is a new storage. On a CPU it counts only if it may be larger than a slot of the
# window; a smaller one is used in place in the window. On a GPU storages stay while they are copied
# and come ahead of use, as many as copies in flight may hold.
class _LeftStorage:
    """The bytes of a moved storage; it stays on the device while other tensors refer to it."""

    def __init__(self, storage: torch.UntypedStorage, version: int, span: tuple[int, int]) -> None:
        self.version = version
        self.start_bytes, self.stop_bytes = span
        self.nbytes = span[1] - span[0]
        self.there = weakref.ref(storage)
        self.there_start_bytes = 0  # where the storage that is there begins, of the first one
        self.number = 0
        self.copied: torch.UntypedStorage | None = None  # while a copy in flight needs it

    def covers(self, storage: torch.UntypedStorage, version: int, span: tuple[int, int]) -> bool:
        inside = self.start_bytes <= span[0] and span[1] <= self.stop_bytes
        return self.there() is storage and self.version == version and inside


@dataclass(frozen=True, slots=True)
class _LeftTensor:
    owner: SavedElsewhere
    record: _LeftStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset_bytes: int  # of the first storage

    def tensor(self) -> Tensor:
        storage = self.owner.restore(self.record)
        offset = (self.offset_bytes - self.record.there_start_bytes) // self.dtype.itemsize
        with no_dispatch():  # a mode without values refuses storages
            empty = torch.empty(0, dtype=self.dtype, device=storage.device)
            tensor = empty.set_(storage, offset, self.shape, self.stride)
        mode = self.owner.values
        return tensor if mode is None else FakeTensor(mode, tensor, "cpu")


class SavedElsewhere:
    """Implements the keeper of saved activations (`zero/hooks/handles.py`)."""

    def __init__(
        self, live: LiveBytes, values: WithoutValues | None = None, *, in_place: bool
    ) -> None:
        """`live` knows which storages count. `values` is the mode of a pass without values.
        `in_place`: the model computes on the CPU, where the window is."""
        self.values = values
        self._live = live
        self._in_place = in_place
        self._left: weakref.WeakValueDictionary[int, _LeftStorage] = weakref.WeakValueDictionary()
        self._order: list[weakref.ref[_LeftStorage]] = []

    def keep(self, tensor: Tensor) -> _LeftTensor | None:
        """Move the tensor away; return None if it stays."""
        if tensor.layout is not torch.strided or (tensor.is_leaf and tensor.requires_grad):
            return None
        span = span_of(tensor)
        if span[1] - span[0] < MIN_NBYTES or not self._live.nbytes_of(tensor):
            return None
        record = self._record_of(tensor.untyped_storage(), tensor._version, span)
        offset = int(tensor.storage_offset()) * tensor.itemsize
        return _LeftTensor(self, record, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def _record_of(
        self, storage: torch.UntypedStorage, version: int, span: tuple[int, int]
    ) -> _LeftStorage:
        record = self._left.get(storage._cdata)
        if record is None or not record.covers(storage, version, span):
            if storage.nbytes() <= WHOLE * (span[1] - span[0]):
                span = 0, storage.nbytes()
            record = self._left[storage._cdata] = _LeftStorage(storage, version, span)
            if not self._in_place:
                record.number, record.copied = len(self._order), storage
                self._order.append(weakref.ref(record))
                self._copy(len(self._order), arriving=False)
        return record

    def _copy(self, number: int, *, arriving: bool) -> None:
        """Let copies of records before `number`, the latest first, hold what they may at most:
        of those that leave, or of those that are `arriving` ahead of use."""
        living = [record for record in (ref() for ref in self._order) if record is not None]
        nbytes = sum(r.nbytes for r in living if r.number >= number and r.copied is not None)
        for record in reversed([each for each in living if each.number < number]):
            if record.copied is None and (not arriving or record.there() is not None):
                continue
            nbytes += record.nbytes
            if nbytes > max(DEVICE_NBYTES, record.nbytes):
                record.copied = None
                if arriving:
                    return
            elif record.copied is None:
                record.copied = self._made(record)

    def restore(self, record: _LeftStorage) -> torch.UntypedStorage:
        """Return the record's bytes where the model computes."""
        storage = record.there() or self._made(record)
        record.copied = None
        if not self._in_place:
            self._copy(record.number, arriving=True)
        return storage

    def _made(self, record: _LeftStorage) -> torch.UntypedStorage:
        in_window = self._in_place and record.nbytes <= _MIN_SLOT_NBYTES
        with self._live.counting(not in_window):
            # zeros, where there are values at all: indices have to be some
            storage = torch.zeros(record.nbytes, dtype=torch.uint8).untyped_storage()
        record.there = weakref.ref(storage)
        record.there_start_bytes = record.start_bytes
        return storage
