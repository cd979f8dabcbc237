"""Several ranks as plain PyTorch trains them: DDP, and FSDP2 with and without its CPU offload."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from offload.bench.step_deepspeed import LossOnly
from offload.bench.step_systems import Batch, Moved, StepTimes, adamw_arguments, build_model

if TYPE_CHECKING:
    from offload.config import OffloadConfig


class Replicated:
    """DistributedDataParallel: every rank has everything."""

    defers = False

    def __init__(self, config: OffloadConfig) -> None:
        dist.init_process_group("gloo")
        self._model = self._wrap(LossOnly(build_model(config)))
        self._clip = config.clip_grad_norm
        self._params = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(self._params, fused=True, **adamw_arguments(config))

    def _wrap(self, model: LossOnly) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model)

    def step(self, micro_batches: Sequence[Batch]) -> StepTimes:
        started = time.perf_counter()
        losses = []
        for inputs, targets in micro_batches:
            loss = self._model(inputs, targets) / len(micro_batches)
            loss.backward()
            losses.append(loss.item())
        computed = time.perf_counter()
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self._params, self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return StepTimes(sum(losses), time.perf_counter() - started, computed - started)

    def settle(self) -> None:
        """Nothing is ever left to do."""

    def moved(self) -> Moved:
        return Moved.by_the_kernel()

    def close(self) -> None:
        dist.destroy_process_group()


class FullySharded(Replicated):
    """`fully_shard` of every block and of the root, as its documentation has it."""

    def __init__(self, config: OffloadConfig, *, offload: bool) -> None:
        self._offload = offload
        super().__init__(config)

    def _wrap(self, model: LossOnly) -> nn.Module:
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        settings: dict[str, Any] = {}
        if self._offload:  # there is no GPU that memory could be pinned for
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        for block in model.model.layers:
            fully_shard(block, **settings)
        fully_shard(model, **settings)
        return model
