"""`save_pretrained` of an engine's model writes the files of the model's own, piece by piece."""

import contextlib
import importlib
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import offload
from offload.checkpoint.format.safetensors_file import SafetensorsWriter
from offload.errors import CheckpointError, NoSpaceError, PathError, StateError
from tests.offload.engine_cases import NVME, assert_same_bits, config, seeded
from tests.outside.pretrained_cases import assert_same_files
from tests.outside.trainer_cases import tiny_llama, transformers, values_of

safetensors = pytest.importorskip("safetensors.torch")


loading = importlib.import_module("offload.integrations.transformers.pretrained")
saving = importlib.import_module("offload.integrations.transformers.pretrained_save")


BUDGET = {"host": "64MiB", "nvme": "256MiB"}
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("quiet_transformers")


def mixtral() -> Any:
    """Its files have experts one by one, and gates apart from what they are fused with."""
    settings = transformers.MixtralConfig(num_local_experts=4, **SMALL)
    return transformers.MixtralForCausalLM(settings)


def with_engine(model: nn.Module, folder: Path, **keys: Any) -> offload.Engine:
    engine = offload.initialize(
        model, config(folder, keys.pop("placement", NVME), budget=BUDGET, **keys)
    )
    saving.StreamedSave.install(engine.module, engine)
    return engine


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("build_one", "keys"),
    [
        (tiny_llama, {}),
        (tiny_llama, {"max_shard_size": "20KB"}),
        (tiny_llama, {"max_shard_size": 1000, "variant": "x"}),
        (mixtral, {}),
        (mixtral, {"max_shard_size": "20KB"}),
        (mixtral, {"save_original_format": False}),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_the_files_are_those_of_the_models_own_method(
    build_one: Any, keys: dict[str, Any], tmp_path: Path
) -> None:
    model = build_one()
    model.save_pretrained(tmp_path / "expected", **dict(keys))
    with with_engine(model, tmp_path):
        model.save_pretrained(tmp_path / "found", **dict(keys))
        model.save_pretrained(tmp_path / "found", **dict(keys))  # over what is there
    assert_same_files(tmp_path / "found", tmp_path / "expected")
    assert "save_pretrained" not in vars(model)


def test_experts_one_by_one_are_loaded_into_packed_ones(tmp_path: Path) -> None:
    """In shards, and by ranges where they can be; of fewer experts nothing is loaded."""
    expected, model = seeded(mixtral), seeded(mixtral, 1)
    expected.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    with with_engine(model, tmp_path) as engine:
        before = values_of(model)
        other = transformers.MixtralConfig(num_local_experts=2, **SMALL)
        transformers.MixtralForCausalLM(other).save_pretrained(tmp_path / "other")
        with pytest.raises(CheckpointError, match="does not fit MixtralForCausalLM"):
            loading.load_weights(engine, tmp_path / "other")
        tiny_llama().save_pretrained(tmp_path / "llama")
        with pytest.raises(CheckpointError, match="has no"):
            loading.load_weights(engine, tmp_path / "llama")
        assert_same_bits(values_of(model), before)
        loading.load_weights(engine, tmp_path / "saved")
        assert_same_bits(values_of(model), values_of(expected))


# --------------------------------------------------------------- opened and dispatched models
@pytest.mark.sample(5)
@pytest.mark.parametrize("build_one", [tiny_llama, mixtral])
@pytest.mark.parametrize("state", ["opened", "dispatched", "trains"])
@pytest.mark.parametrize("keys", [{"max_shard_size": "20KB"}, {"save_original_format": False}])
def test_what_was_opened_is_saved_from_where_it_is(
    build_one: Any, state: str, keys: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    build_one().save_pretrained(tmp_path / "model")
    own = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    own.save_pretrained(tmp_path / "expected", **dict(keys))
    model: Any = offload.open_pretrained(tmp_path / "model")
    settings = config(tmp_path, NVME, budget=BUDGET)
    with contextlib.ExitStack() as closing:
        if state == "dispatched":
            offload.dispatch(model, {**settings, "placement": {"parameters": "nvme"}})
            closing.enter_context(offload.dispatched(model))
        elif state == "trains":
            closing.enter_context(offload.initialize(model, settings))
        whole = type(model).state_dict

        def valueless(*args: Any, **asked: Any) -> Any:
            assert asked.get("keep_vars"), "all values at once"
            return whole(*args, **asked)

        monkeypatch.setattr(type(model), "state_dict", valueless)
        model.save_pretrained(tmp_path / "found", **dict(keys))
        monkeypatch.undo()
    actual, expected = (tmp_path / name for name in ("found", "expected"))
    assert {p.name for p in actual.iterdir()} == {p.name for p in expected.iterdir()}
    for path in expected.glob("*.safetensors"):
        assert_same_bits(safetensors.load_file(actual / path.name), safetensors.load_file(path))


def test_a_model_of_whose_tensors_files_have_several_as_one_keeps_its_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = transformers.NomicBertConfig(**{**SMALL, "num_key_value_heads": 4})
    model = transformers.NomicBertModel(settings)
    model.save_pretrained(tmp_path / "expected", save_original_format=False)
    with with_engine(model, tmp_path), caplog.at_level("WARNING", "offload"):
        model.save_pretrained(tmp_path / "found")
    assert "attn.Wqkv.weight of files is" in caplog.text
    assert_same_files(tmp_path / "found", tmp_path / "expected")


def test_an_opened_model_is_not_written_over_its_own_files(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "model", max_shard_size="20KB")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    model: Any = offload.open_pretrained(tmp_path / "model")
    with pytest.raises(PathError, match="has the files that this model's weights are read from"):
        model.save_pretrained(tmp_path / "model/../model")
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    offload.dispatch(model, {"budget": {"host": "64MiB"}})
    with offload.dispatched(model):
        model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    opened: Any = offload.open_pretrained(tmp_path / "model")
    assert_same_bits(
        {n: p.value() for n, p in opened.named_parameters()}, dict(again.named_parameters())
    )
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == len(
        [name for name in before if name.endswith(".safetensors")]
    )


def test_a_failed_save_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    with with_engine(model, tmp_path) as engine:
        model.save_pretrained(tmp_path / "saved")
        before = sorted((p.name, p.read_bytes()) for p in (tmp_path / "saved").iterdir())

        def full(*_: Any) -> None:
            raise NoSpaceError("no space", path="here")

        monkeypatch.setattr(SafetensorsWriter, "append", full)
        with pytest.raises(NoSpaceError):
            model.save_pretrained(tmp_path / "saved")
        monkeypatch.undo()
        after = sorted((p.name, p.read_bytes()) for p in (tmp_path / "saved").iterdir())
        assert after == before
        with engine.gathered(), pytest.raises(StateError, match="is gathered"):
            model.save_pretrained(tmp_path / "other")
