"""The building blocks of descriptions of architectures."""

from __future__ import annotations

from collections.abc import Callable

from offload.zero.groups.module_tree import ModuleKind, ModuleTree, TreeParam


def module(class_name: str, **children: ModuleTree) -> ModuleTree:
    """Return a module without parameters of its own."""
    return ModuleTree(class_name, {}, children)


def weights(class_name: str, **shapes: tuple[int, ...]) -> ModuleTree:
    """Return a module with parameters of its own and no children."""
    return ModuleTree(class_name, {name: TreeParam(shape) for name, shape in shapes.items()})


def linear(inputs: int, outputs: int, *, bias: bool = False) -> ModuleTree:
    more = {"bias": (outputs,)} if bias else {}
    return weights("Linear", weight=(outputs, inputs), **more)


def conv1d(inputs: int, outputs: int) -> ModuleTree:
    """Return a linear layer as in GPT-2, with a transposed weight."""
    return weights("Conv1D", weight=(inputs, outputs), bias=(outputs,))


def embedding(count: int, width: int, class_name: str = "Embedding") -> ModuleTree:
    return weights(class_name, weight=(count, width))


def layer_norm(width: int) -> ModuleTree:
    return weights("LayerNorm", weight=(width,), bias=(width,))


def repeat(count: int, make: Callable[[int], ModuleTree]) -> ModuleTree:
    """Return an nn.ModuleList of `count` blocks; `make` is given each one's index."""
    blocks = {str(index): make(index) for index in range(count)}
    return ModuleTree("ModuleList", {}, blocks, ModuleKind.CONTAINER)


def tie(tied: bool, of: ModuleTree, to: ModuleTree) -> None:
    """Let `of` use the weight of `to`."""
    if tied:
        of.params["weight"] = to.params["weight"]
