"""`offload train`, killed at any moment and resumed, ends with the bits of a run that was never
killed."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offload.checkpoint.format.folder import recover
from tests.faults.train_victim import Request, write_inputs
from tests.offload.checkpoint_crash import bits_of

REPOSITORY = Path(__file__).parents[2]
STEPS, LONG_STEPS = 4, 40
KILLS, LONG_KILLS = 1, 1000
MAX_LIVES = 2000

Victim = Callable[[Request], int]


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.train_victim"], cwd=REPOSITORY, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip

    def asked(request: Request) -> int:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(request.to_json() + "\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    with process:
        yield asked
        process.kill()


def resumed(folder: Path) -> int | None:
    """The step after which the last run went on, as it says; None if it did not come so far."""
    match = re.search(r"^resumed after step (\d+)", (folder / "output.txt").read_text(), re.M)
    return int(match[1]) if match else None


def final_bits(run: Path) -> int:
    return bits_of(max((run / "checkpoints").glob("step-*"), key=lambda path: path.stem))


def losses(run: Path) -> list[tuple[int, float]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], row["loss"]) for row in map(json.loads, lines)]


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(
    victim: Victim, tmp_path: Path, long: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, max_kills = (LONG_STEPS, LONG_KILLS) if long else (STEPS, KILLS)
    write_inputs(tmp_path, steps)
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert victim(Request(str(tmp_path), "whole", resume=False)) == 0
    expected = final_bits(whole)
    began = time.monotonic()
    assert victim(Request(str(tmp_path), "whole", resume=True)) == 0
    span_s = 3 * (time.monotonic() - began)  # a third of the lives are over before they go on
    draw, began = random.Random(0), time.monotonic()
    kills = runs = 0
    while kills < max_kills:
        shutil.rmtree(run, ignore_errors=True)
        step = lives = 0
        status = signal.SIGKILL
        while status:
            # some lives are too short to come to the next checkpoint
            life_s = draw.uniform(0, span_s) if kills < max_kills else None
            going_on = (run / "metrics.jsonl").exists()
            status = victim(Request(str(tmp_path), "run", going_on, life_s))
            said = (tmp_path / "output.txt").read_text()
            assert status in (0, signal.SIGKILL), said[-3000:]
            last = resumed(tmp_path)
            assert last is None or last >= step, "a checkpoint that had been there is lost"
            step = last or step
            kills += status == signal.SIGKILL
            lives += 1
            assert lives < MAX_LIVES, f"it does not get beyond step {step}"
        runs += 1
        check_run(run, whole, expected)
    with capsys.disabled():
        seconds = time.monotonic() - began
        print(f"\n{kills} kills in {runs} runs of {steps} steps, {seconds:.0f} s: the same bits")


def check_run(run: Path, whole: Path, expected: int) -> None:
    assert final_bits(run) == expected
    assert losses(run) == losses(whole)
    recover(run / "checkpoints")  # as the next save does
    for folder, other in ((run / "checkpoints", whole / "checkpoints"), (run, whole)):
        left = {*os.listdir(folder)} - {*os.listdir(other)}
        left = {name for name in left if ".tmp-" not in name}  # a text on its way
        # killed amid the removal behind its last step, it has nothing left to do
        max_left = 1 if folder.name == "checkpoints" else 0
        assert len({name.partition(".")[0] for name in left}) <= max_left, left
