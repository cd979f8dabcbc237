"""Modules of packed experts, access to their slices, and a small model of them."""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
activations = importlib.import_module("transformers.activations")
moe = importlib.import_module("transformers.integrations.moe")
experts = importlib.import_module("offload.weights.packed_experts")


class Slices:
    """Every expert's slices as leaves of their own, and what was asked for."""

    def __init__(self, module: nn.Module, frozen: Callable[[int, str], bool] | None = None) -> None:
        self.packed: dict[str, Tensor] = {
            n: getattr(module, n) for n in experts.weight_names(module)
        }
        self.leaves = [
            {name: self._leaf(expert, name, frozen) for name in self.packed}
            for expert in range(len(module.down_proj))  # type: ignore[arg-type]
        ]
        self.announced: list[list[int]] = []
        self.used: list[int] = []

    def _leaf(
        self, expert: int, name: str, frozen: Callable[[int, str], bool] | None
    ) -> nn.Parameter:
        packed = self.packed[name]
        trained = packed.requires_grad and not (frozen is not None and frozen(expert, name))
        return nn.Parameter(packed.detach()[expert].clone(), requires_grad=trained)

    def announce(self, experts: Sequence[int]) -> None:
        self.announced.append(list(experts))

    @contextmanager
    def using(self, expert: int) -> Iterator[Mapping[str, Tensor]]:
        self.used.append(expert)
        yield self.leaves[expert]

    def gradient(self, name: str) -> Tensor | None:
        """The gradient of the packed parameter: None if no expert has one."""
        gradients = [leaf[name].grad for leaf in self.leaves]
        if all(each is None for each in gradients):
            return None
        zeros = torch.zeros_like(self.packed[name][0])
        return torch.stack([zeros if each is None else each for each in gradients])


def packed_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules, by name, with transformers' default implementation of experts, or offload's."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "is_transposed")
        and module.config._experts_implementation in (experts.DEFAULT, experts.NAME)  # type: ignore[union-attr]
    }


@contextmanager
def sliced(modules: Sequence[nn.Module]) -> Iterator[list[Slices]]:
    """Inside, the modules compute with leaf slices."""
    made = [Slices(module) for module in modules]
    for module, slices in zip(modules, made, strict=True):
        experts.attach(module, slices)
    try:
        yield made
    finally:
        for module in modules:
            experts.detach(module)


def equal_or_no_tokens(actual: Tensor | None, expected: Tensor | None) -> bool:
    """Whether gradients have the same bits; none at all is a gradient of zeros."""
    if actual is None or expected is None:
        return all(each is None or not each.any() for each in (actual, expected))
    return actual.dtype == expected.dtype and torch.equal(actual, expected)


class Config:
    """The attributes that a module of experts reads of its configuration."""

    def __init__(self) -> None:
        self._experts_implementation = "grouped_mm"


@dataclass(frozen=True)
class Shape:
    """A module of experts: sizes, the decorator's flags and the activation."""

    experts: int
    hidden: int
    inner: int
    dtype: torch.dtype = torch.float32
    is_transposed: bool = False
    has_bias: bool = False
    has_gate: bool = True
    is_concatenated: bool = True
    own_gate: bool = False
    act: str = "silu"
    flags: Mapping[str, bool] = field(init=False)

    def __post_init__(self) -> None:
        names = ("is_transposed", "has_bias", "has_gate", "is_concatenated")
        object.__setattr__(self, "flags", {name: getattr(self, name) for name in names})

    def build(self, generator: torch.Generator) -> nn.Module:
        E, D, I = self.experts, self.hidden, self.inner  # noqa: E741

        def packed(*shape: int) -> nn.Parameter:
            drawn = torch.randn(E, *shape, generator=generator) / 3
            return nn.Parameter(drawn.to(self.dtype))

        def matrix(inputs: int, outputs: int) -> nn.Parameter:
            return packed(inputs, outputs) if self.is_transposed else packed(outputs, inputs)

        def init(module: Any, config: Config) -> None:
            nn.Module.__init__(module)
            up, width = ("gate_up_proj", 2 * I) if self.has_gate else ("up_proj", I)
            module.num_experts = E
            module.act_fn = activations.ACT2FN[self.act]
            setattr(module, up, matrix(D, width))
            module.down_proj = matrix(I, D)
            if self.has_bias:
                setattr(module, f"{up}_bias", packed(width))
                module.down_proj_bias = packed(D)

        def forward(module: Any, *args: Any) -> Tensor:
            raise AssertionError("the registry has another")

        body: dict[str, Any] = {"__init__": init, "forward": forward}
        if self.own_gate:
            body["_apply_gate"] = interleaved_gate
        made = moe.use_experts_implementation(type("Experts", (nn.Module,), body), **self.flags)
        return made(Config())


def interleaved_gate(module: nn.Module, gate_up: Tensor) -> Tensor:
    """As gpt-oss has it."""
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate = gate.clamp(max=7.0)
    up = up.clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


# ------------------------------------------------ a small model of experts, a module each or packed
EXPERTS, HIDDEN, INNER = 8, 32, 32
Call = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """Each token goes to the experts that it is told to."""

    def __init__(self, generator: torch.Generator, *, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        if packed:
            self.experts = Shape(EXPERTS, HIDDEN, INNER).build(generator)
        else:
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(HIDDEN, 2 * INNER), nn.GELU(), nn.Linear(2 * INNER, HIDDEN))
                for _ in range(EXPERTS)
            )

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:  # [T, D], [T, K] -> [T, D]
        weights = self.gate(x).softmax(-1).gather(1, chosen)
        if self.packed:
            routed: Tensor = self.experts(x, chosen, weights)
            return x + routed
        assert isinstance(self.experts, nn.ModuleList), "not packed"
        for number, expert in enumerate(self.experts):
            tokens, place = (chosen == number).nonzero(as_tuple=True)
            if len(tokens):
                x = x.index_add(0, tokens, expert(x[tokens]) * weights[tokens, place, None])
        return x


class Routed(nn.Module):
    def __init__(self, layers: int, *, packed: bool, call: Call | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(Block(generator, packed=packed) for _ in range(layers))
        self._call: Call = call or (lambda block, x, chosen: block(x, chosen))

    def forward(self, x: Tensor, routing: Sequence[Tensor]) -> Tensor:
        for block, chosen in zip(self.layers, routing, strict=True):
            x = self._call(block, x, chosen)
        return x
