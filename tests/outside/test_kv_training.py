"""KV caches in tiers while a model trains: rollouts change no token and no bit of the training."""

from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.errors import BudgetError, StateError, TierFullError, UnsupportedError
from tests.offload.engine_cases import HOST, NVME, assert_same_bits, on_the_cpu_alone, states_of
from tests.outside.trainer_cases import VOCABULARY, settings, tiny_llama, transformers
from tests.ranks.processes import run_ranks

pytestmark = on_the_cpu_alone("test_kv_dispatch.py has a device's")
PROMPTS = torch.randint(3, VOCABULARY, (4, 3, 7), generator=torch.Generator().manual_seed(1))
WAY = {"max_new_tokens": 12, "do_sample": True, "eos_token_id": None, "pad_token_id": 0}
SMALL = {"budget": {"host": "380KiB", "nvme": "64MiB"}, "kv": {"tokens": 64}}
OPTIMIZER = {"type": "adamw", "lr": 3e-3, "weight_decay": 0.1, "chunk": 1024}


def engine_of(folder: Path, home: Any, *, lora: bool = False, **keys: Any) -> offload.Engine:
    """All on nvme, but for a `home` of None: then all on host, and no caches in tiers."""
    model, placement = tiny_llama(), HOST if home is None else {**NVME, "kv": home}
    if lora:
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM"))
    return offload.initialize(model, settings(folder, placement, optimizer=OPTIMIZER, **keys))


def kv_nbytes(engine: offload.Engine) -> int:
    engine.check_integrity()
    return sum(each.by_class.get("kv", 0) for each in engine.report().tiers.values())


def train(model: Any, optimizer: Any, tokens: torch.Tensor) -> float:
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def trained(engine: offload.Engine, rank: int = 0, **more: Any) -> tuple[Any, ...]:
    """Tokens and losses, states, the uses that are expected of a step, and kv's peak on nvme."""
    model: Any = engine.module
    torch.manual_seed(3)
    seen = []
    with engine:
        for prompt in PROMPTS:
            way = {**WAY, "max_new_tokens": 12 - 5 * rank, "attention_mask": prompt > 0, **more}
            rollout = model.generate(input_ids=prompt, **way)
            assert kv_nbytes(engine) == 0
            seen.append((rollout.tolist(), train(model, engine.optimizer, rollout)))
        peak = engine.report().tiers["nvme"].peak_by_class.get("kv", 0)
        return seen, states_of(engine), engine.store.trace.cursor.schedule.uses, peak


def test_rollouts_with_caches_in_tiers_change_no_bit(tmp_path: Path) -> None:
    expected = trained(engine_of(tmp_path, None, lora=True))
    for kv, keys in (("host", {}), ("nvme", SMALL), ({"host": "40%", "nvme": "60%"}, SMALL)):
        got = trained(engine_of(tmp_path, kv, lora=True, **keys))
        assert got[0] == expected[0]
        assert_same_bits(got[1], expected[1])
        assert got[2] == expected[2]  # what prefetch and eviction follow
        assert (got[3] > 0) == (kv != "host")


def ranks_trained(folder: Path) -> list[Any]:
    """Of one of several ranks, whose rollouts have 12 and 7 tokens."""
    keys: dict[str, Any] = {"zero": {"stage": 3, "timeout_s": 30.0}, "kv": {"tokens": 64}}
    rank, ways = torch.distributed.get_rank(), ((None, False), ("nvme", False), ("nvme", True))
    return [trained(engine_of(folder, kv, **keys), rank, synced_gpus=sync)[:2] for kv, sync in ways]


@pytest.mark.slow
def test_ranks_generate_different_lengths(tmp_path: Path) -> None:
    for plain, *paged in run_ranks(2, tmp_path, ranks_trained, tmp_path):
        for got in paged:
            assert got[0] == plain[0]
            assert_same_bits(got[1], plain[1])


def test_a_cache_that_is_kept_outlives_updates_and_trains_nothing(tmp_path: Path) -> None:
    plain, outputs = tiny_llama(), []
    numbers = torch.optim.AdamW(plain.parameters(), lr=3e-3, weight_decay=0.1)
    with engine_of(tmp_path, "nvme", **SMALL) as engine:
        model: Any = engine.module
        for each, optimizer in ((plain, numbers), (model, engine.optimizer)):
            cache = transformers.DynamicCache(config=each.config)
            with torch.inference_mode():
                each(PROMPTS[0], past_key_values=cache)
            train(each, optimizer, PROMPTS[1])
            with torch.no_grad():
                outputs.append(each(PROMPTS[2], past_key_values=cache).logits)
        torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=3e-6)
        with pytest.raises(UnsupportedError, match=r"pass no gradient on.*torch\.no_grad"):
            model(PROMPTS[3], past_key_values=cache)
        with pytest.raises(TierFullError, match=r"tier full: KV cache, .*raise budget\."):
            model.generate(PROMPTS[0].repeat(1, 250), **WAY)
        train(model, engine.optimizer, PROMPTS[1])
        with pytest.raises(UnsupportedError, match=r"is a StaticLayer.*DynamicCache"):
            model.generate(PROMPTS[0], cache_implementation="static", **WAY)
        engine.close(keep="host")
        with torch.no_grad(), pytest.raises(StateError, match="the engine is closed"):
            model(PROMPTS[3], past_key_values=cache)
        assert model.generate(PROMPTS[0], **WAY).shape == (3, 19)


def test_what_has_no_place_is_refused_before_anything(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"budget\.host: .* short of .*kv .*lower kv\.tokens"):
        engine_of(tmp_path, "nvme", kv={"tokens": 1 << 20})
    with pytest.raises(UnsupportedError, match=r"placement\.kv: Linear has no KV cache"):
        offload.initialize(torch.nn.Linear(4, 4), {"placement": {"kv": "nvme"}})
