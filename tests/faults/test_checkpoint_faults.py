"""Checkpoints on a disk that fails at any call of a save or a load: the bits of a run without
faults, or an error that says why. What was saved before is there, and the engine trains on."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import offload
from offload import checkpoint
from offload.checkpoint.checked_files import TRIES
from offload.checkpoint.folder import recover
from offload.errors import (
    CheckpointError,
    NoSpaceError,
    OffloadError,
    PathError,
    StorageError,
    StuckError,
)
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

DATA = batches(6)
FIRST, LAST = 1, 4  # steps of the checkpoints that are saved
CASES, LONG_CASES, LONG_FAULTS = 30, 60, 10_000


@dataclass(frozen=True)
class Case:
    """One call of a save or a load goes wrong, with `always` all behind it as well."""

    verb: str
    operation: str
    number: int
    kind: str
    steps: int
    always: bool

    @classmethod
    def drawn(cls, seed: int, calls: dict[str, Counter[str]]) -> Case:
        draw = random.Random(seed)
        verbs = [*calls]
        verb = verbs[seed % len(verbs)]
        operations = sorted(calls[verb])
        operation = operations[seed // len(verbs) % len(operations)]
        return cls(
            verb, operation, draw.randrange(calls[verb][operation]),
            draw.choice(kinds_of(operation)), draw.randint(FIRST, LAST), draw.random() < 0.2,
        )  # fmt: skip


class Bench:
    """An engine, two checkpoints, and the bits that each step has without faults."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, FaultyCalls()
        # one that is never saved again, and one that is replaced each time
        self.kept, self.path = folder / "run/step-000001", folder / "run/step-000002"
        self.engine = offload.initialize(seeded(TinyLM), config(folder, HOST, precision="bf16"))
        self.expected: list[dict[str, Tensor]] = [states_of(self.engine)]
        for number in range(LAST + 1):
            self.train(number)
            self.expected.append(states_of(self.engine))
            if number == 0:
                self.engine.save_checkpoint(self.kept)
                self.engine.save_checkpoint(self.path)
        self.saved = 1  # steps of what is in `path`

    def train(self, number: int) -> None:
        losses_of(self.engine, [DATA[number]])

    @property
    def steps(self) -> int:
        return self.engine.report().steps

    def reach(self, steps: int) -> None:
        """That state, from what is kept."""
        self.load(self.kept, 1)
        for number in range(1, steps):
            self.train(number)

    def load(self, path: Path, *steps: int) -> None:
        """Without faults: the bits of one of `steps`."""
        self.engine.load_checkpoint(path)
        assert self.steps in steps
        assert_same_bits(states_of(self.engine), self.expected[self.steps])

    def count(self, verb: str) -> Counter[str]:
        """The calls of a save or a load."""
        self.reach(1)
        self.calls.arm("", 0, "")
        self.verbs[verb]()
        return Counter(self.calls.seen)

    @property
    def verbs(self) -> dict[str, Callable[[], Any]]:
        return {
            "save": lambda: self.engine.save_checkpoint(self.path),
            "load": lambda: self.engine.load_checkpoint(self.path),
            "latest and prune": self._look,
        }

    def _look(self) -> None:
        folder = self.path.parent
        found = checkpoint.latest(folder)
        if found is None:  # each time something else was read than was written
            assert self.calls.hits > TRIES
        else:
            assert found in (self.path, self.kept)
        checkpoint.prune(folder, keep_last=2)

    def meet(self, case: Case) -> OffloadError | None:
        """The error, if there was any; whatever happened, `case` has ended well."""
        self.reach(case.steps if case.verb == "save" else 1)
        self.calls.arm(case.operation, case.number, case.kind, always=case.always)
        caught: OffloadError | None = None
        try:
            self.verbs[case.verb]()
        except OffloadError as error:
            caught = error
        if caught is not None:
            assert str(self.folder) in str(caught)
        if case.verb == "save":
            self._check_save(case, caught)
        else:
            self._check_other(case, caught)
        return caught

    def _check_save(self, case: Case, caught: OffloadError | None) -> None:
        self.train(case.steps)  # what has not been saved is not lost
        assert_same_bits(states_of(self.engine), self.expected[case.steps + 1])
        is_unseen = case.operation == "pwrite" and case.kind in UNSEEN and self.calls.hits
        if isinstance(caught, StuckError) and not case.always:
            self._load_any(case, caught)  # while the call that was given up is under way
        self.calls.release()
        try:
            self._load_any(case, caught)  # also when that has returned
            self.saved = self.steps
            recover(self.path.parent)
        except CheckpointError:
            assert is_unseen, self.calls.hit
            shutil.rmtree(self.path)  # a damaged manifest is not replaced: it may be anybody's
            self.load(self.kept, 1)
            self.engine.save_checkpoint(self.path)
            self.saved = 1
        assert sorted(os.listdir(self.path.parent)) == [self.kept.name, self.path.name]

    def _load_any(self, case: Case, caught: OffloadError | None) -> None:
        self.load(self.path, case.steps, *([] if caught is None else [self.saved]))

    def _check_other(self, case: Case, caught: OffloadError | None) -> None:
        if caught is None and case.verb == "load":
            assert_same_bits(states_of(self.engine), self.expected[self.saved])
        self.calls.release()
        self.load(self.path, self.saved)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("bench"))
    with bench.calls.installed(), bench.engine:
        yield bench


def test_drawn_faults_leave_the_bits_or_an_error(
    bench: Bench, long: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = {verb: bench.count(verb) for verb in bench.verbs}
    met: Counter[tuple[str, str]] = Counter()  # errors
    cases: Counter[tuple[str, str]] = Counter()
    hits: Counter[tuple[str, str]] = Counter()  # calls that went wrong
    for seed in range(10**9):
        case = Case.drawn(seed, calls)
        try:
            error = bench.meet(case)
        except BaseException:
            print(seed, case, bench.calls.hit)  # by pytest, with the failure
            raise
        what = case.operation, case.kind
        hits[what] += bench.calls.hits
        cases[what] += bench.calls.hits > 0
        met[what] += error is not None
        enough = hits.total() >= LONG_FAULTS and cases.total() >= LONG_CASES
        if enough if long else cases.total() >= CASES:
            break
    with capsys.disabled():
        print(table(cases, hits, met))
    assert len({operation for operation, _ in hits}) >= 12


def table(*columns: Counter[tuple[str, str]]) -> str:
    """Cases, faults in them and errors that ended them, by the call that went wrong."""
    lines = [f"\n{'call':16}{'cases':>7}{'faults':>7}{'errors':>7}  cases of each kind"]
    for operation in sorted({operation for operation, _ in columns[0]}):
        kinds = {kind: n for (name, kind), n in columns[0].items() if name == operation and n}
        sums = [sum(n for (name, _), n in each.items() if name == operation) for each in columns]
        text = ", ".join(f"{kind} {n}" for kind, n in sorted(kinds.items()))
        lines.append(f"{operation:16}{sums[0]:7}{sums[1]:7}{sums[2]:7}  {text}")
    totals = [each.total() for each in columns]
    lines.append(f"{'all':16}{totals[0]:7}{totals[1]:7}{totals[2]:7}")
    return "\n".join(lines)


SAYS = {"ENOSPC": NoSpaceError, "EDQUOT": NoSpaceError, "stuck": StuckError}


@pytest.mark.parametrize("kind", ["EIO", "ENOSPC", "EDQUOT", "stuck"])
@pytest.mark.parametrize(
    "operation",
    ["mkdir", "create", "pwrite", "sync_file_range", "fsync", "exchange", "fsync folder"],
)
def test_a_save_that_cannot_be_completed_is_an_error_of_its_kind(
    bench: Bench, operation: str, kind: str, long: bool
) -> None:
    if kind == "EDQUOT" and operation != "pwrite" and not long:
        pytest.skip("as ENOSPC: --long")
    error = bench.meet(Case("save", operation, 0, kind, 3, always=True))
    assert type(error) is SAYS.get(kind, StorageError)
    assert not isinstance(error, PathError)


@pytest.mark.parametrize("kind", ["short", "slow"])
def test_a_save_whose_writes_are_short_or_slow_is_whole(bench: Bench, kind: str) -> None:
    assert bench.meet(Case("save", "pwrite", 0, kind, 3, always=True)) is None
