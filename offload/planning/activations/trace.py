"""Counts activations by running the model's own forward and backward without values.

    the model ── its parameters exchanged for valueless ones of the configured precision
       │
       ├─ blocks   wrapped by the runtime's own micro-batches and recomputation; of many identical
       │           ones a few are run and count for the others (`traced_blocks`)
       ├─ forward  every operation is seen: storages are counted from birth to death
       └─ backward the same; a parameter's gradient is taken as soon as it is there

It runs twice: as it is, and with what autograd saves leaving for another tier as
`swap/activations` would take it. Storages below torch's dispatcher (a kernel's scratch memory)
are not seen.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offload.config import OffloadConfig
from offload.planning.activations.compiler_free import without_compiler
from offload.planning.activations.cuda_choices import choosing_for_cuda
from offload.planning.activations.facts import NO_WORK, ActivationFacts
from offload.planning.activations.pass_watch import PassWatch
from offload.planning.activations.saved_elsewhere import SavedElsewhere
from offload.planning.activations.traced_blocks import CannotSkipError, watched_blocks
from offload.planning.activations.valueless import WithoutValues
from offload.planning.plan.workload import Workload
from offload.tiers import accelerator
from offload.tiers.errors import OffloadError, UnsupportedError
from offload.zero.groups.discovery import Unit, discover, managed
from offload.zero.hooks.handles import HandleTable
from offload.zero.recompute.micro_batches import MicroBatching
from offload.zero.recompute.recompute import Recomputation

# Calls the model on inputs of its own making; gives the loss, or the logits.
Run = Callable[[nn.Module, Workload], Tensor]


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def trace_activations(
    model: nn.Module, config: OffloadConfig, workload: Workload, *, device: str | None = None,
    skip: bool = True,
) -> ActivationFacts:  # fmt: skip
    """Count one forward and backward pass of `model` under `config`.

    Models that take `input_ids` and `labels`, or `tokens` and `targets`, are supported. `device`
    (cpu or cuda) selects the kernels, by default `config.device`. The model, on any device, is left
    unchanged. `skip=False` runs every block.

    Raises UnsupportedError if it is not known how to call the model.
    """
    call = training_run(model)
    return _traced(model, config.settled(), workload, call, device, _both, skip=skip)


def trace_forward(
    model: nn.Module, config: OffloadConfig, workload: Workload, *, device: str | None = None,
    skip: bool = True,
) -> ActivationFacts:  # fmt: skip
    """Like `trace_activations`, for one forward pass without gradients in eval mode: nothing is
    saved, and there is no backward. The cache of keys and values is left out: `generation_facts`
    adds it. Models that take `input_ids` or `tokens` are supported.
    """
    call = forward_run(model)
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        return _traced(model, config.settled(), workload, call, device, _forward_alone, skip=skip)
    finally:
        for module, was in training.items():
            module.training = was


def _traced(
    model: nn.Module, config: OffloadConfig, workload: Workload, call: Run, device: str | None,
    both: Callable[[Callable[..., PassWatch]], ActivationFacts], *, skip: bool,
) -> ActivationFacts:  # fmt: skip
    target = device or _device_of(config)
    try:
        units = discover(model, config.groups.blocks, experts=config.splits_experts(1)).units
        passes = partial(_passes, model, units, config, workload, call, target)
        try:
            return both(partial(passes, skip=skip))
        except (CannotSkipError, LookupError):  # or blocks are called by their numbers
            return both(partial(passes, skip=False))
    except OffloadError as error:
        raise UnsupportedError(f"{type(model).__name__} cannot be traced: {error}") from error


def _forward_alone(passes: Callable[..., PassWatch]) -> ActivationFacts:
    watch = passes(elsewhere=False, gradients=False)
    peak = watch.peak
    cost = watch.cost(backward=False)
    return ActivationFacts(
        0, peak.nbytes, peak.nbytes, watch.peak_at, cost, NO_WORK, peak.heap_nbytes,
        peak.heap_nbytes,
    )  # fmt: skip


def _device_of(config: OffloadConfig) -> str:
    return accelerator.default_type() if config.device == "auto" else config.device


def _both(passes: Callable[..., PassWatch]) -> ActivationFacts:
    return facts_of(passes(elsewhere=False), passes(elsewhere=True))


def facts_of(here: PassWatch, elsewhere: PassWatch) -> ActivationFacts:
    """The facts of a pass from two traces: saved tensors stay, and saved tensors move elsewhere."""
    return ActivationFacts(
        saved_nbytes=here.saved.nbytes,
        peak_nbytes=here.peak.nbytes,
        peak_elsewhere_nbytes=elsewhere.peak.nbytes,
        peak_at=here.peak_at,
        forward=here.cost(backward=False),
        backward=here.cost(backward=True),
        heap_peak_nbytes=here.peak.heap_nbytes,
        heap_peak_elsewhere_nbytes=elsewhere.peak.heap_nbytes,
    )


def _passes(
    model: nn.Module, units: Sequence[Unit], config: OffloadConfig, workload: Workload, run: Run,
    device: str, *, skip: bool, elsewhere: bool, gradients: bool = True,
) -> PassWatch:  # fmt: skip
    """Run forward and, with `gradients`, backward, and return the watch that observed them."""
    watch = PassWatch()
    away = SavedElsewhere(watch.live, in_place=device == "cpu") if elsewhere else None
    with ExitStack() as stack:
        stack.enter_context(_collector_off())
        stack.enter_context(without_compiler())
        values = WithoutValues(device)
        stack.enter_context(valueless(model, values, DTYPES[config.precision]))
        if device == "cuda":
            stack.enter_context(choosing_for_cuda(model, units))
        stack.enter_context(as_the_engine(model, units, config, away))
        stack.enter_context(watched_blocks(model, units, watch, skip=skip))
        stack.enter_context(values)
        stack.enter_context(watch)
        stack.enter_context(torch.set_grad_enabled(gradients))
        loss = run(model, workload)
        watch.end_forward(loss)
        if gradients:
            loss.backward()
    if not watch.looked_alike:
        raise CannotSkipError
    return watch


def training_run(model: nn.Module) -> Run:
    """Choose inputs by the names of forward's parameters, or raise UnsupportedError."""
    names = inspect.signature(model.forward).parameters.keys()
    if {"tokens", "targets"} <= names:
        return lambda model, workload: _loss(model(_tokens(workload), _tokens(workload)))
    if {"input_ids", "labels"} <= names:
        more = _uncached(names)
        return lambda model, workload: _loss(
            model(input_ids=_tokens(workload), labels=_tokens(workload), **more)
        )
    raise UnsupportedError(
        f"{_takes(model)}, which take input_ids and labels (or tokens and targets)"
    )


def forward_run(model: nn.Module) -> Run:
    """Like `training_run`, for a generating pass: returns the logits of each sequence's last token,
    or of all tokens if the model cannot omit the others. Nothing is cached."""
    names = inspect.signature(model.forward).parameters.keys()
    if "decoder_input_ids" in names:
        raise UnsupportedError(
            f"{type(model).__name__} has an encoder and a decoder: what generating takes is "
            "predicted for models of one stack alone"
        )
    if "tokens" in names:
        return lambda model, workload: _logits(model(_tokens(workload)))
    if "input_ids" in names:
        more = _uncached(names)
        if "logits_to_keep" in names:
            more["logits_to_keep"] = 1
        return lambda model, workload: _logits(model(input_ids=_tokens(workload), **more))
    raise UnsupportedError(f"{_takes(model)}, which take input_ids (or tokens)")


def _takes(model: nn.Module) -> str:
    names = sorted(inspect.signature(model.forward).parameters)
    return (
        f"{type(model).__name__}.forward takes {', '.join(names) or 'nothing'}: what to call it "
        "with is known for language models alone"
    )


def _uncached(names: Collection[str]) -> dict[str, Any]:
    return {"use_cache": False} if "use_cache" in names else {}


def _loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def _logits(output: Any) -> Tensor:
    logits: Tensor = output.logits
    return logits


def _tokens(workload: Workload) -> Tensor:
    return torch.zeros(workload.batch, workload.sequence, dtype=torch.long)


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
def valueless(model: nn.Module, values: WithoutValues, dtype: torch.dtype) -> Iterator[None]:
    """Replace parameters and buffers by valueless ones of the types that the engine would use."""
    made: dict[int, Tensor] = {}

    def exchanged(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            if isinstance(tensor, nn.Parameter):
                kind = dtype if managed(tensor) else tensor.dtype
                new = values.tensor_like(tensor.detach(), kind)
                with values:
                    made[id(tensor)] = nn.Parameter(new, requires_grad=tensor.requires_grad)
            else:
                made[id(tensor)] = values.adopted(tensor)
        return made[id(tensor)]

    before = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    try:
        for module, parameters, buffers in before:
            both: Any = ((module._parameters, parameters), (module._buffers, buffers))
            for own, tensors in both:
                own.update({k: exchanged(t) for k, t in tensors.items() if t is not None})
        yield
    finally:
        for module, parameters, buffers in before:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


@contextmanager
def as_the_engine(
    model: nn.Module, units: Sequence[Unit], config: OffloadConfig, away: SavedElsewhere | None
) -> Iterator[None]:
    """Install what changes the live bytes as the engine does: recomputation, micro-batches, saved
    tensors that move elsewhere, gradients that are taken."""
    with ExitStack() as stack:
        checkpoint = config.placement.activations.checkpoint
        if checkpoint and any(unit.repeated for unit in units):
            selective = checkpoint == "selective"
            recomputation = Recomputation(units, _AllHere(), selective=selective, keeper=away)
            stack.callback(recomputation.remove)
        if config.micro_batches > 1:
            micro_batching = MicroBatching(config.micro_batches, units, _alone, compare=False)
            stack.callback(micro_batching.remove)
        if away is not None:
            stack.enter_context(_leaving(model, away))
        for param in model.parameters():
            if param.requires_grad:
                hook = param.register_post_accumulate_grad_hook(_take_gradient)
                stack.callback(hook.remove)
        yield


class _AllHere:
    """The parameter source of a trace: all parameters are always in place."""

    def held(self, unit: Unit) -> AbstractContextManager[None]:
        return nullcontext()

    def versions(self, unit: Unit) -> tuple[int, ...]:
        return ()


def _alone(groups: Sequence[int], more: bool) -> AbstractContextManager[None]:
    return nullcontext()


def _take_gradient(param: Tensor) -> None:
    param.grad = None


@contextmanager
def _leaving(model: nn.Module, away: SavedElsewhere) -> Iterator[None]:
    """Hand the tensors that autograd saves during the model's forward to `away`."""
    handles = HandleTable(lambda group: None, away)
    entered: list[AbstractContextManager[Any]] = []

    def before(module: nn.Module, args: Any) -> None:
        entered.append(handles.hooks())
        entered[-1].__enter__()

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    hooks = [
        model.register_forward_pre_hook(before),
        model.register_forward_hook(after, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
