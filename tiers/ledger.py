"""The number of bytes that each tier holds, by class: the accounts behind every budget.

Every lease and extent enters here when it is taken and leaves when it is freed. Peaks are kept per
tier and per (tier, class), because a peak is what a machine has to have.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from offload.tiers.arena import Arena
from offload.tiers.errors import IntegrityError
from offload.tiers.tier import Tier
from offload.tiers.units import format_bytes


class StateClass(enum.StrEnum):
    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    KV = "kv"  # keys and values of tokens, for attention
    STAGING = "staging"  # in transit: belongs to no class for longer than one move


@dataclass(slots=True)
class TierAccount:
    """One tier's balance. All figures in bytes, rounded to pages as the arena rounds them."""

    budget_nbytes: int
    used_nbytes: int = 0
    peak_nbytes: int = 0
    by_class: dict[StateClass, int] = field(default_factory=lambda: defaultdict(int))
    peak_by_class: dict[StateClass, int] = field(default_factory=lambda: defaultdict(int))

    def move(self, state_class: StateClass, nbytes: int) -> None:
        """Add `nbytes` (negative when freed)."""
        self.used_nbytes += nbytes
        of_class = self.by_class[state_class] + nbytes
        self.by_class[state_class] = of_class
        if self.used_nbytes > self.peak_nbytes:
            self.peak_nbytes = self.used_nbytes
        if of_class > self.peak_by_class[state_class]:
            self.peak_by_class[state_class] = of_class


class Ledger:
    """The accounts of all tiers. Not thread-safe: callers hold one lock around it."""

    def __init__(self) -> None:
        self.accounts: dict[Tier, TierAccount] = {}
        self._arenas_used: dict[Tier, list[Arena]] = defaultdict(list)

    def open_account(self, tier: Tier, budget_nbytes: int) -> TierAccount:
        if tier in self.accounts:
            raise IntegrityError(f"ledger: the {tier} tier has an account already")
        account = TierAccount(budget_nbytes)
        self.accounts[tier] = account
        return account

    def audit(self, tier: Tier, arena: Arena) -> None:
        """Name an arena whose used bytes must add up to the tier's account."""
        self._arenas_used[tier].append(arena)

    def check_integrity(self) -> None:
        """Raise IntegrityError, printing the balance, unless every account adds up."""
        for tier, account in self.accounts.items():
            by_class = sum(account.by_class.values())
            arenas = sum(arena.used_nbytes for arena in self._arenas_used[tier])
            balanced = by_class == account.used_nbytes == arenas
            if not balanced or account.used_nbytes > account.budget_nbytes:
                raise IntegrityError(_balance(tier, account, arenas))
            if any(nbytes < 0 for nbytes in account.by_class.values()):
                raise IntegrityError(_balance(tier, account, arenas))
            for arena in self._arenas_used[tier]:
                arena.check()


def _balance(tier: Tier, account: TierAccount, arenas: int) -> str:
    classes: Mapping[StateClass, int] = account.by_class
    terms = " + ".join(f"{name} {nbytes}" for name, nbytes in sorted(classes.items()))
    return (
        f"ledger of the {tier} tier does not balance: {terms or '0'} = "
        f"{sum(classes.values())} by class, {account.used_nbytes} by account, {arenas} in arenas, "
        f"budget {account.budget_nbytes} ({format_bytes(account.budget_nbytes)})"
    )


@dataclass(frozen=True, slots=True)
class OldBytes:
    """Bytes of versions from before a speculative update, where they are kept."""

    files: int = 0
    memory: int = 0  # of the host

    def __add__(self, other: OldBytes) -> OldBytes:
        return OldBytes(self.files + other.files, self.memory + other.memory)

    def __sub__(self, other: OldBytes) -> OldBytes:
        return OldBytes(self.files - other.files, self.memory - other.memory)

    def holds(self, other: OldBytes) -> bool:
        """Whether these bytes are enough for `other`."""
        return other.files <= self.files and other.memory <= self.memory
