"""examples/sequence_parallel.py: ranks with a part of each sequence train as one process does."""

import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload.errors import ConfigError
from tests.offload.engine_cases import HOST, NVME, config
from tests.outside.test_chunked_loss import TILED, TOKENS, made
from tests.outside.trainer_cases import values_of
from tests.ranks.processes import run_ranks

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "sequence_parallel.py")
ROWS = TOKENS[:, :16]
MASK = torch.ones_like(ROWS).index_put((torch.tensor(1), torch.tensor([0, 1, 2])), torch.tensor(0))
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
CASES: list[tuple[int, dict[str, Any], str, dict[str, Any]]] = [
    *((stage, homes, "llama", {}) for stage in range(4) for homes in (HOST, NVME)),
    (3, TILED["placement"], "llama", {"num_key_value_heads": 1}), (2, HOST, "gemma 3", WINDOW),
]  # fmt: skip


def trained(model: Any, optimizer: Any, loss_of: Any, value: Any) -> tuple[list[float], Any]:
    """Ranks have other numbers of labels, one of them none in the third batch."""
    losses = []
    for step, start in enumerate((0, 3, 9, 6)):
        tokens = ROWS.roll(step, 1)
        labels = tokens.masked_fill(MASK.roll(1, 1) * MASK == 0, -100)
        labels[0 if step != 2 else slice(None), :start] = -100
        loss = loss_of(input_ids=tokens, labels=labels, attention_mask=MASK if step % 2 else None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value(loss))
    return losses, values_of(model)


def on_ranks(folder: Path) -> list[Any]:
    results, kind = [], runpy.run_path(EXAMPLE)["SequenceParallel"]
    for stage, homes, name, sizes in CASES:
        keys = {"optimizer": {"type": "sgd", "lr": 0.3}, "loss": {"chunked": stage == 3}}
        block = {"blocks": [f"{name.title().replace(' ', '')}DecoderLayer"]}
        keys = config(folder, homes, **keys, zero={"stage": stage}, groups=block)
        with offload.initialize(made(name, **sizes), keys) as engine:
            parallel = kind(engine.module)
            results.append(trained(engine.module, engine.optimizer, parallel.loss, parallel.mean))
    for rows, heads, what in (
        (ROWS[:, 1:], 4, "pad it to 16"), (ROWS + torch.distributed.get_rank(), 4, "same rows"),
        (ROWS, 1, "1 attention heads of LlamaForCausalLM do not divide by 2 ranks"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=what):
            kind(made(num_attention_heads=heads, num_key_value_heads=1)).loss(rows, labels=rows)
    return results


def test_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path / "ranks", on_ranks, tmp_path)
    torch.testing.assert_close([first, first[0:8:2]], [second, first[1:8:2]], rtol=0, atol=0)
    for result, (_, _, name, sizes) in zip(first, CASES, strict=True):
        model = made(name, **sizes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        loss_of = partial(lambda own, **batch: own(**batch).loss, model)
        expected = trained(model, optimizer, loss_of, Tensor.item)
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)
