"""`offload.compress` of packed experts: each is in codes by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

import offload
from tests.offload.engine_cases import bits
from tests.outside.pretrained_cases import FILE, saved
from tests.outside.test_compress import CAUSAL, opened, values
from tests.outside.zoo import transformers

pytestmark = pytest.mark.usefixtures("quiet_transformers")


def mixture(folder: Path, model_type: str = "mixtral", dtype: str = "float32") -> Path:
    return saved(
        folder, model_type, hidden_size=32, intermediate_size=32, moe_intermediate_size=32,
        num_attention_heads=4, num_key_value_heads=4, head_dim=8, dtype=dtype,
    )  # fmt: skip


@pytest.mark.sample(3)
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


@pytest.mark.sample(3)
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
