"""A pass with values, watched as a trace is: what traces are held against."""

import gc
from contextlib import ExitStack
from typing import Any

import torch
import torch._dynamo  # else the first checkpoint imports it, and leaves cycles behind
from torch import Tensor, nn

from offload.config import OffloadConfig
from offload.planning.activations.facts import ActivationFacts
from offload.planning.activations.pass_watch import PassWatch
from offload.planning.activations.trace import SavedElsewhere, as_the_engine, facts_of, run_of
from offload.planning.activations.traced_blocks import watched_blocks
from offload.planning.activations.valueless import unpacked_sequences
from offload.planning.plan.estimate import Workload
from offload.zero.groups.parameter_grouping import group_parameters

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def config_of(precision: str = "fp32", checkpoint: Any = False, **more: Any) -> OffloadConfig:
    return OffloadConfig.load(
        {
            "device": "cpu",
            "precision": precision,
            "placement": {"activations": {"checkpoint": checkpoint}},
            **more,
        }
    )


def real_facts(model: nn.Module, config: OffloadConfig, workload: Workload) -> ActivationFacts:
    """What really was alive and run; every block is."""
    for param in model.parameters():
        param.data = param.data.to(DTYPES[config.precision])
    here = _watched(model, config, workload, elsewhere=False)
    elsewhere = _watched(model, config, workload, elsewhere=True)
    return facts_of(here, elsewhere)


def _watched(
    model: nn.Module, config: OffloadConfig, workload: Workload, *, elsewhere: bool
) -> PassWatch:
    units = group_parameters(model, config.groups.blocks).units
    run = run_of(model, trains=True)
    watch = PassWatch()
    away = SavedElsewhere(watch.live, in_place=True) if elsewhere else None
    gc.collect()
    gc.disable()
    try:
        with ExitStack() as stack:
            stack.enter_context(unpacked_sequences())
            stack.enter_context(as_the_engine(model, units, config, away))
            stack.enter_context(watched_blocks(model, units, watch, least=None))
            stack.enter_context(watch)
            loss = run(model, workload)
            watch.end_forward(loss)
            loss.backward()
    finally:
        gc.enable()
    return watch


def packed_nbytes(model: nn.Module, workload: Workload) -> int:
    """Bytes of storages that autograd packs in a plain forward, each once, but for those of
    parameters and inputs, counted without the runtime."""
    others = {id(p.untyped_storage()): p.untyped_storage() for p in model.parameters()}
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen.setdefault(tensor.untyped_storage()._cdata, tensor.detach())
        return tensor

    inputs: list[Tensor] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs.extend(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))

    hook = model.register_forward_pre_hook(before, with_kwargs=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run_of(model, trains=True)(model, workload)
    hook.remove()
    given = {storage._cdata for storage in others.values()}
    given |= {tensor.untyped_storage()._cdata for tensor in inputs}
    del loss
    return sum(
        tensor.untyped_storage().nbytes() for key, tensor in seen.items() if key not in given
    )
