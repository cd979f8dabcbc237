"""One long sequence on several ranks: each has a part of its tokens, and all share the states.

torchrun --nproc-per-node 2 examples/sequence_parallel.py

Copy `SequenceParallel` into your program. Everything in a transformer but attention computes each
token alone, so each rank runs the model on its part of the sequence. In attention the ranks
exchange parts: each gets all tokens for a part of the heads, and returns its results (Ulysses,
Jacobs et al., 2023; ALST, Bekman et al., 2025). Weights, norms and losses are those of one process
that has the whole sequence, up to rounding.

    tokens    rank 0: t0 t1, all heads        rank 1: t2 t3, all heads
    exchange  rank 0: t0 t1 t2 t3, heads 0-3  rank 1: t0 t1 t2 t3, heads 4-7
"""

from __future__ import annotations

import itertools
import math
import sys
from pydoc_data.topics import topics  # texts on every machine
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import offload
from offload.errors import ConfigError, StateError, UnsupportedError

LENGTH = 512  # tokens of the whole sequence
CONFIG = {
    "budget": {"host": "48MiB", "nvme": "1GiB"},
    "placement": {
        "parameters": "nvme", "gradients": "nvme", "optimizer": "nvme",
        "activations": {"checkpoint": True},
    },
    "optimizer": {"type": "adamw", "lr": 3e-3, "weight_decay": 0.1},
    "clip_grad_norm": 1.0,
    "loss": {"chunked": True},
    "zero": {"stage": 3},
}  # fmt: skip
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # kinds of layers
BY_LENGTH = {"dynamic", "longrope"}  # kinds of rotary embedding that look at the last position


class SequenceParallel:
    """Computes the loss of a causal language model of transformers, each rank on its part.

    `group`: the ranks that share each sequence, by default all. With several such groups (from
    `dist.new_subgroups`), each has its own sequences, and the loss is the mean over all of them.

    Raises ConfigError if the heads do not divide by the ranks, UnsupportedError for a model in
    which tokens of different ranks would meet outside of attention.
    """

    _numbers = itertools.count()

    def __init__(self, model: Any, group: dist.ProcessGroup | None = None) -> None:
        self.model = model
        self.group = dist.group.WORLD if group is None else group
        self.ranks, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self._calls = 0  # of attention, in this forward
        self._is_inside = False  # of `loss`
        self._check(model.config.get_text_config())
        self.name = f"sequence_parallel_{next(self._numbers)}"  # for `set_attn_implementation`
        AttentionInterface.register(self.name, self._attention)
        AttentionMaskInterface.register(self.name, self._mask)
        model.set_attn_implementation(self.name)

    def _check(self, config: Any) -> None:
        kind = type(self.model).__name__
        rope = getattr(config, "rope_parameters", None) or {}
        kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
        others = {*(getattr(config, "layer_types", None) or ())} - ATTENTION
        for what, why in (
            (not self.model._supports_sdpa, "attention that torch's SDPA does not compute"),
            (not rope, "positions that are not rotary"),
            (kinds & BY_LENGTH, f"{', '.join(kinds & BY_LENGTH)} rotary embedding, by the length"),
            (others, f"layers of {', '.join(others)}, in which tokens meet as well"),
            (getattr(config, "output_router_logits", False), "an auxiliary loss of all tokens"),
        ):
            if what:
                raise UnsupportedError(f"{kind} has {why}; train it without sequence parallelism")
        heads = config.num_attention_heads
        if heads % self.ranks:
            fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ConfigError(
                f"the {heads} attention heads of {kind} do not divide by {self.ranks} ranks; let "
                f"{fitting} ranks share a sequence (group=)"
            )

    # ---------------------------------------------------------------- the loss
    def loss(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Return this rank's share of the mean loss of all labels but -100, for `backward`. The
        mean of all ranks' shares (`mean`) is the loss that one process would return.

        All ranks of a group give the same whole batch, `[B, S]`, and S divides by the ranks.
        `attention_mask` is 1 for tokens and 0 for padding; what is padded on the right needs none.
        A row is one document: documents that are packed into a row would attend to each other.
        """
        self._check_batch(input_ids, labels, attention_mask)
        # each token's label is the next token, also where that one is another rank's
        targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        mine = self._part(targets)
        count = (mine != -100).sum()
        dist.all_reduce(count)  # of all groups
        self._calls, self._is_inside = 0, True
        try:
            loss: Tensor = self.model(
                input_ids=self._part(input_ids), position_ids=self._part(positions),
                attention_mask=attention_mask, labels=mine, shift_labels=mine, use_cache=False,
                # a sum over labels, divided by this: the engine averages gradients over all ranks
                num_items_in_batch=count.clamp(min=1) / dist.get_world_size(),
            ).loss  # fmt: skip
        finally:
            self._is_inside = False
        layers = self.model.config.get_text_config().num_hidden_layers
        if self._calls != layers:
            raise UnsupportedError(
                f"{self._calls} of the {layers} layers of {type(self.model).__name__} called the "
                "attention function: tokens of different ranks would not meet in the others; train "
                "it without sequence parallelism"
            )
        return loss

    @staticmethod
    def mean(loss: Tensor) -> float:
        """Return the loss of the whole batch, to print it. For all ranks together."""
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def _part(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.ranks, dim=1)[self.rank].contiguous()

    def _check_batch(self, input_ids: Tensor, labels: Tensor, mask: Tensor | None) -> None:
        given = [each for each in (input_ids, labels, mask) if each is not None]
        sizes = [tuple(each.shape) for each in given]
        if len(set(sizes)) > 1 or input_ids.dim() != 2:
            raise ConfigError(f"expected [B, S] of tokens, labels and mask, all alike: {sizes}")
        # a different batch on one rank would be a wrong result, or a wait for ever
        weights = torch.arange(1, input_ids.numel() + 1, device=input_ids.device).view_as(input_ids)
        sums = [int((each * weights).sum()) for each in given] + [-1] * (3 - len(given))
        mine = torch.tensor([*input_ids.shape, *sums], device=input_ids.device)
        every = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(every, mine, group=self.group)
        if any(not torch.equal(each, mine) for each in every):
            raise ConfigError(
                "the ranks of a group have different batches; give all of them the same rows, in "
                "the same order"
            )
        length = input_ids.shape[1]
        if length % self.ranks:
            raise ConfigError(
                f"a sequence of {length} tokens does not divide by {self.ranks} ranks; pad it to "
                f"{length + -length % self.ranks} on the right, with labels of -100"
            )

    # ---------------------------------------------------------------- attention
    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: Tensor | None, **keys: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Attention of transformers: query `[B, H, S/n, D]`, result `[B, S/n, H, D]`."""
        for name in "softcap", "s_aux", "position_bias":
            if keys.get(name) is not None:
                raise UnsupportedError(f"attention with {name} is not computed on several ranks")
        self._calls += 1
        # fewer heads of keys and values than ranks: a head is on each rank that has its queries
        times = math.lcm(key.shape[1], self.ranks) // key.shape[1]
        key, value = (each.repeat_interleave(times, dim=1) for each in (key, value))
        query, key, value = (self._all_tokens(each) for each in (query, key, value))
        groups = query.shape[1] // key.shape[1]
        local = SimpleNamespace(
            num_key_value_groups=groups, is_causal=getattr(module, "is_causal", True)
        )
        result, _ = sdpa_attention_forward(local, query, key, value, attention_mask, **keys)
        return self._all_heads(result), None

    def _mask(self, batch_size: int, q_length: int, kv_length: int, **keys: Any) -> Tensor | None:
        """Return the mask of the whole sequence; None where it is causal and no more."""
        if not self._is_inside:
            raise StateError(
                "the model was called outside of SequenceParallel.loss, where ranks do not share a "
                "sequence; to generate or evaluate on each rank by itself, call "
                "model.set_attn_implementation('sdpa') first"
            )
        length = q_length * self.ranks
        if keys.get("attention_mask") is not None and kv_length != length:
            raise ConfigError(f"attention_mask has {kv_length} columns: the sequence has {length}")
        return sdpa_mask(batch_size, length, length, **keys)

    def _all_tokens(self, part: Tensor) -> Tensor:
        """`[B, H, S/n, D]` -> `[B, H/n, S, D]`."""
        parts = part.unflatten(1, (self.ranks, -1)).movedim(1, 0)
        return Exchange.apply(parts, self.group).movedim(0, 2).flatten(2, 3)

    def _all_heads(self, part: Tensor) -> Tensor:
        """`[B, S, H/n, D]` -> `[B, S/n, H, D]`."""
        parts = part.unflatten(1, (self.ranks, -1)).movedim(1, 0)
        return Exchange.apply(parts, self.group).movedim(0, 2).flatten(2, 3)


class Exchange(torch.autograd.Function):
    """Part i of each rank's tensor goes to rank i, and so do gradients back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)  # gloo has it, too
        return received

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        upstream = upstream.contiguous()
        received = torch.empty_like(upstream)
        dist.all_to_all_single(received, upstream, group=ctx.group)
        return received, None


def main(steps: int) -> None:
    if not dist.is_torchelastic_launched():
        sys.exit("start it by torchrun: torchrun --nproc-per-node 2 examples/sequence_parallel.py")
    with torch.device("meta"):  # weights are made group by group, in their tier
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
                num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=LENGTH,
            )
        )  # fmt: skip
    rows = torch.tensor(list("".join(topics.values()).encode())).unfold(0, LENGTH, LENGTH)
    with offload.initialize(model, CONFIG) as engine:  # joins the ranks that torchrun has begun
        parallel = SequenceParallel(model)
        generator = torch.Generator().manual_seed(0)  # the same rows on all ranks
        for step in range(steps):
            row = rows[torch.randint(len(rows), (1,), generator=generator)].to(engine.device)
            loss = parallel.loss(row, labels=row)
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            value = parallel.mean(loss)
            if dist.get_rank() == 0 and (step % 10 == 0 or step == steps - 1):
                print(f"step {step + 1}: loss {value:.3f}", flush=True)
        engine.save_checkpoint("runs/sequence_parallel/checkpoint")  # any number of ranks loads it
        peaks = {name: tier.peak_nbytes >> 20 for name, tier in engine.report().tiers.items()}
        print(f"rank {dist.get_rank()}, MiB: {peaks}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
