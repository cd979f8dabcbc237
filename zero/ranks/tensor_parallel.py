"""Ranks with different parts of the same parameters (tensor parallelism by DTensor).

    mesh        tp 0        tp 1
    dp 0        A0 b        A1 b       A: a DTensor in shards     b: whole everywhere (a plain
    dp 1        A0 b        A1 b                                     parameter, or Replicate)

ZeRO shards, gathers and reduces down a column (`Ranks`): A0 is to it a parameter like any other.
Along a row the model's own collectives run, in its forward and backward; here is what a step needs
along a row besides: one norm of all gradients, in which A0 and A1 add up and b counts once. All
ranks get the same number, so all clip, skip and scale alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offload.tiers.errors import ConfigError, UnsupportedError
from offload.zero.ranks.ranks import Ranks
from offload.zero.tensors.local_tensors import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This rank among those that have parts of the same parameters."""

    ranks: Ranks  # with process groups of their own: the model's collectives would interleave

    @classmethod
    def find(
        cls, params: Iterable[tuple[str, torch.nn.Parameter]], data_ranks: Sequence[int],
        device: torch.device, timeout_s: float,
    ) -> TensorParallel | None:  # fmt: skip
        """Return the mesh that a model's DTensors are on; None if there are none. `data_ranks` are
        those with other data and the same parts. All ranks of the mesh have to call this.

        Raises UnsupportedError for DTensors that cannot be trained, ConfigError if `data_ranks` and
        the mesh have more than this rank in common.
        """
        mesh: DeviceMesh | None = None
        mesh_ranks: tuple[int, ...] = ()
        for name, param in params:
            if not is_dtensor(param):
                continue
            _check(name, param)
            ranks = tuple(int(rank) for rank in param.device_mesh.mesh.flatten())
            if mesh is not None and ranks != mesh_ranks:
                raise UnsupportedError(
                    f"{name} is a DTensor on the ranks {_listed(ranks)}, others of this model are "
                    f"on {_listed(mesh_ranks)}; parallelise all of a model on one mesh dimension"
                )
            mesh, mesh_ranks = param.device_mesh, ranks
        if mesh is None:
            return None
        if len(set(mesh_ranks) & set(data_ranks)) > 1:
            raise ConfigError(
                f"the model has DTensors on the ranks {_listed(mesh_ranks)}, which cannot have "
                "different data as well; name the ranks that do: offload.initialize(model, config, "
                'mesh=mesh["dp"]), with the data-parallel dimension of the mesh that '
                "parallelize_module got the other one of"
            )
        return cls(Ranks.meet(0, None, device, timeout_s, mesh))

    def counted_elsewhere(self, params: Sequence[torch.nn.Parameter]) -> frozenset[int]:
        """Return the indices of those that are whole on every rank and counted by the first one."""
        if self.ranks.rank == 0:
            return frozenset()
        return frozenset(index for index, param in enumerate(params) if not _is_sharded(param))

    def agree_on(self, param: torch.nn.Parameter, values: torch.Tensor) -> torch.Tensor:
        """Return a local part's initial values: the first rank's, if it is whole everywhere."""
        return values if _is_sharded(param) else self.ranks.from_first(values)


def _is_sharded(param: torch.nn.Parameter) -> bool:
    return is_dtensor(param) and any(each.is_shard() for each in param.placements)


def _check(name: str, param: DTensor) -> None:
    from torch.distributed.tensor import Replicate, Shard

    mesh = param.device_mesh
    if mesh.ndim > 1:
        raise UnsupportedError(
            f"{name} is a DTensor on a mesh of {mesh.ndim} dimensions; parallelise the model on "
            'one of them (parallelize_module(model, mesh["tp"], ...)) and leave data parallelism '
            'to offload.initialize(model, config, mesh=mesh["dp"]) instead of fully_shard'
        )
    if any(type(each) not in (Shard, Replicate) for each in param.placements):
        raise UnsupportedError(
            f"{name} is a DTensor placed as {param.placements}; only Shard and Replicate are known"
        )
    if param.is_meta:
        raise UnsupportedError(
            f"{name} is a DTensor on the meta device; give it values before offload.initialize "
            "(model.to_empty(device=...) and the model's own initialisation)"
        )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
