"""`offload.from_pretrained` loads what transformers' own loads, to the bit: heads, ties, formats
and settings (every architecture: `test_causal_lm_zoo.py`). What it does not load is
refused by name.
"""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload.errors import CheckpointError, ConfigError, OffloadError, UnsupportedError
from offload.weights.lazy_tensors import LazyTensor
from tests.offload.engine_cases import HOST, NVME, bits, config, said_by
from tests.outside.pretrained_cases import FILE, assert_same_model, edit, opened, plainly, saved
from tests.outside.zoo import transformers

pytestmark = pytest.mark.usefixtures("quiet_transformers")

CAUSAL = transformers.AutoModelForCausalLM
CLASSES = transformers.AutoModelForSequenceClassification
PROGRAM = Path(__file__).with_name("pretrained_memory.py")
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
BART = {
    "vocab_size": 64, "max_position_embeddings": 64, "encoder_layers": 1, "encoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_layers": 1, "decoder_ffn_dim": 48,
    "decoder_attention_heads": 4, "d_model": 32, "num_beams": 3,
}  # fmt: skip
BERT = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "intermediate_size": 48,
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("llama"), "llama")


# ------------------------------------------------------------------------------------ the zoo
@pytest.mark.sample(6)
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mistral", "mixtral", "phi", "qwen2"])
def test_a_new_head_begins_as_transformers_begins_it(model_type: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", model_type)
    plain = plainly(folder, CLASSES, num_labels=3)
    with opened(folder, tmp_path, CLASSES, num_labels=3) as engine:
        assert_same_model(plain, engine)
        assert engine.module.config.num_labels == 3


def test_what_is_missing_and_what_is_not_expected_is_reported(
    llama: Path, tmp_path: Path, capfd: Any
) -> None:
    logger = logging.getLogger("transformers.modeling_utils")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        opened(llama, tmp_path, CLASSES).close()
    finally:
        logger.removeHandler(handler)
    (text,) = said
    rows = dict(line.split("|")[:2] for line in text.splitlines() if "|" in line)
    assert {k.strip(): v.strip() for k, v in rows.items()} == {
        "Key": "Status", "lm_head.weight": "UNEXPECTED", "score.weight": "MISSING",
    }  # fmt: skip


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TIED: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "equal": lambda tensors: {**tensors, HEAD: tensors[EMBEDDING].clone()},
    "different": lambda tensors: {**tensors, HEAD: tensors[EMBEDDING] + 1},
    "the head alone": lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}),
    "neither": lambda tensors: {n: t for n, t in tensors.items() if n != EMBEDDING},
    "as saved": lambda tensors: None,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("change", TIED)
def test_tied_weights_are_tied_as_transformers_ties_them(change: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama", tie_word_embeddings=True)
    edit(folder, TIED[change])
    plain = plainly(folder, CAUSAL)
    with opened(folder, tmp_path, CAUSAL) as engine:
        assert_same_model(plain, engine)
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) == (change != "different")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "settings",
    [
        {"attn_implementation": "eager"},
        {"ignore_mismatched_sizes": True, "vocab_size": 80},
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 3},
        {"key_mapping": {"^decoder.h": "model.layers"}},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
def test_settings_are_those_of_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama")
    if "key_mapping" in settings:
        edit(folder, lambda t: {k.replace("model.layers", "decoder.h"): v for k, v in t.items()})
    plain = plainly(folder, CAUSAL, **settings)
    with opened(folder, tmp_path, CAUSAL, **settings) as engine:
        assert_same_model(plain, engine)
        assert engine.module.config._attn_implementation == plain.config._attn_implementation


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["t5", "bart", "bert"])
def test_other_models_than_decoders(kind: str, tmp_path: Path) -> None:
    """Buffers that are files' (BART's), or made anew; a generation config inside the other one."""
    build: dict[str, Callable[[], Any]] = {
        "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
        "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**BART)),
        "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**BERT)),
    }
    model = build[kind]()
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model/generation_config.json").unlink(missing_ok=True)
    for each in (type(model), transformers.AutoModel):
        plain = plainly(tmp_path / "model", each)
        with opened(tmp_path / "model", tmp_path, each) as engine:
            assert_same_model(plain, engine)


# -------------------------------------------------------------------------------------- formats
@pytest.mark.sample(4)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_folder_in_any_format_is_loaded_in_any_precision(
    stored: torch.dtype, precision: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "model", "mixtral")
    edit(folder, lambda tensors: {n: t.to(stored) for n, t in tensors.items()})
    plain = plainly(folder, CAUSAL, precision)
    given = plainly(folder, CAUSAL, "fp32")  # its fp32 values, to be rounded by the engine
    keys = config(tmp_path, HOST, budget={"host": "64MiB"}, precision=precision)
    with offload.initialize(given, keys) as expected, expected.gathered():
        values = {n: p.detach().clone() for n, p in given.named_parameters()}
        masters = {n: expected.values.read(p, "master") for n, p in given.named_parameters()}
    with opened(folder, tmp_path, CAUSAL, precision) as engine, engine.gathered():
        for name, param in engine.module.named_parameters():
            assert bits(param.detach().clone()) == bits(values[name]), name
            assert bits(engine.values.read(param, "master")) == bits(masters[name]), name
        other = dict(plain.named_buffers())
        assert all(b.dtype == other[n].dtype for n, b in engine.module.named_buffers())


# -------------------------------------------------------------------------- before it trains
def step_losses(model: Any, optimizer: Any) -> list[float]:
    tokens = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(2))
    losses = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def new_values(model: Any) -> None:
    layer = model.model.layers[0]
    for module in (model.model.embed_tokens, model.lm_head, layer.mlp.up_proj):
        if isinstance(module.weight, LazyTensor):
            module.weight.data = module.weight.value()
    with torch.no_grad():
        model.model.embed_tokens.weight[3] = model.model.embed_tokens.weight[:3].mean(0)
    model.lm_head.weight.data.mul_(2)
    model.model.norm.weight.data = torch.full((32,), 0.5)
    torch.nn.init.normal_(layer.mlp.up_proj.weight, std=0.1)


def shorter(model: Any) -> None:
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1


def beside(model: Any) -> None:
    model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.Linear(model.vocab_size, 8))
    model.lm_head.append(torch.nn.Linear(8, model.vocab_size))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: None,
    "frozen": lambda model: model.model.requires_grad_(False),
    "more tokens": lambda model: model.resize_token_embeddings(70),
    "new values": new_values,
    "rounded": lambda model: model.bfloat16().float().to("cpu"),
    "shorter": shorter,
    "recomputed": lambda model: model.gradient_checkpointing_enable(),
    "beside": beside,
    "normed": lambda model: torch.nn.utils.parametrizations.weight_norm(model.lm_head),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_can_be_changed_before_it_trains(change: str, llama: Path, tmp_path: Path) -> None:
    def made(load: Any) -> Any:
        torch.manual_seed(5)
        model = load(llama)
        CHANGES[change](model)
        return model.train(), [p for p in model.parameters() if p.requires_grad]

    model, params = made(CAUSAL.from_pretrained)
    expected = step_losses(model, torch.optim.AdamW(params, lr=1e-2))
    model, params = made(offload.open_pretrained)
    keys = config(tmp_path, NVME, budget={"host": "64MiB", "nvme": "64MiB"}, optimizer={"lr": 1e-2})
    with offload.initialize(model, keys, parameters=params) as engine:
        assert step_losses(model, engine.optimizer) == pytest.approx(expected, abs=1e-5)


# ---------------------------------------------------------------------------------- memory
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_the_model_is_never_whole_in_ram(kind: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }  # fmt: skip
    for name, layers in (("model", 16), ("small", 2)):
        shape: Any = transformers.LlamaConfig(**sizes, num_hidden_layers=layers)
        if kind == "mixtral":
            sizes |= {"intermediate_size": 512, "num_local_experts": 4}
            shape = transformers.MixtralConfig(**sizes, num_hidden_layers=layers)
        CAUSAL.from_config(shape).save_pretrained(tmp_path / name, max_shard_size="100MB")
    host_mib = 96
    folders = (str(tmp_path / name) for name in ("model", ".", "small"))
    measured = said_by(PROGRAM, *folders, str(host_mib))
    limit = (host_mib << 20) + 3 * measured["largest"] + (64 << 20)
    assert measured["peak"] - measured["baseline"] < limit < measured["model"], measured


# --------------------------------------------------------------------------------- refusals
def configured(**keys: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))

    return change


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            lambda folder: (folder / FILE).unlink(), ConfigError,
            "has no model.safetensors and no model.safetensors.index",
        ),
        (
            lambda folder: (folder / FILE).rename(folder / "pytorch_model.bin"), ConfigError,
            "opens no pickles .* model.save_pretrained",
        ),
        (lambda folder: (folder / "config.json").unlink(), ConfigError, "has no config.json"),
        (
            lambda folder: (folder / "adapter_config.json").write_text("{}"), UnsupportedError,
            "holds an adapter .*PeftModel.from_pretrained",
        ),
        (
            configured(quantization_config={"quant_method": "hqq"}), UnsupportedError,
            "weights quantized by hqq, which is not read here",
        ),
        (configured(architectures=["FooForCausalLM"]), ConfigError, "FooForCausalLM"),
        (configured(architectures=None), ConfigError, "names no class"),
        (
            configured(model_type="foo", auto_map={"AutoConfig": "code.Config"}), ConfigError,
            "get_class_from_dynamic_module",
        ),
        (configured(vocab_size=80), CheckpointError, "ignore_mismatched_sizes=True"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_loaded_is_refused_by_name(
    change: Any, kind: type[OffloadError], message: str, llama: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    change(folder)
    with pytest.raises(kind, match=message):
        offload.open_pretrained(folder, model_class=CAUSAL if "dynamic" in message else None)


@pytest.mark.parametrize("name", ["device_map", "dtype", "load_in_8bit", "revision", "state_dict"])
def test_arguments_that_would_mean_something_else_are_refused(name: str, llama: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name}=: "):
        offload.from_pretrained(llama, {}, **{name: "auto"})


def by_data(model: Any) -> None:
    model.lm_head.weight.data = model.model.embed_tokens.weight.data


def by_a_parameter(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight[:].detach())


@pytest.mark.parametrize("tie", [by_data, by_a_parameter])
def test_weights_tied_by_their_memory_are_refused_by_name(
    tie: Any, llama: Path, tmp_path: Path
) -> None:
    for load in (CAUSAL.from_pretrained, offload.open_pretrained):
        model = load(llama)
        tie(model)
        with pytest.raises(UnsupportedError, match=r"embed_tokens\.weight and lm_head\.weight h"):
            offload.initialize(model, config(tmp_path, HOST))
