"""Traces against real passes on the CPU: every figure is the same, to the byte."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from offload.gpt import LanguageModel, build_meta_model
from offload.planning.activations.trace import trace_activations
from offload.planning.plan.estimate import Workload
from offload.tiers.errors import UnsupportedError
from tests.planning.real_pass import DTYPES, config_of, packed_nbytes, real_facts

TINY = {"layers": 6, "hidden": 64, "heads": 4, "vocab": 256}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {**TINY, "tied": False},
    "grouped heads": {**TINY, "kv_heads": 2},
}
WORKLOAD = Workload(4, 128)  # large enough that some of what is saved leaves, and some stays


def _config(shape: str, **more: Any) -> Any:
    return config_of(train={"model": SHAPES[shape]}, **more)


CHECKPOINTS = (False, True, "selective")


@pytest.mark.sample("llama-bf16")
@pytest.mark.parametrize(
    ("shape", "precision"), [("llama", "fp32"), ("grouped heads", "bf16"), ("llama", "bf16")]
)
def test_a_trace_equals_a_real_pass(shape: str, precision: str, long: bool) -> None:
    passes = CHECKPOINTS if long or shape == "llama" else (True,)
    for checkpoint in passes:
        config = _config(shape, precision=precision, checkpoint=checkpoint)
        traced = trace_activations(build_meta_model(config), config, WORKLOAD)
        real = real_facts(LanguageModel(config.train.model), config, WORKLOAD)
        assert traced == real, checkpoint
        assert traced.peak_elsewhere_nbytes < traced.peak_nbytes or checkpoint
    print(f"{shape}, {precision}: {len(passes)} traces, largest difference 0 bytes, 0 operations")


@pytest.mark.sample(3)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_saved_bytes_are_those_that_autograd_packs(shape: str, precision: str) -> None:
    config = _config(shape, precision=precision)
    traced = trace_activations(build_meta_model(config), config, WORKLOAD)
    model = LanguageModel(config.train.model).to(DTYPES[precision])
    assert traced.saved_nbytes == packed_nbytes(model, WORKLOAD)


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_blocks_that_are_not_run_count_as_if_they_were(data: st.DataObject) -> None:
    model = {
        "layers": data.draw(st.integers(2, 9)),
        "hidden": 32 * data.draw(st.integers(1, 3)),
        "heads": 2,
        "tied": data.draw(st.booleans()),
    }
    config = config_of(
        data.draw(st.sampled_from(["fp32", "bf16"])),
        data.draw(st.sampled_from([False, True, "selective"])),
        train={"model": model},
    )
    workload = Workload(data.draw(st.integers(2, 5)), data.draw(st.integers(1, 200)))
    meta = build_meta_model(config)
    few = trace_activations(meta, config, workload)
    assert few == trace_activations(meta, config, workload, skip=False)


class _Mixed(nn.Module):
    """Every second block drops out; another one is wider."""

    def __init__(self, widths: list[int], drops: list[float]) -> None:
        super().__init__()
        self.first = nn.Embedding(8, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, w), nn.ReLU(), nn.Dropout(p), nn.Linear(w, 64))
            for w, p in zip(widths, drops, strict=True)
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        x = self.first(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return SimpleNamespace(loss=x.square().mean())


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("widths", "drops"),
    [
        ([96] * 12, [0.0, 0.1] * 6),
        ([96, 96, 128] * 6, [0.1] * 18),
        ([96] * 5 + [160] + [96] * 6, [0.0] * 12),
    ],
)
def test_blocks_that_differ_count_by_their_own(widths: list[int], drops: list[float]) -> None:
    config, workload = config_of(), Workload(4, 64)
    with torch.device("meta"):
        meta = _Mixed(widths, drops)
    traced = trace_activations(meta, config, workload)
    assert traced == real_facts(_Mixed(widths, drops), config, workload)


def test_flops_are_those_of_the_products() -> None:
    config = _config("llama")
    facts = trace_activations(build_meta_model(config), config, WORKLOAD)
    tokens, hidden, layers = WORKLOAD.tokens, TINY["hidden"], TINY["layers"]
    mlp = config.train.model.mlp_width
    weights = layers * (4 * hidden + 3 * mlp) * hidden + hidden * TINY["vocab"]
    scores = layers * 2 * tokens * WORKLOAD.sequence * hidden // 2  # the causal half
    assert facts.forward.flops == 2 * (tokens * weights + scores)
    again = tokens * hidden * TINY["vocab"]  # the loss computes its logits once more
    assert facts.backward.flops == 2 * (2 * tokens * weights + again + 5 * scores // 2)


def test_the_model_is_as_it_was() -> None:
    config = _config("llama", checkpoint=True)
    model = LanguageModel(config.train.model)
    model.register_buffer("table", torch.arange(4.0))
    before = {name: (id(x), x.clone()) for name, x in model.state_dict(keep_vars=True).items()}
    trace_activations(model, config, WORKLOAD, device="cuda")
    after = model.state_dict(keep_vars=True)
    assert {name: id(x) for name, x in after.items()} == {n: i for n, (i, _) in before.items()}
    assert all(torch.equal(x, before[name][1]) for name, x in after.items())
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())


def test_the_model_is_as_it_was_after_an_error() -> None:
    def fails(module: nn.Module, args: Any, output: Any) -> None:
        raise KeyError("stopped")

    config = _config("llama", checkpoint=True)
    model = build_meta_model(config)
    model.register_forward_hook(fails)
    with pytest.raises(KeyError, match="stopped"):
        trace_activations(model, config, WORKLOAD)
    assert all(type(p) is nn.Parameter and p.is_meta for p in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_of_unknown_input_says_what_is_known() -> None:
    with pytest.raises(UnsupportedError, match=r"forward takes input: .* input_ids and labels"):
        trace_activations(nn.Linear(8, 8), config_of(), WORKLOAD)


def test_code_that_depends_on_values_is_refused() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            x = self.layer(F.one_hot(input_ids, 4).float())
            return x.sum() if x.sum() > 0 else x.mean()

    with pytest.raises(UnsupportedError, match="Asks cannot be traced: its code depends on values"):
        trace_activations(Asks(), config_of(), Workload(2, 8))


def test_what_a_model_compiles_is_traced_as_it_is_written() -> None:
    def refuses(*_: Any) -> Any:
        raise AssertionError("compiled")

    class Compiles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.layer.compile(backend=refuses)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            x = self.layer(F.one_hot(input_ids, 4).float())
            return SimpleNamespace(loss=torch.compile(torch.sin, backend=refuses)(x).sum())

    assert trace_activations(Compiles(), config_of(), Workload(2, 8)).forward.flops > 0


# ---------------------------------------------------------------- models of transformers
SIZE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZE,
    "gpt2": {
        "n_embd": 64, "n_layer": 5, "n_head": 4, "vocab_size": 256, "n_positions": 128,
        "bos_token_id": 0, "eos_token_id": 1,
    },
    "qwen2_moe": {
        **SIZE, "num_experts": 4, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "gemma2": {**SIZE, "num_hidden_layers": 10, "head_dim": 16, "sliding_window": 16},
}  # fmt: skip
# layers alternate in gemma2; qwen2_moe routes by values, but its experts run as one grouped product
PASSES = {
    "llama": ("bf16", "selective"),
    "gpt2": ("fp32", True),
    "qwen2_moe": ("fp32", False),
    "gemma2": ("bf16", False),
}


def _built(kind: str, device: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **MODELS[kind])
    with torch.device(device):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.sample("llama")
@pytest.mark.parametrize("kind", MODELS)
def test_a_trace_of_a_transformers_model_equals_a_real_pass(kind: str, long: bool) -> None:
    workload = Workload(4, 40)
    passes = (("fp32", False), PASSES[kind]) if long else (PASSES[kind],)
    for precision, checkpoint in passes:
        config = config_of(precision, checkpoint)
        traced = trace_activations(_built(kind, "meta"), config, workload)
        real = real_facts(_built(kind, "cpu"), config, workload)
        assert traced == real, (precision, checkpoint)
    print(f"{kind}: {len(passes)} traces, largest difference 0 bytes, 0 FLOPs, 0 operations")
