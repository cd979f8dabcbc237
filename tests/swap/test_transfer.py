from __future__ import annotations

import threading

import pytest

from offload.swap.threads import transfer as transfer_module
from offload.swap.threads.transfer import Transfer
from offload.tiers.errors import StorageError


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
