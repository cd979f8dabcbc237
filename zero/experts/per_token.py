"""The number of experts that a router chooses for a token, from a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

# As the configurations of transformers (5.17) call it.
_CHOSEN = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k",
    "moe_k", "top_k_experts",
)  # fmt: skip
_ATTRIBUTES = ("num_experts_per_tok", "top_k", "k")  # of routers, and of modules with experts
_INSIDE = ("text_config", "ffn_config")
_BY_TYPE = {"switch_transformers": 1, "nllb-moe": 2}  # written into the code


def experts_per_token(values: Mapping[str, Any]) -> int | None:
    """Return the number that all layers share; None if none is named, or layers differ."""
    for key in _CHOSEN:
        if (found := _number(values.get(key))) is not None:
            return found
    for key in _INSIDE:
        inner = values.get(key)
        inner = inner if isinstance(inner, Mapping) else getattr(inner, "__dict__", None)
        if inner is not None and (found := experts_per_token(inner)) is not None:
            return found
    return _BY_TYPE.get(str(values.get("model_type")))


def experts_per_token_of(model: nn.Module) -> int | None:
    """Return the number from the model's configuration; without one, the number in its modules'
    attributes, if they agree on it."""
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        return experts_per_token(vars(config.get_text_config()))
    found = {
        number
        for module in model.modules()
        for name in _ATTRIBUTES
        if (number := _number(getattr(module, name, None))) is not None
    }
    return found.pop() if len(found) == 1 else None


def _number(value: Any) -> int | None:
    """Return one number, or that of a list with the same one for each layer; None otherwise."""
    if isinstance(value, list):
        return _number(value[0]) if value and all(each == value[0] for each in value) else None
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and value > 0 else None
