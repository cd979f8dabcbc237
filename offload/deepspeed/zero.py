"""`deepspeed.zero`: models that are never whole in RAM, and parameters read or written outside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn

from offload.deepspeed.engine import engine_of
from offload.tiers.errors import UnsupportedError


class Init:
    """Modules made inside are on the meta device; `initialize` gives them their values, group by
    group, by the initialisers that their constructors call. `initialize` raises UnsupportedError,
    naming them, for values written otherwise (a `load_state_dict` inside).

    The argument `enabled` has an effect; DeepSpeed's others say how parameters are cut.
    """

    def __init__(
        self, module: nn.Module | None = None, data_parallel_group: Any = None,
        mem_efficient_linear: bool = True, remote_device: str | None = None,
        pin_memory: bool = False, config_dict_or_path: Any = None, config: Any = None,
        enabled: bool = True, dtype: torch.dtype | None = None, mpu: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        self._contexts = contextlib.ExitStack()
        self._enabled = enabled

    def __enter__(self) -> Init:
        if self._enabled:
            self._contexts.enter_context(torch.device("meta"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._contexts.close()


class GatheredParameters:
    """Gather full parameters for the block. `modifier_rank`: the rank whose writes count on all.

    Before `initialize` parameters are full anyway; those on the meta device have no values yet, and
    writing to them is an UnsupportedError.
    """

    def __init__(
        self, params: nn.Parameter | nn.Module | Iterable[nn.Parameter],
        modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True,
    ) -> None:  # fmt: skip
        self._params = _listed(params) if enabled else []
        self._modifier_rank = modifier_rank
        self._contexts = contextlib.ExitStack()

    def __enter__(self) -> None:
        by_engine: dict[Any, list[nn.Parameter]] = {}
        for param in self._params:
            engine = engine_of(param)
            if engine is not None:
                by_engine.setdefault(engine, []).append(param)
            elif param.is_meta and self._modifier_rank is not None:
                raise UnsupportedError(
                    "zero.GatheredParameters(..., modifier_rank=...) before deepspeed.initialize: "
                    "parameters made under zero.Init have no memory yet, and what is written would "
                    "be lost; write after initialize, or in the module's reset_parameters()"
                )
        for engine, params in by_engine.items():
            self._contexts.enter_context(engine.offload.gathered(params))
            if self._modifier_rank is not None and engine.world_size > 1:
                self._contexts.enter_context(_from_rank(params, self._modifier_rank))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._contexts.__exit__(kind, error, trace)


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
