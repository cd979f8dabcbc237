"""Quantized weights on several ranks: each rank has them all, what is trained is sharded."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import offload
from offload.errors import UnsupportedError
from tests.offload.engine_cases import HOST, NVME, assert_same_bits, batches, config, losses_of
from tests.offload.storage_cases import adapted, round_to
from tests.ranks.processes import run_ranks
from tests.ranks.programs import BUDGET

STORAGE: dict[str, Any] = {"storage": {"weights": "nf4", "group_size": 32}}
Outcomes = list[tuple[list[float], dict[str, Tensor]]]


def keys_of(folder: str, stage: int, placement: dict[str, Any], **keys: Any) -> dict[str, Any]:
    zero = {"stage": stage, "timeout_s": 10}
    return config(Path(folder), placement, budget=BUDGET, zero=zero, **keys)


def train(folder: str) -> tuple[Outcomes, str]:
    """With quantized weights at every stage and with dequantized ones; what is said of a write."""
    data = batches(8)[dist.get_rank() :: dist.get_world_size()]
    outcomes: Outcomes = []
    said = ""
    plain = adapted()
    round_to(plain, "nf4")
    cases = [(stage, adapted(), STORAGE) for stage in (0, 1, 2, 3)]
    for number, (stage, model, storage) in enumerate([(3, plain, {}), *cases]):
        home = NVME if number % 2 else HOST
        with offload.initialize(model, keys_of(folder, stage, home, **storage)) as engine:
            losses = losses_of(engine, data)
            engine.save_checkpoint(Path(folder) / f"checkpoint-{number}")
            values = {name: value.clone() for name, value in model.state_dict().items()}
            outcomes.append((losses, values))
            if stage == 3 and storage:
                with (
                    pytest.raises(UnsupportedError) as error,
                    engine.gathered(model.embed.weight),
                    torch.no_grad(),
                ):
                    model.embed.weight.zero_()
                said = str(error.value)
                engine.load_checkpoint(Path(folder) / "checkpoint-0")
                assert_same_bits(model.state_dict(), values)
    return outcomes, said


@pytest.mark.slow
def test_ranks_train_adapters_on_codes_as_on_dequantized_values(tmp_path: Path) -> None:
    for outcomes, said in run_ranks(2, tmp_path, train, str(tmp_path)):
        losses, values = outcomes[0]
        for other in outcomes[1:]:
            assert other[0] == losses
            assert_same_bits(other[1], values)
        assert "several ranks, each of which has all of it" in said
