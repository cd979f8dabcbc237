"""Every test of a library's trainer is quiet."""

from collections.abc import Iterator

import pytest

from tests.outside.conftest import quiet_trainers as quiet_trainers


@pytest.fixture(autouse=True)
def quiet_library() -> Iterator[None]:
    from tests.outside.trainer_cases import quiet

    with quiet():
        yield
