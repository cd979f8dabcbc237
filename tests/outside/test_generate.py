"""`offload generate`: the text of transformers' own `generate`, streamed, and its closing table."""

from pathlib import Path
from typing import Any

import pytest
import torch

from offload.cli.app import main

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

LINES = ["the quick brown fox jumps over the lazy dog", "to be or not to be, naïve — 日本"] * 8
NEW = ["--max-new-tokens", "12"]


def tokenizer() -> Any:
    """A tokenizer of bytes and their pairs, trained on a few lines."""
    own = tokenizers.Tokenizer(tokenizers.models.BPE())
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>", "<pad>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    own.train_from_iterator(LINES, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=320, max_position_embeddings=64, bos_token_id=0,
        eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def placed(tmp_path: Path) -> list[str]:
    """Everything on nvme, with little room in memory."""
    path = tmp_path / "serve.yaml"
    path.write_text(
        "device: cpu\nbudget: {host: 200KiB, nvme: 64MiB}\nplacement: {parameters: nvme}\n"
        f"nvme: {{paths: [{tmp_path}]}}\n"
    )
    return ["--config", str(path)]


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["generate", *words])
    return int(caught.value.code or 0)


def plainly(folder: Path, prompt: str, **sampling: Any) -> str:
    own = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    ids = own([prompt], return_tensors="pt")["input_ids"]
    torch.manual_seed(7)
    tokens = model.generate(ids, max_new_tokens=12, **sampling)
    return str(own.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True))


# ---------------------------------------------------------------- the text
@pytest.mark.sample(2)
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 1.4}], ids=str)
def test_the_text_is_transformers_own(
    sampling: dict[str, Any], folder: Path, placed: list[str], capsys: Any
) -> None:
    transformers.GenerationConfig(**sampling).save_pretrained(folder)
    expected = plainly(folder, "to be or", **sampling)
    greedy = [] if sampling else ["--greedy", "--prompt-lookup", "3"]
    assert run(str(folder), *placed, "--prompt", "to be or", *NEW, "--seed", "7", *greedy) == 0
    said = capsys.readouterr()
    assert said.out == expected + "\n"  # nothing but the text
    for part in ("prefill: ", "decoding: ", "nvme read", "waited: ", "peak RSS"):
        assert part in said.err


def test_no_more_tokens_come_than_the_context_leaves(
    placed: list[str], tmp_path: Path, capsys: Any
) -> None:
    config = transformers.GPT2Config(
        n_positions=16, n_embd=32, n_layer=1, n_head=2, vocab_size=320, bos_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "short")
    tokenizer().save_pretrained(tmp_path / "short")
    length = len(tokenizer()("to be")["input_ids"])
    assert run(str(tmp_path / "short"), *placed, "--prompt", "to be") == 0
    assert f"decoding: {16 - length} tokens" in capsys.readouterr().err


# ---------------------------------------------------------------- what is refused
def test_what_cannot_be_meant_is_one_line(folder: Path, placed: list[str], capsys: Any) -> None:
    ok = [str(folder), *placed, "--prompt", "to be"]
    for words, said in (
        ([*ok, "--max-new-tokens", "0"], "greater than or equal"),
        ([str(folder), *placed, "--prompt", "x" * 99], "leave none of the 64 that the model was"),
        ([str(folder), "--prompt", " "], "has no tokens; give it some text"),
        (["nowhere", "--prompt", "x"], "nowhere is not a local folder"),
        ([*ok, *NEW, "-o", "budget.host=1KiB"], "budget.host"),
    ):
        assert run(*words) != 0
        error = capsys.readouterr().err
        assert said in " ".join(error.split()), words
        assert "Traceback" not in error
