"""The next uses of items that passes choose: experts, which belong to tables.

A table has places in the trace, each before one of the trace's uses or after the last one. The
table's items are no uses in the trace: no choice of a router, in any order, changes the trace.

    uses         a     b     c     c     b     a      of items in no table
    places          T     U           U     T         of tables T and U
    chosen         4,1    8           8    1,4        by the forward, and so needed by its backward

So it is known which items a backward needs, and where. For later forwards only the share of recent
forwards that chose an item is known (an exponential average). The items worth most memory are those
needed soon and with a high probability, so an item's next use is the number of uses until the
table's next place, divided by that share. benchmarks/records/expert-residency.md compares this with
knowing the routing beforehand (Belady, 1966).
"""

from dataclasses import dataclass, field

_RECENT = 1 / 4  # the weight of the last forward in a share
_MIN_SHARE = 1e-6


@dataclass(slots=True, eq=False)
class Table:
    """The items of one table, named by small integers. Not thread-safe, but for `order_of` and
    `share_of`."""

    chosen: dict[int, int] = field(default_factory=dict)  # by this forward, in the order of use;
    # those that its backward has used since are taken out
    settled_at: int | None = None  # the place at which the forward has announced all that it uses
    _uses: int = 0  # by this forward
    _passes: int = 0  # forwards that used this table
    _shares: dict[int, tuple[float, int]] = field(default_factory=dict)  # the last, and its pass

    def begin_pass(self) -> None:
        self.chosen = {}
        self.settled_at = None
        self._uses = 0

    def use(self, item: int) -> None:
        self._passes += not self._uses
        self._uses += 1
        self.chosen.pop(item, None)
        self.chosen[item] = self._uses
        share, last = self._shares.get(item, (0.0, 0))
        if last < self._passes:
            self._shares[item] = _faded(share, self._passes - last) + _RECENT, self._passes

    def order_of(self, item: int) -> float | None:
        """The time of this forward's use, from 0 to 1; None if its backward does not need it."""
        use = self.chosen.get(item)
        return None if use is None else use / (self._uses + 1)

    def share_of(self, item: int) -> float:
        """The share of the recent forward passes through this table that chose `item`. Never 0."""
        share, last = self._shares.get(item, (0.0, 0))
        passes = self._passes
        weights = 1 - _faded(1.0, passes)  # the sum over all forwards so far
        return max(_MIN_SHARE, _faded(share, passes - last) / weights) if passes else _MIN_SHARE


def _faded(share: float, passes: int) -> float:
    """The value to which a share decays after `passes` forward passes."""
    return share * (1 - _RECENT) ** passes
