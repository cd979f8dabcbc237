"""Quantized weights in other libraries' formats have their values, to the bit, and what is damaged
or mislabelled is refused before a weight is allocated."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import offload
from offload.errors import CheckpointError, OffloadError, UnsupportedError
from offload.quantized import matrix
from offload.quantized.reading import settings_in, settings_of
from offload.weights.lazy_tensors import LazyTensor, lazy_tensors
from tests.offload.engine_cases import HOST, config
from tests.offload.engine_states import bits
from tests.offload.quantized_cases import FORMATS, Weight, compressed, four_bits, gptq

ROWS, COLUMNS = 24, 64
MANY = [
    "ct int4, asymmetric",
    "gptq desc_act",
    "awq",
    "nf4 nested",
    "ct fp8, blocks",
    "fp8",
    "ct nvfp4",
]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def write(folder: Path, settings: Any, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return folder


def named(weight: Weight, module: str = "linear") -> dict[str, Tensor]:
    return {f"{module}.{name}": tensor for name, tensor in weight.parts.items()}


def opened(folder: Path) -> dict[str, LazyTensor]:
    return lazy_tensors([folder / "model.safetensors"], settings_in(folder))


# ------------------------------------------------------------------------------------- values
@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_the_format(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = FORMATS[name].make(ROWS, COLUMNS, generator())
    plain = {"linear.bias": torch.arange(24.0), "norm.weight": torch.ones(3).bfloat16()}
    folder = write(tmp_path, FORMATS[name].settings, {**named(made), **plain})
    tensors = opened(folder)
    assert tensors.keys() == {"linear.weight", *plain}
    lazy = tensors["linear.weight"]
    assert (lazy.shape, lazy.dtype) == (made.value.shape, made.value.dtype)
    assert bits(lazy.value()) == bits(made.value)
    monkeypatch.setattr(matrix, "_PIECE_NUMEL", 5 * COLUMNS)
    assert bits(lazy.value()) == bits(made.value)  # in pieces, the last one shorter
    assert all(bits(tensors[name].value()) == bits(tensor) for name, tensor in plain.items())


def test_packed_experts_in_fp8_are_read_one_by_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = [FORMATS["fp8"].make(ROWS, COLUMNS, generator()) for _ in range(3)]
    tensors = {
        f"up{end}": torch.stack([each.parts[f"weight{end}"] for each in made])
        for end in ("", "_scale_inv")
    }
    tensors["up_activation_scale"] = torch.ones(3)
    folder = write(tmp_path, FORMATS["fp8"].settings, tensors)
    (lazy,) = opened(folder).values()
    assert "activations are quantized, too" in caplog.text
    assert bits(lazy.value()) == bits(torch.stack([each.value for each in made]))
    assert bits(lazy.row(1).value()) == bits(made[1].value)


def test_a_zero_point_of_gptq_v1_that_carries_changes_the_next_as_in_gptqmodel(
    tmp_path: Path,
) -> None:
    made = gptq().make(ROWS, COLUMNS, generator())
    made.parts["qzeros"][0, 0] = 0x0000001F  # row 0 has 15, row 1 has 1
    value = opened(write(tmp_path, gptq().settings, named(made)))["linear.weight"].value()
    code = made.parts["qweight"][0, :2] & 15
    zeros = torch.tensor([0, 3])  # 15 + 1 carries into 1 + 1
    assert bits(value[:2, 0]) == bits(made.parts["scales"][0, :2] * (code - zeros))


@pytest.mark.parametrize("name", ["nf4 nested", "gptq desc_act", "ct int4, asymmetric"])
def test_weights_of_a_quantized_folder_begin_with_its_values(name: str, tmp_path: Path) -> None:
    one, two = (FORMATS[name].make(32, 32, generator()) for _ in range(2))
    tensors = {
        **named(one, "0"),
        **named(two, "1"),
        "0.bias": torch.ones(32),
        "1.bias": torch.ones(32),
    }
    folder = write(tmp_path / "model", FORMATS[name].settings, tensors)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    keys = config(tmp_path, HOST)
    with offload.initialize(model, keys, weights=folder) as engine, engine.gathered():
        assert bits(model[0].weight.detach().clone()) == bits(one.value.float())
        assert bits(model[1].weight.detach().clone()) == bits(two.value.float())


def test_modules_of_several_groups_are_read_by_name_pattern_and_class(tmp_path: Path) -> None:
    eight, four, other = compressed(8), compressed(4), compressed(strategy="channel")
    settings = four.settings | {
        "config_groups": {
            "a": four.settings["config_groups"]["group_0"],
            "b": eight.settings["config_groups"]["group_0"] | {"targets": ["re:.*down.*"]},
            "c": other.settings["config_groups"]["group_0"] | {"targets": ["x.down"]},
        }
    }
    made = {
        "x.up": four.make(ROWS, COLUMNS, generator()),
        "y.down": eight.make(ROWS, COLUMNS, generator()),
        "x.down": other.make(ROWS, COLUMNS, generator()),
    }
    tensors = {k: v for name, each in made.items() for k, v in named(each, name).items()}
    weights = opened(write(tmp_path, settings, tensors))
    assert {n: bits(t.value()) for n, t in weights.items()} == {
        f"{n}.weight": bits(each.value) for n, each in made.items()
    }


# ------------------------------------------------------------------------------------- refusals
def changed(settings: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {**settings, **keys}


def with_weights(**keys: Any) -> dict[str, Any]:
    settings = compressed().settings
    group = settings["config_groups"]["group_0"]
    group = {**group, "weights": {**group["weights"], **keys}}
    return {**settings, "config_groups": {"group_0": group}}


def with_group(**keys: Any) -> dict[str, Any]:
    settings = compressed().settings
    return {**settings, "config_groups": {"g": {**settings["config_groups"]["group_0"], **keys}}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "quark"}, "quantized by quark, which is not read here"),
        ({"quant_method": "aqlm"}, "by aqlm"),
        ({"quant_method": "hqq"}, "by hqq"),
        ({"quant_method": "torchao"}, "by torchao"),
        ({}, "by None"),
        ("gptq", "by gptq"),
        (changed(compressed().settings, format="mxfp6-pack-quantized"), "mxfp6-pack-quantized"),
        (changed(compressed().settings, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (changed(compressed().settings, transform_config={"a": 1}), "transform_config"),
        (changed(compressed().settings, sparsity_config={"format": "sparse-24"}), "sparse-24"),
        (changed(compressed().settings, config_groups={"W4A16": ["Linear"]}), "W4A16"),
        (with_weights(num_bits=3), "3 bits"),
        (with_weights(type="float"), "type float"),
        (with_weights(strategy="token"), "strategy token"),
        (changed(gptq().settings, bits=3), "3 bits"),
        (changed(gptq().settings, checkpoint_format="marlin"), "marlin"),
        (changed(gptq().settings, dynamic={"+:.*up": {"bits": 8}}), r"\+:.\*up"),
        (changed(FORMATS["awq"].settings, version="gemv"), "gemv"),
        (changed(FORMATS["awq"].settings, bits=8), "8 bits"),
        (changed(four_bits().settings, bnb_4bit_quant_type="fp4"), "fp4"),
        (changed(four_bits().settings, load_in_8bit=True), "8 bits"),
    ],
)
def test_formats_that_are_not_read_are_refused_by_name(
    settings: Any, message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, settings, {"a.weight": torch.ones(2)})
    with pytest.raises(UnsupportedError, match=message):
        opened(folder)


Change = Callable[[dict[str, Tensor]], Any]


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(f"linear.{name}")


def put(name: str, value: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.update(
        {f"linear.{name}": value(tensors.get(f"linear.{name}", torch.ones(1)))}
    )


def state(**keys: Any) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        name = "linear.weight.quant_state.bitsandbytes__nf4"
        said = json.loads(bytes(tensors[name].tolist())) | keys
        tensors[name] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)

    return change


HUGE = [1 << 39, 1 << 39]
DAMAGES: list[tuple[str, Change, str]] = [
    ("ct int4", without("weight_scale"), "weight_scale is not there"),
    ("ct int4", without("weight_shape"), "weight_shape is not there"),
    ("ct int4", without("weight_packed"), "weight_packed is not there"),
    ("ct int4", put("weight_scale", lambda t: t[:, :2]), "has shape"),
    ("ct int4", put("weight_scale", lambda t: t.int()), "is torch.int32"),
    ("ct int4", put("weight_packed", lambda t: t.half()), "is torch.float16"),
    ("ct int4", put("weight_packed", lambda t: t[:, :-1]), "says"),
    ("ct int4", put("weight_packed", lambda t: t[None]), "has shape"),
    ("ct int4", put("weight_shape", lambda t: torch.tensor(HUGE)), "says"),
    ("ct int4", put("weight_shape", lambda t: torch.tensor([ROWS, -8])), "says"),
    ("ct int4", put("weight_shape", lambda t: torch.tensor([ROWS, 63])), "do not divide"),
    ("ct int4", put("weight", lambda t: torch.ones(ROWS, COLUMNS)), "and a quantized one"),
    ("ct int4, asymmetric", without("weight_zero_point"), "weight_zero_point is not there"),
    ("ct int4, asymmetric", put("weight_zero_point", lambda t: t[:1]), "has shape"),
    ("ct int4, groups in any order", put("weight_g_idx", lambda t: t + 1), "names groups"),
    ("ct int4, groups in any order", put("weight_g_idx", lambda t: t - 1), "names groups"),
    ("ct fp8", without("weight_scale"), "none is"),
    ("ct fp8", put("weight_scale", lambda t: t[:-1]), "has shape"),
    ("ct fp8", put("weight", lambda t: t.float()), "is torch.float32"),
    ("ct fp8, blocks", put("weight_scale", lambda t: t[:, :1]), "has shape"),
    ("ct int8, bytes, asymmetric, fp16", without("weight_zero_point"), "zero_point is not there"),
    ("ct nvfp4", without("weight_global_scale"), "weight_global_scale is not there"),
    ("ct nvfp4", put("weight_scale", lambda t: t[:, 1:]), "has shape"),
    ("ct nvfp4", put("weight_scale", lambda t: t.float()), "is torch.float32"),
    ("ct mxfp4", without("weight_packed"), "weight_packed is not there"),
    ("ct mxfp4", put("weight_packed", lambda t: t[:, 1:]), "do not divide"),
    ("fp8", without("weight_scale_inv"), "none is"),
    ("fp8", without("weight"), "belongs to no weight"),
    ("fp8", put("weight_scale_inv", lambda t: t[:1]), "has shape"),
    ("fp8", put("weight_scale_inv", lambda t: t.long()), "is torch.int64"),
    ("fp8", put("weight", lambda t: t.flatten()), "has 1 dimensions"),
    ("fp8, one scale", put("weight_scale_inv", lambda t: torch.ones(2, 2)), "has shape"),
    ("gptq", without("scales"), "scales is not there"),
    ("gptq", without("qzeros"), "qzeros is not there"),
    ("gptq", without("qweight"), "belongs to no weight"),
    ("gptq", put("scales", lambda t: t[1:]), "has shape"),
    ("gptq", put("qzeros", lambda t: t[:, 1:]), "has shape"),
    ("gptq", put("qweight", lambda t: t[:-1]), "do not divide"),
    ("gptq", put("g_idx", lambda t: t + 9), "names groups 9 to 12, and there are 4"),
    ("gptq desc_act", without("g_idx"), "order of its columns is not known"),
    ("awq", without("qzeros"), "qzeros is not there"),
    ("awq", put("scales", lambda t: t.long()), "is torch.int64"),
    ("awq", put("qweight", lambda t: t[:40]), "do not divide"),
    ("nf4", without("weight"), "are not there"),
    ("nf4", without("weight.absmax"), "absmax is not there"),
    ("nf4", without("weight.quant_map"), "quant_map is not there"),
    ("nf4", without("weight.quant_state.bitsandbytes__nf4"), "belongs to no weight"),
    ("nf4", put("weight", lambda t: t[:-1]), "767 bytes"),
    ("nf4", put("weight.absmax", lambda t: t[:-1]), "has shape"),
    ("nf4", put("weight.quant_map", lambda t: t.flip(0)), "other values than nf4"),
    ("nf4", state(shape=HUGE), "their codes are"),
    ("nf4", state(shape=[24, 64, 1]), "shape"),
    ("nf4", state(shape=[24, -64]), "shape"),
    ("nf4", state(shape=[True, 1536]), "shape"),
    ("nf4", state(blocksize=63), "blocksize"),
    ("nf4", state(blocksize=32), "has shape"),
    ("nf4", state(dtype="int8"), "dtype: Input should be"),
    ("nf4", state(quant_type="fp4"), "does not describe nf4"),
    ("nf4", state(pad="x" * 9999), "bytes"),
    (
        "nf4",
        put(
            "weight.quant_state.bitsandbytes__nf4",
            lambda t: torch.full((60,), 91, dtype=torch.uint8),
        ),
        "Invalid JSON",
    ),
    ("nf4 nested", without("weight.nested_quant_map"), "nested_quant_map is not there"),
    ("nf4 nested", state(nested_offset="nan"), "nested_offset"),
    ("nf4 nested", state(nested_offset=float("inf")), "nested_offset"),
    ("nf4 nested", state(nested_blocksize=1 << 60), "nested_blocksize"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "message"), DAMAGES, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(DAMAGES)]
)
def test_what_does_not_fit_together_is_named(
    name: str, change: Change, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = named(FORMATS[name].make(ROWS, COLUMNS, generator()))
    change(tensors)
    folder = write(tmp_path, FORMATS[name].settings, tensors)
    monkeypatch.setattr(matrix.Matrix, "read", lambda *_: pytest.fail("allocated"))
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        opened(folder)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("gptq", {"group_size": 24}), ("gptq", {"group_size": 0}), ("gptq", {"group_size": "8"}),
        ("gptq", {"group_size": True}), ("gptq", {"bits": 8}), ("awq", {"group_size": 48}),
        ("nf4", {"bnb_4bit_quant_type": "fp4"}), ("nf4", {"load_in_8bit": True}),
        ("fp8", {"weight_block_size": [16, 16]}), ("fp8", {"weight_block_size": [0, 16]}),
        ("fp8", {"weight_block_size": None}), ("fp8", {"quant_method": "fbgemm_fp8"}),
        ("ct fp8", {"format": "pack-quantized"}), ("ct int8, bytes", {"format": "marlin-24"}),
        ("nf4", {"quant_method": "gptq", "bits": 4}), ("gptq", {"quant_method": "awq"}),
        ("ct int4", {"ignore": ["re:lin.*"]}), ("ct int4", {"ignore": ["re:("]}),
        ("ct int4", {"config_groups": {}}), ("ct int4", with_weights(num_bits=8)),
        ("ct int4", with_weights(group_size=32)), ("ct int4", with_weights(group_size=-3)),
        ("ct int4", with_weights(symmetric=False)), ("ct int4", with_weights(strategy="channel")),
        ("ct int4", with_group(targets=["other"])),
    ],
    ids=str,
)  # fmt: skip
def test_a_mislabelled_folder_is_refused(name: str, other: dict[str, Any], tmp_path: Path) -> None:
    tensors = named(FORMATS[name].make(ROWS, COLUMNS, generator()))
    folder = write(tmp_path, {**FORMATS[name].settings, **other}, tensors)
    with pytest.raises((CheckpointError, UnsupportedError)):
        opened(folder)


def zero_points(value: int) -> list[Tensor]:
    """Zero points as older files have them, and packed: 4 bits."""
    word = (value + 8) * 0x11111111
    packed = torch.full((ROWS // 8, 4), word - (1 << 32 if word >> 31 else 0), dtype=torch.int32)
    return [torch.full((ROWS, 4), value, dtype=torch.int8), packed]


@pytest.mark.parametrize("kind", [0, 1])
def test_symmetric_weights_have_no_zero_points_but_zero(kind: int, tmp_path: Path) -> None:
    weight = FORMATS["ct int4"].make(ROWS, COLUMNS, generator())
    for value in (0, 3):
        tensors = named(weight) | {"linear.weight_zero_point": zero_points(value)[kind]}
        folder = write(tmp_path / str(value), FORMATS["ct int4"].settings, tensors)
        if value == 0:
            assert torch.equal(opened(folder)["linear.weight"].value(), weight.value)
            continue
        with pytest.raises(CheckpointError, match="zero_point is not zero"):
            opened(folder)


@pytest.mark.parametrize("name", ["ct int4", "gptq", "awq", "nf4"])
def test_quantized_tensors_without_the_mark_are_refused(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, None, named(FORMATS[name].make(ROWS, COLUMNS, generator())))
    with pytest.raises(CheckpointError, match="has no quantization_config"):
        opened(folder)


def test_a_mark_without_quantized_tensors_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, gptq().settings, {"linear.weight": torch.ones(4, 4)})
    with pytest.raises(CheckpointError, match="none is"):
        opened(folder)


@pytest.mark.parametrize("name", MANY)
def test_files_with_any_byte_changed_are_values_or_typed_errors(
    name: str, tmp_path: Path, long: bool
) -> None:
    """Header, tables, and where they end: never a crash, never more memory than the file's codes
    stand for."""
    tensors = named(FORMATS[name].make(8, 32 if name != "awq" else 64, generator()))
    folder = write(tmp_path, FORMATS[name].settings, tensors)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    chance = random.Random(0)
    outcomes = set()
    for _ in range(2000 if long else 150):
        damaged = bytearray(whole)
        if chance.random() < 0.3:
            del damaged[chance.randrange(len(damaged)) :]
        for _ in range(chance.randrange(1, 4)):
            if damaged:
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            for lazy in opened(folder).values():
                assert lazy.numel() < 4096
                lazy.value()
            outcomes.add("read")
        except OffloadError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


WEIRD: list[Any] = [None, 0, -1, True, "x", [], {}, 10**30, 0.5, [1], {"a": 1}, ["re:("], "re:("]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*path, key)
            yield from leaves(inner, (*path, key))


@pytest.mark.parametrize("name", MANY)
def test_any_value_of_the_configuration_is_read_or_refused(name: str, tmp_path: Path) -> None:
    settings = FORMATS[name].settings | {
        key: [] for key in ("dynamic", "sparsity_config", "format", "version")
        if key not in FORMATS[name].settings
    }  # fmt: skip
    write(tmp_path, settings, named(FORMATS[name].make(8, 64, generator())))
    stored = tmp_path / "model.safetensors"
    for path in leaves(settings):
        for weird in WEIRD:
            changed = copy.deepcopy(settings)
            inner: Any = changed
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = weird
            with contextlib.suppress(OffloadError):
                read = settings_of({"quantization_config": changed}, tmp_path)
                for lazy in lazy_tensors([stored], read).values():
                    assert lazy.numel() <= 8 * 64
                    lazy.value()


def test_four_bits_of_other_storage_formats(tmp_path: Path) -> None:
    """`bnb_4bit_quant_storage`: the same bytes under another name, for FSDP."""
    made = four_bits().make(ROWS, COLUMNS, generator())
    made.parts["weight"] = made.parts["weight"].flatten().view(torch.bfloat16)[:, None]
    folder = write(tmp_path, four_bits().settings, named(made))
    assert bits(opened(folder)["linear.weight"].value()) == bits(made.value)
