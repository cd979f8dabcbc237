"""Any number of processes save and prune in one folder; a whole one is always there."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import offload
from offload.checkpoint.format import folder as folders
from offload.checkpoint.format.disk import lock_folder, unlock
from offload.checkpoint.format.reader import CheckpointReader
from tests.offload.engine_cases import HOST, config
from tests.offload.interrupt_points import at_point

REPOSITORY = Path(__file__).parents[2]
SAVERS, ROUNDS, KILLED = 3, 3, 2


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [True, False])
def test_savers_in_one_folder_succeed_and_touch_nothing_of_anybody_else(
    tmp_path: Path, exchange: bool, long: bool
) -> None:
    """Some are killed at random moments, and others take their place."""
    if not exchange and not long:
        pytest.skip("where folders cannot be exchanged: --long")
    foreign = tmp_path / "backup.old-0123456789ab" / "optimizer" / "000.safetensors"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("precious")
    factor = 75 if long else 1
    command = [
        sys.executable, "-m", "tests.offload.checkpoint_savers", str(tmp_path),
        f"--processes={SAVERS}", f"--rounds={ROUNDS * factor}",
        f"--kill={KILLED * factor}",
        *([] if exchange else ["--no-exchange"]),
    ]  # fmt: skip
    ended = subprocess.run(
        command, cwd=REPOSITORY, text=True, capture_output=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["wrong"] == []
    assert report["done"]["save"] >= ROUNDS * factor * (SAVERS - 2)
    assert foreign.read_text() == "precious"
    kept = [name for name in sorted(os.listdir(tmp_path)) if not name.startswith("step-")]
    assert kept == [foreign.parts[-3], "one", "two"], "the last save has cleared up"
    assert not any("." in path.name for path in tmp_path.glob("step-*"))


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@pytest.mark.sample("False")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("exchange", [True, False])
def test_interrupted_at_any_moment_a_save_leaves_a_whole_checkpoint_and_no_lock(
    tmp_path: Path, exchange: bool, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(folders, "exchange", lambda a, b: False)
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    path, draw, interrupted = tmp_path / "run" / "saved", random.Random(0), 0
    with offload.initialize(torch.nn.Linear(8, 8), config(tmp_path, HOST)) as engine:
        took_s = min(seconds_of(lambda: engine.save_checkpoint(path)) for _ in range(4))
        for _ in range(1500 if long else 20):
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, took_s))
                engine.save_checkpoint(path)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            with CheckpointReader(path) as reader:
                reader.check(contents=True)
        signal.signal(signal.SIGALRM, handler)
        engine.save_checkpoint(path)
        engine.load_checkpoint(path)
    assert interrupted
    assert os.listdir(path.parent) == ["saved"]


def test_a_forked_child_does_not_end_its_parent_s_lock(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path)
    assert lock is not None
    pid = os.fork()
    if pid == 0:
        lock.close()
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(BlockingIOError):
        lock_folder(tmp_path)
    unlock(lock)
    unlock(lock_folder(tmp_path))


@pytest.mark.parametrize("point", range(1, 9))
def test_a_ctrl_c_while_a_lock_is_given_back_leaves_no_lock(tmp_path: Path, point: int) -> None:
    lock = lock_folder(tmp_path)
    assert lock is not None
    with suppress(KeyboardInterrupt), at_point(point):
        unlock(lock)
    del lock
    unlock(lock_folder(tmp_path))  # BlockingIOError where it is left
