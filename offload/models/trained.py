"""The protocol of an engine, for checkpoints, run folders and optimizers that do not import it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from offload.config import OffloadConfig
    from offload.models.state import StateDictHooks
    from offload.optimizers.optimizer import OffloadOptimizer
    from offload.report import Report
    from offload.weights.spread_experts import SpreadExperts
    from offload.zero.groups.values import ParameterValues
    from offload.zero.step.runtime import Runtime


@dataclass(frozen=True)
class SavedCheckpoint:
    """The last checkpoint that was saved, and the number of steps before it."""

    path: Path
    step: int


class Trained(Protocol):
    """A model in tiers that trains (`offload.engine.Engine` documents its methods)."""

    module: nn.Module
    optimizer: OffloadOptimizer
    device: torch.device
    config: OffloadConfig
    values: ParameterValues
    state_dicts: StateDictHooks
    spread: SpreadExperts
    carried: dict[str, Any]
    last_checkpoint: SavedCheckpoint | None
    made_at: float  # on time.perf_counter
    watching: Any  # its `runs.watch.Watch`, or None

    @property
    def runtime(self) -> Runtime:
        """Groups, gradients, and pending updates."""

    @property
    def steps_done(self) -> int:
        """Steps so far, skipped ones included."""

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""

    @property
    def swap_folders(self) -> Sequence[str]:
        """The folders that hold swap files."""

    def settle(self) -> None: ...
    def checkpoint_saved(self, *, wait: bool = True) -> bool: ...
    def gathered(
        self, *what: nn.Parameter | nn.Module | Iterable[nn.Parameter]
    ) -> AbstractContextManager[None]: ...
    def report(self) -> Report: ...
    def waits(self) -> dict[str, float]: ...
    def before_close(self, call: Callable[[], None]) -> None: ...
    def watch_ended(self, watch: Any) -> None:
        """Note that its watch was closed."""
