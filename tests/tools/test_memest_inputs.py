"""Every kind of source gives the model's shape, and loads no more than it needs."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload.config import OffloadConfig
from offload.gpt import build_meta_model
from offload.planning.plan.estimate import Workload
from offload.process.child import child_environment
from offload.process.disk_cache import cache_folder, remembered
from offload.tiers.errors import CheckpointError, ConfigError, UnsupportedError
from offload.tools.memest.source.model_source import SourceKind
from offload.tools.memest.source.read_model import read_model, read_stated
from offload.tools.memest.source.stated_sizes import StatedSizes, parse_count
from offload.zero.groups.model_shape import ModelShape
from offload.zero.groups.parameter_grouping import group_parameters
from tests.tools.model_files import TINY_LLAMA_NUMEL, entries_of, write_config, write_safetensors


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300), nn.Linear(300, 5))


def test_a_configuration_and_its_folder_give_the_same_model(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    file, folder = read_model(str(path)), read_model(str(tmp_path))
    assert file.shape == folder.shape
    assert file.shape.numel == TINY_LLAMA_NUMEL
    assert (file.kind, file.name) == (SourceKind.CONFIGURATION, tmp_path.name)
    assert file.context == 128
    assert file.fingerprint == folder.fingerprint != ""


def test_tied_weights_count_once_and_their_group_serves_both_units(tmp_path: Path) -> None:
    shape = read_model(str(write_config(tmp_path, tie_word_embeddings=True))).shape
    assert shape.numel == TINY_LLAMA_NUMEL - 64 * 32
    names = ("model.embed_tokens.weight", "lm_head.weight")
    assert shape.groups[0].params[0].names == names
    assert shape.units[-1].groups == (0,)


def test_code_of_a_folder_does_not_make_an_unknown_architecture_known(tmp_path: Path) -> None:
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('executed')")
    path = write_config(
        tmp_path, model_type="evil", architectures=["Evil"],
        auto_map={"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.E"},
    )  # fmt: skip
    with pytest.raises(ConfigError, match="architecture 'evil' is unknown"):
        read_model(str(path))


def test_a_model_is_built_once_and_then_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path)
    first = read_model(str(path))
    assert first.cache is not None
    assert "once (a few seconds)" in capsys.readouterr().err

    def build_again(*_: Any) -> nn.Module:
        raise AssertionError("built a second time")

    monkeypatch.setattr("offload.tools.memest.source.read_model.build_on_meta", build_again)
    second = read_model(str(path))
    assert (second.shape, second.cache) == (first.shape, first.cache)
    assert capsys.readouterr().err == ""


def test_without_transformers_the_weights_beside_a_configuration_tell_its_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(tmp_path)
    monkeypatch.setattr("offload.tools.memest.source.read_model.is_installed", lambda: False)
    monkeypatch.setattr(
        "offload.tools.memest.source.transformers_models.is_installed", lambda: False
    )
    with pytest.raises(ConfigError, match=r"without transformers; install it"):
        read_model(str(path))
    write_safetensors(tmp_path / "w.safetensors", entries_of(LLAMA_TENSORS))
    for source in (read_model(str(path)), read_model(str(tmp_path))):
        assert source.name == tmp_path.name
        assert not source.has_graph
        assert source.shape.numel == sum(math.prod(shape) for shape in LLAMA_TENSORS.values())
        assert "sizes alone" in source.notes[0]


def test_another_head_than_a_language_models_is_the_librarys_own_class(tmp_path: Path) -> None:
    path = write_config(tmp_path, architectures=["LlamaForSequenceClassification"])
    shape = read_model(str(path)).shape
    assert shape.numel == TINY_LLAMA_NUMEL - 64 * 32 + 2 * 32  # two labels instead of the head
    assert shape.units[-1].name == "score"


def test_a_damaged_cache_is_as_good_as_none(tmp_path: Path) -> None:
    shape = read_model(str(write_config(tmp_path))).shape
    asked: list[str] = []

    def ask(key: str) -> ModelShape:
        def find() -> ModelShape:
            asked.append(key)
            return shape

        return remembered("shapes", key, ModelShape, find)

    assert ask("some") == ask("some") == shape
    assert asked == ["some"]
    file = cache_folder() / "shapes" / "some.json"
    whole = file.read_bytes()
    damages = [b"", whole[:-9], b"[]", b"{}", b"\xff\x00"]
    damages += [whole.replace(b"[64,32]", other) for other in (b'["64",-1]', b"[64,33]")]
    for number, damaged in enumerate(damages):
        assert damaged != whole
        file.write_bytes(damaged)
        assert ask("some") == shape
        assert len(asked) == number + 2
        assert file.read_bytes() == whole
    ask("other")
    assert asked[-1] == "other"


def activation_config(**activations: Any) -> OffloadConfig:
    return OffloadConfig.load({"device": "cpu", "placement": {"activations": activations}})


def test_activations_are_traced_once_per_kind_of_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "offload.yaml"
    path.write_text("train: {model: {layers: 2, hidden: 64, heads: 2}}")
    config, work = activation_config(), Workload(2, 16)
    first = read_model(str(path)).activations(config, work, "cpu")
    traced: list[Workload] = []

    def trace(model: nn.Module, config: OffloadConfig, workload: Workload, **_: Any) -> Any:
        traced.append(workload)
        return replace(first, saved_nbytes=workload.batch)

    monkeypatch.setattr("offload.planning.activations.trace.trace_activations", trace)
    again = read_model(str(path))
    assert again.activations(config, work, "cpu") == first
    assert traced == []
    others = [
        (config, Workload(3, 16)), (config, Workload(2, 8)),
        (activation_config(checkpoint=True), work),
        (config.model_copy(update={"precision": "bf16"}), work),
    ]  # fmt: skip
    for other_config, other_work in others * 2:
        again.activations(other_config, other_work, "cpu")
    assert len(traced) == len(others)
    again.activations(config, work, "cuda")
    path.write_text("train: {model: {layers: 2, hidden: 64, heads: 4}}")
    read_model(str(path)).activations(config, work, "cpu")
    assert len(traced) == len(others) + 2


def test_a_model_that_does_not_run_on_tokens_is_said_not_to() -> None:
    source = read_model(f"{__name__}:small_model")
    with pytest.raises(UnsupportedError, match="Sequential"):
        source.activations(activation_config(), Workload(1, 8), "cpu")


def test_a_model_whose_sizes_do_not_go_together_is_said_to_fail(tmp_path: Path) -> None:
    path = write_config(
        tmp_path, model_type="deepseek_v3", architectures=None, kv_lora_rank=8, q_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, head_dim=8, n_routed_experts=4,
        moe_intermediate_size=16, num_key_value_heads=4,
    )  # fmt: skip
    source = read_model(str(path))
    with pytest.raises(UnsupportedError, match="its forward fails for 1 x 8 tokens"):
        source.activations(activation_config(), Workload(1, 8), "cpu")


LLAMA_TENSORS = {
    "lm_head.weight": (640, 320),
    "model.embed_tokens.weight": (640, 320),
    "model.norm.weight": (320,),
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in (0, 1, 10)
        for name, shape in (
            ("self_attn.q_proj", (320, 320)), ("mlp.up_proj", (480, 320)),
            ("input_layernorm", (320,)),
        )
    },
}  # fmt: skip


def test_weights_saved_by_a_model_have_the_models_count(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = small_model()
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    shape = read_model(str(tmp_path / "m.safetensors")).shape
    assert shape == group_parameters(model).shape()


def test_an_index_reads_all_files_beside_it(tmp_path: Path) -> None:
    names = list(LLAMA_TENSORS)
    halves = {"a.safetensors": names[:4], "b.safetensors": names[4:]}
    for file, part in halves.items():
        entries = entries_of({name: LLAMA_TENSORS[name] for name in part})
        write_safetensors(tmp_path / file, {"__metadata__": {"format": "pt"}, **entries})
    weight_map = {name: file for file, part in halves.items() for name in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    whole = read_model(str(write_safetensors(tmp_path / "w", entries_of(LLAMA_TENSORS))))
    (tmp_path / "w").unlink()
    assert read_model(str(index)).shape == whole.shape
    assert read_model(str(tmp_path)).shape == whole.shape
    index.unlink()
    assert read_model(str(tmp_path)).shape == whole.shape


def test_missing_shards_are_named(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a-0.safetensors", entries_of({"a": (2,)}))
    weight_map = {"a": "a-0.safetensors", **{f"b{i}": f"a-{i}.safetensors" for i in range(1, 8)}}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    missing = r"names 'a-1\.safetensors', and there is no such file"
    with pytest.raises(CheckpointError, match=missing):
        read_model(str(index))


def test_buffers_and_quantized_weights_are_not_counted_and_that_is_said(tmp_path: Path) -> None:
    entries = entries_of({"h.0.attn.bias": (1, 1, 8, 8), "h.0.fc.weight": (8, 8)})
    start = entries["h.0.fc.weight"]["data_offsets"][1]
    entries["h.1.fc.weight"] = {
        "dtype": "F8_E4M3", "shape": [4, 4], "data_offsets": [start, start + 16],
    }  # fmt: skip
    source = read_model(str(write_safetensors(tmp_path / "w.safetensors", entries)))
    assert source.shape.numel == 64
    assert any("1 buffers" in note for note in source.notes)
    assert any("16 elements are quantized" in note for note in source.notes)


def test_a_function_is_built_without_memory() -> None:
    source = read_model(f"{__name__}:small_model")
    with torch.device("meta"):
        assert source.shape == group_parameters(small_model()).shape()
    assert source.kind is SourceKind.FACTORY
    assert source.build is not None
    assert all(param.is_meta for param in source.build().parameters())


def test_a_function_of_the_current_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_models_of_this_test.py").write_text(
        "from torch import nn\nclass Zoo:\n    build = staticmethod(lambda: nn.Linear(8, 8))\n"
    )
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    assert read_model("my_models_of_this_test:Zoo.build").shape.numel == 72
    assert sys.path == path


@pytest.mark.parametrize(
    "text", ["precision: bf16", "train: {model: {layers: 2, hidden: 128, heads: 4}}"]
)
def test_an_offload_configuration_names_the_built_in_model(text: str, tmp_path: Path) -> None:
    path = tmp_path / "offload.yaml"
    path.write_text(text)
    source = read_model(str(path))
    config = OffloadConfig.load(path)
    assert source.config == config
    assert source.shape == group_parameters(build_meta_model(config)).shape()
    assert any("train:" in note for note in source.notes) is ("train" not in text)


@pytest.mark.parametrize(
    "sizes",
    [
        {"params": 7_000_000_000, "layers": 32, "hidden": 4096},
        {"params": 7_000_000_001},
        {"params": 6_738_415_616, "layers": 32, "hidden": 4096, "vocab": 32000},
        {"params": 1_000_000},
        {"params": 10**12},
        {"params": 125_000_000, "hidden": 768},
        {"params": 3 * 10**9, "layers": 26},
    ],
)
def test_stated_parameters_are_met_by_the_width_of_the_mlp(sizes: dict[str, Any]) -> None:
    source = read_stated(StatedSizes(**sizes))
    model = source.train_model
    assert model is not None
    assert 0 <= sizes["params"] - source.shape.numel < 3 * model.hidden * model.layers
    for name in ("layers", "hidden", "vocab"):
        assert sizes.get(name) in (None, getattr(model, name))


@pytest.mark.parametrize(
    "text",
    ["", "-7e9", "0", "nan", "inf", "1e400", "7 apples", "7GiB", "1e16", "0x10", "7,5B", "1e-3"],
)
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="number of parameters"):
        parse_count(text)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({}, "which size"),
        ({"layers": 3}, "which size"),
        ({"params": 10**6, "layers": 32, "hidden": 4096}, r"already have [\d,]+; lower"),
        ({"layers": 2, "hidden": 33}, "even size"),
        ({"layers": 2, "hidden": 64, "vocab": 100}, "--vocab"),
        # what no model has, before it is counted
        ({"layers": 4096, "hidden": 1 << 24}, "--hidden: input should be less than"),
        ({"layers": 2, "hidden": 256, "vocab": 1 << 31}, "--vocab: input should be less than"),
    ],
)
def test_sizes_that_contradict_are_refused(sizes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_stated(StatedSizes(**sizes))


def test_what_is_known_already_is_read_without_torch(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "o.yaml").write_text("precision: bf16")
    for name in ("config.json", "o.yaml"):
        read_model(str(tmp_path / name))
    read_stated(StatedSizes(params=10**9))
    program = (
        "import sys\n"
        "from offload.tools.memest.source.read_model import *\n"
        "for name in ('config.json', 'o.yaml', '.'):\n"
        "    assert read_model(name).shape.numel\n"
        "assert read_stated(StatedSizes(params=10**9)).shape.numel > 9 * 10**8\n"
        "heavy = {'torch', 'numba', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environment = {
        "PYTHONPATH": child_environment()["PYTHONPATH"], "PATH": "/usr/bin:/bin",
        "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"],
    }  # fmt: skip
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, env=environment)
