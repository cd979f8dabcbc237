"""`offload.compress` of packed experts: each is in codes by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import offload
from offload.errors import ConfigError, UnsupportedError
from tests.offload.engine_cases import HOST, bits, config
from tests.outside.pretrained_cases import FILE, saved
from tests.outside.test_causal_lm_zoo import transformers
from tests.outside.test_compress import CAUSAL, opened, values

pytestmark = pytest.mark.usefixtures("quiet_transformers")


def mixture(folder: Path, model_type: str = "mixtral", dtype: str = "float32") -> Path:
    return saved(
        folder, model_type, hidden_size=32, intermediate_size=32, moe_intermediate_size=32,
        num_attention_heads=4, num_key_value_heads=4, head_dim=8, dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize("code", ["int4", "int8"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_are_in_codes_each_by_itself(code: str, model_type: str, tmp_path: Path) -> None:
    folder = mixture(tmp_path / "model", model_type)
    offload.compress(folder, tmp_path / "out", storage=code, group_size=32)
    files = load_file(tmp_path / "out" / FILE)
    assert not any("experts" in name and name.endswith(".weight") for name in files)
    found, before = opened(tmp_path / "out"), values(folder)
    experts = {name for name in found if ".experts." in name}
    assert len(experts) == 4
    for name in experts:
        flat = before[name].unflatten(-1, (-1, 32)).float()
        error = (found[name].float() - before[name].float()).unflatten(-1, (-1, 32)).abs()
        most = flat.abs().amax(-1, keepdim=True)
        assert bool((error <= most / (127 if code == "int8" else 7) * 0.52).all()), name


@pytest.mark.parametrize("code", ["int4", "int8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_transformers_loads_the_same_experts(code: str, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    folder = mixture(tmp_path / "model", dtype=dtype)
    offload.compress(folder, tmp_path / "out", storage=code, group_size=32)
    keys = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    loaded, told = CAUSAL.from_pretrained(tmp_path / "out", output_loading_info=True, **keys)
    assert not told["missing_keys"]
    expected = dict(loaded.named_parameters())
    for name, value in opened(tmp_path / "out").items():
        assert bits(value.float()) == bits(expected[name].detach().float()), name


def test_experts_in_any_tier_have_the_values_of_the_folder(tmp_path: Path) -> None:
    folder = mixture(tmp_path / "model")
    offload.compress(folder, tmp_path / "out", storage="int4", group_size=32)
    expected = opened(tmp_path / "out")
    keys = config(tmp_path, HOST, budget={"host": "64MiB"}, precision="fp32")
    model: Any = offload.dispatch(offload.open_pretrained(tmp_path / "out"), keys)
    with offload.dispatched(model) as owner, owner.gathered():
        found = {n: bits(p.detach().clone()) for n, p in model.named_parameters()}
    assert found == {n: bits(t) for n, t in expected.items()}


def test_values_that_a_dispatched_model_computes_with_are_not_changed(tmp_path: Path) -> None:
    folder = mixture(tmp_path / "model")
    storage = {"weights": "int4", "group_size": 32}
    keys = config(tmp_path, HOST, budget={"host": "64MiB"}, precision="fp32", storage=storage)
    model: Any = offload.dispatch(offload.open_pretrained(folder), keys)
    with (
        offload.dispatched(model),
        pytest.raises(UnsupportedError, match="which compressed-tensors would round"),
    ):
        offload.compress(model, tmp_path / "out", storage="int4", group_size=32)


def test_experts_cannot_be_skipped(tmp_path: Path) -> None:
    folder = mixture(tmp_path / "model")
    skip = ["lm_head", "experts"]
    with pytest.raises(ConfigError, match="transformers looks for codes of all experts"):
        offload.compress(folder, tmp_path / "out", storage="int8", group_size=32, skip=skip)
