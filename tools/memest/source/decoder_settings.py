"""The configurations that are traced on modules of memest (`decoder_modules`), and their settings.

Importing transformers takes longer than a trace. Our modules call torch as transformers' (5.17) do:
a test compares every figure of both traces. Other options are traced on the library's modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.tools.memest.source.config_keys import Keys
from offload.tools.memest.source.decoder_tree import head_dim, kv_heads
from offload.tools.memest.source.family import Family
from offload.tools.memest.source.hugging_face import ModelConfiguration, family_tree

if TYPE_CHECKING:
    from torch import nn

_ADD_OPERATIONS = (  # or outputs, where they are asked for
    "output_attentions", "output_hidden_states", "output_router_logits", "loss_type",
    "use_sliding_window", "router_jitter_noise", "reorder_and_upcast_attn", "torchscript",
    "use_bidirectional_attention",
)  # fmt: skip


@dataclass(frozen=True)
class DecoderSettings:
    """The settings that a forward depends on, apart from the shapes of its parameters."""

    family: Family
    heads: int
    kv_heads: int
    head_dim: int
    attention_dropout: float = 0.0
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    experts_per_token: int = 0
    norms_shares: bool = False  # of a token's experts, so that they sum to 1
    caps_logits: bool = False


def own_settings(configuration: ModelConfiguration, sequence: int) -> DecoderSettings | None:
    """Return the settings for sequences of that length; None if the model is not described here."""
    family = configuration.family
    if family is None:
        return None
    values, keys = configuration.values, configuration.keys(family)
    if any(values.get(name) for name in _ADD_OPERATIONS):
        return None
    if values.get("return_dict", True) is not True or not values.get("is_causal", True):
        return None
    activation, *known = family.activation
    if keys.raw(activation) not in known or not _sees_all(family, keys, sequence):
        return None
    return _gpt2_settings(family, keys) if family.is_gpt2 else _settings(family, keys)


def own_model(configuration: ModelConfiguration, sequence: int) -> nn.Module | None:
    """Return the model on the meta device, of memest's modules; None if not described here."""
    settings = own_settings(configuration, sequence)
    tree = family_tree(configuration)
    if settings is None or tree is None:
        return None
    from offload.tools.memest.source.decoder_modules import model_of

    return model_of(tree, settings)


def traced_modules(configuration: ModelConfiguration, sequence: int) -> str:
    """Return a note on the modules that the figures of a pass were traced on."""
    if own_settings(configuration, sequence) is None:
        return "activations and work: a trace of the modules of the installed transformers"
    return (
        "activations and work: a trace of memest's own modules, which equal those of "
        "transformers 5.17"
    )


def _sees_all(family: Family, keys: Keys, sequence: int) -> bool:
    """Whether attention sees all earlier tokens: no mask is created then."""
    windowed = {"sliding_attention"} if family.alternates else set()
    if set(keys.raw("layer_types") or ()) - {"full_attention"} - windowed:
        return False
    if not family.reads("sliding_window"):
        return True
    window = keys.raw("sliding_window")
    if window is None:
        return not family.alternates
    return isinstance(window, int) and sequence < window


def _settings(family: Family, keys: Keys) -> DecoderSettings | None:
    shares = _shares(family, keys, "attention_dropout", "resid_pdrop")
    if shares is None or not _plain_ropes(family, keys):
        return None
    chosen = keys.size("num_experts_per_tok") if family.mixture else 0
    if chosen and chosen > keys.size("num_local_experts"):
        return None
    cap = "final_logit_softcapping"
    caps = family.reads(cap) and keys.raw(cap) is not None
    return DecoderSettings(
        family, keys.size("num_attention_heads"), kv_heads(keys), head_dim(keys),
        attention_dropout=shares[0], residual_dropout=shares[1], experts_per_token=chosen,
        norms_shares=family.flag(keys, "norm_topk_prob"), caps_logits=caps,
    )  # fmt: skip


def _gpt2_settings(family: Family, keys: Keys) -> DecoderSettings | None:
    shares = _shares(family, keys, "attn_pdrop", "embd_pdrop", "resid_pdrop")
    heads, hidden = keys.size("n_head"), keys.size("n_embd")
    if shares is None or keys.raw("pad_token_id") is not None or hidden % heads:
        return None
    attention, embedding, residual = shares
    return DecoderSettings(family, heads, heads, hidden // heads, attention, embedding, residual)


def _plain_ropes(family: Family, keys: Keys) -> bool:
    """Whether whole heads are rotated, by frequencies that do not change during a run."""
    ropes = [keys.raw(name) for name in ("rope_scaling", "rope_parameters")]
    ropes = [rope for rope in ropes if rope is not None]
    return keys.raw("partial_rotary_factor") in (None, 1.0) and all(
        isinstance(rope, Mapping)
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and rope.get("rope_type", rope.get("type", "default")) in family.ropes
        for rope in ropes
    )


def _shares(family: Family, keys: Keys, *names: str) -> list[float] | None:
    """Return numbers in [0, 1), 0 for those that the family does not read; None for others."""
    values: list[Any] = [keys.raw(name) if family.reads(name) else 0.0 for name in names]
    numbers = [isinstance(v, int | float) and not isinstance(v, bool) for v in values]
    return values if all(numbers) and all(0 <= value < 1 for value in values) else None
