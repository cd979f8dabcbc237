"""The threads that all systems of a bench in this process share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload.swap.worker import ParallelRunner


@contextmanager
def sharing(threads: int) -> Iterator[ParallelRunner]:
    """A runner of `threads` threads for ours, and as many for PyTorch while inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    runner = ParallelRunner(threads, min_share=1)
    try:
        yield runner
    finally:
        torch.set_num_threads(before)
        runner.close()
