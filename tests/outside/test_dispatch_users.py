"""What users do with a model that generates, done with one whose weights are on nvme."""

import _thread
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload.errors import UnsupportedError

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
TOKENS = torch.randint(3, 60, (3, 7), generator=torch.Generator().manual_seed(2))
MASK = torch.ones_like(TOKENS)
MASK[1, :3] = 0  # padded on the left


def build() -> Any:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    made = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(made).eval()


def keys_of(folder: Path) -> dict[str, Any]:
    """Memory for about three of the blocks."""
    return {
        "device": "cpu", "budget": {"host": "400KiB", "nvme": "64MiB"}, "prefetch": 1,
        "placement": {"parameters": "nvme"}, "nvme": {"paths": [str(folder)]},
        "groups": {"blocks": ["LlamaDecoderLayer"]},
    }  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Any]:
    made = offload.dispatch(build(), keys_of(tmp_path))
    yield made
    offload.dispatched(made).close()


def generated(model: Any, **how: Any) -> Tensor:
    torch.manual_seed(1)
    keys = {"max_new_tokens": 6, "do_sample": False, **how}
    return model.generate(TOKENS, attention_mask=MASK, **keys)


def alone(model: Any, **how: Any) -> Tensor:
    return model.generate(TOKENS[:1], max_new_tokens=6, do_sample=False, **how)


WAYS: dict[str, Callable[[Any], Tensor]] = {
    "greedy": generated,
    "beams": lambda model: generated(model, num_beams=3),
    "sampling": lambda model: generated(model, do_sample=True, top_k=5),
    "static cache": lambda model: generated(
        model, cache_implementation="static", disable_compile=True
    ),
    "prompt lookup": lambda model: alone(model, prompt_lookup_num_tokens=2),
    "assistant": lambda model: alone(model, assistant_model=build()),
}


@pytest.mark.slow
def test_every_way_to_generate(model: Any) -> None:
    plain = build()
    for name, way in WAYS.items():
        assert torch.equal(way(model), way(plain)), name
        with torch.inference_mode():
            assert torch.equal(way(model), way(plain)), name


def test_a_pipeline(model: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w1")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="w0", eos_token="w2"
    )
    fast.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    texts = [
        transformers.pipeline("text-generation", model=each, tokenizer=fast)(
            "w5 w6", max_new_tokens=4, do_sample=False
        )
        for each in (model, build())
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_ctrl_c_in_the_middle_leaves_the_model_usable(model: Any) -> None:
    calls = []

    def press(*_: Any) -> None:
        calls.append(1)
        if len(calls) in (3, 10, 20):
            _thread.interrupt_main()

    hook = model.model.layers[3].self_attn.register_forward_hook(press)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            generated(model, max_new_tokens=20)
    hook.remove()
    assert torch.equal(generated(model), generated(build()))
    offload.dispatched(model).check_integrity()


def test_what_changes_the_model_is_refused(model: Any) -> None:
    for change in (
        lambda: model.half(), lambda: model.resize_token_embeddings(70),
        lambda: model.to(torch.bfloat16),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match=r"change the model before|in their tiers"):
            change()
    assert torch.equal(generated(model), generated(build()))


def test_a_trainer_evaluates_it_and_does_not_train_it(model: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    rows = [{"input_ids": row, "labels": row} for row in TOKENS]

    def trainer(each: Any) -> Any:
        settings = transformers.TrainingArguments(
            str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True
        )
        return transformers.Trainer(each, settings, train_dataset=rows)

    losses = [trainer(each).evaluate(rows)["eval_loss"] for each in (model, build())]
    assert losses[0] == losses[1]
    with pytest.raises(UnsupportedError, match="a dispatched model does not train"):
        trainer(model).train()


# ---------------------------------------------------------------------------- accelerate's offload
def _keeps_on_cpu(model: Any, folder: Path) -> None:
    accelerate.cpu_offload(model, "cpu")


def _keeps_on_disk(model: Any, folder: Path) -> None:
    accelerate.disk_offload(model, str(folder / "weights"), "cpu")


def _splits(model: Any, folder: Path) -> None:
    places = {"model": "cpu", "lm_head": "disk"}
    accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(folder / "weights"))


def _casts(model: Any, folder: Path) -> None:
    accelerate.big_modeling.attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32)


MOVING = [_keeps_on_cpu, _keeps_on_disk, _splits, _casts]


@pytest.mark.sample(4)
@pytest.mark.parametrize("moves", MOVING)
@pytest.mark.parametrize("begin", [offload.dispatch, offload.initialize])
def test_hooks_of_accelerate_that_move_weights_are_refused(
    moves: Callable[[Any, Path], None], begin: Any, tmp_path: Path
) -> None:
    model = build()
    moves(model, tmp_path)
    with pytest.raises(UnsupportedError, match=r"has a hook of accelerate .*remove_hook_from_mod"):
        begin(model, keys_of(tmp_path))
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    if moves is _keeps_on_cpu:  # as it was
        with offload.dispatched(offload.dispatch(model, keys_of(tmp_path))):
            assert torch.equal(generated(model), generated(build()))
