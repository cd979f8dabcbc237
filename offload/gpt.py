"""The built-in language model: Llama-shaped, dense or of experts, over bytes.

Built to be offloaded: repeated blocks in one ModuleList, and every module that owns parameters can
initialise them itself (`reset_parameters`), so that a model on the meta device comes to life one
module at a time.

Shapes: B batch, S sequence, H hidden, N heads, K key/value heads, D head size, V vocabulary,
E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from offload.config.training import ModelConfig
from offload.losses import linear_cross_entropy
from offload.moe import MoE
from offload.moe.gate import balancing_loss

if TYPE_CHECKING:
    from offload.config import OffloadConfig


@dataclass(frozen=True)
class ModelOutput:
    """A forward's result: the mean loss (fp32 scalar) if targets were given, else the logits."""

    loss: Tensor | None
    logits: Tensor | None  # BSV; with targets they are never whole


_INIT_STD, _NORM_EPS, _ROPE_THETA = 0.02, 1e-5, 10000.0


class Linear(nn.Linear):
    """A linear layer without bias, initialised from a normal distribution."""

    def __init__(self, inputs: int, outputs: int, std: float = _INIT_STD) -> None:
        self._std = std
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Fill the weight from the default generator."""
        _fill_normal(self.weight, self._std)


class Head(Linear):
    """The last layer: logits, or their loss against targets, which needs no whole logits."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """BSH to BSV; with targets (BS) to their mean cross-entropy in fp32."""
        if targets is None:
            return super().forward(x)
        return linear_cross_entropy(x, self.weight, targets)


class Embedding(nn.Embedding):
    """An embedding initialised from a normal distribution."""

    def reset_parameters(self) -> None:
        """Fill the weight from the default generator."""
        _fill_normal(self.weight, _INIT_STD)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._heads, self._kv_heads = config.heads, config.kv_head_count
        head = config.hidden // config.heads
        self.query = Linear(config.hidden, config.heads * head)
        self.key = Linear(config.hidden, self._kv_heads * head)
        self.value = Linear(config.hidden, self._kv_heads * head)
        self.output = Linear(config.heads * head, config.hidden, _residual_std(config))

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """BSH to BSH."""
        q = self._split(self.query(x), self._heads)
        k = self._split(self.key(x), self._kv_heads)
        v = self._split(self.value(x), self._kv_heads)
        q, k = rotary.turn(q), rotary.turn(k)
        grouped = self._kv_heads != self._heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result

    @staticmethod
    def _split(x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, -1).transpose(1, 2)  # BSH to BNSD


class Rotary(NamedTuple):
    """Angles of one forward, computed on the fly: nothing to store, move or save."""

    cosine: Tensor  # SD
    sine: Tensor  # SD

    @classmethod
    def at(cls, length: int, head: int, like: Tensor) -> Rotary:
        """Return the table for positions 0..length-1, computed in fp32, in the type of `like`."""
        even = torch.arange(0, head, 2, device=like.device, dtype=torch.float32)
        positions = torch.arange(length, device=like.device, dtype=torch.float32)
        angles = torch.outer(positions, _ROPE_THETA ** (-even / head)).repeat(1, 2)
        return cls(angles.cos().to(like.dtype), angles.sin().to(like.dtype))

    def turn(self, x: Tensor) -> Tensor:
        """Rotate BNSD by each position's angle."""
        low, high = x.chunk(2, dim=-1)
        return x * self.cosine + torch.cat((-high, low), dim=-1) * self.sine


class GatedMlp(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.gate = Linear(config.hidden, width)
        self.up = Linear(config.hidden, width)
        self.down = Linear(width, config.hidden, _residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        """...H to ...H."""
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Mixture(MoE):
    """A dropless mixture of MLPs, of which each token is computed by `experts_per_token`."""

    def __init__(self, config: ModelConfig) -> None:
        assert config.experts is not None, "a dense model has none"
        super().__init__(
            config.hidden,
            lambda: GatedMlp(config, config.expert_width),
            config.experts,
            k=config.experts_per_token,
            drop_tokens=False,
            top2_2nd_expert_sampling=False,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """BSH to BSH, and its balancing loss, which counts all choices of a token."""
        output, routing = self.routed(x)
        chosen = torch.zeros_like(routing.shares).scatter(1, routing.experts, 1.0)
        return output, balancing_loss(routing.shares.mean(0), chosen.mean(0), self.k)


class Block(nn.Module):
    """Attention and MLP, each after a norm and around a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=_NORM_EPS)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=_NORM_EPS)
        self.mlp = Mixture(config) if config.experts else GatedMlp(config, config.mlp_width)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor | tuple[Tensor, Tensor]:
        """BSH to BSH; with experts, also their balancing loss."""
        x = x + self.attention(self.attention_norm(x), rotary)
        if isinstance(self.mlp, Mixture):
            output, balancing = self.mlp(self.mlp_norm(x))
            return x + output, balancing
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class LanguageModel(nn.Module):
    """Tokens in, logits (or the loss against shifted targets) out."""

    def __init__(self, config: ModelConfig, *, checkpoint_activations: bool = False) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = checkpoint_activations
        self.embedding = Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=_NORM_EPS)
        self.head = Head(config.hidden, config.vocab)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> ModelOutput:
        """BS tokens (and BS targets) to a ModelOutput. Sequences over max_sequence: ValueError.

        In training, the loss has `aux_loss` times the balancing loss of the experts."""
        length = tokens.shape[1]
        if length > self.config.max_sequence:
            raise ValueError(
                f"a sequence of {length} tokens is longer than max_sequence "
                f"{self.config.max_sequence}"
            )
        x = self.embedding(tokens)
        rotary = Rotary.at(length, self.config.hidden // self.config.heads, x)
        balancing: list[Tensor] = []
        for layer in self.layers:
            x = self._through(layer, x, rotary, balancing)
        x = self.norm(x)
        if targets is None:
            return ModelOutput(None, self.head(x))
        loss = self.head(x, targets)
        if balancing and self.training and self.config.aux_loss:
            loss = loss + self.config.aux_loss * torch.stack(balancing).mean()
        return ModelOutput(loss, None)

    def _through(
        self, layer: nn.Module, x: Tensor, rotary: Rotary, balancing: list[Tensor]
    ) -> Tensor:
        """Compute a layer, BSH to BSH; adds its experts' balancing loss to `balancing`."""
        if self.checkpoint_activations and torch.is_grad_enabled():
            # no dropout anywhere, so there is no generator state to carry
            result = checkpoint(layer, x, rotary, use_reentrant=False, preserve_rng_state=False)
        else:
            result = layer(x, rotary)
        if isinstance(result, tuple):
            result, loss = result
            balancing.append(loss)
        assert isinstance(result, Tensor)
        return result


def build_meta_model(config: OffloadConfig) -> LanguageModel:
    """Return the model of `config.train` on the meta device: shapes without memory.

    The engine applies `placement.activations.checkpoint`.
    """
    with torch.device("meta"):
        return LanguageModel(config.train.model)


def parameter_count(model: nn.Module) -> int:
    """Return the elements of all parameters, tied ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: bytes,
    length: int,
    *,
    temperature: float,
    seed: int,
    device: torch.device | str = "cpu",
) -> bytes:
    """Continue `prompt` by `length` bytes. Greedy at temperature 0; no key/value cache."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    with evaluating(model):
        for _ in range(length):
            window = torch.tensor([tokens[-model.config.max_sequence :]], device=device)
            logits = model(window).logits
            assert logits is not None, "there are no targets"
            tokens.append(_pick(logits[0, -1, :256].float().cpu(), temperature, generator))
    return bytes(tokens)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode: its loss is that of the tokens alone."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _pick(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    shares = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(shares, 1, generator=generator))


def _fill_normal(weight: Tensor, std: float) -> None:
    if not weight.is_meta:  # there is nothing to fill, and torch would import its compiler for it
        nn.init.normal_(weight, std=std)


def _residual_std(config: ModelConfig) -> float:
    """Return a smaller std for additions to the residual, as GPT-2: by 1 / sqrt(their number)."""
    return float(_INIT_STD * (2 * config.layers) ** -0.5)
