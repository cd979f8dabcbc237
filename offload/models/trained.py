"""The protocol of an engine, for checkpoints, run folders and optimizers that do not import it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from offload.checkpoint.format.manifest import BaseRecord
    from offload.config import OffloadConfig
    from offload.models.state import StateDictHooks
    from offload.optimizers.optimizer import OffloadOptimizer
    from offload.report import Report
    from offload.weights.spread_experts import SpreadExperts
    from offload.zero.gradients.loss_scale import LossScale
    from offload.zero.groups.store import WeightStore
    from offload.zero.ranks.ranks import Ranks
    from offload.zero.step.deferred_updates import DeferredUpdates
    from offload.zero.step.optimizer_state import OptimizerState
    from offload.zero.step.stepper import PassCounts


class Steps(Protocol):
    """The steps of a model in tiers (`offload.zero.step.stepper.Stepper` documents its methods)."""

    taken: int
    skipped: int
    passes: PassCounts
    policy: DeferredUpdates

    def forget(self) -> None: ...


class Frozen(Protocol):
    """The hashes of frozen parameters (see `offload.models.frozen_base.FrozenBase`)."""

    def record(self, engine: Trained) -> BaseRecord | None: ...
    def check(self, engine: Trained, manifest: Any, records: Any, path: Any) -> None: ...
    def forget(self) -> None: ...


class Trained(Protocol):
    """A model in tiers that trains (`offload.engine.Engine` documents its methods)."""

    module: nn.Module
    optimizer: OffloadOptimizer
    device: torch.device
    config: OffloadConfig
    state_dicts: StateDictHooks
    spread: SpreadExperts
    ranks: Ranks | None  # None for one rank
    steps: Steps
    loss_scale: LossScale | None
    optimizer_states: Sequence[OptimizerState]  # of each group of `store`
    carried: dict[str, Any]
    made_at: float  # on time.perf_counter
    watching: Any  # its `runs.watch.Watch`, or None

    @property
    def store(self) -> WeightStore:
        """The weights, in groups."""

    @property
    def frozen_base(self) -> Frozen:
        """The hashes of the frozen parameters."""

    @property
    def steps_done(self) -> int:
        """Steps so far, skipped ones included."""

    @property
    def swap_folders(self) -> Sequence[str]:
        """The folders that hold swap files."""

    def has_unstepped_gradients(self) -> bool: ...
    def scaled_backward(self, loss: torch.Tensor) -> AbstractContextManager[torch.Tensor]: ...
    def settle(self) -> None: ...
    def report(self) -> Report: ...
    def waits(self) -> dict[str, float]: ...
    def before_close(self, call: Callable[[], None]) -> None: ...
