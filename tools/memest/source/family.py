"""A family of decoders: how its modules, and the way they run, differ from Llama's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from offload.tools.memest.source.config_keys import Keys

# Names of a block's norms: before and after attention, before and after the MLP.
Norms = tuple[str | None, str | None, str | None, str | None]
BEFORE: Norms = ("input_layernorm", None, "post_attention_layernorm", None)
AFTER: Norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
AROUND: Norms = (
    "input_layernorm", "post_attention_layernorm",
    "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A `model_type`. `defaults` has every key that the family reads, with the library's value.

    Names, shapes and tying are those of transformers' modules (5.17), without modules that have no
    parameters; the operations are theirs, too. Tests build and trace both and compare them.
    """

    prefix: str  # of the names of its classes: Llama
    defaults: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)  # another name of a key -> the key
    qkv_bias: bool = False  # of queries, keys and values alone, whatever the file says
    head_norms: str = ""  # q_norm and k_norm, over each `head` or over the `width` of all heads
    fused: bool = False  # queries, keys and values are one product; so are gate and up
    norms: Norms = BEFORE
    scaled_embedding: bool = False
    mixture: tuple[str, ...] = ()  # a router and experts instead of the MLP, in module order
    # what runs: other values of these keys are not described here
    activation: tuple[str, ...] = ("hidden_act", "silu", "swish")
    ropes: tuple[str, ...] = (
        "default",
        "linear",
        "llama3",
        "yarn",
    )  # the others change as they run
    alternates: bool = False  # every other block sees a window only
    rotates_in_fp32: bool = False

    @property
    def is_gpt2(self) -> bool:
        """Learned positions, layer norms and products of Conv1D instead of what Llama has."""
        return self.prefix == "GPT2"

    @property
    def architecture(self) -> str:
        """The class that is trained."""
        return f"{self.prefix}LMHeadModel" if self.is_gpt2 else f"{self.prefix}ForCausalLM"

    def reads(self, key: str) -> bool:
        """Whether the key means anything to this family."""
        return key in self.defaults

    def flag(self, keys: Keys, key: str) -> bool:
        return self.reads(key) and keys.flag(key)

    def keys(self, values: Mapping[str, Any], where: str) -> Keys:
        return Keys(values, self.defaults, where, self.aliases)
