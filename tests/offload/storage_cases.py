"""What tests of quantized weights share: a model with adapters, and dequantized values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import offload
from offload.config import OffloadConfig
from offload.kernels.bits import FLOAT_OF
from offload.kernels.cpu.quantization import dequantize_weights, quantize_weights
from offload.kernels.weight_formats import QuantType, WeightFormat
from offload.tiered_model import DTYPES
from offload.zero.groups.parameter_grouping import ParameterGrouping, group_parameters
from tests.offload.engine_cases import VOCABULARY, TinyLM, seeded
from tests.offload.engine_states import bits

WIDTH = 64
FORMATS = ("int8", "int4", "nf4")


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of rank 32."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.base = nn.Linear(columns, rows).requires_grad_(False)
        self.a = nn.Linear(columns, 32, bias=False)
        self.b = nn.Linear(32, rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.b(self.a(x))
        return y


class Block(nn.Module):
    """Adapters beside frozen weights, one frozen layer without, and a frozen norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.up = Adapted(2 * WIDTH, WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + y


class AdaptedLM(nn.Module):
    """A frozen embedding, adapted blocks, and a frozen head."""

    def __init__(self, blocks: int = 3, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False).requires_grad_(False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.lm_head(x)
        return logits

    loss = TinyLM.loss


def adapted(blocks: int = 3, *, tied: bool = False) -> Any:
    return seeded(lambda: AdaptedLM(blocks, tied=tied))


def dequantized(values: Tensor, weights: WeightFormat) -> Tensor:
    """Quantize one tensor by itself; return what it reads as, in its own format."""
    kind = FLOAT_OF[values.dtype]
    storage = np.float32 if kind.nbytes == 4 else np.uint16
    flat = values.detach().contiguous().reshape(-1)
    given = flat.view(torch.uint8).numpy().view(storage)
    words = np.empty(given.size // weights.group_size, np.uint32)
    codes = np.empty(weights.codes_nbytes(given.size), np.uint8)
    quantize_weights(given, words, codes, weights, kind)
    back = torch.empty_like(flat)
    dequantize_weights(words, codes, back.view(torch.uint8).numpy().view(storage), weights, kind)
    return back.view(values.shape)


@torch.no_grad()
def round_to(
    model: nn.Module, weights: str, skip: Sequence[str] = ("lm_head",), precision: str = "fp32"
) -> None:
    """Quantize frozen matrices, and dequantize them to `precision`, in place. `skip`: parts of
    names."""
    format_ = WeightFormat(QuantType[weights.upper()], 32)
    named: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        named.setdefault(param, []).append(name)
    for param, names in named.items():
        skipped = any(part in name for part in skip for name in names)
        if param.dim() == 2 and not param.requires_grad and not skipped:
            given = param if precision == "fp32" else param.to(DTYPES[precision])
            param.copy_(dequantized(given, format_))


def in_precision(model: nn.Module, precision: str) -> nn.Module:
    return model.to(DTYPES[precision])


def stored(model: nn.Module, **storage: Any) -> ParameterGrouping:
    """How a model's groups are cut."""
    keys = {"weights": "int4", "group_size": 32, **storage}
    return group_parameters(model).stored(OffloadConfig.load({"storage": keys}).stored)


def frozen_of(engine: offload.Engine) -> dict[str, bytes]:
    """Bits of what is not trained."""
    named = engine.module.named_parameters()
    with engine.gathered():
        return {name: bits(param) for name, param in named if not param.requires_grad}
