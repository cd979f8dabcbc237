"""What of a model, and of how it is spread over GPUs, the memory of every system depends on."""

from __future__ import annotations

from dataclasses import dataclass

from offload.planning.activations.facts import ActivationFacts
from offload.tools.memest.hardware.profiles import HardwareProfile
from offload.zero.model_shape import ModelShape


@dataclass(frozen=True)
class Subject:
    """A model at a batch. Activations in bytes, of one GPU; parameters counted whole."""

    numel: int
    numel_trainable: int
    block_numel: int  # most parameters that one unit and an enclosing root gather at a time
    operator_numel: int  # of the largest weight
    saved_nbytes: int  # activations that autograd holds when forward ends
    working_nbytes: int  # activations beside them, at most
    recomputed: bool  # blocks are recomputed: what is saved are their inputs
    expert_numel: int = 0  # of `numel`, parameters that expert parallelism spreads

    @property
    def activation_nbytes(self) -> int:
        return self.saved_nbytes + self.working_nbytes


@dataclass(frozen=True)
class Ranks:
    """GPUs of one run. `tensor`: GPUs that one copy of the dense parameters is cut over,
    `experts`: GPUs that the experts are spread over."""

    per_node: int = 1
    nodes: int = 1
    tensor: int = 1
    experts: int = 1

    @property
    def count(self) -> int:
        return self.per_node * self.nodes

    @property
    def data(self) -> int:
        """Copies of the dense parameters that ordinary data parallelism keeps."""
        return max(1, self.count // self.tensor)


def subject_of(model: ModelShape, facts: ActivationFacts, *, recomputed: bool) -> Subject:
    """The numbers of a model's shape and of one forward and backward pass."""
    numels = [group.numel for group in model.groups]
    root = sum(numels[index] for unit in model.units if not unit.name for index in unit.groups)
    units = [sum(numels[index] for index in unit.groups) for unit in model.units if unit.name]
    weights = [param.numel for group in model.groups for param in group.params]
    return Subject(
        numel=model.numel,
        numel_trainable=model.numel_trainable,
        block_numel=root + max(units, default=0),
        operator_numel=max(weights, default=0),
        saved_nbytes=facts.saved_nbytes,
        working_nbytes=max(0, facts.peak_nbytes - facts.saved_nbytes),
        recomputed=recomputed,
    )


def ranks_of(profile: HardwareProfile) -> Ranks:
    return Ranks(profile.ranks_per_node, profile.nodes)
