"""A pytest plugin: of all tests that were collected, keep every n-th.

    OFFLOAD_TEST_SHARE=2/8 python -m pytest -p offload.bench.gpu_test_share ...

GPU tests wait for compilers most of the time, so several processes go through them side by side,
each with its share; neighbours in a file, which compile alike, are spread over all of them.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "OFFLOAD_TEST_SHARE"


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Runs before `-m` is looked at or after it: a share of the share is the same either way."""
    number, count = (int(word) for word in os.environ[VARIABLE].split("/"))
    kept = items[number::count]
    left = [item for place, item in enumerate(items) if place % count != number]
    if left:
        config.hook.pytest_deselected(items=left)
    items[:] = kept
