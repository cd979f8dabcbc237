"""Modules that call torch as transformers' (5.17) do, for traces: built from a family's tree.

The lifetime of a tensor depends on the names that refer to it, so each `forward` keeps its results
under as many names, for as long, as the one it stands for. They have no values and are never
trained.
"""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from offload.zero.groups.module_tree import ModuleKind, ModuleTree, TreeParam

if TYPE_CHECKING:
    from offload.tools.memest.source.decoder_settings import DecoderSettings


def model_of(tree: ModuleTree, settings: DecoderSettings) -> nn.Module:
    """Return the module that `tree` describes, on the meta device."""
    with torch.device("meta"):
        return _built(tree, settings, {})


def _built(
    tree: ModuleTree, settings: DecoderSettings, made: dict[TreeParam, nn.Parameter]
) -> nn.Module:
    if tree.kind is ModuleKind.CONTAINER:
        return nn.ModuleList(_built(block, settings, made) for block in tree.children.values())
    module: _Module = _class_of(tree.class_name)()
    module.settings = settings
    for name, param in tree.params.items():
        if param not in made:
            made[param] = nn.Parameter(torch.empty(param.shape))
        module.register_parameter(name, made[param])
    for name, child in tree.children.items():
        module.add_module(name, _built(child, settings, made))
    module.complete()
    return module


@cache
def _class_of(name: str) -> type[_Module]:
    """Return a class of that name: groups are named by their modules' classes."""
    base = next(each for suffix, each in _BY_SUFFIX.items() if name.endswith(suffix))
    return type(name, (base,), {})


class _Module(nn.Module):
    """A module whose parameters and children are set from outside."""

    settings: DecoderSettings

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def complete(self) -> None:
        """Finish the module once all its parameters and children are set."""


# ---------------------------------------------------------------- of both kinds
class _Linear(_Module):
    def forward(self, source: Tensor) -> Tensor:
        return F.linear(source, self.weight, self._parameters.get("bias"))


class _Conv1D(_Module):
    def forward(self, x: Tensor) -> Tensor:
        size_out = (*x.size()[:-1], self.weight.shape[1])
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return x.view(size_out)


class _Embedding(_Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class _LayerNorm(_Module):
    def forward(self, source: Tensor) -> Tensor:
        return F.layer_norm(source, self.weight.shape, self.weight, self.bias, 1e-5)


class _RMSNorm(_Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + 1e-6)
        return self._scaled(hidden_states, input_dtype)

    def _scaled(self, hidden_states: Tensor, dtype: torch.dtype) -> Tensor:
        return self.weight * hidden_states.to(dtype)


class _OlmoNorm(_RMSNorm):
    def _scaled(self, hidden_states: Tensor, dtype: torch.dtype) -> Tensor:
        normed: Tensor = self.weight * hidden_states
        return normed.to(dtype)


class _GemmaNorm(_Module):
    def forward(self, x: Tensor) -> Tensor:
        output = self._plain(x.float())
        output = output * (1.0 + self.weight.float())
        return output.to(x.dtype)

    @staticmethod
    def _plain(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _check_positions(embeds: Tensor, position_ids: Tensor) -> None:
    """Ask before every pass whether sequences are packed, as transformers does; they are not."""
    if embeds.shape[0] != position_ids.shape[0]:
        position_ids = position_ids.expand(embeds.shape[0], -1)
    before_first = position_ids[:, :1] - 1
    difference = torch.diff(position_ids, prepend=before_first, dim=-1)
    packed = (difference != 1).cumsum(-1)
    bool((packed[:, -1] == 0).all())


def _positions(embeds: Tensor) -> Tensor:
    position_ids = torch.arange(embeds.shape[1], device=embeds.device) + 0
    return position_ids.unsqueeze(0)


def _attention(
    module: _Module, query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Tensor:
    settings = module.settings
    more: dict[str, Any] = {}
    times = settings.heads // settings.kv_heads
    if times > 1:
        if key.shape[-1] > 256:
            key, value = _repeated(key, times), _repeated(value, times)
        else:
            more = {"enable_gqa": True}
    dropout = settings.attention_dropout if module.training else 0.0
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=None, dropout_p=dropout, scale=scaling,
        is_causal=query.shape[2] > 1, **more,
    )  # fmt: skip
    return output.transpose(1, 2).contiguous()


def _repeated(states: Tensor, times: int) -> Tensor:
    batch, heads, length, width = states.shape
    states = states[:, :, None, :, :].expand(batch, heads, times, length, width)
    return states.reshape(batch, heads * times, length, width)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    vocab_size = logits.shape[-1]
    logits = logits.float()
    labels = F.pad(labels, (0, 1), value=-100)
    shift_labels = labels[..., 1:].contiguous()
    logits = logits.view(-1, vocab_size)
    shift_labels = shift_labels.view(-1)
    return F.cross_entropy(logits, shift_labels, ignore_index=-100)


class _CausalModel(_Module):
    """A decoder model and its head."""

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, use_cache: bool = False,
        logits_to_keep: int = 0,
    ) -> Any:  # fmt: skip
        body = self.model if "model" in self._modules else self.transformer
        outputs = body(input_ids)
        hidden_states = outputs.last_hidden_state
        logits = self.lm_head(hidden_states[:, slice(-logits_to_keep, None), :])
        if self.settings.caps_logits:
            logits = logits / 30.0
            logits = torch.tanh(logits)
            logits = logits * 30.0
        loss = None if labels is None else _loss(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits, outputs=outputs)


# ---------------------------------------------------------------- Llama and its relatives
class _LlamaModel(_Module):
    def complete(self) -> None:
        frequencies = torch.empty((self.settings.head_dim + 1) // 2)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, input_ids: Tensor) -> Any:
        inputs_embeds = self.embed_tokens(input_ids)
        position_ids = _positions(inputs_embeds)
        for _ in range(2 if self.settings.family.alternates else 1):  # masks, one of a kind
            _check_positions(inputs_embeds, position_ids)
        hidden_states = inputs_embeds
        position_embeddings = self._rotary(hidden_states, position_ids)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states, attention_mask=None, position_embeddings=position_embeddings,
                position_ids=position_ids,
            )  # fmt: skip
        hidden_states = self.norm(hidden_states)
        return SimpleNamespace(last_hidden_state=hidden_states)

    @torch.no_grad()
    def _rotary(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        expanded = self.inv_freq[None, :, None].expand(position_ids.shape[0], -1, 1)
        expanded = expanded.to(dtype=torch.float, device=x.device)
        positions = position_ids[:, None, :].float()
        frequencies = (expanded @ positions).transpose(1, 2)
        both = torch.cat((frequencies, frequencies), dim=-1)
        cos = both.cos() * 1.0
        sin = both.sin() * 1.0
        if self.settings.family.rotates_in_fp32:
            return cos, sin
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


class _LlamaBlock(_Module):
    def forward(self, hidden_states: Tensor, **more: Any) -> Tensor:
        residual = hidden_states
        hidden_states = self._normed(0, hidden_states)
        hidden_states, _ = self.self_attn(hidden_states=hidden_states, **more)
        hidden_states = self._normed(1, hidden_states)
        hidden_states = residual + self._dropped(hidden_states)
        residual = hidden_states
        hidden_states = self._normed(2, hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = self._normed(3, hidden_states)
        return residual + self._dropped(hidden_states)

    def _normed(self, place: int, hidden_states: Tensor) -> Tensor:
        name = self.settings.family.norms[place]
        return hidden_states if name is None else getattr(self, name)(hidden_states)

    def _dropped(self, hidden_states: Tensor) -> Tensor:
        return F.dropout(hidden_states, self.settings.residual_dropout, self.training)


class _LlamaAttention(_Module):
    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **more: Any
    ) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, self.settings.head_dim)
        query, key, value = self._projected(hidden_states, shape)
        cos, sin = position_embeddings
        query, key = self._rotated(query, key, cos, sin)
        output = _attention(self, query, key, value, self.settings.head_dim**-0.5)
        output = output.reshape(*shape[:-2], -1).contiguous()
        output = self.o_proj(output)
        return output, None

    def _projected(self, hidden_states: Tensor, shape: Any) -> tuple[Tensor, ...]:
        query = self._normed("q_norm", self.q_proj(hidden_states), shape)
        key = self._normed("k_norm", self.k_proj(hidden_states), shape)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        return query, key, value

    def _normed(self, name: str, states: Tensor, shape: Any) -> Tensor:
        over = self.settings.family.head_norms
        if over == "width":
            states = getattr(self, name)(states)
        states = states.view(shape)
        if over == "head":
            states = getattr(self, name)(states)
        return states.transpose(1, 2)

    def _rotated(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        cos = cos.unsqueeze(1)
        sin = sin.unsqueeze(1)
        new_query = (query * cos) + (_half_turned(query) * sin)
        new_key = (key * cos) + (_half_turned(key) * sin)
        return new_query.to(query.dtype), new_key.to(key.dtype)


def _half_turned(x: Tensor) -> Tensor:
    first = x[..., : x.shape[-1] // 2]
    second = x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


class _GatedMLP(_Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self._active(self.gate_proj(x)) * self.up_proj(x))

    def _active(self, gate: Tensor) -> Tensor:
        return F.silu(gate)


class _GemmaMLP(_GatedMLP):
    def _active(self, gate: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh")


class _GemmaEmbedding(_Module):
    def complete(self) -> None:
        self.register_buffer("embed_scale", torch.empty(()), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight) * self.embed_scale.to(self.weight.dtype)


class _PhiAttention(_LlamaAttention):
    def _projected(self, hidden_states: Tensor, shape: Any) -> tuple[Tensor, ...]:
        together = self.qkv_proj(hidden_states)
        first = self.settings.heads * self.settings.head_dim
        second = first + self.settings.kv_heads * self.settings.head_dim
        parts = together[..., :first], together[..., first:second], together[..., second:]
        return tuple(each.view(shape).transpose(1, 2) for each in parts)

    def _rotated(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        cos = cos.unsqueeze(1)
        sin = sin.unsqueeze(1)
        width = cos.shape[-1]
        turned, passed = query[..., :width], query[..., width:]
        key_turned, key_passed = key[..., :width], key[..., width:]
        new_query = torch.cat([turned * cos + _half_turned(turned) * sin, passed], dim=-1)
        new_key = torch.cat(
            [key_turned * cos + _half_turned(key_turned) * sin, key_passed], dim=-1
        )  # fmt: skip
        return new_query, new_key


class _PhiMLP(_Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        up = self.gate_up_proj(hidden_states)
        gate, up = up.chunk(2, dim=-1)
        up = up * F.silu(gate)
        return self.down_proj(up)


# ---------------------------------------------------------------- Mixtral, Qwen 3 MoE
class _Experts(_Module):
    """Experts computed as one grouped product (`grouped_mm_experts_forward`)."""

    stands_for_packed_experts = True  # for `discover`

    def forward(self, hidden_states: Tensor, top_index: Tensor, top_weights: Tensor) -> Tensor:
        count, chosen = self.down_proj.shape[0], top_index.size(-1)
        tokens, width = hidden_states.size(0), hidden_states.size(-1)
        sample_weights = top_weights.reshape(-1)
        expert_ids = top_index.reshape(-1)
        ids, order = torch.sort(expert_ids)
        selected = hidden_states[order // chosen]
        weights = sample_weights[order]
        counted = ids.float()
        per_expert = torch.histc(counted, bins=count, min=0, max=count - 1)
        offsets = torch.cumsum(per_expert, dim=0, dtype=torch.int32)
        beyond = (ids >= count).unsqueeze(-1)
        ids.clamp_(max=count - 1)
        selected.masked_fill_(beyond, 0.0)
        made = _grouped(selected, self.gate_up_proj, offsets)
        made = made.masked_fill(beyond, 0.0)
        made = _gated(made)
        made = _grouped(made, self.down_proj, offsets)
        made = made.masked_fill(beyond, 0.0)
        weighted = made * weights.unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.size(0), device=hidden_states.device)
        weighted = weighted[back]
        final = weighted.view(tokens, chosen, width).sum(dim=1)
        return final.to(hidden_states.dtype)


def _grouped(source: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    transposed = weight.transpose(-2, -1)
    return F.grouped_mm(source.to(transposed.dtype), transposed, offs=offsets)


def _gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


class _Router(_Module):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden_states = hidden_states.reshape(-1, self.weight.shape[1])
        logits = F.linear(hidden_states, self.weight)
        shares = F.softmax(logits.float(), dim=-1)
        top, indices = torch.topk(shares, self.settings.experts_per_token, dim=-1)
        top /= top.sum(dim=-1, keepdim=True)
        return logits, top, indices


class _QwenRouter(_Module):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden_states = hidden_states.reshape(-1, self.weight.shape[1])
        logits = F.linear(hidden_states, self.weight)
        shares = F.softmax(logits, dtype=torch.float, dim=-1)
        top, indices = torch.topk(shares, self.settings.experts_per_token, dim=-1)
        if self.settings.norms_shares:
            top /= top.sum(dim=-1, keepdim=True)
        top = top.to(logits.dtype)
        return logits, top, indices


class _Mixture(_Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        batch, length, width = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
        _, weights, index = self.gate(hidden_states)
        hidden_states = self.experts(hidden_states, index, weights)
        return hidden_states.reshape(batch, length, width)


# ---------------------------------------------------------------- GPT-2
class _GPT2Model(_Module):
    def forward(self, input_ids: Tensor) -> Any:
        input_shape = input_ids.size()
        input_ids = input_ids.view(-1, input_shape[-1])
        inputs_embeds = self.wte(input_ids)
        position_ids = _positions(inputs_embeds)
        position_embeds = self.wpe(position_ids)
        hidden_states = inputs_embeds + position_embeds.to(inputs_embeds.device)
        _check_positions(inputs_embeds, position_ids)
        hidden_states = F.dropout(hidden_states, self.settings.embedding_dropout, self.training)
        output_shape = (-1, *input_shape[1:], hidden_states.size(-1))
        for block in self.h:
            hidden_states = block(hidden_states, None, None, None, position_ids=position_ids)
        hidden_states = self.ln_f(hidden_states)
        hidden_states = hidden_states.view(output_shape)
        return SimpleNamespace(last_hidden_state=hidden_states)


class _GPT2Block(_Module):
    def forward(self, hidden_states: Tensor, *nothing: None, **more: Any) -> Tensor:
        residual = hidden_states
        hidden_states = self.ln_1(hidden_states)
        attended, _ = self.attn(hidden_states)
        hidden_states = attended + residual
        residual = hidden_states
        hidden_states = self.ln_2(hidden_states)
        fed_forward = self.mlp(hidden_states)
        return residual + fed_forward


class _GPT2Attention(_Module):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        width = hidden_states.shape[-1]
        query, key, value = self.c_attn(hidden_states).split(width, dim=2)
        shape = (*key.shape[:-1], -1, self.settings.head_dim)
        key = key.view(shape).transpose(1, 2)
        value = value.view(shape).transpose(1, 2)
        query = query.view(shape).transpose(1, 2)
        output = _attention(self, query, key, value, self.settings.head_dim**-0.5)
        output = output.reshape(*output.shape[:-2], -1).contiguous()
        output = self.c_proj(output)
        output = F.dropout(output, self.settings.residual_dropout, self.training)
        return output, None


class _GPT2MLP(_Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.c_fc(hidden_states)
        hidden_states = _gelu(hidden_states)
        hidden_states = self.c_proj(hidden_states)
        return F.dropout(hidden_states, self.settings.residual_dropout, self.training)


def _gelu(x: Tensor) -> Tensor:
    inner = math.sqrt(2.0 / math.pi)
    return 0.5 * x * (1.0 + torch.tanh(inner * (x + 0.044715 * torch.pow(x, 3.0))))


_BY_SUFFIX: dict[str, type[_Module]] = {  # the first that fits
    "GPT2Model": _GPT2Model, "GPT2Block": _GPT2Block, "GPT2Attention": _GPT2Attention,
    "GPT2MLP": _GPT2MLP, "Olmo2RMSNorm": _OlmoNorm,
    "Phi3Attention": _PhiAttention, "Phi3MLP": _PhiMLP, "Gemma2RMSNorm": _GemmaNorm,
    "Gemma2MLP": _GemmaMLP, "ScaledWordEmbedding": _GemmaEmbedding,
    "Qwen3MoeTopKRouter": _QwenRouter, "ForCausalLM": _CausalModel, "LMHeadModel": _CausalModel,
    "Model": _LlamaModel, "DecoderLayer": _LlamaBlock, "Attention": _LlamaAttention,
    "MLP": _GatedMLP, "SparseMoeBlock": _Mixture, "TopKRouter": _Router, "Experts": _Experts,
    "RMSNorm": _RMSNorm, "LayerNorm": _LayerNorm, "Embedding": _Embedding, "Linear": _Linear,
    "Conv1D": _Conv1D,
}  # fmt: skip
