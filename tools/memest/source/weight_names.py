"""Derives the modules of a model from the names of its weights:
`model.layers.12.mlp.up_proj.weight`.

Children that are all numbers are a list of blocks, as in nn.ModuleList; those that look alike (all
with modules inside, or all without) count as one class. Tied weights are stored once, so nothing
is tied here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offload.tools.memest.source.safetensors_header import HeaderTensor
from offload.zero.groups.module_tree import ModuleKind, ModuleTree, TreeParam

# buffers that older versions of transformers and other libraries store
_BUFFERS = (
    ".rotary_emb.inv_freq",
    ".masked_bias",
    ".position_ids",
    ".token_type_ids",
    ".num_batches_tracked",
    ".running_mean",
    ".running_var",
    ".e_score_correction_bias",
)


@dataclass(frozen=True)
class NamedWeights:
    """Modules derived from names, and the names that belong to none."""

    tree: ModuleTree
    buffers: tuple[str, ...]  # names taken for buffers


def tree_of_names(tensors: Mapping[str, HeaderTensor]) -> NamedWeights:
    """Return modules by dotted names, in the order in which a model would have them."""
    root = ModuleTree("")
    buffers = []
    for name, tensor in sorted(tensors.items(), key=lambda item: _order(item[0])):
        if _is_buffer(name, tensor):
            buffers.append(name)
            continue
        *path, last = name.split(".")
        module = root
        for part in path:
            module = module.children.setdefault(part, ModuleTree(""))
        module.params[last] = TreeParam(tensor.shape, managed=tensor.trainable)
    for module in root.modules():
        _name_kind(module)
    return NamedWeights(root, tuple(buffers))


def _is_buffer(name: str, tensor: HeaderTensor) -> bool:
    causal_mask = name.endswith((".attn.bias", ".attention.bias")) and len(tensor.shape) == 4
    return causal_mask or f".{name}".endswith(_BUFFERS)


def _order(name: str) -> list[tuple[int, int, str]]:
    """Return a key to sort names: numbers by value; embeddings come first and heads last, as in
    nearly every model."""
    parts: list[tuple[int, int, str]] = []
    for part in name.split("."):
        if part.isdecimal() and len(part) < 10:
            parts.append((1, int(part), ""))
        else:
            parts.append((_rank(part), 0, part))
    return parts


def _rank(part: str) -> int:
    if part == "weight":
        return -1  # modules list it before the bias
    if "emb" in part or part in ("wte", "wpe"):
        return 0
    return 2 if part in ("norm", "ln_f", "final_layernorm", "lm_head", "head", "score") else 1


def _name_kind(module: ModuleTree) -> None:
    children = module.children
    if not children or module.params or not all(name.isdecimal() for name in children):
        return
    module.kind = ModuleKind.CONTAINER
    for child in children.values():
        child.type_key = ("block" if child.children else "layer", tuple(child.params))
