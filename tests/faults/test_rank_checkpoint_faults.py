"""A disk that fails one of several ranks, in a save, a load or a look for the newest checkpoint:
the bits of a run without faults on all ranks, or an error on all of them, soon. What was saved
before is there, and the ranks train on together."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.checkpoint_bench import MAX_S, Bench, Case, Met, Tally, everyone
from tests.offload.engine_cases import HOST, NVME
from tests.ranks.processes import run_ranks

MANY = 60  # cases of each setup
TALLY = Tally()


@dataclass(frozen=True)
class Setup:
    ranks: int
    stage: int
    placement: dict[str, Any]
    first: int = 0  # seed

    def __str__(self) -> str:
        home = "nvme" if self.placement == NVME else "host"
        return f"{self.ranks}-stage{self.stage}-{home}"


SHORT = [(Setup(2, 3, NVME), 12)]
LONG = [
    *(Setup(2, stage, home, 1000 * stage) for stage in range(4) for home in (HOST, NVME)),
    Setup(3, 2, HOST, 5000), Setup(3, 3, NVME, 6000),
]  # fmt: skip


def meet_all(setup: Setup, count: int, folder: str) -> list[Met]:
    # a wait for another rank that ends by itself takes longer than a case may
    zero = {"stage": setup.stage, "timeout_s": 2 * MAX_S}
    bench = Bench(Path(folder), placement=setup.placement, zero=zero)
    met = []
    with bench.calls.installed(), bench.engine:
        calls = bench.count()
        for seed in range(setup.first, setup.first + count):
            case = Case.drawn(seed, calls)
            try:
                met.append(bench.meet(case))
            except BaseException as error:
                error.add_note(f"{seed} {case} {bench.calls.hit}")
                raise
        everyone(None)
    return met


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "setup" in metafunc.fixturenames:
        is_long = metafunc.config.getoption("--long")
        cases = [(setup, MANY) for setup in LONG] if is_long else SHORT
        metafunc.parametrize(("setup", "count"), cases, ids=[str(setup) for setup, _ in cases])


@pytest.mark.slow
def test_drawn_faults_leave_the_bits_or_an_error_on_all_ranks(
    setup: Setup, count: int, tmp_path: Path
) -> None:
    first, *others = run_ranks(
        setup.ranks, tmp_path / "ranks", meet_all, setup, count, str(tmp_path), timeout_s=600.0
    )
    for met in first:
        TALLY.add(met)
    print(TALLY)
    assert all([met.case for met in each] == [met.case for met in first] for each in others)
    assert sum(met.hits > 0 for met in first) > count // 2
