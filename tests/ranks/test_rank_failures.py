"""When a rank dies, stalls or goes another way: the others leave in time and name it."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.ranks.failures import CLOSING_TIMEOUT_S, TIMEOUT_S, close_after_steps, train_until
from tests.ranks.processes import RankProcess, RanksFailed, run_ranks, stacks_of, start_ranks

ROOT = Path(__file__).parents[2]
GRACE_S = 40.0  # far above what it takes: the machine may be busy
BEGIN_S = 240.0  # until the ranks have begun
WORDS = {
    "killed": "is silent, and was in .*: it ended, or was killed, stopped or cut off",
    "stopped": "is silent, and was in .*: it ended, or was killed, stopped or cut off",
    "raised": "has left: ValueError: the data of this rank has come to its end",
    "sleeping": "lives and has not come to it, but is in none of the engine's collectives",
    # each waits for the other, and the first one to give up blames it
    "saves alone": "how a checkpoint is saved.*take them out of what only",
    "ends earlier": "has closed its engine.*drop_last=True",
}
CASES = [
    ("killed", 1, 3), ("killed", 3, 2), ("stopped", 1, 2), ("stopped", 3, 3), ("raised", 1, 2),
    ("raised", 3, 3), ("sleeping", 1, 3), ("sleeping", 3, 2),
    ("saves alone", 1, 3), ("ends earlier", 1, 2),
]  # fmt: skip


@pytest.mark.sample("killed-3-2", "raised-3-3")
@pytest.mark.parametrize(("fault", "stage", "world_size"), CASES)
def test_the_others_leave_in_time_and_name_it(
    fault: str, stage: int, world_size: int, tmp_path: Path
) -> None:
    culprit = world_size - 1
    ranks = start_ranks(
        world_size, tmp_path / "ranks", train_until, fault, culprit, stage, str(tmp_path)
    )
    try:
        others = [rank for rank in ranks if rank.rank != culprit]
        deadline = _time_of_fault(tmp_path, ranks) + TIMEOUT_S + GRACE_S
        errors = [_error(rank, deadline, ranks) for rank in others]
        assert all(rank.await_end(deadline) for rank in others), stacks_of(ranks)
        print(f"left after {time.monotonic() - deadline + TIMEOUT_S + GRACE_S:.1f} s")
        if fault == "raised":
            assert "ValueError" in _error(ranks[culprit], deadline, ranks)
            assert ranks[culprit].await_end(deadline), stacks_of(ranks)
    finally:
        for rank in ranks:
            rank.kill()
    for rank, error in zip(others, errors, strict=True):
        named = ".*" if fault == "saves alone" else f"rank {culprit} "
        _check(error, rank.rank, named + WORDS[fault])
    assert list((tmp_path / "swap").iterdir()) == []


def _time_of_fault(folder: Path, ranks: list[RankProcess]) -> float:
    deadline = time.monotonic() + BEGIN_S
    while not (folder / "fault").exists():
        assert time.monotonic() < deadline, stacks_of(ranks)
        time.sleep(0.02)
    return float((folder / "fault").read_text())


def _error(rank: RankProcess, deadline: float, ranks: list[RankProcess]) -> str:
    answer = rank.answer(deadline)
    assert answer is not None, stacks_of(ranks)
    ok, text = answer
    assert not ok
    return str(text)


def _check(error: str, rank: int, words: str) -> None:
    """The last line of a traceback names the rank that saw it, the collective and its group, and
    first of all the cause: `words`."""
    last = [line for line in error.splitlines() if "RankError: " in line][-1]
    collective = (
        r"the (all-gather|reduce-scatter|all-reduce) of [\w. ']+ among ranks [\d, ]+ failed"
    )
    assert re.search(rf"RankError: rank {rank}: {collective} after", last), error
    assert re.search(rf"failed after [\d.]+ s: {words}", last), error


@pytest.mark.slow
def test_under_torchrun_a_killed_rank_ends_the_run(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "tests.ranks.failures", "killed", "1", "3", str(tmp_path),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        _, said = run.communicate(timeout=BEGIN_S)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, 9)
    ended = time.monotonic()
    assert run.returncode != 0
    assert ended - float((tmp_path / "fault").read_text()) < TIMEOUT_S + GRACE_S, said
    assert "Signal 9 (SIGKILL)" in said
    assert re.search(
        r"rank 0: the (all-gather|reduce-scatter) of .* among ranks 0, 1.* failed", said
    )
    assert [p.pid for p in psutil.process_iter() if _is_of(p, tmp_path)] == []
    assert list((tmp_path / "swap").iterdir()) == []


def _is_of(process: psutil.Process, folder: Path) -> bool:
    try:
        return str(folder) in process.cmdline()
    except psutil.Error:
        return False  # has ended meanwhile


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stopped", "raised"])
def test_a_rank_that_hosts_the_store_may_be_gone(fault: str, tmp_path: Path, long: bool) -> None:
    """Without a launcher, the store is in the process of rank 0."""
    if not long and fault == "stopped":
        pytest.skip("in make test-long")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [_start_alone(rank, port, fault, tmp_path) for rank in (0, 1)]
    try:
        _, said = ranks[1].communicate(timeout=BEGIN_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    took = time.monotonic() - float((tmp_path / "fault").read_text())
    print(f"left after {took:.1f} s")
    assert took < TIMEOUT_S + GRACE_S, said
    assert ranks[1].returncode == 1, said  # as after any exception: not by a signal
    last = [line for line in said.splitlines() if "RankError: rank 1: " in line][-1]
    # read before the store went, rank 0's own words say more
    words = "store .* does not answer.*the launcher, or rank 0|rank 0 has left: ValueError"
    assert re.search(words, last), last
    assert list((tmp_path / "swap").iterdir()) == []


def _start_alone(rank: int, port: int, fault: str, folder: Path) -> subprocess.Popen[str]:
    place = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **{k: str(v) for k, v in place.items()}}
    command = [sys.executable, "-m", "tests.ranks.failures", fault, "0", "3", str(folder)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize("stage", [1, 3])
def test_closing_leaves_no_rank_in_a_collective(stage: int, tmp_path: Path) -> None:
    took = run_ranks(2, tmp_path / "ranks", close_after_steps, stage, str(tmp_path))
    assert max(took) < CLOSING_TIMEOUT_S


def test_a_hang_shows_the_stacks_of_every_rank(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, tmp_path, time.sleep, 60.0, timeout_s=2.0)
    for rank in (0, 1):
        shown = str(failed.value).split(f"stacks of rank {rank}:")[1]
        assert "_rank_main" in shown
