"""A device's graph that is captured around an offloaded model is refused where it would record
fetching, and everything goes on after that."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload.errors import UnsupportedError
from offload.tiers import accelerator
from offload.tiers.accelerator import Accelerator
from tests.offload.engine_cases import (
    HOST,
    NVME,
    TinyLM,
    assert_same_bits,
    batches,
    config,
    losses_of,
    parameters_of,
    seeded,
)

CUDA = torch.device("cuda", 0)
CAPTURED: dict[str, Callable[[offload.Engine, Tensor], object]] = {
    "the model": lambda engine, loss: engine.module.loss(batches(1)[0]),
    "a block": lambda engine, loss: engine.module.blocks[0](torch.ones(1, 2, 32)),
    "backward": lambda engine, loss: loss.backward(),
    "step": lambda engine, loss: engine.optimizer.step(),
    "zero_grad": lambda engine, loss: engine.optimizer.zero_grad(),
    "a parameter's values": lambda engine, loss: engine.module.norm.weight.sum(),
}


class Recording(Accelerator):
    """A kind whose stream may be recording a graph."""

    recording = False

    def is_capturing(self) -> bool:
        return self.recording


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> Recording:
    stand_in = Recording("cuda", "CUDA")
    monkeypatch.setitem(accelerator.KINDS, "cuda", stand_in)
    return stand_in


@pytest.fixture
def engine(tmp_path: Path, kind: Recording) -> Iterator[offload.Engine]:
    """One whose store takes its device for one of that kind."""
    with offload.initialize(seeded(TinyLM), config(tmp_path, NVME)) as made:
        made.store.device = CUDA
        yield made


@pytest.mark.parametrize("what", CAPTURED)
def test_what_would_be_recorded_is_refused_and_names_the_cure(
    engine: Any, kind: Recording, what: str
) -> None:
    loss = engine.module.loss(batches(1)[0])
    kind.recording = True
    with pytest.raises(UnsupportedError, match=r"a CUDA graph is being captured .* leave this"):
        CAPTURED[what](engine, loss)


def test_training_goes_on_after_a_refused_capture(
    engine: Any, kind: Recording, tmp_path: Path
) -> None:
    losses = losses_of(engine, batches(2))
    kind.recording = True
    with pytest.raises(UnsupportedError):
        engine.module.loss(batches(1)[0])
    kind.recording = False
    losses += losses_of(engine, batches(2))
    with offload.initialize(seeded(TinyLM), config(tmp_path, HOST)) as other:
        assert losses == losses_of(other, batches(2)) + losses_of(other, batches(2))
        assert_same_bits(parameters_of(engine), parameters_of(other))
