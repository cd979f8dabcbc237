"""Checkpoints on a disk that fails at any call of a save or a load: the bits of a run without
faults, or an error that says why. What was saved before is there, and the engine trains on."""

from collections.abc import Iterator

import pytest

from offload.errors import NoSpaceError, PathError, StorageError
from tests.faults.checkpoint_bench import BESIDE, Bench, Case, Tally

pytestmark = pytest.mark.sample(3)

CASES, LONG_CASES, LONG_FAULTS = 18, 60, 10_000


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("bench"))
    with bench.calls.installed(), bench.engine:
        yield bench


def test_drawn_faults_leave_the_bits_or_an_error(
    bench: Bench, long: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, tally = bench.count(), Tally()
    for seed in range(10**9):
        case = Case.drawn(seed, calls)
        try:
            tally.add(bench.meet(case))
        except BaseException:
            print(seed, case, bench.calls.hit)  # by pytest, with the failure
            raise
        enough = tally.faults.total() >= LONG_FAULTS and tally.cases.total() >= LONG_CASES
        if enough if long else tally.cases.total() >= CASES:
            break
    with capsys.disabled():
        print(tally)
    assert len({operation for operation, _ in tally.faults}) >= 8


SAYS = {"ENOSPC": NoSpaceError, "EDQUOT": NoSpaceError}


@pytest.mark.parametrize("kind", ["EIO", "ENOSPC", "EDQUOT"])
@pytest.mark.parametrize(
    "operation", ["mkdir", "create", "pwrite", "fsync", "exchange", "fsync folder"]
)
def test_a_save_that_cannot_be_completed_is_an_error_of_its_kind(
    bench: Bench, operation: str, kind: str, long: bool
) -> None:
    if kind == "EDQUOT" and operation != "pwrite" and not long:
        pytest.skip("as ENOSPC: --long")
    error = bench.meet(Case("save", operation, 0, kind, 3, always=True)).error
    assert type(error) is SAYS.get(kind, StorageError)
    assert not isinstance(error, PathError)


@pytest.mark.parametrize("number", range(4))
def test_a_folder_that_cannot_be_looked_at_is_an_error_of_its_kind(
    bench: Bench, number: int
) -> None:
    error = bench.meet(Case("latest and prune", "stat", number, "EIO", 1, always=True)).error
    assert type(error) is StorageError


@pytest.mark.parametrize("verb", ["save", BESIDE])
@pytest.mark.parametrize("kind", ["short", "slow"])
def test_a_save_whose_writes_are_short_or_slow_is_whole(bench: Bench, kind: str, verb: str) -> None:
    assert bench.meet(Case(verb, "pwrite", 0, kind, 3, always=True)).error is None
    assert bench.meet(Case(verb, "fadvise", 0, "EIO", 3, always=True)).error is None


@pytest.mark.parametrize("told_next", [False, True])
@pytest.mark.parametrize("kind", ["EIO", "ENOSPC"])
def test_what_goes_wrong_with_a_save_beside_training_is_told_once(
    bench: Bench, kind: str, told_next: bool
) -> None:
    case = Case(BESIDE, "fsync folder", 0, kind, 3, always=False, told_next=told_next)
    assert type(bench.meet(case).error) is SAYS.get(kind, StorageError)
    assert bench.engine.checkpoint_saved()
