"""An engine with two checkpoints on a disk that fails: what a save, a load or a look at them may
end with. Of several ranks each has a bench, and one of them the disk that fails."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import offload
from offload import checkpoint
from offload.checkpoint.format.folder import recover
from offload.errors import CheckpointError, OffloadError, RankError, StorageError
from tests.faults.faulty_calls import UNSEEN, FaultyCalls, kinds_of
from tests.offload.engine_cases import (
    HOST,
    TinyLM,
    assert_same_bits,
    batches,
    config,
    losses_of,
    seeded,
    states_of,
)

DATA = batches(18)
BESIDE = "save beside training"
FIRST, LAST = 1, 4  # steps of the checkpoints that are saved
MAX_S = 60.0  # a save or a load ends within it, whatever happens, on a busy machine
Calls = list[dict[str, Counter[str]]]  # by rank and verb


@dataclass(frozen=True)
class Case:
    """One call of a save or a load on a rank goes wrong, with `always` all behind it as well."""

    verb: str
    operation: str
    number: int
    kind: str
    steps: int
    always: bool
    rank: int = 0
    told_next: bool = False  # of a save beside training: the next save says what became of it

    @classmethod
    def drawn(cls, seed: int, calls: Calls) -> Case:
        draw = random.Random(seed)
        verbs = [*calls[0]]
        verb = verbs[seed % len(verbs)]
        makes = [rank for rank, of_verb in enumerate(calls) if of_verb[verb]]
        rank = makes[seed // len(verbs) % len(makes)]
        operations = sorted(calls[rank][verb])
        operation = operations[seed // len(verbs) // len(makes) % len(operations)]
        return cls(
            verb, operation, draw.randrange(calls[rank][verb][operation]),
            draw.choice(kinds_of(operation)), draw.randint(FIRST, LAST), draw.random() < 0.2, rank,
            draw.random() < 0.3,
        )  # fmt: skip


@dataclass(frozen=True)
class Met:
    """What `case` has ended with: how many calls went wrong, and each rank's error, or None."""

    case: Case
    hits: int
    errors: list[OffloadError | None]

    @property
    def error(self) -> OffloadError | None:
        """The error of the rank with the fault."""
        return self.errors[self.case.rank]


def everyone(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Bench:
    """An engine, two checkpoints, and the bits that each step has without faults."""

    def __init__(self, folder: Path, **keys: Any) -> None:
        self.folder, self.calls = folder, FaultyCalls()
        self.ranks = len(everyone(None))
        self.rank = dist.get_rank() if self.ranks > 1 else 0
        # one that is never saved again, and one that is replaced each time
        self.kept, self.path = folder / "run/step-000001", folder / "run/step-000002"
        self.next = folder / "other/next"
        self.engine = offload.initialize(
            seeded(TinyLM), config(folder, keys.pop("placement", HOST), precision="bf16", **keys)
        )
        self.expected: list[dict[str, Tensor]] = [states_of(self.engine)]
        for number in range(LAST + 1):
            self.train(number)
            self.expected.append(states_of(self.engine))
            if number == 0:
                self.engine.save_checkpoint(self.kept)
                self.engine.save_checkpoint(self.path)
        self.saved = 1  # steps of what is in `path`

    def train(self, number: int) -> None:
        losses_of(self.engine, [DATA[number * self.ranks + self.rank]])

    @property
    def steps(self) -> int:
        return self.engine.report().steps

    def reach(self, steps: int) -> None:
        """Load the kept checkpoint and train from it up to `steps`."""
        self.load(self.kept, 1)
        for number in range(1, steps):
            self.train(number)

    def load(self, path: Path, *steps: int) -> None:
        """Without faults: the bits of one of `steps`, the same one on all ranks."""
        self.engine.load_checkpoint(path)
        assert everyone(self.steps) == [self.steps] * self.ranks
        assert self.steps in steps
        assert_same_bits(states_of(self.engine), self.expected[self.steps])

    def count(self) -> Calls:
        counts = {}
        for verb, act in self.verbs.items():
            self.reach(1)
            self.calls.arm("", 0, "")
            act()
            counts[verb] = Counter(self.calls.seen)
        return everyone(counts)

    @property
    def verbs(self) -> dict[str, Callable[[], Any]]:
        return {
            "save": lambda: self.engine.save_checkpoint(self.path),
            "load": lambda: self.engine.load_checkpoint(self.path),
            "latest and prune": self._look,
            **({"resume": self._resume} if self.ranks > 1 else {BESIDE: self._save_beside}),
        }

    def _save_beside(self, *, told_next: bool = False) -> None:
        """And a step meanwhile, whatever becomes of it."""
        steps = self.steps
        try:
            self.engine.save_checkpoint(self.path, wait=False)
        finally:
            try:
                self.train(steps)
            except OffloadError as error:
                pytest.fail(f"training ended with it: {error}")
        if told_next:
            self.engine.save_checkpoint(self.next)
        else:
            self.engine.checkpoint_saved()

    def _look(self) -> None:
        folder = self.path.parent
        latest = checkpoint.latest(folder)
        if latest is None:  # something else was read than was written
            assert self.calls.hits
        else:
            assert latest in (self.path, self.kept)
        checkpoint.prune(folder, keep_last=2)

    def _resume(self) -> None:
        """Every rank looks for itself, and one may find another checkpoint than the others."""
        try:
            latest = checkpoint.latest(self.path.parent)
        except StorageError:
            latest = None
        self.engine.load_checkpoint(latest or self.kept)

    def meet(self, case: Case) -> Met:
        """Whatever happened, `case` has ended well."""
        saves = case.verb in ("save", BESIDE)
        self.reach(case.steps if saves else 1)
        everyone(None)
        if case.rank == self.rank:
            self.calls.arm(case.operation, case.number, case.kind, always=case.always)
        else:
            self.calls.arm("", 0, "")
        caught: OffloadError | None = None
        began = time.monotonic()
        try:
            if case.told_next and case.verb == BESIDE:
                self._save_beside(told_next=True)
            else:
                self.verbs[case.verb]()
        except OffloadError as error:
            caught = error
        assert time.monotonic() - began < MAX_S
        if caught is not None:
            assert str(self.folder) in str(caught)
            assert not isinstance(caught, RankError)  # the ranks go on together
        errors = everyone(caught)
        if case.verb != "latest and prune":  # which no ranks do together
            assert len({error is None for error in errors}) == 1, errors
        met = Met(case, everyone(self.calls.hits)[case.rank], errors)
        if saves:
            self._check_save(met)
        else:
            self._check_other(met)
        return met

    def _release(self) -> None:
        self.calls.release()
        everyone(None)

    def _check_save(self, met: Met) -> None:
        case = met.case
        if case.verb == "save":
            self.train(case.steps)  # what has not been saved is not lost
        assert_same_bits(states_of(self.engine), self.expected[case.steps + 1])
        is_unseen = case.operation == "pwrite" and case.kind in UNSEEN and met.hits
        self._release()
        try:
            self._load_any(met)
            self.saved = self.steps
            if not self.rank:
                recover(self.path.parent)
        except CheckpointError:
            assert is_unseen, self.calls.hit
            if not self.rank:
                shutil.rmtree(self.path)  # a damaged manifest is not replaced: it may be anybody's
            self.load(self.kept, 1)
            self.engine.save_checkpoint(self.path)
            self.saved = 1
        everyone(None)
        if self.next.exists():
            if not is_unseen:
                self.load(self.next, case.steps + 1)
            shutil.rmtree(self.next)
        assert sorted(os.listdir(self.path.parent)) == [self.kept.name, self.path.name]

    def _load_any(self, met: Met) -> None:
        self.load(self.path, met.case.steps, *([] if met.error is None else [self.saved]))

    def _check_other(self, met: Met) -> None:
        if met.error is None and met.case.verb in ("load", "resume"):
            assert everyone(self.steps) == [self.steps] * self.ranks
            assert self.steps in (self.saved, *([1] if met.case.verb == "resume" else []))
            assert_same_bits(states_of(self.engine), self.expected[self.steps])
        self._release()
        self.load(self.path, self.saved)


class Tally:
    """Cases, faults in them and errors that ended them, by the call that went wrong."""

    def __init__(self) -> None:
        self.cases, self.faults, self.errors = Counter[Any](), Counter[Any](), Counter[Any]()

    def add(self, met: Met) -> None:
        self.count((met.case.operation, met.case.kind), met.hits, failed=any(met.errors))

    def count(self, what: tuple[str, str], hits: int, *, failed: bool) -> None:
        self.cases[what] += hits > 0
        self.faults[what] += hits
        self.errors[what] += failed

    def __str__(self) -> str:
        lines = [f"\n{'call':16}{'cases':>7}{'faults':>7}{'errors':>7}  cases of each kind"]
        columns = self.cases, self.faults, self.errors
        for operation in sorted({operation for operation, _ in self.cases}):
            kinds = {kind: n for (name, kind), n in self.cases.items() if name == operation and n}
            sums = [
                sum(n for (name, _), n in each.items() if name == operation) for each in columns
            ]
            text = ", ".join(f"{kind} {n}" for kind, n in sorted(kinds.items()))
            lines.append(f"{operation:16}{sums[0]:7}{sums[1]:7}{sums[2]:7}  {text}")
        totals = [each.total() for each in columns]
        lines.append(f"{'all':16}{totals[0]:7}{totals[1]:7}{totals[2]:7}")
        return "\n".join(lines)
