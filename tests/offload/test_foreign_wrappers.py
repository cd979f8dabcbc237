"""Wrappers that move parameters themselves are refused before and after `offload.initialize`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import offload
from offload.errors import UnsupportedError
from offload.tiers import accelerator
from tests.offload.engine_cases import HOST, MARKS, NVME, TinyLM, batches, config, losses_of, seeded

pytestmark = MARKS


@pytest.fixture
def _one_rank(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class FullyShardedDataParallel(nn.Module):
    """As torch's puts itself around a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
@pytest.mark.parametrize("wrapper", [DistributedDataParallel, FullyShardedDataParallel])
def test_what_reduces_gradients_itself_is_refused(
    wrapper: Any, placement: dict[str, Any], tmp_path: Path
) -> None:
    model = seeded(TinyLM)
    keys = config(tmp_path, placement)
    with offload.initialize(model, keys) as engine:
        for part in (model, model.blocks[0]):
            with pytest.raises(UnsupportedError, match=f"{wrapper.__name__} around a model"):
                wrapper(part)
        wrapper(seeded(TinyLM))  # a model without an engine
        losses_of(engine, batches(2))
    for wrapped in (wrapper(seeded(TinyLM)), nn.Sequential(wrapper(seeded(TinyLM)))):
        with pytest.raises(UnsupportedError, match="use the model as it is"):
            offload.initialize(wrapped, keys)


def test_data_parallel_is_refused_where_it_copies_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(TinyLM)
    with offload.initialize(model, config(tmp_path)):
        assert DataParallel(model).module is model  # it calls the model and does no more
        monkeypatch.setattr(accelerator, "device_count", lambda: 2)
        with pytest.raises(UnsupportedError, match="DataParallel around a model"):
            DataParallel(model)
