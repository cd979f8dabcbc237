"""The three batch sizes of a DeepSpeed configuration: any two give the third."""

from __future__ import annotations

from dataclasses import dataclass

from offload.tiers.errors import ConfigError

TRAIN, MICRO, STEPS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
)  # fmt: skip


@dataclass(frozen=True)
class Batches:
    """Samples per step of all ranks, samples per pass of one rank, and passes per step."""

    train: int
    micro: int
    steps: int

    @classmethod
    def of(cls, train: int | None, micro: int | None, steps: int | None, ranks: int) -> Batches:
        """Derive the missing sizes from the given ones. Raise ConfigError if they contradict each
        other, or none is given."""
        if train is None and micro is None:
            raise ConfigError(f"{TRAIN}: missing; set it or {MICRO}")
        if micro is None:
            assert train is not None, "just looked at"
            micro = train // ((steps or 1) * ranks)
        if steps is None:
            steps = 1 if train is None else train // (micro * ranks) if micro else 0
        found = cls(micro * steps * ranks if train is None else train, micro, steps)
        if min(found.train, micro, steps) < 1 or found.train != micro * steps * ranks:
            raise ConfigError(
                f"{TRAIN}: {found.train} is not {MICRO}: {micro} x {STEPS}: {steps} x {ranks} "
                f"rank{'s' * (ranks != 1)}; remove one of them"
            )
        return found
