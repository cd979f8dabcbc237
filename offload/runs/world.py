"""The ranks of one `offload train` under `torchrun`; the first one decides, prints and writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from offload.config import OffloadConfig
    from offload.zero.ranks.sharding import Sharding


@dataclass(frozen=True)
class World:
    """The ranks of a run. All ranks have to call every method."""

    rank: int
    size: int
    device: torch.device  # of the small tensors that ranks exchange
    sharding: Sharding

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @classmethod
    @contextmanager
    def joined(cls, config: OffloadConfig, device: torch.device) -> Iterator[World]:
        """Join the world given by the environment, until the block ends."""
        from offload.zero.ranks.ranks import start_world
        from offload.zero.ranks.sharding import ALONE, Sharding

        zero = config.zero
        made = start_world(device, zero.timeout_s)
        try:
            if not dist.is_initialized():
                yield cls(0, 1, torch.device("cpu"), ALONE)
                return
            rank, size = dist.get_rank(), dist.get_world_size()
            sharding = Sharding.of(zero.stage, zero.shard_group, size, rank)
            gloo = "gloo" in str(dist.get_backend_config())
            yield cls(rank, size, torch.device("cpu") if gloo else device, sharding)
        finally:
            if made and dist.is_initialized():
                dist.destroy_process_group()

    def tell(self, text: str) -> str:
        """Return the first rank's value on every rank."""
        if self.size == 1:
            return text
        said = [text]
        dist.broadcast_object_list(said, 0, device=self.device)
        return said[0]

    def mean(self, number: float) -> float:
        """Return the mean over all ranks."""
        return sum(self._all(number)) / self.size

    def greatest(self, number: float) -> float:
        """Return the maximum over all ranks."""
        return max(self._all(number))

    def _all(self, number: float) -> list[float]:
        if self.size == 1:
            return [number]
        numbers = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        numbers[self.rank] = number
        dist.all_reduce(numbers)
        gathered: list[float] = numbers.tolist()
        return gathered
