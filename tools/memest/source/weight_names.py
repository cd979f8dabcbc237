"""Derives the modules of a model from the names of its weights:
`model.layers.12.mlp.up_proj.weight`.

Children that are all numbers are a list of blocks, as in nn.ModuleList; those that look alike (all
with modules inside, or all without) count as one class. Tied weights are stored once, so nothing
is tied here.
"""

from collections.abc import Mapping
from functools import cache

import torch
from torch import nn

from offload.weights.tensor_file import Stored

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


def model_of_names(tensors: Mapping[str, Stored]) -> tuple[nn.Module, list[str]]:
    """Return a model on the meta device, whose modules are derived from dotted names, in the order
    in which a model would have them; and the names that are taken for buffers."""
    root = nn.Module()
    buffers = []
    for name, tensor in sorted(tensors.items(), key=lambda item: _order(item[0])):
        if _is_buffer(name, tensor):
            buffers.append(name)
            continue
        *path, last = name.split(".")
        module = root
        for part in path:
            # not add_module, which refuses the names of a module's own attributes
            module = module._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
        is_trained = is_trainable(tensor)
        dtype = torch.float32 if is_trained else torch.uint8
        values = torch.empty(tensor.shape, dtype=dtype, device=torch.device("meta"))
        module._parameters[last] = nn.Parameter(values, requires_grad=is_trained)
    return _with_lists(root), buffers


def is_trainable(tensor: Stored) -> bool:
    """Whether a tensor is real floating point of at least 16 bits; others are quantized, an index
    or complex."""
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1


def _is_buffer(name: str, tensor: Stored) -> bool:
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


@cache
def _class_of(is_block: bool, params: tuple[str, ...]) -> type[nn.Module]:
    """Return the class of entries of a list that look alike."""
    return type("Block" if is_block else "Layer", (nn.Module,), {"params": params})


def _with_lists(module: nn.Module) -> nn.Module:
    """Return the module with an nn.ModuleList for each one whose children are all numbers."""
    children = {name: _with_lists(child) for name, child in module.named_children()}
    module._modules.update(children)
    if not children or module._parameters or not all(name.isdecimal() for name in children):
        return module
    for child in children.values():
        if not isinstance(child, nn.ModuleList):
            child.__class__ = _class_of(bool(child._modules), tuple(child._parameters))
    module_list = nn.ModuleList()
    module_list._modules.update(children)
    return module_list
