"""Every causal language model of transformers that builds from a tiny random configuration trains
two steps with parameters, gradients and optimizer states on nvme, as in plain PyTorch to the bit.

Equal means: in both steps the loss and the gradient of every parameter. The plain copy takes over
the engine's weights after the first step, since AdamW itself agrees only to rounding.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from tests.offload.engine_cases import NVME, bits, config, gradients_of

pytestmark = pytest.mark.sample(4)

transformers = pytest.importorskip("transformers")
AUTO = importlib.import_module("transformers.models.auto.modeling_auto")
NAMES: dict[str, str] = dict(AUTO.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LEAST_EQUAL = 128  # of the 178 that transformers 5.17 has
LEAST_EQUAL_OF_SAMPLE = 12  # every eighth one, without --long

# One dictionary for all: each configuration takes the keys that it has.
SHRINK: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim": 32,
    "embedding_size": 32, "word_embed_proj_dim": 32, "intermediate_size": 48, "n_inner": 48,
    "ffn_dim": 48, "d_ff": 48, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_hidden_layers": 2,
    "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2, "encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8, "max_position_embeddings": 64, "n_positions": 64,
    "n_ctx": 64, "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "state_size": 8, "rotary_dim": 4,
    "layer_types": None, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "attention_dropout": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "dropout": 0.0, "layerdrop": 0.0,
    "is_decoder": True, "use_cache": False,
}  # fmt: skip
# Parameters beyond this make a model not tiny: the shrink dictionary does not reach its sizes.
MOST_NUMEL = 3_000_000

outcomes: Counter[str] = Counter()
reasons: dict[str, str] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("swap")


@pytest.fixture(autouse=True)
def _quiet_and_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)
    torch.set_num_threads(threads)


def tiny_config(model_type: str) -> Any:
    made = transformers.AutoConfig.for_model(model_type)
    made = getattr(made, "text_config", None) or made
    known = {key: value for key, value in SHRINK.items() if hasattr(made, key)}
    return type(made)(**known)


def build(model_type: str) -> nn.Module:
    """On the meta device first: a model that is not tiny is never allocated."""
    settings = tiny_config(model_type)
    model_class = getattr(transformers, NAMES[model_type])
    with torch.device("meta"):
        numel = sum(p.numel() for p in model_class(copy.deepcopy(settings)).parameters())
    if numel > MOST_NUMEL:
        raise ValueError(f"{numel} parameters after shrinking")
    torch.manual_seed(0)
    model: nn.Module = model_class(settings)
    return model.float().train()


def loss_and_gradients(model: nn.Module, tokens: Tensor) -> Tensor:
    torch.manual_seed(1)  # dropout that no key turns off
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


def plain_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_equal_step(plain: nn.Module, engine: offload.Engine, tokens: Tensor) -> None:
    expected_loss = loss_and_gradients(plain, tokens)
    loss = loss_and_gradients(engine.module, tokens)
    assert bits(loss) == bits(expected_loss), (loss, expected_loss)
    found, expected = gradients_of(engine), plain_gradients(plain)
    assert found.keys() == expected.keys()
    wrong = [name for name in found if bits(found[name]) != bits(expected[name])]
    assert not wrong, f"{len(wrong)} of {len(found)} gradients differ: {wrong[:4]}"


@pytest.mark.parametrize("model_type", sorted(NAMES))
def test_two_steps_on_nvme_equal_plain_pytorch(model_type: str, folder: Path, long: bool) -> None:
    if not long and sorted(NAMES).index(model_type) % 8 != 4:
        outcomes["left to --long"] += 1
        pytest.skip("every eighth architecture: --long has all")
    try:
        plain = build(model_type)
        tokens = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(2))
        loss_and_gradients(plain, tokens)
    except Exception as error:  # noqa: BLE001 - whatever keeps plain PyTorch from training it
        outcomes["does not build or train plainly"] += 1
        reasons[model_type] = f"{type(error).__name__}: {error}".split("\n")[0][:90]
        pytest.skip(reasons[model_type])
    plain.zero_grad()
    ours = build(model_type)
    outcomes["built"] += 1
    settings = config(
        folder, NVME, budget={"host": "64MiB", "nvme": "256MiB"}, optimizer={"chunk": 65536}
    )
    with offload.initialize(ours, settings) as engine:
        assert_equal_step(plain, engine, tokens)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        plain.zero_grad()
        plain.load_state_dict(engine.module.state_dict())
        assert_equal_step(plain, engine, tokens.flip(0))
        engine.optimizer.step()
        engine.settle()
        engine.check_integrity()
    outcomes["equal"] += 1


def test_enough_architectures_were_compared() -> None:
    """Runs last: fails when architectures stop building, whatever the reason."""
    print(dict(outcomes))
    if outcomes.total() < len(NAMES):
        pytest.skip("only part of the architectures was selected")
    least = LEAST_EQUAL_OF_SAMPLE if outcomes["left to --long"] else LEAST_EQUAL
    assert outcomes["equal"] >= least, reasons
