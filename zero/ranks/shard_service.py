"""Shards that other ranks ask for: a rank gathers a group whether or not the others use it.

    rank 0   model: the tower's turn      whole ◀─ shards ──┐
                    └ asks for (group, phase) ──▶ ┌─────────┴──────────┐
    rank 1   model: elsewhere, or in no module    │ its serving thread │
                                                  └────────────────────┘

So ranks may call other modules, a module more often, or a module alone, and none waits for another
rank's model. Ranks in step ask at about the same time; the bytes are those of an all-gather.

The *phase* counts what changes values on all ranks: steps, and writes. A rank that is asked for the
values of a phase sends them as soon as it comes there, after the group's update. Behind the shard,
it says whether that had these values until it was sent. If not (it is a phase ahead), the copy is
never used: as a rule, the rank that asked is within that step or write, and drops it.

For process groups of CPUs (gloo), where any rank can be sent a message at any time. On a GPU, ranks
gather together, in the same order.
"""

import logging
import threading
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from offload.swap.threads.ordered import OrderedWork
from offload.swap.threads.transfer import Transfer

_log = logging.getLogger("offload")

_ASK, _ANSWER, _SHARD = 1, 2, 3  # tags of messages
_SENT, _OTHER, _REFUSED = 2, 1, 0  # answers; other: values of another moment were sent
_END = -1  # in the place of a number: the rank asks for nothing any more
_ENDLESS, _BRIEF = timedelta(days=3650), timedelta(seconds=2)

# the rank; the number of a state and a kind of its elements; the phase; whether updated in it
_Ask = tuple[int, int, int, int]


class Lender(Protocol):
    """A state of which this rank has a shard."""

    def lend(self, *, frozen: bool, ahead: bool) -> AbstractContextManager[torch.Tensor]:
        """Provide the shard's trained or frozen elements (1D uint8), after updates by steps;
        `ahead`: after that in the phase's backward pass, too."""

    def had(self, phase: int, *, ahead: bool) -> bool:
        """Return whether the bytes have been those of a phase since `lend`, and are so now."""


class ShardService(OrderedWork):
    """This rank's side: it asks on the gathering thread, and answers on this one."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> None:
        """All ranks of `group` make one at the same time."""
        super().__init__("offload-serve", device)
        self._group = group
        self._limit = timedelta(seconds=timeout_s)
        self._others = [rank for rank in range(group.size()) if rank != group.rank()]
        self._sources: list[Lender] = []
        self._asks = True  # whether this rank does
        self._none_asks = threading.Event()  # of the others
        self._phase_lock = threading.Lock()  # guards the fields below
        self.phase = 0
        self._early: list[_Ask] = []  # for a phase that this rank has not come to
        self._refuses = False
        threading.Thread(target=self._listen, name="offload-asked", daemon=True).start()

    def add(self, source: Lender) -> int:
        """Return the number of another state, the same on all ranks."""
        self._sources.append(source)
        return len(self._sources) - 1

    def advance(self) -> None:
        """Note that a step or a write, which all ranks make, is complete here."""
        with self._phase_lock:
            self.phase += 1
            early, self._early = self._early, []
        for ask in early:
            self._take(ask)

    def fetch(
        self, number: int, phase: int, ahead: bool, whole: torch.Tensor, limit: timedelta, *,
        frozen: bool,
    ) -> bool:  # fmt: skip
        """Fill the others' places in `whole` (1D uint8). Returns whether all of them had the values
        of `phase`, updated in it or not (`ahead`). Raises RuntimeError if a rank cannot be reached
        within `limit`, or refuses: it has failed, or has closed its engine."""
        asked = torch.tensor([self._group.rank(), 2 * number + frozen, phase, ahead])
        shards, moves = whole.view(self._group.size(), -1), []
        for rank in self._others:
            answer = torch.empty(1, dtype=torch.int64)
            arriving = self._group.recv([answer], rank, _ANSWER)
            moves.append((answer, arriving, self._group.recv([shards[rank]], rank, _SHARD)))
        for rank in self._others:
            self._group.send([asked], rank, _ASK).wait(limit)
        fits = True
        for answer, arriving, shard in moves:
            arriving.wait(limit)
            if answer.item() == _REFUSED:
                raise RuntimeError("a rank sends no parameters any more")
            shard.wait(limit)
            fits &= answer.item() == _SENT
        return fits

    # ---------------------------------------------------------------- answering
    def _listen(self) -> None:
        """Take what other ranks ask for, on the listening thread, until none asks any more."""
        message, asking = torch.empty(4, dtype=torch.int64), set(self._others)
        while asking:
            try:
                self._group.recv_anysource([message], _ASK).wait(_ENDLESS)
            except RuntimeError as error:  # the connections are gone, and the ranks with them
                _log.debug("no rank asks for shards any more: %s", error)
                break
            ask = tuple(message.tolist())
            if ask[1] == _END:
                asking.discard(ask[0])
            else:
                self._take(ask)
        self._none_asks.set()

    def _take(self, ask: _Ask) -> None:
        rank, _, phase, _ = ask
        with self._phase_lock:
            if phase > self.phase and not self._refuses:
                self._early.append(ask)
                return
            sent = None if self._refuses else self.submit(ask, partial(self._send, *ask))
        if sent is None:
            self._answer(rank, _REFUSED)
        else:
            sent.then(partial(self._refuse_after_failure, rank))

    def _send(self, rank: int, number: int, phase: int, ahead: int) -> None:
        source, is_ahead = self._sources[number // 2], bool(ahead)
        with source.lend(frozen=bool(number % 2), ahead=is_ahead) as shard, suppress(RuntimeError):
            self._group.send([shard], rank, _SHARD).wait(self._limit)
            del shard  # before the answer: then the other rank may be done, and this one asleep
        self._answer(rank, _SENT if source.had(phase, ahead=is_ahead) else _OTHER)

    def _refuse_after_failure(self, rank: int, sent: Transfer[None]) -> None:
        if sent.failure is not None:
            _log.error("no parameters are sent to other ranks any more: %s", sent.failure.error)
            self._answer(rank, _REFUSED)

    def _answer(self, rank: int, answer: int) -> None:
        with suppress(RuntimeError):  # it is gone: the next collective with it says so
            self._group.send([torch.tensor([answer])], rank, _ANSWER).wait(_BRIEF)

    # ---------------------------------------------------------------- closing
    def end(self, timeout_s: float) -> None:
        """Ask no more, and answer until the other ranks ask no more, for `timeout_s` at most: a
        slower one may still read what this one has read."""
        self._ask_no_more()
        self._none_asks.wait(timeout_s)

    def _ask_no_more(self) -> None:
        asked, self._asks = self._asks, False
        for rank in self._others if asked else ():
            with suppress(RuntimeError):  # it has ended already
                ended = torch.tensor([self._group.rank(), _END, 0, 0])
                self._group.send([ended], rank, _ASK).wait(_BRIEF)

    def close(self) -> None:
        """Refuse all asks from here on."""
        with self._phase_lock:
            self._refuses = True
            early, self._early = self._early, []
        super().close()
        for ask in early:
            self._take(ask)
        self._ask_no_more()
        self._sources.clear()
