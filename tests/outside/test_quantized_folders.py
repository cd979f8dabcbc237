"""`offload.open_pretrained` of quantized folders: the model is transformers' own, with ordinary
weights, which have the values that the formats' libraries give (where these are installed)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import offload
from offload.weights.lazy_tensors import lazy_tensors
from tests.offload.engine_cases import HOST, bits, config
from tests.offload.quantized_cases import FORMATS, Format, four_bit_floats, fp8, plain_codes
from tests.outside.pretrained_cases import FILE, assert_all_uses_equal, saved
from tests.outside.zoo import transformers

pytestmark = pytest.mark.usefixtures("quiet_transformers")

SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def quantize(folder: Path, kind: Format, keep: tuple[str, ...] = ("lm_head", "gate.weight")) -> Any:
    """Other weights for the layers' matrices, in this format, in place: their values by name."""
    tensors = load_file(folder / FILE)
    random = torch.Generator().manual_seed(5)
    values: dict[str, Tensor] = {}
    for name in list(tensors):
        matrix = (tensors[name].ndim == 2 and ".layers." in f".{name}") or ".c_" in name
        if not matrix or not name.endswith("weight") or any(each in name for each in keep):
            continue
        shape = tensors.pop(name).shape
        if ".c_" in name:  # GPT-2's layers have the columns first
            shape = shape[::-1]
        made = kind.make(*shape, random)
        values[name] = made.value.t() if ".c_" in name else made.value
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{end}": part.clone() for end, part in made.parts.items()}
    save_file(tensors, folder / FILE, {"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    text["quantization_config"] = kind.settings
    (folder / "config.json").write_text(json.dumps(text))
    return values


def llama(folder: Path) -> Path:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, dtype="bfloat16"))
    model.bfloat16().save_pretrained(folder)
    return folder


# --------------------------------------------------------------------------------- the model
@pytest.mark.parametrize("name", ["ct int4", "gptq desc_act", "awq", "nf4 nested", "fp8"])
def test_the_model_is_one_with_ordinary_weights(name: str, tmp_path: Path) -> None:
    folder = llama(tmp_path / "model")
    before = load_file(folder / FILE)
    values = quantize(folder, FORMATS[name])
    model: Any = offload.open_pretrained(folder, dtype=torch.float32)
    assert type(model) is transformers.LlamaForCausalLM
    assert not hasattr(model.config, "quantization_config")
    keys = config(tmp_path, HOST, budget={"host": "64MiB"})
    with offload.initialize(model, keys) as engine, engine.gathered():
        actual = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert len(values) == 14
    assert {n: bits(t) for n, t in actual.items()} == {
        n: bits(values.get(n, before.get(n)).float()) for n in actual
    }


@pytest.mark.parametrize("name", ["ct int4", "gptq", "awq", "ct fp8, blocks"])
def test_experts_are_packed_as_transformers_packs_them(name: str, tmp_path: Path) -> None:
    """Per expert in the files, one tensor in the model; a row of it reads one expert."""
    folder = saved(tmp_path / "model", "mixtral", hidden_size=32, intermediate_size=32)
    values = quantize(folder, FORMATS[name])
    model: Any = offload.open_pretrained(folder, dtype=torch.float32)
    experts = model.model.layers[0].mlp.experts
    prefix = "model.layers.0.block_sparse_moe.experts"
    for number in range(len(experts.gate_up_proj)):
        up = [values[f"{prefix}.{number}.{each}.weight"] for each in ("w1", "w3")]
        assert bits(experts.gate_up_proj.row(number).value()) == bits(torch.cat(up).float())
        down = values[f"{prefix}.{number}.w2.weight"].float()
        assert bits(experts.down_proj.row(number).value()) == bits(down)


# ------------------------------------------------------------------------- their own libraries
@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "weights",
    [
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True},
        {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
        {"num_bits": 8, "strategy": "channel", "symmetric": True},
        {"num_bits": 8, "strategy": "channel", "symmetric": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_compressed_tensors_gives_the_same_values(
    weights: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import PackedQuantizationCompressor as Packed
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(24, 64, generator=random).to(dtype)
    groups = 64 // weights.get("group_size", 64)
    shape = (24, groups)
    half = 1 << (weights["num_bits"] - 1)
    zero = torch.randint(-half, half, shape, generator=random).to(torch.int8)
    state = {
        "weight": weight, "weight_scale": (torch.rand(shape, generator=random) / 4).to(dtype),
        **({} if weights["symmetric"] else {"weight_zero_point": zero}),
    }  # fmt: skip
    stored = Packed.compress(state, scheme)
    expected = Packed.decompress(stored, scheme)["weight"]
    settings = {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip
    save_file({f"a.{n}": t.contiguous() for n, t in stored.items()}, tmp_path / FILE)
    assert bits(read(tmp_path, settings)["a.weight"]) == bits(expected)


@pytest.mark.parametrize(
    "weights",
    [
        {"type": "float", "strategy": "tensor"}, {"type": "float", "strategy": "channel"},
        {"type": "float", "strategy": "group", "group_size": 16},
        {"type": "float", "strategy": "block", "block_structure": [16, 48]},
        {"type": "int", "strategy": "channel"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_compressed_tensors_gives_the_same_values_of_bytes(
    weights: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import NaiveQuantizationCompressor as Naive
    from compressed_tensors.quantization import QuantizationScheme

    size = weights.get("block_structure") or [1, weights.get("group_size", 64)]
    kind = plain_codes(weights["type"], weights["strategy"], size=tuple(size), dtype=dtype)
    weights = {"num_bits": 8, "symmetric": True, **weights}
    made = kind.make(24, 64, torch.Generator().manual_seed(1))
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    expected = Naive.decompress(dict(made.parts), scheme)["weight"]
    save_file({f"a.{n}": t.contiguous() for n, t in made.parts.items()}, tmp_path / FILE)
    assert bits(read(tmp_path, kind.settings)["a.weight"]) == bits(expected)


@pytest.mark.parametrize("size", [16, 32])
def test_compressed_tensors_gives_the_same_values_in_fp4(size: int, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import MXFP4PackedCompressor, NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme

    kind = four_bit_floats(size)
    made = kind.make(24, 64, torch.Generator().manual_seed(1))
    library = NVFP4PackedCompressor if size == 16 else MXFP4PackedCompressor
    scheme = QuantizationScheme(**kind.settings["config_groups"]["g"])
    expected = library.decompress(dict(made.parts), scheme)["weight"]
    save_file({f"a.{n}": t for n, t in made.parts.items()}, tmp_path / FILE)
    assert bits(read(tmp_path, kind.settings)["a.weight"]) == bits(expected)


def test_experts_in_mxfp4_have_the_values_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = torch.Generator().manual_seed(2)
    blocks = torch.randint(256, (3, 64, 2, 16), generator=random).to(torch.uint8)
    scales = torch.randint(255, (3, 64, 2), generator=random).to(torch.uint8)
    save_file({"down_proj_blocks": blocks, "down_proj_scales": scales}, tmp_path / FILE)
    (lazy,) = lazy_tensors([tmp_path / FILE], {"quant_method": "mxfp4"}).values()
    expected = convert_moe_packed_tensors(blocks, scales)
    assert bits(lazy.value()) == bits(expected)
    assert bits(lazy.row(2).value()) == bits(expected[2])
    save_file({"down_proj_blocks": blocks, "down_proj_scales": scales[1:]}, tmp_path / FILE)
    with pytest.raises(offload.errors.CheckpointError, match="has shape"):
        lazy_tensors([tmp_path / FILE], {"quant_method": "mxfp4"})


@pytest.mark.parametrize("block", [(16, 32), None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fp8_is_the_model_that_transformers_dequantizes_in_every_use(
    block: tuple[int, int] | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Opened, dispatched on two tiers, and written again; in fp32 also a frozen base's step."""
    folder = llama(tmp_path / "model")
    quantize(folder, fp8(block=block))
    plain = transformers.LlamaForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    )
    assert_all_uses_equal(plain, folder, tmp_path, dtype)


def read(folder: Path, settings: Any) -> dict[str, Tensor]:
    tensors = lazy_tensors([folder / FILE], settings)
    return {name: lazy.value() for name, lazy in tensors.items()}


@pytest.mark.sample(7)
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("block", [32, 64])
def test_bitsandbytes_gives_the_same_values(
    nested: bool, dtype: torch.dtype, block: int, tmp_path: Path
) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    weight = torch.randn(96, 130, generator=torch.Generator().manual_seed(1)).to(dtype)
    stored, state = functional.quantize_4bit(
        weight, blocksize=block, compress_statistics=nested, quant_type="nf4"
    )
    parts = {f"a.weight.{n}": t for n, t in state.as_dict(packed=True).items()}
    save_file({"a.weight": stored, **parts}, tmp_path / FILE)
    settings = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
    }  # fmt: skip
    expected = functional.dequantize_4bit(stored, state)
    assert bits(read(tmp_path, settings)["a.weight"]) == bits(expected)


@pytest.mark.sample(4)
@pytest.mark.parametrize("settings", ["nf4", "nf4, twice"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_transformers_quantizes_with_bitsandbytes_is_read_as_it_dequantizes_it(
    family: str, settings: str, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    if family == "llama":
        llama(tmp_path / "model")
    else:
        shape = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=64)
        transformers.GPT2LMHeadModel(shape).bfloat16().save_pretrained(tmp_path / "model")
    keys: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    keys["bnb_4bit_use_double_quant"] = "twice" in settings
    quantized = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=transformers.BitsAndBytesConfig(**keys)
    )
    quantized.save_pretrained(tmp_path / "quantized")
    params = dict(offload.open_pretrained(tmp_path / "quantized").named_parameters())
    for name, param in quantized.dequantize(torch.float32).named_parameters():
        value = params[name].value()  # type: ignore[attr-defined]
        if "c_" in name and name.endswith("weight"):  # it dequantizes into linear layers
            value = value.t()
        assert bits(value.contiguous()) == bits(param.detach().to(value.dtype)), name
