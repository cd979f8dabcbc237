"""Threads for arithmetic, and what is waited for."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from offload.swap.threads import transfer as transfer_module
from offload.swap.threads.transfer import Transfer
from offload.swap.threads.worker import ParallelRunner, Worker
from offload.tiers.errors import StorageError


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("n", [0, 1, 7, 64, 1000])
def test_a_range_is_covered_once(threads, n):
    runner = ParallelRunner(threads, min_share=4)
    seen = [0] * n

    def body(lo: int, hi: int) -> None:
        for i in range(lo, hi):
            seen[i] += 1

    runner(body, n)
    runner.close()
    assert seen == [1] * n


def test_an_error_in_any_share_is_raised():
    runner = ParallelRunner(2, min_share=1)

    def body(lo: int, hi: int) -> None:
        if lo:
            raise ValueError("second half")

    with pytest.raises(ValueError, match="second half"):
        runner(body, 10)
    runner.close()


def test_a_failing_worker_raises_in_its_waiters():
    told = threading.Event()

    def work() -> bool:
        raise RuntimeError("broken")

    worker = Worker("test", work, lambda error: told.set())
    worker.wake()
    assert told.wait(10)
    assert isinstance(worker.failure, RuntimeError)
    worker.close()


AT_THE_END = """
import weakref
from offload.swap.threads.worker import ParallelRunner

class Engine: pass

engine, runner = Engine(), ParallelRunner(3, min_share=1)
weakref.finalize(engine, lambda: (runner(lambda lo, hi: None, 9), print("closed")))
runner(lambda lo, hi: None, 9)
"""


def test_a_program_that_ends_without_closing_may_still_share() -> None:
    """An engine that was not closed waits for its update when the interpreter ends."""
    ended = subprocess.run(
        [sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=60,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, "closed\n"), ended.stderr


def failing(message: str = "gone") -> Transfer[int]:
    transfer: Transfer[int] = Transfer("a test transfer")
    error = StorageError(message)
    error.__cause__ = OSError(5, "Input/output error")
    transfer.fail(error)
    return transfer


def test_every_wait_raises_the_error_with_its_cause_and_the_traceback_does_not_grow() -> None:
    transfer = failing()
    depths = []
    for _ in range(3):
        with pytest.raises(StorageError, match="gone") as caught:
            transfer.wait()
        assert isinstance(caught.value.__cause__, OSError)
        depths.append(len(caught.traceback))
    assert len(set(depths)) == 1


def test_a_wait_that_stalls_is_told_of_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transfer_module, "STALL_S", 0.01)
    transfer: Transfer[int] = Transfer("read of layer.3")
    threading.Timer(0.1, transfer.complete, [1]).start()
    assert transfer.wait() == 1
    assert "still waiting for read of layer.3" in caplog.text
