"""KV caches of dispatched models: `generate` gives the same tokens and logits, leaving nothing."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)
from transformers.cache_utils import DynamicCache

import offload
import offload.tiered_model
from offload.errors import BudgetError, TierFullError, UnsupportedError
from tests.offload.engine_cases import DEVICE_BUDGET, ON, on_a_gpu_too

MIXED = {"host": "40%", "nvme": "60%"}
PLACEMENTS: list[Any] = ["host", "nvme", MIXED]
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 61,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "eos_token_id": None, "bos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
PROMPT = torch.randint(3, 61, (2, 13), generator=torch.Generator().manual_seed(1)).to(ON)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "assisted": {"prompt_lookup_num_tokens": 3},
    "prompt in chunks": {"prefill_chunk_size": 5},
    "no cache": {"use_cache": False},
}


def llama(**keys: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, **keys)).eval().requires_grad_(False).to(ON)


def gemma() -> Any:
    """Windows of 7 tokens in every other layer."""
    torch.manual_seed(0)
    types = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=7, layer_types=types)
    return Gemma3ForCausalLM(config).eval().requires_grad_(False).to(ON)


def bart() -> Any:
    torch.manual_seed(0)
    config = BartConfig(
        d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=61,
        eos_token_id=None, forced_eos_token_id=None, bos_token_id=1, pad_token_id=0,
        decoder_start_token_id=2,
    )  # fmt: skip
    return BartForConditionalGeneration(config).eval().requires_grad_(False).to(ON)


MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "gemma": gemma, "bart": bart}


def dispatched(model: Any, folder: Path, tier: Any, **keys: Any) -> Any:
    """With pages of two tokens of two sequences, unless `keys` say else."""
    settings = {
        "placement": {"parameters": "nvme", "kv": tier}, "kv": {"tokens": 32}, "device": ON,
        "budget": {"host": "2MiB", "nvme": "64MiB", **DEVICE_BUDGET},
        "nvme": {"paths": [str(folder)]}, **keys,
    }  # fmt: skip
    return offload.dispatched(offload.dispatch(model, settings))


def generated(model: Any, prompt: torch.Tensor = PROMPT, **keys: Any) -> Any:
    torch.manual_seed(3)
    return model.generate(
        prompt, max_new_tokens=9, return_dict_in_generate=True, output_logits=True, **keys
    )


def bits(output: Any) -> tuple[list[list[int]], bytes]:
    return output.sequences.tolist(), torch.stack(output.logits).cpu().numpy().tobytes()


def kv_nbytes(owner: Any) -> int:
    owner.check_integrity()
    return sum(each.by_class.get("kv", 0) for each in owner.report().tiers.values())


# -------------------------------------------------------------------------------- what it computes
@on_a_gpu_too
@pytest.mark.sample(4)
@pytest.mark.parametrize("kv", PLACEMENTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_logits_are_those_in_ram(name: str, kv: Any, tmp_path: Path, long: bool) -> None:
    plain, model = MODELS[name](), MODELS[name]()
    with dispatched(model, tmp_path, kv) as owner:
        for way, keys in WAYS.items() if long or kv == MIXED else [("beams", WAYS["beams"])]:
            prompt = PROMPT[:1] if way == "assisted" else PROMPT
            expected = bits(generated(plain, prompt, **keys))
            assert bits(generated(model, prompt, **keys)) == expected, way
            assert kv_nbytes(owner) == 0
        peaks = {str(t): r.peak_by_class.get("kv", 0) for t, r in owner.report().tiers.items()}
        assert (peaks["nvme"] > 0) == (kv != "host")


def counting() -> Any:
    """Generates 0 to 8 in turn: each token's row of the head is the embedding of the one before."""
    model = llama()
    embedded, head = model.model.embed_tokens.weight, model.lm_head.weight
    embedded[:9] = torch.eye(9, 32)
    head.zero_()[:9] = embedded[torch.arange(-1, 8) % 9]
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.1)
        layer.mlp.down_proj.weight.mul_(0.1)
    return model


@on_a_gpu_too
@pytest.mark.parametrize("kv", [None, MIXED], ids=str)
def test_assisted_decoding_has_the_tokens_of_greedy_decoding_in_fewer_passes(
    kv: Any, tmp_path: Path
) -> None:
    prompt = (torch.arange(18) % 9)[None].to(ON)
    expected = counting().generate(prompt, max_new_tokens=20, do_sample=False)
    assert expected[0].tolist() == [token % 9 for token in range(38)]
    model, assistant = counting(), counting()
    with dispatched(model, tmp_path, kv, kv={}), dispatched(assistant, tmp_path, None, kv={}):
        passes: list[int] = []
        model.register_forward_hook(lambda *_: passes.append(1))
        for way in (
            {"prompt_lookup_num_tokens": 9}, {"assistant_model": assistant},
            {"assistant_model": counting()},
        ):  # fmt: skip
            passes.clear()
            actual = model.generate(prompt, max_new_tokens=20, do_sample=False, **way)
            assert actual.tolist() == expected.tolist(), way
            assert len(passes) <= 5, way


def test_a_prompt_is_computed_once_and_used_again(tmp_path: Path) -> None:
    plain, model = llama(), llama()
    with dispatched(model, tmp_path, MIXED) as owner:
        outputs = []
        for each in (plain, model):
            cache = DynamicCache(config=each.config)
            with torch.no_grad():
                each(PROMPT, past_key_values=cache)
            runs = []
            for ends in ([[5], [6]], [[7], [8]]):
                prompt = torch.cat([PROMPT, torch.tensor(ends)], dim=1)
                runs.append(generated(each, prompt, past_key_values=copy.deepcopy(cache)))
            outputs.append([bits(run) for run in runs])
            del cache, runs
        assert outputs[0] == outputs[1]
        assert kv_nbytes(owner) == 0


# -------------------------------------------------------------------------------- in 8 bits
@on_a_gpu_too
def test_8_bits_are_the_same_in_every_tier_and_near(tmp_path: Path) -> None:
    expected = torch.stack(generated(llama()).logits)
    logits = []
    budget = {"host": "8MiB", **DEVICE_BUDGET}
    for kv in PLACEMENTS:
        for tokens in (32, 4096):
            keys = {"kv": {"dtype": "int8", "tokens": tokens}, "budget": budget}
            with dispatched(llama(), tmp_path, kv, **keys) as owner:
                logits.append(torch.stack(generated(owner.module).logits))
    assert all(torch.equal(each, logits[0]) for each in logits)
    assert 0 < (logits[0] - expected).abs().max() < 0.01 * expected.abs().max()


# -------------------------------------------------------------------------------- budgets
def test_a_budget_too_small_for_one_token_is_refused_before_anything(tmp_path: Path) -> None:
    model = llama()
    with pytest.raises(BudgetError, match=r"budget\.nvme: .* short of .*kv .*raise budget\.nvme"):
        dispatched(model, tmp_path, "nvme", kv={}, budget={"host": "2MiB", "nvme": "96KiB"})
    assert bits(generated(model)) == bits(generated(llama()))


@pytest.mark.sample(2)
@pytest.mark.parametrize("kv", ["host", "nvme"])
def test_running_out_of_room_says_what_to_raise_and_the_model_goes_on(
    kv: str, tmp_path: Path
) -> None:
    budget = {"host": "512KiB", "nvme": "480KiB" if kv == "nvme" else "64MiB"}
    with dispatched(llama(), tmp_path, kv, budget=budget) as owner:
        long = PROMPT.repeat(1, 80)
        with pytest.raises(TierFullError, match=rf"{kv} tier full: KV cache, layer .*{kv}") as full:
            generated(owner.module, long)
        assert full.value.needed_nbytes > 0
        del full
        gc.collect()
        assert kv_nbytes(owner) == 0
        assert bits(generated(owner.module)) == bits(generated(llama()))


# -------------------------------------------------------------------------------- refusals
def test_another_batch_of_a_cache_with_tokens_is_refused(tmp_path: Path) -> None:
    with dispatched(llama(), tmp_path, "nvme") as owner, torch.no_grad():
        cache = DynamicCache()
        owner.module(torch.tensor([[1, 2, 3]]), past_key_values=cache)
        with pytest.raises(UnsupportedError, match="cannot be replaced"):
            cache.batch_repeat_interleave(2)
        with pytest.raises(UnsupportedError, match="has a batch of 1, and is to have one of 2"):
            cache.reorder_cache(torch.tensor([0, 0]))


def test_gradients_through_a_cache_are_refused(tmp_path: Path) -> None:
    with dispatched(llama(), tmp_path, "nvme") as owner:
        embeds = torch.randn(2, 3, 32, requires_grad=True)
        with pytest.raises(UnsupportedError, match=r"pass no gradient on.*use_cache=False"):
            owner.module(inputs_embeds=embeds, past_key_values=DynamicCache())


def test_a_model_without_a_known_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"placement\.kv: Linear has no KV cache"):
        dispatched(torch.nn.Linear(4, 4), tmp_path, "nvme")
    rwkv = RwkvForCausalLM(RwkvConfig(hidden_size=32, vocab_size=61, num_hidden_layers=2))
    with pytest.raises(UnsupportedError, match=r"placement\.kv: RwkvForCausalLM has no KV cache"):
        dispatched(rwkv, tmp_path, "nvme")
