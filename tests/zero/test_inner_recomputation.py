"""A checkpoint around a part of a unit computes that part again when the unit is released."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offload
from tests.offload.engine_cases import (
    HOST,
    MARKS,
    NVME,
    TinyLM,
    assert_same_bits,
    batches,
    config,
    losses_of,
    seeded,
    states_of,
)

pytestmark = MARKS


class Checkpointing(TinyLM):
    """Its blocks' MLPs are checkpointed by the model, inside of the blocks."""

    class Part(nn.Module):
        def __init__(self, mlp: nn.Module) -> None:
            super().__init__()
            self.inner = mlp

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.mlp = self.Part(block.mlp)


def run(folder: Path, build: Callable[[], nn.Module], placement: Any, **keys: Any) -> Any:
    with offload.initialize(seeded(build), config(folder, placement, **keys)) as engine:
        return losses_of(engine, batches(4)), states_of(engine)


@pytest.mark.parametrize("keys", [{}, {"groups": {"blocks": ["Block"]}}], ids=["whole", "blocks"])
def test_a_checkpoint_inside_a_unit_trains_to_the_same_bits(tmp_path: Path, keys: Any) -> None:
    tight: dict[str, Any] = {
        "budget": {"host": "500KiB", "nvme": "64MiB"},
        "optimizer": {"chunk": 2048},
    }
    losses, states = run(tmp_path, Checkpointing, NVME, **keys, **tight)
    expected_losses, expected = run(tmp_path, Checkpointing, HOST, **keys)
    assert losses == expected_losses
    assert_same_bits(states, expected)
    plain, _ = run(tmp_path, TinyLM, HOST, **keys)
    assert losses == plain
