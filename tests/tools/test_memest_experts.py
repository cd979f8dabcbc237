"""Experts that memest reads from a model's configuration."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from offload.config import OffloadConfig
from offload.planning.activations.trace import trace_activations
from offload.planning.plan.estimate import Workload
from offload.tools.memest.estimate.result import active_numel
from offload.tools.memest.source.read_model import read_model
from offload.zero.groups.parameter_grouping import experts_per_token_of

QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 128,
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "vocab_size": 151936,
}  # fmt: skip


def written(folder: Path, **values: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return str(path)


def test_qwen3_30b_a3b_has_three_billion_active_parameters(tmp_path: Path) -> None:
    shape = read_model(written(tmp_path, **QWEN3_30B)).shape
    assert shape.numel == 30_532_122_624
    assert (len(shape.tables), len(shape.groups)) == (48, 48 * 128 + 51)
    expert = 3 * 2048 * 768
    assert active_numel(shape) == shape.numel - 48 * 120 * expert == 3_353_032_704
    dense, *rows = (group for group in shape.groups if group.name.startswith("model.layers.7."))
    assert dense.packed
    assert {group.numel for group in rows} == {expert}
    assert shape.groups[2].params[0].names == ("model.layers.0.mlp.experts.gate_up_proj[0]",)


@pytest.mark.parametrize(
    ("values", "number"),
    [
        ({"num_experts_per_tok": 8}, 8),
        ({"num_experts_per_tok": None, "top_k_experts": 4}, 4),
        ({"ffn_config": SimpleNamespace(moe_top_k=4)}, 4),
        ({"num_experts": 8}, None),
        ({"moe_topk": [6, 6, 6]}, None),
    ],
)
def test_how_many_are_chosen_is_read_by_any_of_its_names(
    values: dict[str, Any], number: int | None
) -> None:
    text = SimpleNamespace(**values)
    model = nn.Module()
    model.config = SimpleNamespace(get_text_config=lambda: text)
    assert experts_per_token_of(model) == number


def test_a_function_of_ones_own_with_listed_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "listed_experts.py").write_text(
        "import torch\n"
        "class Block(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.top_k = 2\n"
        "        self.gate = torch.nn.Linear(64, 8)\n"
        "        self.experts = torch.nn.ModuleList(torch.nn.Linear(64, 256) for _ in range(8))\n"
        "def make():\n"
        "    return torch.nn.ModuleDict({'blocks': torch.nn.ModuleList([Block(), Block()])})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    shape = read_model("listed_experts:make").shape
    assert (len(shape.tables), shape.experts_per_token) == (2, 2)
    assert not any(group.packed for group in shape.groups)
    idle = 2 * 6 * (64 * 256 + 256)
    assert active_numel(shape) == shape.numel - idle


# ---------------------------------------------------------------- over ranks
@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_of_many_blocks_with_experts_four_are_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recompute: bool
) -> None:
    source = read_model(written(tmp_path, **{**QWEN3_30B, "num_hidden_layers": 9}))
    assert source.build is not None
    model = source.build()
    placement = {"activations": {"checkpoint": recompute}}
    config = OffloadConfig.load({"precision": "bf16", "placement": placement})
    every = trace_activations(model, config, Workload(2, 64), device="cuda", skip=False)
    called: list[int] = []
    blocks = {id(layer.mlp): number for number, layer in enumerate(model.model.layers)}
    kind = type(model.model.layers[0].mlp)
    own = kind.forward

    def forward(self: Any, *args: Any) -> Any:
        called.append(blocks[id(self)])
        return own(self, *args)

    monkeypatch.setattr(kind, "forward", forward)
    few = trace_activations(model, config, Workload(2, 64), device="cuda")
    assert set(called) == {0, 1, 2, 8}
    assert few == every
