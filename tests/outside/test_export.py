"""A folder that `offload checkpoint export` writes is one that transformers opens as it is."""

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
from offload.tiered_model import DTYPES
from tests.offload.engine_cases import HOST, assert_same_bits, bits, config, seeded
from tests.offload.test_checkpoint_cli import run
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
    export(path, tmp_path / "out")
    plain, said = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said.values()), said
    with opened(folder, tmp_path, kind) as engine:
        engine.load_checkpoint(path)
        plain.config.name_or_path = engine.module.config.name_or_path
        assert_same_model(plain, engine)


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_experts_are_packed_as_in_memory(
    dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "model", "mixtral")
    path = checkpoint(folder, tmp_path)
    monkeypatch.setattr("offload.checkpoint.foreign.exporting.SHARD", "20KB")
    monkeypatch.setattr("offload.checkpoint.foreign.exporting._PIECE_NUMEL", 999)
    export(path, tmp_path / "out", dtype)
    plain = CAUSAL.from_pretrained(tmp_path / "out")
    assert plain.dtype == DTYPES[dtype or "fp32"]
    plain.save_pretrained(tmp_path / "expected", max_shard_size="20KB", save_original_format=False)
    actual, expected = (
        {name: tensor for file in (tmp_path / each).glob("*.safetensors")
         for name, tensor in load_file(file).items()}
        for each in ("out", "expected")
    )  # fmt: skip
    assert_same_bits(actual, expected)


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
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written == {"model_type": "mine", "dtype": "bfloat16"}
    (source / "config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
        export(tmp_path / "checkpoint", tmp_path / "another", None, source)
    assert not (tmp_path / "another").exists()
