"""What memest writes for a transformers model trains in the README's loop, caches and all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.tools.memest.cli import main as memest
from tests.tools.model_files import write_config

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "LlamaDecoderLayer": {"model_type": "llama", **SIZES},
    "MixtralDecoderLayer": {"model_type": "mixtral", **SIZES, "num_local_experts": 4},
    "GPT2Block": {
        "model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4,
        "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
}  # fmt: skip


def build(values: dict[str, Any]) -> Any:
    values = dict(values)
    config = transformers.CONFIG_MAPPING[values.pop("model_type")](**values)
    assert config.use_cache is True
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (3, 4, 8), generator=generator)
    return [{"input_ids": each, "labels": each} for each in tokens]


def losses(model: Any, optimizer: Any, **more: Any) -> list[float]:
    """The loop of the README."""
    values = []
    for batch in batches():
        loss = model(**batch, **more).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values


def plain_losses(values: dict[str, Any]) -> list[float]:
    model = build(values)
    return losses(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "kept"),
    [
        ("LlamaDecoderLayer", "checkpoint=true"),
        ("MixtralDecoderLayer", "checkpoint=selective"),
        ("GPT2Block", "tier=nvme"),
    ],
)
def test_what_memest_writes_trains_as_it_is(
    block: str, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, file = write_config(tmp_path, MODELS[block]), tmp_path / "offload.yaml"
    options = [
        "precision=fp32", f"groups.blocks=[{block}]", f"placement.activations.{kept}",
        "budget={host: 32MiB, nvme: 256MiB}", "placement.parameters=nvme", "optimizer.lr=1e-3",
        "optimizer.weight_decay=0.0",
    ]  # fmt: skip
    keys = [word for option in options for word in ("-o", option)]
    work = ["--batch", "4", "--sequence", "8", "--gpu", "none", "--no-measure", "--format", "json"]
    with pytest.raises(SystemExit) as caught:
        memest([str(config), *work, *keys, "--write", str(file)])
    assert not caught.value.code
    model = build(MODELS[block])
    with offload.initialize(model, file) as engine:
        assert losses(model, engine.optimizer) == pytest.approx(
            plain_losses(MODELS[block]), rel=1e-6
        )


def test_a_training_pass_has_no_cache() -> None:
    model, batch = build(MODELS["LlamaDecoderLayer"]), batches()[0]
    with offload.initialize(model, {}):
        assert model(**batch).past_key_values is None
        assert model.model(batch["input_ids"]).past_key_values is None
        with torch.no_grad():
            assert model(**batch).past_key_values is not None
        model.eval()
        assert model(**batch).past_key_values is not None
