"""`offload.compress` in the formats of GPTQ and AWQ, and of packed experts: files that have the
values that the formats' documented formulas give, in plain numpy."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

import offload
from offload.cli.app import app
from offload.errors import CheckpointError, ConfigError, UnsupportedError
from tests.offload.engine_cases import HOST, bits, config
from tests.offload.quantised_cases import AWQ_ORDER, product
from tests.outside.pretrained_cases import FILE, edit, saved
from tests.outside.test_causal_lm_zoo import transformers
from tests.outside.test_compress import CAUSAL, is_linear, opened, stored, values
from tests.outside.test_quantised_folders import llama

pytestmark = pytest.mark.usefixtures("quiet_transformers")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
UP = "model.layers.1.mlp.up_proj.weight"


def cast(folder: Path, dtype: torch.dtype) -> Path:
    """A tiny Llama, of which one group has no negative value, one is zero, and one has no positive
    one."""
    CAUSAL.from_pretrained(llama(folder)).to(dtype).save_pretrained(folder)

    def odd(tensors: dict[str, Tensor]) -> None:
        up = tensors[UP]
        up[3, :32] = up[3, :32].abs() + 0.25
        up[5, 32:] = 0
        up[6, :32] = -up[6, :32].abs()

    return edit(folder, odd)


def mixture(folder: Path, model_type: str = "mixtral", dtype: str = "float32") -> Path:
    return saved(
        folder, model_type, hidden_size=32, intermediate_size=32, moe_intermediate_size=32,
        num_attention_heads=4, num_key_value_heads=4, head_dim=8, dtype=dtype,
    )  # fmt: skip


def fields(words: Tensor, count: int) -> np.ndarray[Any, Any]:
    """Of int32 [n, m] the codes [n, m, count], the lowest bits first."""
    shifts = np.arange(count, dtype=np.uint32) * (32 // count)
    whole = words.numpy().view(np.uint32)[..., None] >> shifts
    return whole & np.uint32((1 << (32 // count)) - 1)


def of_gptq(tensors: dict[str, Tensor], module: str, number_of_bits: int) -> Tensor:
    """By AutoGPTQ's formula: the zero point of each column is its field and 1."""
    parts = {end: tensors[f"{module}.{end}"] for end in ("qweight", "qzeros", "scales", "g_idx")}
    count = 32 // number_of_bits
    packed = fields(parts["qweight"].t().contiguous(), count)
    codes = torch.from_numpy(packed.reshape(packed.shape[0], -1).astype(np.int64))
    less = fields(parts["qzeros"], count)
    zeros = torch.from_numpy(less.reshape(less.shape[0], -1).astype(np.int64)) + 1
    assert int(zeros.max()) < 1 << number_of_bits  # no field is 0 - 1
    of = parts["g_idx"].long()
    return product(codes, zeros.t()[:, of], parts["scales"].t()[:, of])


def of_awq(tensors: dict[str, Tensor], module: str) -> Tensor:
    parts = {end: tensors[f"{module}.{end}"] for end in ("qweight", "qzeros", "scales")}

    def in_order(words: Tensor) -> Tensor:
        found = np.empty((*words.shape, 8), dtype=np.int64)
        found[..., AWQ_ORDER] = fields(words, 8)
        return torch.from_numpy(found.reshape(words.shape[0], -1))

    codes, zeros = in_order(parts["qweight"]).t(), in_order(parts["qzeros"]).t()
    size = codes.shape[1] // zeros.shape[1]
    scales = parts["scales"].t().repeat_interleave(size, 1)
    return product(codes, zeros.repeat_interleave(size, 1), scales)


# ------------------------------------------------------------------------------- GPTQ and AWQ
@pytest.mark.parametrize(("library", "code"), [("gptq", "int4"), ("gptq", "int8"), ("awq", "int4")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_files_have_the_values_of_the_formats_formulas(
    library: str, code: str, dtype: torch.dtype, tmp_path: Path, long: bool
) -> None:
    if not long and dtype == torch.float16:
        pytest.skip("fp32 has scales in fp16, too: --long has both")
    folder = cast(tmp_path / "model", dtype)
    before = load_file(folder / FILE)
    offload.compress(folder, tmp_path / "out", storage=code, format=library, group_size=32)
    tensors, found = load_file(tmp_path / "out" / FILE), opened(tmp_path / "out")
    for name, value in found.items():
        if not is_linear(name):
            assert bits(value) == bits(before[name]), name
            continue
        module = name.removesuffix(".weight")
        formula = of_awq(tensors, module) if library == "awq" else of_gptq(
            tensors, module, 4 if code == "int4" else 8
        )  # fmt: skip
        assert bits(value) == bits(formula.to(dtype)), name
        expected, odd = stored(before[name], code, 32), torch.zeros(value.shape, dtype=torch.bool)
        if name == UP and library == "gptq":
            odd[3, :32] = True
            step = before[name][3, :32].max().float() / 14 * 1.02
            error = (value - before[name])[odd].float().abs()
            assert bool((error <= step / 2 + 2**-8).all())
        if code == "int4":
            assert bits(value[~odd]) == bits(expected[~odd]), name
        else:
            most = before[name].float().unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True)
            error = (value.float() - before[name].float()).unflatten(1, (-1, 32)).abs()
            assert bool((error <= most / 127 * 0.52 + most * 2**-8).all()), name


@pytest.mark.parametrize(("library", "code"), [("gptq", "int4"), ("gptq", "int8"), ("awq", "int4")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_gptqmodel_loads_the_same_values(
    library: str, code: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    pytest.importorskip("gptqmodel")
    pytest.importorskip("optimum")
    skip = ["lm_head", "layers.0.mlp.up_proj", "o_proj"]
    folder = cast(tmp_path / "model", dtype)
    offload.compress(
        folder, tmp_path / "out", storage=code, format=library, group_size=32, skip=skip
    )
    loaded = CAUSAL.from_pretrained(
        tmp_path / "out", dtype=torch.float16, device_map={"": "cpu"}
    )  # fmt: skip
    found = opened(tmp_path / "out")
    modules = {n: m for n, m in loaded.named_modules() if hasattr(m, "qweight")}
    assert len(modules) == 11
    for name, module in modules.items():
        if library == "awq":
            from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

            value = dequantize_gemm(module.qweight, module.qzeros, module.scales, 4, 32).t()
        else:
            value = module.dequantize_weight().t()
        assert bits(value.contiguous()) == bits(found[f"{name}.weight"].half()), name


@pytest.mark.parametrize("library", ["gptq", "awq"])
def test_a_folder_that_is_compressed_again_keeps_its_values(library: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"storage": "int4", "format": library}
    offload.compress(llama(tmp_path / "model"), tmp_path / "once", **keys)
    offload.compress(tmp_path / "once", tmp_path / "twice", **keys)
    once, twice = (load_file(tmp_path / name / FILE) for name in ("once", "twice"))
    assert {n: bits(t) for n, t in once.items()} == {n: bits(t) for n, t in twice.items()}


def test_what_is_skipped_is_named_for_each_library(tmp_path: Path) -> None:
    folder = llama(tmp_path / "model")

    def said(name: str, **keys: Any) -> Any:
        offload.compress(folder, tmp_path / name, storage="int4", **keys)
        return json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]

    layers = ["gate_proj", "up_proj", "down_proj"]
    gptq = said("gptq", format="gptq")
    (ends,) = gptq["modules_in_block_to_quantize"]
    assert set(ends) == {f"mlp.{n}" for n in layers} | {f"self_attn.{n}_proj" for n in "qkvo"}
    assert list(gptq["dynamic"]) == [r"-:^lm_head(\..*)?$"]
    some = said("some", format="gptq", skip=["lm_head", "layers.0.mlp"])
    (names,) = some["modules_in_block_to_quantize"]
    assert "model.layers.1.mlp.up_proj" in names
    assert "model.layers.0.mlp.up_proj" not in names
    assert r"-:^model\.layers\.0\.mlp\.up_proj(\..*)?$" in some["dynamic"]
    awq = said("awq", format="awq", skip=["lm_head", "layers.0.mlp"])
    skipped = [f"model.layers.0.mlp.{n}" for n in layers]
    assert awq["modules_to_not_convert"] == [*skipped, "lm_head"]
    assert (gptq["sym"], awq["zero_point"], awq["version"]) == (False, True, "gemm")


def test_a_checkpoint_is_exported_for_a_library(tmp_path: Path) -> None:
    folder = llama(tmp_path / "model")
    keys = config(tmp_path, HOST, budget={"host": "64MiB"}, precision="bf16")
    with offload.from_pretrained(folder, keys) as engine:
        engine.save_checkpoint(tmp_path / "checkpoint")
    command = ["checkpoint", "export", str(tmp_path / "checkpoint"), str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*command, "--storage", "int4", "--format", "awq"])
    assert result.exit_code == 0, result.output
    command = ["compress", str(folder), str(tmp_path / "expected"), "--storage", "int4"]
    assert CliRunner().invoke(app, [*command, "--format", "awq"]).exit_code == 0
    found, expected = (load_file(tmp_path / name / FILE) for name in ("out", "expected"))
    assert {n: bits(t) for n, t in found.items()} == {n: bits(t) for n, t in expected.items()}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"format": "gptq"}, "say which by storage"),
        ({"storage": "int4", "format": "gguf"}, "format: expected one of compressed-tensors"),
        ({"storage": "int8", "format": "awq"}, "awq holds no int8, compressed-tensors and gptq do"),
        ({"storage": "nf4", "format": "gptq"}, "gptq holds no nf4, bitsandbytes does"),
        ({"storage": "int4", "format": "bitsandbytes"}, "bitsandbytes holds no int4"),
        ({"storage": "int4", "format": "awq", "group_size": 256}, "groups of 128 and less"),
        ({"storage": "int4", "format": "gptq", "skip": []}, "lm_head would be chosen"),
        ({"storage": "int4", "format": "awq", "skip": []}, "lm_head would be chosen"),
    ],
    ids=str,
)
def test_what_a_format_does_not_hold_is_refused(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = llama(tmp_path / "model")
    with pytest.raises(ConfigError, match=message):
        offload.compress(folder, tmp_path / "out", **keys)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_rows_that_kernels_do_not_take_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama", intermediate_size=40, hidden_size=32)
    for library in ("gptq", "awq"):
        with pytest.raises(ConfigError, match=r"take 32 rows at a time, not (40|16)"):
            offload.compress(
                folder, tmp_path / "out", storage="int4", format=library, group_size=32,
                skip=["lm_head", "down_proj"],
            )  # fmt: skip


@pytest.mark.parametrize("factor", [1e6, 1e-7])
@pytest.mark.parametrize("code", ["int4", "int8"])
def test_scales_that_fp16_does_not_hold_are_named(code: str, factor: float, tmp_path: Path) -> None:
    """Those of weights in fp32 are written in fp16. The small ones became zero in int8."""
    folder = cast(tmp_path / "model", torch.float32)
    edit(folder, lambda tensors: {**tensors, UP: tensors[UP] * factor})
    with pytest.raises(CheckpointError, match=r"which torch\.float16 does not hold"):
        offload.compress(folder, tmp_path / "out", storage=code, format="gptq", group_size=32)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------- experts
CASES = [("compressed-tensors", "int4"), ("compressed-tensors", "int8"), ("gptq", "int4"),
         ("awq", "int4")]  # fmt: skip


@pytest.mark.parametrize(("library", "code"), CASES)
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_are_in_codes_each_by_itself(
    library: str, code: str, model_type: str, tmp_path: Path, caplog: Any, long: bool
) -> None:
    if not long and model_type != "mixtral" and (library, code) != CASES[0]:
        pytest.skip("other names in files: --long has all formats")
    folder = mixture(tmp_path / "model", model_type)
    with caplog.at_level(logging.WARNING, "offload"):
        offload.compress(folder, tmp_path / "out", storage=code, format=library, group_size=32)
    assert ("transformers itself does not read" in caplog.text) == (library in ("gptq", "awq"))
    files = load_file(tmp_path / "out" / FILE)
    assert not any("experts" in name and name.endswith(".weight") for name in files)
    found, before = opened(tmp_path / "out"), values(folder)
    experts = {name for name in found if ".experts." in name}
    assert len(experts) == 4
    for name in experts:
        flat = before[name].unflatten(-1, (-1, 32)).float()
        error = (found[name].float() - before[name].float()).unflatten(-1, (-1, 32)).abs()
        if library in ("gptq", "awq"):
            rows = before[name].reshape(-1, 32)
            assert bits(found[name].reshape(-1, 32)) == bits(stored(rows, code, 32)), name
        else:  # symmetric
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
    offload.compress(folder, tmp_path / "out", storage="int4", format="awq", group_size=32)
    expected = opened(tmp_path / "out")
    storage = {"weights": "int4", "group_size": 32, "skip": ["lm_head", "embed_tokens", "gate"]}
    for more in ({}, {"storage": storage}):
        keys = config(tmp_path, HOST, budget={"host": "64MiB"}, precision="fp32", **more)
        model: Any = offload.dispatch(offload.open_pretrained(tmp_path / "out"), keys)
        with offload.dispatched(model) as owner, owner.gathered():
            found = {n: bits(p.detach().clone()) for n, p in model.named_parameters()}
        assert found == {n: bits(t) for n, t in expected.items()}


def test_values_that_a_dispatched_model_computes_with_are_not_changed(tmp_path: Path) -> None:
    folder = mixture(tmp_path / "model")
    storage = {"weights": "int4", "group_size": 32}
    keys = config(tmp_path, HOST, budget={"host": "64MiB"}, precision="fp32", storage=storage)
    model: Any = offload.dispatch(offload.open_pretrained(folder), keys)
    with offload.dispatched(model) as owner:
        for library in ("compressed-tensors", "gptq"):
            with pytest.raises(UnsupportedError, match=f"which {library} would round"):
                offload.compress(
                    model, tmp_path / "out", storage="int4", format=library, group_size=32
                )
        offload.compress(model, tmp_path / "out", storage="int4", format="awq", group_size=32)
        with owner.gathered():
            expected = {n: bits(p.detach().clone()) for n, p in model.named_parameters()}
    found = opened(tmp_path / "out")
    for name in (n for n in expected if is_linear(n) and "router" not in n):
        assert bits(found[name]) == expected[name], name


def test_skipped_experts(tmp_path: Path) -> None:
    folder = mixture(tmp_path / "model")
    skip = ["lm_head", "experts"]
    with pytest.raises(ConfigError, match="transformers looks for codes of all experts"):
        offload.compress(folder, tmp_path / "out", storage="int8", group_size=32, skip=skip)
    keys: dict[str, Any] = {"storage": "int4", "group_size": 32, "skip": skip}
    offload.compress(folder, tmp_path / "awq", format="awq", **keys)
    offload.compress(folder, tmp_path / "gptq", format="gptq", **keys)
    container = "model.layers.0.block_sparse_moe.experts"
    said = [json.loads((tmp_path / n / "config.json").read_text())["quantization_config"]
            for n in ("awq", "gptq")]  # fmt: skip
    assert container in said[0]["modules_to_not_convert"]
    assert rf"-:^{container.replace('.', chr(92) + '.')}(\..*)?$" in said[1]["dynamic"]
    before = values(folder)
    for name in ("awq", "gptq"):
        for key, value in opened(tmp_path / name).items():
            assert (bits(value) == bits(before[key])) == ("_proj" not in key or "experts" in key)


def test_experts_are_pruned(tmp_path: Path) -> None:
    folder = mixture(tmp_path / "model")
    offload.compress(folder, tmp_path / "out", prune="2:4")
    for name, value in values(tmp_path / "out").items():
        if ".experts." in name:
            assert bool(((value.unflatten(-1, (-1, 4)) == 0).sum(-1) == 2).all()), name
