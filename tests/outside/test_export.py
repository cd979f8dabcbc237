"""A folder that `offload checkpoint export` writes is one that transformers opens as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import offload
from offload.checkpoint.foreign.exporting import export
from offload.checkpoint.format.reader import CheckpointReader
from offload.errors import CheckpointError
from offload.integrations.transformers.hub_export import write_hub_format
from offload.tiered_model import DTYPES
from tests.offload.engine_cases import HOST, assert_same_bits, bits, config, seeded
from tests.offload.test_checkpoint_cli import run
from tests.offload.test_checkpoint_forged import in_time, signed
from tests.outside.pretrained_cases import assert_same_model, opened, saved
from tests.outside.zoo import NAMES, transformers

pytestmark = pytest.mark.usefixtures("quiet_transformers")


CAUSAL = transformers.AutoModelForCausalLM
TOKENIZER = {"tokenizer.json": "{}", "merges.txt": "a b", "chat_template.jinja": "{{ x }}"}


def checkpoint(folder: Path, swap: Path, precision: str = "fp32", **settings: Any) -> Path:
    """Of the model in `folder`, its weights moved a little."""
    with opened(folder, swap, precision=precision, **settings) as engine:
        with engine.gathered(), torch.no_grad():
            for param in engine.module.parameters():
                param.mul_(1.25)
        engine.save_checkpoint(swap / "checkpoint")
    return swap / "checkpoint"


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", sorted(NAMES)[2::4])
def test_an_exported_model_is_the_trained_one(model_type: str, tmp_path: Path, long: bool) -> None:
    if not long and sorted(NAMES).index(model_type) % 12 != 2:
        pytest.skip("every twelfth architecture: --long has a fourth of them")
    kind = getattr(transformers, NAMES[model_type])
    try:
        folder = saved(tmp_path / "model", model_type)
        kind.from_pretrained(folder)
    except Exception as error:  # noqa: BLE001 - whatever keeps transformers from it
        pytest.skip(f"{type(error).__name__}: {error}"[:90])
    path = checkpoint(folder, tmp_path)
    for out, hub_format in ("own", None), ("out", write_hub_format):
        export(path, tmp_path / out, hub_format=hub_format)
        plain, said = kind.from_pretrained(tmp_path / out, output_loading_info=True)
        assert not any(said.values()), said
        with opened(folder, tmp_path, kind) as engine:
            engine.load_checkpoint(path)
            plain.config.name_or_path = engine.module.config.name_or_path
            assert_same_model(plain, engine)
    plain.save_pretrained(tmp_path / "expected")
    assert_same_bits(
        *(load_file(tmp_path / name / "model.safetensors") for name in ("out", "expected"))
    )


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_experts_are_one_by_one_as_transformers_saves_them(
    dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "model", "mixtral")
    path = checkpoint(folder, tmp_path)
    monkeypatch.setattr("offload.checkpoint.foreign.weight_shards.SHARD", "20KB")
    monkeypatch.setattr("offload.checkpoint.foreign.exporting._PIECE_NUMEL", 999)
    export(path, tmp_path / "out", dtype, hub_format=write_hub_format)
    plain = CAUSAL.from_pretrained(tmp_path / "out")
    assert plain.dtype == DTYPES[dtype or "fp32"]
    plain.save_pretrained(tmp_path / "expected", max_shard_size="20KB")
    for name in sorted(each.name for each in (tmp_path / "expected").glob("model*")):
        found, expected = (tmp_path / each / name for each in ("out", "expected"))
        if name.endswith(".json"):
            maps = [json.loads(each.read_text())["weight_map"] for each in (found, expected)]
            assert maps[0] == maps[1]
            assert any("experts.3." in tensor for tensor in maps[0])
        else:
            assert_same_bits(load_file(found), load_file(expected))


def test_a_class_that_transformers_does_not_have_keeps_its_own_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint(saved(tmp_path / "model", "llama"), tmp_path)
    with CheckpointReader(path) as reader:
        record = reader.manifest.model
    assert record is not None
    for change in {"architectures": ["Mine"]}, {"hidden_act": "none of them"}:
        other = record.model_copy(update={"config": {**record.config, **change}})
        with caplog.at_level("WARNING", "offload"):
            assert write_hub_format(other, [], tmp_path) is None
        assert "tensors keep the names" in caplog.text
        caplog.clear()


def test_a_head_and_its_settings_are_those_that_were_trained(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama")
    kind = transformers.AutoModelForSequenceClassification
    keys = config(tmp_path, HOST, budget={"host": "64MiB"})
    with offload.from_pretrained(folder, keys, model_class=kind, num_labels=5) as engine:
        engine.save_checkpoint(tmp_path / "checkpoint")
        with engine.gathered():
            score = engine.module.score.weight.detach().clone()  # type: ignore[union-attr]
    export(tmp_path / "checkpoint", tmp_path / "out")
    with opened(tmp_path / "out", tmp_path) as engine, engine.gathered():
        assert type(engine.module) is transformers.LlamaForSequenceClassification
        assert engine.module.config.num_labels == 5
        assert bits(engine.module.score.weight.detach()) == bits(score)


def test_the_tokenizer_comes_from_the_folder_that_the_model_came_from(
    tmp_path: Path, capsys: Any
) -> None:
    folder = saved(tmp_path / "model", "llama")
    path = checkpoint(folder, tmp_path)
    assert run("export", path, tmp_path / "without") == 0
    assert "without a tokenizer: --source FOLDER" in capsys.readouterr().out
    for name, text in TOKENIZER.items():
        (folder / name).write_text(text)
    (folder / "tokenizer.bin").write_text("not this")
    assert run("export", path, tmp_path / "out") == 0
    assert "chat_template.jinja, merges.txt, tokenizer.json" in capsys.readouterr().out
    assert all((tmp_path / "out" / n).read_text() == text for n, text in TOKENIZER.items())
    assert not (tmp_path / "out/tokenizer.bin").exists()

    other = tmp_path / "other"
    folder.rename(other)
    assert run("export", path, tmp_path / "gone") == 0
    assert "without a tokenizer" in capsys.readouterr().out
    assert run("export", path, tmp_path / "named", "--source", other) == 0
    assert (tmp_path / "named/merges.txt").is_file()
    assert run("export", path, tmp_path / "never", "--source", folder) == 2
    assert "is no folder; name the model's" in capsys.readouterr().err


def test_of_a_model_that_is_not_of_transformers_the_configuration_is_given(tmp_path: Path) -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Linear(4, 4)

    with offload.initialize(seeded(Wrapped), config(tmp_path, HOST)) as engine:
        engine.save_checkpoint(tmp_path / "checkpoint")
    with CheckpointReader(tmp_path / "checkpoint") as reader:
        assert reader.manifest.model is None
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "mine", "torch_dtype": "float16"}')
    export(tmp_path / "checkpoint", tmp_path / "out", "bf16", source)
    found = json.loads((tmp_path / "out/config.json").read_text())
    assert found == {"model_type": "mine", "dtype": "bfloat16"}
    (source / "config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
        export(tmp_path / "checkpoint", tmp_path / "another", None, source)
    assert not (tmp_path / "another").exists()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**8}, {"architectures": []}, {"architectures": ["Trainer"]},
        {"hidden_size": "x"}, {"vocab_size": -1}, {"num_attention_heads": 0},
        {"auto_map": {"A": "b"}},
    ],
    ids=str,
)  # fmt: skip
def test_a_configuration_that_was_made_up_builds_nothing(
    change: dict[str, Any], tmp_path: Path
) -> None:
    """The weights are written all the same, under their own names where transformers has none."""
    path = checkpoint(saved(tmp_path / "model", "llama"), tmp_path)
    content = json.loads((path / "manifest.json").read_text())
    del content["xxh3"]
    content["model"]["config"] |= change
    (path / "manifest.json").write_text(signed(content))
    with in_time():
        files = export(path, tmp_path / "out", hub_format=write_hub_format)
    assert tmp_path / "out/model.safetensors" in files
