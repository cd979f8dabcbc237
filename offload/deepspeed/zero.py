"""`deepspeed.zero`: models that are never whole in RAM, and parameters read or written outside."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from offload.deepspeed.engine import engine_of
from offload.tiers.errors import UnsupportedError


def Init(  # noqa: N802 - as DeepSpeed names it
    module: nn.Module | None = None, data_parallel_group: Any = None,
    mem_efficient_linear: bool = True, remote_device: str | None = None,
    pin_memory: bool = False, config_dict_or_path: Any = None, config: Any = None,
    enabled: bool = True, dtype: torch.dtype | None = None, mpu: Any = None, **_: Any,
) -> contextlib.AbstractContextManager[Any]:  # fmt: skip
    """Return a context in which modules are made on the meta device; `initialize` gives them their
    values, group by group, by the initialisers that their constructors call. `initialize` raises
    UnsupportedError, naming them, for values written otherwise (a `load_state_dict` inside).

    The argument `enabled` has an effect; DeepSpeed's others say how parameters are cut.
    """
    return torch.device("meta") if enabled else contextlib.nullcontext()


@contextlib.contextmanager
def GatheredParameters(  # noqa: N802 - as DeepSpeed names it
    params: nn.Parameter | nn.Module | Iterable[nn.Parameter],
    modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True,
) -> Iterator[None]:  # fmt: skip
    """Gather full parameters for the block. `modifier_rank`: the rank whose writes count on all.

    Before `initialize` parameters are full anyway; those on the meta device have no values yet, and
    writing to them is an UnsupportedError.
    """
    by_engine: dict[Any, list[nn.Parameter]] = {}
    for param in _listed(params) if enabled else []:
        engine = engine_of(param)
        if engine is not None:
            by_engine.setdefault(engine, []).append(param)
        elif param.is_meta and modifier_rank is not None:
            raise UnsupportedError(
                "zero.GatheredParameters(..., modifier_rank=...) before deepspeed.initialize: "
                "parameters made under zero.Init have no memory yet, and what is written would "
                "be lost; write after initialize, or in the module's reset_parameters()"
            )
    with contextlib.ExitStack() as contexts:
        for engine, gathered in by_engine.items():
            contexts.enter_context(engine.offload.gathered(gathered))
            if modifier_rank is not None and engine.world_size > 1:
                contexts.enter_context(_from_rank(gathered, modifier_rank))
        yield


@contextlib.contextmanager
def _from_rank(params: list[nn.Parameter], rank: int) -> Iterator[None]:
    """Copy one rank's values to all ranks when the block is left."""
    yield
    with torch.no_grad():
        for param in params:
            value = param.detach().clone()
            torch.distributed.broadcast(value, rank)
            if not torch.equal(value, param):
                param.copy_(value)


def _listed(params: nn.Parameter | nn.Module | Iterable[nn.Parameter]) -> list[nn.Parameter]:
    if isinstance(params, nn.Module):
        return list(params.parameters())
    if isinstance(params, torch.Tensor):
        return [params]  # type: ignore[list-item]
    return [each for each in params if isinstance(each, nn.Parameter)]
