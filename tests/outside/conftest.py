"""What tests of other libraries share."""

import contextlib
import io
import warnings
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def quiet_transformers() -> Iterator[None]:
    """No bars of progress or warnings of transformers; what is logged is left alone."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def quiet_trainers() -> Iterator[None]:
    """No warnings and prints inside, and accelerate begins and ends without state."""
    from tests.outside.trainer_cases import forget, quiet

    forget()
    with quiet():
        yield
    forget()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One order of every sum."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
