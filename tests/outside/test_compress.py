"""`offload.compress`: folders with quantized weights, which transformers (and the libraries of the
formats, where they are installed) load with the values that they say."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

import offload
from offload.checkpoint.foreign.exporting import export
from offload.cli.app import app
from offload.errors import ConfigError, PathError, UnsupportedError
from offload.kernels.cpu.quantization import dequantize_weights, quantize_weights
from offload.kernels.floats import Float
from offload.kernels.weight_formats import QuantType, WeightFormat
from tests.offload.engine_cases import HOST, bits, config
from tests.outside.pretrained_cases import FILE, saved
from tests.outside.test_quantized_folders import llama
from tests.outside.zoo import transformers

pytestmark = pytest.mark.usefixtures("quiet_transformers")

CAUSAL = transformers.AutoModelForCausalLM
KINDS = {torch.float32: Float.FP32, torch.bfloat16: Float.BF16, torch.float16: Float.FP16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("model") / "llama")


def values(folder: Path) -> dict[str, Tensor]:
    model = CAUSAL.from_pretrained(folder)
    return {name: param.detach() for name, param in model.named_parameters()}


def opened(folder: Path) -> dict[str, Tensor]:
    model: Any = offload.open_pretrained(folder)
    return {name: param.value() for name, param in model.named_parameters()}


def stored(weight: Tensor, code: str, group_size: int) -> Tensor:
    """Through the codes that `storage:` keeps."""
    kind, weights = KINDS[weight.dtype], WeightFormat(QuantType[code.upper()], group_size)
    flat = weight.contiguous().view(-1).view(torch.uint8).numpy().view(kind.storage)
    words = np.empty(flat.size // group_size, dtype=np.uint32)
    codes = np.empty(weights.codes_nbytes(flat.size), dtype=np.uint8)
    quantize_weights(flat, words, codes, weights, kind)
    back = np.empty_like(flat)
    dequantize_weights(words, codes, back, weights, kind)
    return torch.from_numpy(back.view(np.uint8)).view(weight.dtype).view(weight.shape)


def is_linear(name: str) -> bool:
    return "_proj" in name


# --------------------------------------------------------------------------------- quantizing
@pytest.mark.sample("32-torch.bfloat16-int4", "32-torch.float32-nf4", "64-torch.bfloat16-int8")
@pytest.mark.parametrize("code", ["int4", "int8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("group_size", [32, 64])
def test_codes_are_those_of_storage(
    code: str, dtype: torch.dtype, group_size: int, tmp_path: Path
) -> None:
    if (code, dtype) == ("int8", torch.float16):
        pytest.skip("as bf16")
    folder = llama(tmp_path / "model")
    model = CAUSAL.from_pretrained(folder).to(dtype)
    model.save_pretrained(tmp_path / "cast")
    before = dict(model.named_parameters())
    files = offload.compress(
        tmp_path / "cast", tmp_path / "out", storage=code, group_size=group_size
    )
    assert {file.name for file in files} >= {FILE, "config.json"}
    assert all(file.is_file() for file in files)
    for name, value in opened(tmp_path / "out").items():
        expected = before[name].detach()
        if not is_linear(name):
            assert bits(value) == bits(expected), name
        elif code == "int8" and dtype != torch.float32:  # scales in the weight's format
            error = (value.double() - expected.double()).abs().view(-1, group_size).amax(1)
            largest = expected.double().abs().view(-1, group_size).amax(1)
            assert bool((error <= largest / 127 * 0.52 + largest * 2**-8).all())
        else:
            assert bits(value) == bits(stored(expected, code, group_size)), name


@pytest.mark.sample(3)
@pytest.mark.parametrize("code", ["int4", "int8", "nf4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_transformers_loads_the_same_values(code: str, dtype: str, tmp_path: Path) -> None:
    library = "bitsandbytes" if code == "nf4" else "compressed_tensors"
    pytest.importorskip(library)
    model = CAUSAL.from_pretrained(llama(tmp_path / "model")).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "cast")
    skip = ["lm_head", "layers.0.mlp.up_proj", "o_proj"]
    offload.compress(tmp_path / "cast", tmp_path / "out", storage=code, group_size=32, skip=skip)
    keys: dict[str, Any] = {}
    if code != "nf4":
        keys["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    loaded = CAUSAL.from_pretrained(tmp_path / "out", **keys)
    if code == "nf4":
        loaded = loaded.dequantize(torch.float32)
    expected = dict(loaded.named_parameters())
    tensors = opened(tmp_path / "out")
    assert sum(is_linear(name) for name in tensors) == 14
    for name, value in tensors.items():
        assert bits(value.float()) == bits(expected[name].detach().float()), name


def test_packed_experts_of_a_dispatched_model_are_written(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "mixtral", hidden_size=32, intermediate_size=32)
    keys = config(tmp_path, HOST, budget={"host": "64MiB"})
    model: Any = offload.dispatch(offload.open_pretrained(folder), keys)
    with offload.dispatched(model):
        offload.compress(model, tmp_path / "out", storage="int4", group_size=32)
    offload.compress(folder, tmp_path / "expected", storage="int4", group_size=32)
    actual, expected = (load_file(tmp_path / name / FILE) for name in ("out", "expected"))
    assert {n: bits(t) for n, t in actual.items()} == {n: bits(t) for n, t in expected.items()}


def test_an_exported_checkpoint_is_compressed_as_the_folder_it_came_from(
    folder: Path, tmp_path: Path
) -> None:
    keys = config(tmp_path, HOST, budget={"host": "64MiB"}, precision="bf16")
    with offload.from_pretrained(folder, keys) as engine:
        engine.save_checkpoint(tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "exported")
    for source, out in (tmp_path / "exported", "out"), (folder, "expected"):
        offload.compress(source, tmp_path / out, storage="int4", group_size=32)
    actual, expected = (load_file(tmp_path / name / FILE) for name in ("out", "expected"))
    assert {n: bits(t) for n, t in actual.items()} == {n: bits(t) for n, t in expected.items()}
    said = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert said["ignore"] == ["lm_head"]


# ------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"storage": "int3"}, "expected one of int8, int4, nf4, got 'int3'"),
        ({"storage": "int4", "group_size": 48}, "group_size: expected one of"),
        ({"storage": "int4", "group_size": 256}, "no whole groups of 256"),
        ({"storage": "int4", "skip": ["*"]}, "is left to be changed"),
        ({"storage": "int4", "skip": ["lm_haed"]}, "'lm_haed' names no module"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_done_is_refused_before_anything_is_written(
    keys: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        offload.compress(folder, tmp_path / "out", **keys)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(PathError, match="exists; remove it"):
        offload.compress(folder, tmp_path / "out", storage="int4")
    with pytest.raises(PathError, match="is no folder; make it"):
        offload.compress(folder, tmp_path / "none/out", storage="int4")
    with pytest.raises(UnsupportedError, match="Linear is no model of transformers"):
        offload.compress(torch.nn.Linear(4, 4), tmp_path / "other", storage="int4")


def test_the_command(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    command = ["compress", str(folder), str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*command, "--storage", "nf4"])
    assert result.exit_code == 0, result.output
    assert "wrote" in result.output
    assert (tmp_path / "out/tokenizer_config.json").is_file()
    tensors = opened(tmp_path / "out")
    assert sum(is_linear(name) for name in tensors) == 14
    (folder / "tokenizer_config.json").unlink()


# ------------------------------------------------------------------------------ packed experts
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
    after, before = opened(tmp_path / "out"), values(folder)
    experts = {name for name in after if ".experts." in name}
    assert len(experts) == 4
    for name in experts:
        flat = before[name].unflatten(-1, (-1, 32)).float()
        error = (after[name].float() - before[name].float()).unflatten(-1, (-1, 32)).abs()
        largest = flat.abs().amax(-1, keepdim=True)
        assert bool((error <= largest / (127 if code == "int8" else 7) * 0.52).all()), name
