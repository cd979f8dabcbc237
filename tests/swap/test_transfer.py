from __future__ import annotations

import threading
import time

import pytest

from offload.swap.threads import transfer as transfer_module
from offload.swap.threads.transfer import Transfer, all_of
from offload.tiers.errors import StateError, StorageError


def failing(message: str = "gone") -> Transfer[int]:
    transfer: Transfer[int] = Transfer("a test transfer")
    error = StorageError(message)
    error.__cause__ = OSError(5, "Input/output error")
    transfer.fail(error)
    return transfer


def test_wait_returns_the_value() -> None:
    transfer: Transfer[int] = Transfer("x")
    assert not transfer.done()
    transfer.complete(3)
    assert transfer.done()
    assert transfer.wait() == 3


def test_a_completed_transfer_is_done_at_once() -> None:
    assert Transfer.completed("here").wait(0) == "here"


def test_every_waiter_wakes_up() -> None:
    transfer: Transfer[int] = Transfer("x")
    seen: list[int] = []
    threads = [threading.Thread(target=lambda: seen.append(transfer.wait())) for _ in range(8)]
    for thread in threads:
        thread.start()
    transfer.complete(7)
    for thread in threads:
        thread.join(5)
    assert seen == [7] * 8


def test_every_wait_raises_the_error_with_its_cause_and_the_traceback_does_not_grow() -> None:
    transfer = failing()
    depths = []
    for _ in range(3):
        with pytest.raises(StorageError, match="gone") as caught:
            transfer.wait()
        assert isinstance(caught.value.__cause__, OSError)
        depths.append(len(caught.traceback))
    assert len(set(depths)) == 1


def test_a_timeout_says_what_and_how_long_and_the_transfer_goes_on() -> None:
    transfer: Transfer[int] = Transfer("read of layer.3")
    with pytest.raises(StorageError, match=r"waited 0\.01 s for read of layer\.3"):
        transfer.wait(0.01)
    transfer.complete(1)
    assert transfer.wait(0.01) == 1


def test_a_wait_that_stalls_is_told_of_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transfer_module, "STALL_S", 0.01)
    transfer: Transfer[int] = Transfer("read of layer.3")
    threading.Timer(0.1, transfer.complete, [1]).start()
    assert transfer.wait() == 1
    assert "still waiting for read of layer.3" in caplog.text


def test_completing_twice_is_a_bug() -> None:
    transfer = Transfer.completed(1)
    with pytest.raises(StateError, match="twice"):
        transfer.complete(2)


def test_callbacks_have_run_when_wait_returns() -> None:
    transfer: Transfer[int] = Transfer("x")
    order: list[str] = []

    def slow(ended: Transfer[int]) -> None:
        time.sleep(0.05)
        assert ended.wait() == 1  # a callback may look at the value
        order.append("callback")

    transfer.then(slow)
    mover = threading.Thread(target=transfer.complete, args=(1,))
    mover.start()
    transfer.wait(5)
    order.append("waiter")
    mover.join()
    assert order == ["callback", "waiter"]


def test_a_callback_added_late_runs_at_once_and_once() -> None:
    calls: list[int] = []
    transfer = Transfer.completed(1)
    transfer.then(lambda ended: calls.append(ended.wait()))
    assert calls == [1]


def test_an_error_in_a_callback_is_not_lost() -> None:
    transfer: Transfer[int] = Transfer("x")
    transfer.then(lambda _: 1 / 0)
    transfer.complete(1)
    with pytest.raises(ZeroDivisionError):
        transfer.wait()


def test_all_of_keeps_the_order_and_ends_with_the_last() -> None:
    first: Transfer[int] = Transfer("first")
    second: Transfer[int] = Transfer("second")
    both = all_of([first, second])
    second.complete(2)
    assert not both.done()
    first.complete(1)
    assert both.wait(0) == [1, 2]
    assert all_of([]).wait() == []


def test_all_of_raises_the_first_error_only_when_nothing_moves_any_more() -> None:
    moving: Transfer[int] = Transfer("still moving")
    joined = all_of([failing("first"), moving, failing("second")])
    assert not joined.done()
    moving.complete(1)
    with pytest.raises(StorageError, match="first") as caught:
        joined.wait(0)
    assert any("second" in note for note in caught.value.__notes__)
