"""Engines that are closed when their test ends."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import offload
from tests.offload.engine_cases import HOST, NVME, config, saved_step
from tests.offload.plain_training import DECAY, LR, MakeEngine


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeEngine]:
    """Makes engines with swap files in a folder of the test; closes them in the end."""
    engines: list[offload.Engine] = []

    def make_engine(model: nn.Module, placement: Any = NVME, **keys: Any) -> offload.Engine:
        keys = {"optimizer": {"lr": LR, "weight_decay": DECAY, "chunk": 2048}, **keys}
        parameters, weights = keys.pop("parameters", None), keys.pop("weights", None)
        settings = config(tmp_path, placement, **keys)
        engine = offload.initialize(model, settings, parameters=parameters, weights=weights)
        engines.append(engine)
        return engine

    yield make_engine
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    return saved_step(folder, config(folder, HOST, precision="bf16"))


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "saved"))
