"""A runner with threads, and arrays that are not where one expects them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from offload.kernels.floats import Body, Runner


@pytest.fixture
def threads() -> Iterator[Runner]:
    """Three threads on ragged chunks, handed out last first."""
    with ThreadPoolExecutor(3) as pool:

        def run(body: Body, n: int) -> None:
            cuts = sorted({0, n, *(n * k // 7 for k in range(7)), *(min(n, k) for k in (1, 30))})
            ranges = list(pairwise(cuts))
            for future in [pool.submit(body, *pair) for pair in reversed(ranges)]:
                future.result()

        yield run
