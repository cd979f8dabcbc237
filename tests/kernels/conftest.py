"""A runner with threads, and the formats that tests of quantized weights have."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from offload.kernels.floats import Body, Runner
from tests.kernels.quantization_cases import ALL, SAMPLE


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All formats and kinds of values, or a sample of them."""
    own = {mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")}
    if {"weights", "kind"} <= set(metafunc.fixturenames) and ("weights", "kind") not in own:
        cases = ALL if metafunc.config.getoption("--long") else SAMPLE
        names = [f"{each.quant_type.name}-{each.group_size}-{kind.name}" for each, kind in cases]
        metafunc.parametrize(("weights", "kind"), cases, ids=names)


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
