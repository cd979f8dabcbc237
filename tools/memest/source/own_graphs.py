"""Which configurations have a forward of our own (`planning/decoder_modules`), and its settings.

Importing transformers takes longer than tracing what it builds. For the families most asked about
the trace runs on modules of our own, which call torch as transformers' (5.17) do; a test compares
every figure of the two traces. Whatever is not described here is traced on transformers' modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from offload.planning.decoder_settings import Settings
from offload.tools.memest.source.config_keys import Keys
from offload.tools.memest.source.decoder_pieces import head_dim, kv_heads
from offload.tools.memest.source.hugging_face import ModelConfiguration, family_tree

if TYPE_CHECKING:
    from torch import nn

AS_IN = "transformers 5.17"
_SILU = ("silu", "swish")
_ROPES = ("default", "linear", "llama3", "yarn")  # the others change their frequencies as they run
# By default; others need `use_sliding_window`, too.
_WINDOWS = {"mistral": 4096, "mixtral": None, "phi3": None, "gemma2": 4096}
_ASK_FOR_MORE = (  # asked for, they add operations or outputs
    "output_attentions", "output_hidden_states", "output_router_logits", "loss_type",
    "use_sliding_window", "router_jitter_noise", "reorder_and_upcast_attn", "torchscript",
    "use_bidirectional_attention",
)  # fmt: skip


def own_settings(configuration: ModelConfiguration, sequence: int) -> Settings | None:
    """How the model runs on sequences of that length; None if that is not described here."""
    family = configuration.family
    read = _READ.get(configuration.model_type)
    if family is None or read is None:
        return None
    values, keys = configuration.values, configuration.keys(family)
    if any(values.get(name) for name in _ASK_FOR_MORE) or not values.get("is_causal", True):
        return None
    if values.get("return_dict", True) is not True or not _windowless(values, sequence):
        return None
    return read(keys)


def own_model(configuration: ModelConfiguration, sequence: int) -> nn.Module | None:
    """The model on the meta device, made of our modules; None if it is not described here."""
    settings = own_settings(configuration, sequence)
    tree = family_tree(configuration)
    if settings is None or tree is None:
        return None
    from offload.planning.decoder_modules import model_of

    return model_of(tree, settings)


def traced_modules(configuration: ModelConfiguration, sequence: int) -> str:
    """Where the figures of a pass come from."""
    if own_settings(configuration, sequence) is None:
        return "activations and work: a trace of the modules of the installed transformers"
    return f"activations and work: a trace of memest's own modules, which equal those of {AS_IN}"


def _windowless(values: Mapping[str, Any], sequence: int) -> bool:
    """Whether attention sees all that came before: no mask is made then."""
    kind = values["model_type"]
    alternating = {"sliding_attention"} if kind == "gemma2" else set()
    if set(values.get("layer_types") or ()) - {"full_attention"} - alternating:
        return False
    if kind not in _WINDOWS:
        return True
    window = values.get("sliding_window", _WINDOWS[kind])
    if window is None:
        return not alternating
    return isinstance(window, int) and sequence < window


def _plain_rope(keys: Keys, ropes: tuple[str, ...]) -> bool:
    for name in ("rope_scaling", "rope_parameters"):
        rope = keys.raw(name)
        if rope is None:
            continue
        if not isinstance(rope, dict) or rope.get("partial_rotary_factor", 1.0) != 1.0:
            return False
        if rope.get("rope_type", rope.get("type", "default")) not in ropes:
            return False
    return keys.raw("partial_rotary_factor") in (None, 1.0)


def _llama(keys: Keys, ropes: tuple[str, ...] = _ROPES) -> Settings | None:
    return _rotary(keys, ropes) if keys.raw("hidden_act") in (None, *_SILU) else None


def _rotary(keys: Keys, ropes: tuple[str, ...] = _ROPES) -> Settings | None:
    dropout = _share(keys, "attention_dropout", 0.0)
    if dropout is None or not _plain_rope(keys, ropes):
        return None
    heads = keys.size("num_attention_heads")
    return Settings(heads, kv_heads(keys), head_dim(keys), attention_dropout=dropout)


def _olmo2(keys: Keys) -> Settings | None:
    found = _llama(keys)
    return found and replace(found, rotates_in_fp32=True)


def _phi3(keys: Keys) -> Settings | None:
    found, dropout = _llama(keys, ("default",)), _share(keys, "resid_pdrop", 0.0)
    return None if dropout is None else found and replace(found, residual_dropout=dropout)


def _gemma2(keys: Keys) -> Settings | None:
    if keys.raw("hidden_activation") not in (None, "gelu_pytorch_tanh"):
        return None
    found, cap = _rotary(keys), keys.raw("final_logit_softcapping")
    return found and replace(found, masks=2, caps_logits=cap is not None)


def _qwen3_moe(keys: Keys) -> Settings | None:
    return _mixture(keys, 8, norms_shares=keys.flag("norm_topk_prob"))


def _mixtral(keys: Keys) -> Settings | None:
    return _mixture(keys, 2, norms_shares=True)


def _mixture(keys: Keys, usual: int, *, norms_shares: bool) -> Settings | None:
    found, chosen = _llama(keys), keys.size_or("num_experts_per_tok", usual)
    if chosen > keys.size("num_local_experts"):
        return None
    return found and replace(found, experts_per_token=chosen, norms_shares=norms_shares)


def _gpt2(keys: Keys) -> Settings | None:
    dropouts = [_share(keys, name, 0.1) for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")]
    attention, embedding, residual = dropouts
    if attention is None or embedding is None or residual is None:
        return None
    if keys.raw("activation_function") not in (None, "gelu_new"):
        return None
    if keys.raw("pad_token_id") is not None or keys.size("n_embd") % keys.size("n_head"):
        return None
    heads = keys.size("n_head")
    return Settings(heads, heads, keys.quotient("n_embd", "n_head"), attention, embedding, residual)


def _share(keys: Keys, name: str, otherwise: float) -> float | None:
    """A number from 0 to below 1; None for anything else."""
    value = keys.raw(name)
    if value is None:
        return otherwise
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < 1 else None


_READ: dict[str, Callable[[Keys], Settings | None]] = {
    "llama": _llama, "mistral": _llama, "qwen2": _llama, "qwen3": _llama, "mixtral": _mixtral,
    "gpt2": _gpt2, "olmo2": _olmo2, "phi3": _phi3, "gemma2": _gemma2, "qwen3_moe": _qwen3_moe,
}  # fmt: skip
