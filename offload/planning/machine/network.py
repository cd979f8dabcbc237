"""The time of collectives between GPUs of machines that are described rather than present.

A model of two terms, bytes over the slower of two links and the time of messages one after another.
Of a group of `n` ranks, `m` on each machine of `L`, a buffer of `B` bytes:

    all-gather, a ring     B (n-1)/n over a GPU's link within the machine
                           B (n-m)/n over the machine's network, of which the group has m/L
                           n/m - 1 steps between machines, the others within
    all-to-all             B (m-1)/n over a GPU's link within the machine
                           B (n-m)/n over a rank's part 1/L of the network: nothing is summed on
                           the way, each rank sends to each; one message to every rank

Nothing congests: networks are taken to carry what every machine can send.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.planning.step.collective_sequence import Among, Call, Exchange
from offload.zero.ranks.sharding import Sharding


@dataclass(frozen=True, slots=True)
class Members:
    """The members of one process group."""

    ranks: int
    per_machine: int

    @property
    def machines(self) -> int:
        return -(-self.ranks // self.per_machine)


@dataclass(frozen=True)
class Network:
    """The links between ranks: sustained bytes per second in one direction, and latencies."""

    ranks_per_machine: int
    inside_bytes_per_s: float  # of one GPU to those beside it
    between_bytes_per_s: float  # of one machine to the others; 0: unknown
    begin_s: float  # of any collective
    inside_step_s: float  # of a ring, from one GPU to the next
    between_step_s: float  # ... from one machine to the next
    message_s: float  # to send one more message, where each rank sends to each

    def members(self, among: Among, sharding: Sharding) -> Members:
        """The members of a group. Shards are on neighbours, replicas a shard group apart."""
        here = self.ranks_per_machine
        if among is Among.SHARDS:
            return Members(sharding.ranks, min(sharding.ranks, here))
        return Members(sharding.replicas, min(sharding.replicas, max(1, here // sharding.ranks)))

    def knows(self, sharding: Sharding) -> bool:
        """Whether the times of all groups of `sharding` are known."""
        inside = sharding.world_size <= self.ranks_per_machine
        return self.inside_bytes_per_s > 0 and (inside or self.between_bytes_per_s > 0)

    def seconds(self, exchange: Exchange, sharding: Sharding) -> float:
        """Seconds of one call, while every rank of the world makes one like it."""
        members = self.members(exchange.among, sharding)
        if members.ranks == 1:
            return 0.0
        if exchange.call is Call.ALL_GATHER:
            return self._ring_s(exchange.nbytes, members)
        return self._all_to_all_s(exchange.nbytes, members)

    def all_to_all_s(self, nbytes: int, ranks: int) -> float:
        """Seconds of one call among each `ranks` neighbours, each with a buffer of `nbytes`."""
        return self._all_to_all_s(nbytes, Members(ranks, min(ranks, self.ranks_per_machine)))

    def _ring_s(self, nbytes: int, members: Members) -> float:
        n, m = members.ranks, members.per_machine
        inside_s = nbytes * (n - 1) / n / self.inside_bytes_per_s if m > 1 else 0.0
        share = m / self.ranks_per_machine
        between_s = self._between_s(nbytes * (n - m) / n, share)
        between = members.machines - 1
        steps_s = between * self.between_step_s + (n - 1 - between) * self.inside_step_s
        return self.begin_s + steps_s + max(inside_s, between_s)

    def _all_to_all_s(self, nbytes: int, members: Members) -> float:
        n, m = members.ranks, members.per_machine
        inside_s = nbytes * (m - 1) / n / self.inside_bytes_per_s if m > 1 else 0.0
        between_s = self._between_s(nbytes * (n - m) / n, 1 / self.ranks_per_machine)
        step_s = self.between_step_s if n > m else self.inside_step_s
        return self.begin_s + step_s + (n - 1) * self.message_s + max(inside_s, between_s)

    def _between_s(self, nbytes: float, share: float) -> float:
        return nbytes / (self.between_bytes_per_s * share) if nbytes else 0.0
