"""The `nvme` tier: extents in one file per path, within one byte budget."""

from collections.abc import Sequence

from offload.tiers.arena import Arena
from offload.tiers.errors import TierFullError
from offload.tiers.ledger import Ledger, StateClass
from offload.tiers.tier import PAGE_NBYTES, Extent, Tier
from offload.tiers.units import round_up


class FileTier:
    """Allocates extents; reads and writes nothing. Synchronous, not thread-safe.

    `shares` are the paths' measured bandwidths (any unit): each new extent goes to the path that
    is emptiest relative to its share, so that traffic spreads as the devices can bear it.
    """

    name = Tier.NVME

    def __init__(self, budget_nbytes: int, shares: Sequence[float], ledger: Ledger) -> None:
        total = sum(shares)
        if not shares or min(shares) <= 0:
            raise ValueError(f"shares must be positive, one per path; got {list(shares)}")
        self.shares = tuple(share / total for share in shares)
        # Any path may hold all of it: the account and the files' lengths keep to the budget.
        self.arenas = [Arena(budget_nbytes) for _ in shares]
        self.account = ledger.open_account(self.name, budget_nbytes)
        for arena in self.arenas:
            ledger.audit(self.name, arena)
        self._classes: dict[tuple[int, int], StateClass] = {}

    def spare_nbytes(self, lengths: Sequence[int]) -> int:
        """The bytes by which files of these `lengths`, one per path, may grow in all."""
        return max(0, self.account.budget_nbytes // PAGE_NBYTES * PAGE_NBYTES - sum(lengths))

    def allocate(
        self, nbytes: int, owner: str, state_class: StateClass,
        lengths: Sequence[int] | None = None,
    ) -> Extent:  # fmt: skip
        """A new extent of whole pages on one path, where files of these `lengths` have room for it
        or may be made longer. Raises TierFullError."""
        size = round_up(max(nbytes, 1), PAGE_NBYTES)
        free = self.account.budget_nbytes - self.account.used_nbytes
        lengths = [0] * len(self.arenas) if lengths is None else lengths
        spare = self.spare_nbytes(lengths)
        for index in sorted(range(len(self.arenas)), key=self._fill) if size <= free else ():
            offset = self.arenas[index].allocate(size, lengths[index] + spare)
            if offset is not None:
                self.account.move(state_class, size)
                self._classes[(index, offset)] = state_class
                return Extent(self.name, offset, size, index)
        raise TierFullError(
            str(self.name), owner, nbytes, free, self.account.budget_nbytes,
            "raise budget.nvme or add a path to nvme.paths",
        )  # fmt: skip

    def _fill(self, index: int) -> float:
        return self.arenas[index].used_nbytes / self.shares[index]

    def free(self, extent: Extent) -> None:
        """Give an extent back. KeyError if it is not allocated."""
        state_class = self._classes.pop((extent.path_index, extent.offset_bytes))
        size = self.arenas[extent.path_index].free(extent.offset_bytes)
        self.account.move(state_class, -size)
