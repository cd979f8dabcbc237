"""Perplexity of a causal language model on a text, by overlapping windows.

    tokens      0 ........................................................ T
    window 0    ├──── scored ────┤
    window 1            ├─ seen ─┤─ scored ─┤
    window 2                       ├─ seen ─┤─ scored ─┤

Each window begins `stride` tokens after the one before it, and scores the tokens that this one did
not have; so each token but the first is scored once, with as much before it as the window has. This
is the evaluation that Hugging Face's guide on perplexity describes; the mean here is over the
tokens that are scored, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offload.display.progress import progress
from offload.tiered_model import TieredModel
from offload.tiers.errors import ConfigError, UnsupportedError
from offload.zero.hooks.unit_hooks import UnitHooks


@dataclass(frozen=True, slots=True)
class Perplexity:
    """A perplexity: `value` is exp of the mean loss per token (in nats) over `tokens` tokens."""

    value: float
    loss: float
    tokens: int


@dataclass(frozen=True, slots=True)
class _Window:
    tokens: range
    scored: int  # of its last ones


def perplexity(
    model: nn.Module, tokens: Tensor | Sequence[int], *, window: int = 1024, stride: int = 512,
    batch: int = 1,
) -> Perplexity:  # fmt: skip
    """Return the perplexity of a causal language model (`model(input_ids=...).logits`), plain or
    dispatched, in evaluation mode, on the token ids of one text, (T,).

    `window` tokens are seen at once, at most the model's positions; `batch` windows are computed
    together: weights of a model on nvme are read once for all of them. Memory: the logits of batch
    x window tokens, in fp32.

    Raise ConfigError for impossible sizes, UnsupportedError for a model without logits.
    """
    ids = torch.as_tensor(tokens, dtype=torch.int64).reshape(-1)
    _check(model, ids.numel(), window, stride, batch)
    total, count = 0.0, 0
    keys = {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}
    device = _device(model)
    with torch.no_grad(), _evaluating(model), progress("perplexity", ids.numel() - 1) as came:
        for windows in _batches(ids.numel(), window, stride, batch):
            given = torch.stack([ids[w.tokens.start : w.tokens.stop] for w in windows]).to(device)
            logits = getattr(model(input_ids=given, **keys), "logits", None)
            if logits is None or logits.shape[:2] != given.shape:
                raise UnsupportedError(
                    f"{type(model).__name__} gives no logits for each token; perplexity is that of "
                    "a causal language model"
                )
            for row, each in enumerate(windows):
                scored = logits[row, -each.scored - 1 : -1].float()
                losses = nn.functional.cross_entropy(
                    scored, given[row, -each.scored :], reduction="none"
                )
                total += float(losses.double().sum())
                count += each.scored
                came(each.scored)
    return Perplexity(_exp(total / count), total / count, count)


def _device(model: nn.Module) -> torch.device:
    """Return the device on which the model expects its inputs."""
    for module in model.modules():
        owner = UnitHooks.owner_of(module)
        if isinstance(owner, TieredModel):
            return owner.device
    return next((param.device for param in model.parameters()), torch.device("cpu"))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _check(model: nn.Module, count: int, window: int, stride: int, batch: int) -> None:
    if count < 2:
        raise ConfigError(f"perplexity: the text has {count} tokens, and needs 2")
    if batch < 1 or window < 2 or not 1 <= stride < window:
        raise ConfigError(
            f"perplexity: window {window}, stride {stride}, batch {batch}: a window has at least 2 "
            "tokens, and the next one begins inside of it"
        )
    config: Any = getattr(model, "config", None)
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, int) and min(window, count) > most:
        raise ConfigError(f"perplexity: window {window}: the model has {most} positions")


def _batches(count: int, window: int, stride: int, batch: int) -> Iterator[list[_Window]]:
    """Yield batches of windows of one size; a smaller last window is a batch by itself."""
    held: list[_Window] = []
    seen = 1  # the first token is not scored: nothing is before it
    for start in range(0, count, stride):
        stop = min(start + window, count)
        one = _Window(range(start, stop), stop - seen)
        if held and len(held[0].tokens) != len(one.tokens):
            yield held
            held = []
        held.append(one)
        seen = stop
        if len(held) == batch or stop == count:
            yield held
            held = []
        if stop == count:
            return


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
