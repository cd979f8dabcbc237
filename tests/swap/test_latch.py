"""A latch is opened once, for all that wait, whatever interrupts a wait."""

from __future__ import annotations

import threading
import time

from offload.swap.threads.latch import Latch
from tests.offload.interrupt_points import after_us, at_point, counted_points

SOON_S = 10.0


def test_it_lets_go_all_that_wait_and_stays_open() -> None:
    latch, passed = Latch(), []
    threads = [threading.Thread(target=lambda: passed.append(latch.wait(SOON_S))) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert not latch.is_open
    assert not latch.wait(0.001)
    latch.open()
    latch.open()
    for thread in threads:
        thread.join(SOON_S)
    assert passed == [True] * 5
    assert latch.is_open
    assert latch.wait(0)


def test_a_ctrl_c_at_any_point_of_a_wait_leaves_it_usable() -> None:
    with counted_points() as count:
        Latch().wait(0.001)
    for number in range(1, count() + 1):
        latch = Latch()
        try:
            with at_point(number):
                latch.wait(0.001)
        except KeyboardInterrupt:
            pass
        other = threading.Thread(target=latch.open, daemon=True)
        other.start()
        latch.wait_for_ever()
        other.join(SOON_S)
        assert not other.is_alive()


def test_a_ctrl_c_ends_a_wait_for_ever() -> None:
    began = time.monotonic()
    try:
        with after_us(1000):
            Latch().wait_for_ever()
        raise AssertionError("it was never opened")
    except KeyboardInterrupt:
        assert time.monotonic() - began < SOON_S
