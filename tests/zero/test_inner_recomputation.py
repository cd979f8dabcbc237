"""A checkpoint around a part of a unit computes that part again when the unit is released."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offload
from tests.offload.engine_cases import (
    HOST,
    MARKS,
    NVME,
    ON,
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
            result: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return result

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


def test_transformers_checkpointing_within_one_small_unit(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": False,
    }  # fmt: skip
    data = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(3)).to(ON)

    def losses(*, checkpointing: bool) -> list[float]:
        model = seeded(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        found = []
        with offload.initialize(model, config(tmp_path)) as engine:
            for _ in range(4):
                loss = model(input_ids=data, labels=data).loss
                loss.backward()
                engine.optimizer.step()
                engine.optimizer.zero_grad()
                found.append(loss.item())
        return found

    assert losses(checkpointing=True) == losses(checkpointing=False)
