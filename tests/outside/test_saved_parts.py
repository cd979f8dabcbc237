"""`save_pretrained` of a model, of a part of one, or of one around others writes its own tensors,
wherever each of them is: the files are those of an equal model in plain transformers."""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.errors import PathError, StateError, UnsupportedError
from tests.offload.engine_cases import HOST, NVME, config, seeded
from tests.outside.test_pretrained_save import BUDGET, SMALL, assert_same_files, mixtral
from tests.outside.trainer_cases import tiny_llama, transformers

safetensors = pytest.importorskip("safetensors.torch")
Open = Callable[[str], Any]  # a model of the folder of this name
BERT: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("quiet_transformers")


class Own(transformers.PreTrainedModel):  # type: ignore[name-defined,misc]
    """A user's class around another model."""

    config_class = transformers.LlamaConfig
    _supports_sdpa = True

    def __init__(self, settings: Any, inner: nn.Module) -> None:
        super().__init__(settings)
        self.head = nn.Linear(settings.hidden_size, 3)
        self.inner = inner
        self.register_buffer("scale", torch.full((2,), 0.5))
        self.post_init()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(input_ids, output_hidden_states=True).hidden_states[-1]
        return self.head(hidden) * self.scale.sum()


class Reward(nn.Module):
    """As many libraries have it: no model of transformers, around one."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.value = nn.Linear(base.config.hidden_size, 1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.base(input_ids, output_hidden_states=True).hidden_states[-1]
        return self.value(hidden)


def around(kind: Callable[[Any], nn.Module], base: Any) -> Any:
    return seeded(lambda: kind(base), seed=3)


def classifier(base: Any) -> Any:
    made = transformers.LlamaForSequenceClassification(base.config)
    made.model = base.model
    return made


def both(opened: Open) -> Any:
    return transformers.EncoderDecoderModel(encoder=opened("encoder"), decoder=opened("decoder"))


def loss_of(model: Any) -> torch.Tensor:
    tokens = torch.arange(16).view(2, 8)
    if isinstance(model, transformers.EncoderDecoderModel):
        output = model(input_ids=tokens, decoder_input_ids=tokens).logits
    else:
        output = model(input_ids=tokens)
        output = getattr(output, "logits", output)
    return output.float().pow(2).mean()


@dataclass(frozen=True)
class Shape:
    """A model, the names of the modules that are in tiers, and of those to save."""

    build: Callable[[Open], Any]
    parts: tuple[str, ...]
    saved: tuple[str, ...]


SHAPES = {
    "the whole": Shape(lambda opened: opened("llama"), ("",), ("", "model")),
    "a part": Shape(lambda opened: opened("llama"), ("model",), ("", "model")),
    "an untied part": Shape(lambda opened: opened("untied"), ("model",), ("", "model")),
    "a head": Shape(lambda opened: opened("untied"), ("lm_head",), ("", "model")),
    "a block": Shape(lambda opened: opened("llama"), ("model.layers.1",), ("", "model")),
    "experts": Shape(lambda opened: opened("mixtral"), ("model",), ("", "model")),
    "of two": Shape(both, ("",), ("", "encoder", "decoder")),
    "two parts": Shape(both, ("encoder", "decoder"), ("", "encoder", "decoder")),
    "one of two": Shape(both, ("decoder",), ("", "encoder", "decoder")),
    "two blocks": Shape(
        lambda opened: opened("llama"), ("model.layers.0", "model.layers.2"), ("", "model")
    ),
    "one's own": Shape(
        lambda opened: around(lambda base: Own(base.config, base), opened("llama")),
        ("",), ("", "inner", "inner.model"),
    ),
    "one's own, a part": Shape(
        lambda opened: around(lambda base: Own(base.config, base), opened("llama")),
        ("inner",), ("", "inner", "inner.model"),
    ),
    "a reward model": Shape(
        lambda opened: around(Reward, opened("llama")), ("",), ("base", "base.model")
    ),
    "a classifier": Shape(
        lambda opened: around(classifier, opened("llama")), ("",), ("", "model")
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("models")
    untied = transformers.LlamaConfig(**SMALL)
    bert = transformers.BertConfig(**BERT)
    decoder = transformers.BertConfig(**BERT, is_decoder=True, add_cross_attention=True)
    models = {
        "llama": tiny_llama,
        "untied": lambda: transformers.LlamaForCausalLM(untied),
        "mixtral": mixtral,
        "encoder": lambda: transformers.BertModel(bert),
        "decoder": lambda: transformers.BertLMHeadModel(decoder),
    }
    for name, build in models.items():
        seeded(build).save_pretrained(base / name)
    return base


def plain_model(shape: Shape, folders: Path) -> Any:
    def from_folder(name: str) -> Any:
        kind = {"encoder": transformers.AutoModel}.get(name, transformers.AutoModelForCausalLM)
        return kind.from_pretrained(folders / name)

    return shape.build(from_folder)


def put_into_tiers(part: nn.Module, how: str, folder: Path, closing: ExitStack) -> Any:
    """ "host" and "nvme" train, "dispatched" computes."""
    if how != "dispatched":
        made = offload.initialize(
            part, config(folder, HOST if how == "host" else NVME, budget=BUDGET)
        )
        return closing.enter_context(made)
    offload.dispatch(part, config(folder, {"parameters": "nvme"}, budget=BUDGET))
    closing.enter_context(offload.dispatched(part))
    return None


def saved_of(model: Any, shape: Shape, folder: Path, keys: dict[str, Any]) -> None:
    for name in shape.saved:
        model.get_submodule(name).save_pretrained(folder / (name or "whole"), **dict(keys))


def assert_saved(model: Any, plain: Any, shape: Shape, folder: Path, **keys: Any) -> None:
    saved_of(model, shape, folder / "found", keys)
    saved_of(plain, shape, folder / "expected", keys)
    for name in shape.saved:
        assert_same_files(
            folder / "found" / (name or "whole"), folder / "expected" / (name or "whole")
        )


@pytest.mark.sample(
    "a part-opened-dispatched-whole", "experts-opened-nvme-shards",
)  # fmt: skip
@pytest.mark.parametrize("keys", [{}, {"max_shard_size": "20KB"}], ids=["whole", "shards"])
@pytest.mark.parametrize("how", ["host", "nvme", "dispatched"])
@pytest.mark.parametrize("source", ["opened", "plain"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_model_saves_its_own_tensors_wherever_they_are(
    name: str, source: str, how: str, keys: dict[str, Any], folders: Path, tmp_path: Path
) -> None:
    """Before training, after a step, and when what had the tiers is closed."""
    if (name, source) in (("a part", "plain"), ("one of two", "opened")):
        pytest.skip("see test_what_transformers_itself_cannot_save_is_refused")
    shape = SHAPES[name]
    plain, model = plain_model(shape, folders), plain_model(shape, folders)
    if source == "opened":
        model = shape.build(lambda each: offload.open_pretrained(folders / each))
    with ExitStack() as closing:
        parts = [model.get_submodule(each) for each in shape.parts]
        engines = [put_into_tiers(each, how, tmp_path, closing) for each in parts]
        assert_saved(model, plain, shape, tmp_path / "before", **keys)
        if how != "dispatched":
            loss_of(model).backward()
            for engine in engines:
                engine.optimizer.step()
            plain.load_state_dict(model.state_dict())
            assert_saved(model, plain, shape, tmp_path / "after", **keys)
    assert_saved(model, plain, shape, tmp_path / "closed", **keys)


@pytest.mark.parametrize(("name", "source"), [("a part", "plain"), ("one of two", "opened")])
def test_what_transformers_itself_cannot_save_is_refused(
    name: str, source: str, folders: Path, tmp_path: Path
) -> None:
    """A model that was not opened, with a head that is tied to a part on nvme, or around weights
    that are still in files."""
    model = plain_model(SHAPES[name], folders)
    if source == "opened":
        model = SHAPES[name].build(lambda each: offload.open_pretrained(folders / each))
    with ExitStack() as closing:
        for each in SHAPES[name].parts:
            put_into_tiers(model.get_submodule(each), "nvme", tmp_path, closing)
        with pytest.raises(UnsupportedError, match="storage\\(\\) of"):
            model.save_pretrained(tmp_path / "found")
    assert not list((tmp_path / "found").glob("*.safetensors"))


def test_a_model_without_values_is_not_saved(folders: Path, tmp_path: Path) -> None:
    model: Any = offload.open_pretrained(folders / "llama")
    engine = offload.initialize(model.model, config(tmp_path, NVME, budget=BUDGET))
    engine.close("drop")
    with pytest.raises(StateError):
        model.save_pretrained(tmp_path / "found")
    assert not list((tmp_path / "found").glob("*.safetensors"))


def test_weights_that_are_still_in_files_are_not_written_over(
    folders: Path, tmp_path: Path
) -> None:
    """Nor where the other weights are in tiers already."""
    shutil.copytree(folders / "untied", tmp_path / "own")
    model: Any = offload.open_pretrained(tmp_path / "own")
    with offload.initialize(model.lm_head, config(tmp_path, NVME, budget=BUDGET)):
        for part in model, model.model:
            with pytest.raises(PathError, match="has the files that this model's weights"):
                part.save_pretrained(tmp_path / "own")
    assert_same_files(tmp_path / "own", folders / "untied")
