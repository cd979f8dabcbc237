"""Training of several ranks with plain PyTorch: DDP, and FSDP2 with and without its CPU offload."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from offload.bench.systems import Plain
from offload.train.plain import LossOnly

if TYPE_CHECKING:
    from offload.config import OffloadConfig


class Replicated(Plain):
    """DistributedDataParallel: every rank has everything."""

    keeps_masters = False

    def wrapped(self, model: LossOnly) -> nn.Module:
        dist.init_process_group("gloo")
        return nn.parallel.DistributedDataParallel(model)

    def close(self) -> None:
        dist.destroy_process_group()


class FullySharded(Replicated):
    """`fully_shard` applied to every block and to the root, as in its documentation."""

    def __init__(self, config: OffloadConfig, folder: Path, *, offload: bool = False) -> None:
        self._offload = offload
        super().__init__(config, folder)

    def wrapped(self, model: LossOnly) -> nn.Module:
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        dist.init_process_group("gloo")
        settings: dict[str, Any] = {}
        if self._offload:  # there is no GPU that memory could be pinned for
            settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        for block in model.model.layers:
            fully_shard(block, **settings)
        fully_shard(model, **settings)
        return model
