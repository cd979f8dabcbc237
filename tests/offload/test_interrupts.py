"""A Ctrl-C that was dropped on its way is raised at the next check."""

from __future__ import annotations

import os
import signal

import pytest

from offload.train.interrupts import noted_interrupts


def test_an_interrupt_that_was_swallowed_is_raised_again() -> None:
    with noted_interrupts() as interrupts:
        interrupts.check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
