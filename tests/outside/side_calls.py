"""Modules, and ways to call them from the side: by a method of a tower, as an inner module, by
their `forward`. For `test_side_calls.py`.

Modules and inputs are PyTorch's own cases (ModuleInfo), and those below that decide how they
compute by what they find out about their parameters.
"""

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_modules import module_db


@dataclass(frozen=True)
class Recipe:
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, dict[str, Any]]]


class Tower(nn.Module):
    """One of two, as models of images and texts have them."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.spare = nn.Parameter(torch.zeros(1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*args, **kwargs)

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*args, **kwargs)


class Towers(nn.Module):
    def __init__(self, bodies: list[nn.Module]) -> None:
        super().__init__()
        self.towers = nn.ModuleList(map(Tower, bodies))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.towers[1](*args, **kwargs)


def _functional(body: nn.Module, args: Any, kwargs: Any) -> Any:
    params = {**dict(body.named_parameters()), **dict(body.named_buffers())}
    return torch.func.functional_call(body, params, args, kwargs)


WAYS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "the model": lambda model, args, kwargs: model(*args, **kwargs),
    "a unit": lambda model, args, kwargs: model.towers[1](*args, **kwargs),
    "a method": lambda model, args, kwargs: model.towers[1].encode(*args, **kwargs),
    "an inner module": lambda model, args, kwargs: model.towers[1].body(*args, **kwargs),
    "its forward": lambda model, args, kwargs: model.towers[1].body.forward(*args, **kwargs),
    "functional_call": lambda model, args, kwargs: _functional(model.towers[1].body, args, kwargs),
    "the whole": lambda model, args, kwargs: model(*args, **kwargs),
}


def built(recipe: Recipe, way: str) -> nn.Module:
    seed()
    if way == "the whole":
        return recipe.build()
    return Towers([recipe.build(), recipe.build()])


def seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    if hasattr(value, "__iter__") and not isinstance(value, str):
        return [tensor for each in value for tensor in tensors_in(each)]
    return []


def copied(value: Any) -> Any:
    """The same structure with tensors of its own, all of them leaves."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, (list, tuple)):
        parts = [copied(each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return copy.deepcopy(value)


# ----------------------------------------------------------------------- PyTorch's own cases
def info_recipes(training: bool) -> Iterator[Recipe]:
    for info in module_db:
        if torch.float32 not in info.supported_dtypes("cpu") or "Lazy" in info.name:
            continue
        seed()
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=training
        )
        for number, case in enumerate(inputs):
            if case.forward_input is not None:
                yield Recipe(f"{info.name} {number}", _builder(info, case), _inputs_of(case))


def _builder(info: Any, case: Any) -> Callable[[], nn.Module]:
    made = case.constructor_input

    def build() -> nn.Module:
        return info.module_cls(*copy.deepcopy(made.args), **copy.deepcopy(made.kwargs))

    return build


def _inputs_of(case: Any) -> Callable[[], tuple[Any, dict[str, Any]]]:
    given = case.forward_input
    return lambda: (copy.deepcopy(given.args), copy.deepcopy(given.kwargs))


# ----------------------------------------------------------------------- modules that ask
def _x(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _ids(*shape: int, limit: int = 11) -> Tensor:
    return torch.randint(limit, shape, generator=torch.Generator().manual_seed(1))


def _padded(rows: int, columns: int, *, whole: bool = False) -> Tensor:
    lengths = [columns - 1 - 2 * n for n in range(rows)]
    lengths[0] = 0 if whole else columns
    return torch.arange(columns) >= torch.tensor(lengths)[:, None]


def _layer(**how: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **how)


class _OverWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.query = nn.Parameter(torch.randn(2, 4, 3, 8))
        self.bag = nn.EmbeddingBag(11, 16)
        self.norm = nn.LayerNorm(16)
        self.two = nn.Bilinear(16, 16, 5)

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        a = self.attention
        seen = nn.functional.multi_head_attention_forward(
            x, x, x, 16, 4, a.in_proj_weight, a.in_proj_bias, None, None, False, 0.0,
            a.out_proj.weight, a.out_proj.bias, training=self.training,
        )  # fmt: skip
        scaled = nn.functional.scaled_dot_product_attention(self.query, self.query, self.query)
        bag = nn.functional.embedding_bag(ids, self.bag.weight)
        normal = nn.functional.layer_norm(x, (16,), self.norm.weight, self.norm.bias)
        folded = x.transpose(0, 1) @ self.two.weight[0]
        return seen, scaled, bag, normal, folded, nn.functional.bilinear(x, x, self.two.weight)


def _one(*shape: int) -> Callable[[], tuple[Any, dict[str, Any]]]:
    return lambda: ((_x(*shape),), {})


def _masked(name: str, **how: Any) -> Callable[[], tuple[Any, dict[str, Any]]]:
    return lambda: ((_x(3, 7, 16),), {name: _padded(3, 7, **how)})


def own_recipes() -> Iterator[Recipe]:
    pad = "src_key_padding_mask"
    for how in (
        {},
        {"norm_first": True},
        {"activation": "gelu"},
        {"dropout": 0.0},
        {"bias": False},
    ):
        name = "".join(how)
        yield Recipe(
            f"encoder {name}", lambda how=how: nn.TransformerEncoder(_layer(**how), 2), _masked(pad)
        )
        yield Recipe(f"layer {name}", lambda how=how: _layer(**how), _masked(pad, whole=True))
        yield Recipe(f"layer {name}, nothing padded", lambda how=how: _layer(**how), _one(3, 7, 16))
    yield Recipe(
        "encoder with a norm, not nested", lambda: nn.TransformerEncoder(
            _layer(), 2, nn.LayerNorm(16), enable_nested_tensor=False
        ), _masked(pad),
    )  # fmt: skip
    for how in ({}, {"bias": False}, {"add_zero_attn": True}, {"kdim": 16, "vdim": 16}):
        for weights in (True, False):
            yield Recipe(
                f"attention {''.join(how)} {weights}",
                lambda how=how: nn.MultiheadAttention(16, 4, batch_first=True, **how),
                lambda weights=weights: (
                    (_x(3, 7, 16),) * 3,
                    {"key_padding_mask": _padded(3, 7), "need_weights": weights},
                ),
            )
    yield Recipe(
        "transformer", lambda: nn.Transformer(16, 4, 1, 1, 32, batch_first=True),
        lambda: (
            (_x(3, 7, 16), _x(3, 5, 16, seed=2)), {"src_key_padding_mask": _padded(3, 7)},
        ),
    )  # fmt: skip
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        yield Recipe(
            kind.__name__, lambda kind=kind: kind(16, 8, 2, bidirectional=True), _one(5, 3, 16)
        )
    yield Recipe("LSTM proj", lambda: nn.LSTM(16, 8, 2, proj_size=4), _one(5, 3, 16))
    yield Recipe(
        "packed sequence", lambda: nn.GRU(16, 8, batch_first=True), lambda: (
            (nn.utils.rnn.pack_padded_sequence(_x(3, 7, 16), torch.tensor([7, 4, 2]), True),), {}
        ),
    )  # fmt: skip
    for mode in ("sum", "mean", "max"):
        yield Recipe(
            f"bag {mode}", lambda mode=mode: nn.EmbeddingBag(11, 16, mode=mode, padding_idx=2),
            lambda: ((_ids(20), torch.tensor([0, 4, 4, 11])), {}),
        )  # fmt: skip
    yield Recipe("max_norm", lambda: nn.Embedding(11, 16, max_norm=1.0), lambda: ((_ids(9),), {}))
    yield Recipe(
        "bag with max_norm",
        lambda: nn.EmbeddingBag(11, 16, max_norm=1.0),
        lambda: ((_ids(3, 4),), {}),
    )
    yield Recipe("bilinear", lambda: nn.Bilinear(16, 8, 5), lambda: ((_x(3, 16), _x(3, 8)), {}))
    over: dict[str, Callable[[nn.Module], nn.Module]] = {
        "weight_norm": parametrizations.weight_norm,
        "spectral_norm": parametrizations.spectral_norm,
        "orthogonal": parametrizations.orthogonal,
        "old weight_norm": nn.utils.weight_norm,
        "old spectral_norm": nn.utils.spectral_norm,
    }
    for name, change in over.items():
        yield Recipe(name, lambda change=change: change(nn.Linear(16, 8)), _one(3, 16))
    yield Recipe(
        "spectral convolution", lambda: parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)),
        _one(2, 3, 6, 6),
    )  # fmt: skip
    yield Recipe(
        "channels_last", lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU(4)),
        lambda: ((_x(2, 3, 6, 6).to(memory_format=torch.channels_last),), {}),
    )  # fmt: skip
    yield Recipe(
        "norms", lambda: nn.Sequential(
            nn.BatchNorm1d(16), nn.LayerNorm(16), nn.RMSNorm(16), nn.GroupNorm(4, 16)
        ), _one(6, 16),
    )  # fmt: skip
    yield Recipe("functions", _OverWeights, lambda: ((_x(3, 7, 16), _ids(3, 4)), {}))
