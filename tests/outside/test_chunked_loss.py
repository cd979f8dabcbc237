"""`loss: {chunked: true}`: causal language models of transformers train as with whole logits."""

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.config import OffloadConfig
from offload.errors import ConfigError
from offload.losses.causal_lm import ChunkedLoss
from offload.planning.activations.trace import trace_activations
from offload.planning.plan.estimate import Workload
from tests.offload.engine_cases import HOST, NVME, config, seeded
from tests.outside.trainer_cases import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "qwen": ("Qwen3ForCausalLM", "Qwen3Config", {**SIZES, "head_dim": 8}),
    "gemma 2, capped": (
        "Gemma2ForCausalLM", "Gemma2Config",
        {**SIZES, "head_dim": 8, "final_logit_softcapping": 2.0},
    ),
    "gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**SIZES, "head_dim": 8}),
    "gpt 2, tied": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "mixtral, auxiliary loss": (
        "MixtralForCausalLM", "MixtralConfig",
        {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    ),
    "cohere, multiplied": ("CohereForCausalLM", "CohereConfig", {**SIZES, "logit_scale": 0.3}),
    "granite, divided": ("GraniteForCausalLM", "GraniteConfig", {**SIZES, "logits_scaling": 3.0}),
}  # fmt: skip
CHUNKED: dict[str, Any] = {"loss": {"chunked": True}, "optimizer": {"type": "sgd", "lr": 0.3}}
TOKENS = torch.arange(34).view(2, 17) * 7 % 97 + 3


pytestmark = pytest.mark.usefixtures("quiet_trainers")


def made(kind: str = "llama", **keys: Any) -> Any:
    model, settings, sizes = KINDS[kind]
    own = getattr(transformers, settings)(**{**sizes, **keys})
    return seeded(lambda: getattr(transformers, model)(own)).train()


def steps(model: Any, optimizer: Any) -> list[float]:
    """The losses of three steps of two passes, the second with a count of Trainer's, and of eval.
    Parts of rows have no labels."""
    labels, losses = TOKENS.clone(), []
    labels[0, :5] = -100
    for _ in range(3):
        for more in ({}, {"num_items_in_batch": torch.tensor(50)}):
            loss = model(input_ids=TOKENS, labels=labels, **more).loss
            (loss * 0.5).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    output = model.eval()(input_ids=TOKENS, labels=labels)
    assert output.logits.shape == (2, 17, 101)
    return [*losses, output.loss.item()]


@pytest.mark.parametrize("kind", KINDS)
def test_models_train_as_with_whole_logits(tmp_path: Path, kind: str) -> None:
    plain, results = made(kind), []
    expected = steps(plain, torch.optim.SGD(plain.parameters(), lr=0.3))
    for placement in (HOST, NVME):
        model = made(kind)
        with offload.initialize(model, config(tmp_path, placement, **CHUNKED)) as engine:
            losses = steps(model, engine.optimizer)
            results.append((losses, {k: v.clone() for k, v in model.state_dict().items()}))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    torch.testing.assert_close(results[0][0], expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(results[0][1], dict(plain.state_dict()), rtol=0, atol=1e-6)


def gradients(model: Any, engine: Any = None, **keys: Any) -> list[Tensor | None]:
    """The loss and gradients of one pass; of a model of its own without an engine."""
    torch.manual_seed(1)
    tokens = TOKENS.remainder(model.config.vocab_size)
    loss = model(input_ids=tokens, **{"labels": tokens, **keys}).loss
    loss.backward()
    params = [param for param in model.parameters() if param.requires_grad]
    return [loss.detach(), *(engine.gradient(p) if engine else p.grad for p in params)]


class Kept(nn.Module):
    """A head as PEFT's `modules_to_save` wraps it: the old one, and one to train."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.original_module = head.requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(head).requires_grad_()})

    def forward(self, x: Tensor) -> Any:
        return self.modules_to_save["default"](x)


def keep_the_head(model: Any) -> None:
    model.lm_head = Kept(model.lm_head)


def add_tokens(model: Any) -> None:
    torch.manual_seed(3)
    model.resize_token_embeddings(110)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a frozen head": lambda model: model.lm_head.requires_grad_(False),
    "a head to save": keep_the_head,
    "more tokens": add_tokens,
    "checkpoints": lambda model: model.gradient_checkpointing_enable(),
    "compiled": lambda model: model.compile(backend="eager"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_models_have_the_same_gradients(tmp_path: Path, change: str) -> None:
    model, plain = made(), made()
    for each in (model, plain):
        CHANGES[change](each)
    with offload.initialize(model, config(tmp_path, **CHUNKED)) as engine:
        torch.testing.assert_close(gradients(model, engine), gradients(plain), rtol=0, atol=1e-6)


TILED: dict[str, Any] = {"placement": {**NVME, "activations": {"checkpoint": True, "tiled_mlp": 5}}}


@pytest.mark.parametrize(
    ("kind", "keys", "own"),
    [
        *((kind, {}, TILED) for kind in KINDS if "mixtral" not in kind),
        ("llama", {"labels": torch.full_like(TOKENS, -100)}, CHUNKED),
        ("llama", {"labels": TOKENS[:, -4:], "logits_to_keep": 4}, CHUNKED),
        ("llama", {"shift_labels": TOKENS.roll(-1, 1), "num_items_in_batch": 7}, CHUNKED),
    ],
)
def test_calls_have_the_same_gradients(
    tmp_path: Path, kind: str, keys: dict[str, Any], own: dict[str, Any]
) -> None:
    model = made(kind)
    with offload.initialize(model, config(tmp_path, **own)) as engine:
        pair = gradients(model, engine, **keys), gradients(made(kind), **keys)
    torch.testing.assert_close(*pair, rtol=0, atol=1e-5 if keys else 1e-6, equal_nan=bool(keys))


def test_a_head_stored_in_8_bits_and_autocast(tmp_path: Path) -> None:
    model = made()
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name)
    stored = {"storage": {"weights": "int8", "group_size": 32, "skip": []}}
    plain = copy.deepcopy(model)
    with offload.initialize(model, config(tmp_path, **CHUNKED, **stored)) as engine:
        with engine.gathered(model), torch.no_grad():
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                theirs.copy_(ours)
        torch.testing.assert_close(gradients(model, engine), gradients(plain), rtol=0, atol=1e-6)
    model, plain = made(), made()
    with (
        offload.initialize(model, config(tmp_path, **CHUNKED)) as engine,
        torch.autocast("cpu", torch.bfloat16),
    ):
        pairs = zip(gradients(model, engine), gradients(plain), strict=True)
    for ours, theirs in pairs:
        assert ours is not None
        assert theirs is not None
        assert (ours - theirs).abs().max() <= 0.02 * theirs.abs().max()


def test_what_needs_logits_has_them_or_is_refused(tmp_path: Path) -> None:
    model = made()
    with offload.initialize(model, config(tmp_path, **CHUNKED)):
        output = model(input_ids=TOKENS, labels=TOKENS)
        for use in (
            lambda: output.logits.argmax(-1), lambda: output["logits"][..., :-1, :],
            lambda: output.logits + 1, lambda: torch.softmax(output.logits, -1),
            lambda: 2.0 * output.logits, lambda: len(output[1]), lambda: output.logits == 0,
        ):  # fmt: skip
            with pytest.raises(ConfigError, match=r"loss\.chunked: true"):
                use()
        with pytest.raises(ValueError, match="labels are"):
            model(input_ids=TOKENS, labels=TOKENS[:1])
        assert model(input_ids=TOKENS).logits.shape == (2, 17, 101)
        assert model.generate(TOKENS[:1, :4], max_new_tokens=3, do_sample=False).shape == (1, 7)
        output.loss.backward()
        for add in (model.lm_head.register_forward_hook, model.lm_head.register_full_backward_hook):
            hook = add(lambda *given: given[-1])
            with pytest.raises(ConfigError, match="has hooks"):
                model(input_ids=TOKENS, labels=TOKENS)
            hook.remove()
        before, model.loss_type = model.loss_type, "ForMaskedLM"
        with pytest.raises(ConfigError, match="loss_type has become ForMaskedLM"):
            model(input_ids=TOKENS, labels=TOKENS)
        model.loss_type = before
        model.loss_function = lambda logits, labels, **_: logits.mean()
        with pytest.raises(ConfigError, match="mean needs them"):
            model(input_ids=TOKENS, labels=TOKENS)
    assert model(input_ids=TOKENS).logits.shape == (2, 17, 101)  # an ordinary model again
    assert "forward" not in vars(model.lm_head)


class Scaled(nn.Linear):
    """A head that is more than a linear layer."""


def own_loss(model: Any) -> None:
    model.loss_function = lambda logits, labels, **_: logits.mean()


def other_head(model: Any) -> None:
    model.lm_head = Scaled(32, 101, bias=False)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "only linear layers": (lambda model: nn.Linear(3, 3), "no causal language model"),
    "no head": (lambda model: model.model, "no causal language model"),
    "a loss of its own": (own_loss, "only transformers' ForCausalLMLoss"),
    "a head of its own": (other_head, "only that of an nn.Linear"),
    "a hook": (lambda model: model.lm_head.register_forward_hook(print) and None, "has hooks"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_models_with_other_losses_are_refused(tmp_path: Path, why: str) -> None:
    change, said = REFUSED[why]
    model = made()
    changed = change(model) or model
    with pytest.raises(ConfigError, match=said):
        offload.initialize(changed, config(tmp_path, **CHUNKED))
    with offload.initialize(changed, config(tmp_path)):
        pass  # as it was


def test_a_trace_counts_no_whole_logits() -> None:
    facts = [
        trace_activations(
            made(vocab_size=32000), OffloadConfig.load({"loss": {"chunked": chunked}}),
            Workload(4, 1024), device="cpu",
        )
        for chunked in (True, False)
    ]  # fmt: skip
    logits = 4 * 4096 * 32000
    assert facts[0].peak_nbytes < 0.5 * logits
    assert facts[1].peak_nbytes > 2 * logits


@pytest.mark.slow
def test_every_causal_language_model_has_the_same_loss_or_is_refused() -> None:
    from tests.outside.zoo import NAMES, build

    ends: Counter[str] = Counter()
    for name in NAMES:
        try:
            model: Any = build(name)
            expected = gradients(model)
        except Exception as error:  # noqa: BLE001 -- not trained from a tiny configuration
            print(name, repr(error)[:90])
            continue
        model.zero_grad()
        try:
            loss = ChunkedLoss(model)
            actual = gradients(model)
            loss.remove()
        except ConfigError:
            ends["refused"] += 1
            continue
        for ours, theirs in zip(actual, expected, strict=True):
            assert (ours is None) == (theirs is None), name
            if ours is not None and theirs is not None:
                assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max() + 2e-8, name
        ends["the same"] += 1
    print(ends)
    assert ends == {"the same": 117, "refused": 13}  # docs/transformers.md says so
