"""An engine's bytes held and moved so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from offload.memory.memory_guard import MemoryGuardReport
from offload.tiers.ledger import TierAccount
from offload.tiers.tier import TIERS, Tier
from offload.tiers.units import format_bytes
from offload.zero.step.deferred_updates import SpeculationCounts

if TYPE_CHECKING:
    from offload.zero.step.runtime import Runtime
    from offload.zero.step.stepper import StepOutcome


@dataclass(frozen=True)
class TierReport:
    """One tier. All in bytes.

    `used_nbytes` and `peak_nbytes` never exceed `budget_nbytes`; `by_class` and `peak_by_class` are
    the same by what the bytes are for (parameters, gradients, optimizer, ...). Peaks of classes are
    at times of their own.
    """

    budget_nbytes: int
    used_nbytes: int
    peak_nbytes: int
    by_class: dict[str, int]
    peak_by_class: dict[str, int]

    @classmethod
    def of(cls, account: TierAccount) -> TierReport:
        return cls(
            account.budget_nbytes, account.used_nbytes, account.peak_nbytes,
            {str(name): n for name, n in account.by_class.items()},
            {str(name): n for name, n in account.peak_by_class.items()},
        )  # fmt: skip


def tier_reports(accounts: Mapping[Tier, TierAccount]) -> dict[str, TierReport]:
    """Return every tier by its name; zeros for one that was never opened."""
    return {str(tier): TierReport.of(accounts.get(tier, TierAccount(0))) for tier in TIERS}


@dataclass(frozen=True, kw_only=True)
class TierTraffic:
    """Bytes that the tiers of this rank hold, and bytes moved between them so far.

    `tiers` are device, host and nvme, and any other that was registered, whether used or not.
    `bytes_moved` is by link, since the beginning (`nvme read`, `nvme write`, `host to device` ...);
    `evictions` counts copies that made room for others. `placements` says in words where each class
    of state lives.

    `waits` are seconds for which the thread that computes has waited since the beginning: for
    `nvme` (transfers from and to files), `link` (copies between host and device), `update` (a
    group's pending update, whatever that waits for) and `ranks` (collectives, and what their
    threads wait for). On a GPU the thread queues work and goes on: its own stream's waits are not
    in here.

    `memory` says what is left of the machine's RAM, or of the cgroup that has least, and which
    copies were given up for it (`MemoryGuardReport`).
    """

    tiers: dict[str, TierReport]
    bytes_moved: dict[str, int]
    evictions: int = 0
    placements: dict[str, str] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    memory: MemoryGuardReport

    def __str__(self) -> str:
        """Return a few lines to read: bytes held and moved, and seconds waited."""
        lines = [
            f"{name:<7} {format_bytes(tier.used_nbytes)} held, {format_bytes(tier.peak_nbytes)} at "
            f"most, of {format_bytes(tier.budget_nbytes)}"
            for name, tier in self.tiers.items()
            if tier.budget_nbytes
        ]
        moved = [f"{name} {format_bytes(n)}" for name, n in self.bytes_moved.items() if n]
        waited = [f"{name} {seconds:.1f} s" for name, seconds in self.waits.items() if seconds]
        return "\n".join([
            *lines, f"moved   {', '.join(moved) or 'nothing'}",
            f"waited  {', '.join(waited) or 'for nothing'}",
            *([f"memory  {self.memory}"] if self.memory.given_back_nbytes else []),
        ])  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Report(TierTraffic):
    """The traffic of an engine's tiers, and the outcome of its steps.

    `steps` were taken, `skipped_steps` not, for infinite or NaN gradients. `gradient_norm` is that
    of the last step, unscaled and before the engine's clipping (a loop that clips by itself hands
    over gradients that are clipped already); `loss_scale` is None unless the precision is fp16.
    `trials` counts the groups of parameters that were updated during backward as if the step would
    clip and skip nothing: `kept`, `redone` in the step, or `taken_back` before it, since their
    values or gradients were read or changed. None is after a step that clipped or was skipped:
    `paused_steps` counts these.
    """

    steps: int
    skipped_steps: int
    gradient_norm: float | None
    loss_scale: float | None
    trials: SpeculationCounts
    muon: str = ""  # which parameters it trains

    @classmethod
    def of(cls, runtime: Runtime, last: StepOutcome | None, **traffic: Any) -> Report:
        """Return the outcome of a runtime's steps, the last one being `last`, with the fields of
        `TierTraffic`. `engine.watch()` has a figure in each row of the same name as a field here
        (`StepMetrics.of`)."""
        return cls(
            steps=runtime.stepper.taken,
            skipped_steps=runtime.stepper.skipped,
            gradient_norm=None if last is None else last.gradient_norm,
            loss_scale=None if runtime.loss_scale is None else runtime.loss_scale.scale,
            trials=replace(runtime.stepper.policy.counts),
            **traffic,
        )

    def __str__(self) -> str:
        """Return a few lines to read: bytes held and moved, and the outcome of the steps."""
        norm = "" if self.gradient_norm is None else f", gradient norm {self.gradient_norm:.4g}"
        steps = f"steps   {self.steps}, {self.skipped_steps} skipped{norm}"
        trials = f"{self.trials}" and f"\ntrials  {self.trials}"
        muon = self.muon and f"\n{self.muon}"
        return f"{super().__str__()}\n{steps}{trials}{muon}"
