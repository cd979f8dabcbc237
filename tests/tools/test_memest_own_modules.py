"""Traces of the modules written here against those of transformers': every figure is the same."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload.config import OffloadConfig
from offload.planning.activations.trace import trace_activations
from offload.planning.plan.workload import Workload
from offload.tools.memest.source.decoder_settings import own_model, own_settings, traced_modules
from offload.tools.memest.source.hugging_face import check_configuration
from offload.tools.memest.source.transformers_models import build_on_meta
from offload.zero.groups.discovery import discover

pytest.importorskip("transformers")

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "mixtral", "gpt2", "olmo2", "phi3", "gemma2", "qwen3_moe",
)  # fmt: skip
PASSES = 1  # of each family, without --long; kinds of recomputation take turns


def _drawn(kind: str, draw: random.Random) -> dict[str, Any]:
    """A configuration as people write them, at an odd size."""
    if kind == "gpt2":
        heads = draw.choice([1, 2, 4])
        return {
            "model_type": kind, "n_embd": heads * draw.choice([8, 16, 20, 64]), "n_head": heads,
            "n_layer": draw.choice([1, 2, 5, 9]), "vocab_size": draw.choice([50, 256, 5000]),
            "n_positions": 512, "n_inner": draw.choice([None, 48, 100]),
            "resid_pdrop": draw.choice([0.0, 0.1]), "attn_pdrop": draw.choice([0.0, 0.1]),
            "embd_pdrop": draw.choice([0.0, 0.1]), "tie_word_embeddings": draw.random() < 0.7,
        }  # fmt: skip
    groups, times = draw.choice([1, 2, 3]), draw.choice([1, 1, 2, 4])
    head_dim = draw.choice([8, 16, 20, 64, 320])
    values: dict[str, Any] = {
        "model_type": kind, "hidden_size": groups * times * draw.choice([head_dim, 16]),
        "intermediate_size": draw.choice([24, 96, 200, 1000]), "head_dim": head_dim,
        "num_hidden_layers": draw.choice([1, 2, 5, 9]), "num_attention_heads": groups * times,
        "num_key_value_heads": groups, "vocab_size": draw.choice([50, 256, 5000]),
        "tie_word_embeddings": draw.random() < 0.5, "attention_dropout": draw.choice([0.0, 0.1]),
        "pad_token_id": 2, "sliding_window": draw.choice([None, 4096]),
        "attention_bias": draw.random() < 0.3, "mlp_bias": draw.random() < 0.3,
        "rope_scaling": draw.choice([None, {"rope_type": "linear", "factor": 2.0}]),
        "num_local_experts": 4, "num_experts_per_tok": draw.choice([1, 2]),
    }  # fmt: skip
    if kind == "qwen3_moe":
        values |= {
            "num_experts": values.pop("num_local_experts"), "norm_topk_prob": draw.random() < 0.5,
            "moe_intermediate_size": 40, "decoder_sparse_step": draw.choice([1, 2]),
        }  # fmt: skip
    if kind == "phi3":
        values |= {"resid_pdrop": draw.choice([0.0, 0.1]), "rope_scaling": None}
    if kind == "gemma2":
        values |= {"sliding_window": 4096, "final_logit_softcapping": draw.choice([30.0, None])}
    if kind == "qwen2":
        values["hidden_size"] = groups * times * head_dim
        del values["head_dim"]
    return values


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_trace_equals_that_of_transformers_modules(kind: str, long: bool) -> None:
    draw = random.Random(kind)
    for number in range(24 if long else PASSES):
        values = _drawn(kind, draw)
        configuration = check_configuration(json.loads(json.dumps(values)), "config.json")
        workload = Workload(draw.choice([1, 1, 2, 3]), draw.choice([1, 7, 40, 128, 300]))
        recompute = ("false", "selective", "true")[(number + FAMILIES.index(kind)) % 3]
        precision = draw.choice(["bf16", "fp32"])
        config = OffloadConfig.load(
            {}, [f"precision={precision}", f"placement.activations.checkpoint={recompute}"]
        )
        ours, theirs = own_model(configuration, workload.sequence), build_on_meta(configuration)
        assert ours is not None, values
        there = discover(theirs, ()).shape()
        assert replace(discover(ours, ()).shape(), experts_per_token=there.experts_per_token) == (
            there
        )
        device = draw.choice(["cpu", "cuda"])
        found = trace_activations(ours, config, workload, device=device)
        expected = trace_activations(theirs, config, workload, device=device)
        assert found == expected, (values, workload, recompute, precision, device)


PLAIN: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "olmo2", "phi3", "gemma2"])
def test_traces_at_the_size_of_real_models_are_the_same(kind: str) -> None:
    """Where the largest storages are not the heap's, what the MLP still refers to is its peak."""
    values = {
        "model_type": kind, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 5,
        "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "head_dim": 64,
        "pad_token_id": 0,
    }  # fmt: skip
    configuration = check_configuration(values, "config.json")
    config, workload = OffloadConfig.load({"precision": "bf16"}), Workload(1, 2048)
    ours, theirs = own_model(configuration, workload.sequence), build_on_meta(configuration)
    assert ours is not None
    found = trace_activations(ours, config, workload, device="cpu")
    assert found == trace_activations(theirs, config, workload, device="cpu")


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("mistral", {"sliding_window": 128}),  # a mask is made
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64}),
        ("qwen3", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"output_hidden_states": True}),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}),
        ("mixtral", {"output_router_logits": True}),
        ("gpt2", {"pad_token_id": 0}),
        ("gpt2", {"activation_function": "relu"}),
        ("gemma2", {"sliding_window": 128}),
        ("gemma2", {"hidden_activation": "silu"}),
        ("gemma2", {"sliding_window": None}),
        ("phi3", {"sliding_window": 100}),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("olmo", {}),
    ],
)  # fmt: skip
def test_what_would_run_another_way_is_left_to_transformers(
    kind: str, more: dict[str, Any]
) -> None:
    values = {"model_type": kind, **(PLAIN if kind != "gpt2" else {}), **more}
    configuration = check_configuration(values, "config.json")
    assert own_settings(configuration, 128) is None
    assert "installed transformers" in traced_modules(configuration, 128)


def test_a_first_answer_needs_no_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **PLAIN}))
    program = (
        "import sys\nfrom offload.tools.memest.cli import main\n"
        "try:\n    main([sys.argv[1], '--gpu', 'RTX 4090', '--ram', '64GiB'])\n"
        "except SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'sympy'} & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "config.json")],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.stdout.endswith("['torch']\n"), result.stdout + result.stderr
    assert "memest's own modules" in result.stdout
