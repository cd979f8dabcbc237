"""These run where the command line names them: `make null-gpu`."""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if any("null_gpu" in argument for argument in config.args) else True
