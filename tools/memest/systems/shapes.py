"""Families of models from small to enormous, in common shapes.

Each family has a list of widths with the depth at which they are usual (GPT-3, arXiv 2005.14165,
table 2.1; Megatron-LM, 2104.04473, table 1; ZeRO-Infinity, 2104.07857, table 1; Llama 2 and 3).
Between two of them the model gets deeper, a layer at a time, until the next width would be no
larger. So each family is one list of shapes, ordered by size.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from offload.planning.activations.facts import NO_WORK, ActivationFacts, HeapFacts, PassCost
from offload.planning.activations.generation_facts import GenerationFacts, generation_facts
from offload.planning.plan.cache_shape import CacheShape, alike
from offload.planning.plan.workload import Generation, Workload
from offload.tools.memest.systems.subject import Subject
from offload.zero.groups.layout import ParamShape
from offload.zero.groups.model_shape import GroupShape, ModelShape, UnitShape
from offload.zero.kv.sizes import CachedLayer

_HEAD_DIM = 128
_MOST_BUNDLES = 64  # of a block's experts
_GPT_SIZES = (
    (12, 768), (24, 1024), (24, 1536), (24, 2048), (32, 2560), (32, 4096), (40, 5120), (48, 6144),
    (64, 8192), (80, 10240), (96, 12288), (105, 20480), (128, 25600), (160, 32768), (192, 49152),
    (205, 90112), (512, 131072),
)  # fmt: skip
_LLAMA_SIZES = (
    (16, 1024), (16, 2048), (28, 3072), (32, 4096), (40, 5120), (60, 6656), (80, 8192),
    (100, 12288), (126, 16384), (160, 24576), (192, 32768), (240, 65536), (512, 131072),
)  # fmt: skip


class FamilyName(enum.StrEnum):
    """Llama: gated MLP, grouped queries, separate head; GPT: plain MLP, tied head; MoE: GPT whose
    every other block has experts instead of its MLP, one for each GPU it runs on."""

    LLAMA = "llama"
    GPT = "gpt"
    MOE = "moe"


@dataclass(frozen=True)
class Shape:
    """One model of a family."""

    family: FamilyName
    layers: int
    hidden: int
    vocabulary: int
    experts: int = 0

    @property
    def attention_numel(self) -> int:
        """The parameters of the projections; keys and values have a quarter of the width in
        Llama."""
        h = self.hidden
        return h * h * 5 // 2 if self.family is FamilyName.LLAMA else 4 * h * h + 4 * h

    @property
    def mlp_numel(self) -> int:
        h = self.hidden
        return 3 * h * self.mlp_width if self.family is FamilyName.LLAMA else 8 * h * h + 5 * h

    @property
    def mlp_width(self) -> int:
        if self.family is not FamilyName.LLAMA:
            return 4 * self.hidden
        return -(-self.hidden * 7 // 2 // 256) * 256  # Llama 3's 3.5 x, in whole 256

    @property
    def moe_layers(self) -> int:
        return self.layers // 2 if self.experts else 0

    @property
    def expert_numel(self) -> int:
        return self.moe_layers * self.experts * self.mlp_numel

    @property
    def embedding_numel(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def numel(self) -> int:
        dense = self.layers * (self.attention_numel + self.mlp_numel + 4 * self.hidden)
        heads = 2 if self.family is FamilyName.LLAMA else 1
        moe = self.expert_numel - self.moe_layers * self.mlp_numel
        return dense + moe + heads * self.embedding_numel + 2 * self.hidden

    @property
    def label(self) -> str:
        experts = f", {self.experts} experts" if self.experts else ""
        return f"{self.layers} layers of {self.hidden}{experts}"


@functools.cache
def shapes_of(family: FamilyName, experts: int = 0) -> Sequence[Shape]:
    """Return the family's shapes, strictly growing. `experts`: per expert layer, for MoE."""
    sizes = _LLAMA_SIZES if family is FamilyName.LLAMA else _GPT_SIZES
    vocabulary = 128_256 if family is FamilyName.LLAMA else 50_304
    count = max(2, experts) if family is FamilyName.MOE else 0
    shapes: list[Shape] = []
    step = 2 if family is FamilyName.MOE else 1
    for (layers, hidden), upper in zip(sizes, [*sizes[1:], None], strict=True):
        last = Shape(family, upper[0], upper[1], vocabulary, count).numel if upper else None
        for depth in range(layers // step * step, 8 * layers, step):
            shape = Shape(family, depth, hidden, vocabulary, count)
            if last is not None and shape.numel >= last:
                break
            if not shapes or shape.numel > shapes[-1].numel:
                shapes.append(shape)
    return tuple(shapes)


def facts_of(shape: Shape, workload: Workload, *, itemsize: int, scores: bool) -> ActivationFacts:
    """Return the activations of one pass with every block recomputed, by formula.

    The blocks' inputs are saved. A block at work holds 34 bytes per token and width in 16 bits, and
    5 per token, token and head where attention scores are kept (Korthikanti et al., 2205.05198,
    equation 1; `scores` false: fused attention, which keeps none). The head holds its logits in 16
    bits, and with their gradient in fp32.
    """
    B, S, H = workload.batch, workload.sequence, shape.hidden
    tokens = B * S
    scale = itemsize / 2
    saved = int(tokens * H * shape.layers * itemsize)
    gate = 1.25 if shape.family is FamilyName.LLAMA else 1.0  # one more product as wide as the MLP
    block = tokens * H * 34 * gate + (5 * tokens * S * (H // _HEAD_DIM) if scores else 0)
    logits = tokens * shape.vocabulary * (itemsize + 4 + 4)
    peak = saved + max(int(block * scale), int(logits))
    active = shape.numel - shape.expert_numel + shape.moe_layers * shape.mlp_numel
    forward = 2 * active * tokens + 4 * B * S * S * H * shape.layers
    cost = PassCost(forward, 0, shape.layers * 20)
    back = PassCost(3 * forward, 0, shape.layers * 60)  # twice, and forward once more
    where = "logits" if logits > block * scale else "backward of a block"
    return ActivationFacts(saved, peak, peak - saved, where, cost, back)


def subject_from(shape: Shape, facts: ActivationFacts) -> Subject:
    """Return the subject of a shape, without building its modules."""
    block = shape.attention_numel + shape.mlp_numel * max(1, shape.experts) + 4 * shape.hidden
    return Subject(
        numel=shape.numel,
        numel_trainable=shape.numel,
        block_numel=shape.embedding_numel + block,
        operator_numel=max(shape.hidden * shape.mlp_width, shape.embedding_numel),
        saved_nbytes=facts.saved_nbytes,
        working_nbytes=facts.peak_nbytes - facts.saved_nbytes,
        recomputed=True,
        expert_numel=shape.expert_numel,
    )


def model_of(shape: Shape) -> ModelShape:
    """Return the groups and units, one weight per part of a block. Experts are separate groups; if
    a block has more than 64, several of them share a group."""

    def group(name: str, table: str, **numels: int) -> GroupShape:
        parts = ((f"{name}.{part}", part, numel) for part, numel in numels.items())
        params = tuple(
            ParamShape((full,), _matrix(numel, shape.hidden) if "norm" not in part else (numel,))
            for full, part, numel in parts
        )
        return GroupShape(name, params, table=table)

    groups = [group("embedding", "", weight=shape.embedding_numel, norm=2 * shape.hidden)]
    attention, norms = shape.attention_numel, 4 * shape.hidden
    for layer in range(shape.layers):
        name = f"layers.{layer}"
        if not shape.experts or layer % 2 == 0:
            groups.append(group(name, "", attention=attention, mlp=shape.mlp_numel, norms=norms))
            continue
        groups.append(group(name, "", attention=attention, norms=norms))
        bundles = min(shape.experts, _MOST_BUNDLES)
        numel = -(-shape.experts * shape.mlp_numel // bundles)
        table = f"{name}.experts"
        groups += [group(f"{table}.{i}", table, weight=numel) for i in range(bundles)]
    if shape.family is FamilyName.LLAMA:
        groups.append(group("head", "", weight=shape.embedding_numel))
    units = [UnitShape("", ()), UnitShape("embedding", (0,))]
    units += [
        UnitShape(
            g.name, (i,), repeated=g.name.startswith("layers.") and not g.table, table=g.table
        )
        for i, g in enumerate(groups)
        if i
    ]
    return ModelShape(tuple(groups), tuple(units))


def _matrix(numel: int, width: int) -> tuple[int, ...]:
    """Return the shape of all weights of a part as one, with rows as wide as the model."""
    return (numel // width, width) if numel % width == 0 else (numel,)


def cache_of(shape: Shape) -> CacheShape:
    """Return the key/value cache of a model that generates."""
    width = shape.hidden // 4 if shape.family is FamilyName.LLAMA else shape.hidden
    return alike(shape.layers, CachedLayer(1, width, width))


def generation_of(
    shape: Shape, generation: Generation, *, itemsize: int
) -> GenerationFacts:  # fmt: skip
    """Return the facts of passes without gradients, by formula: a block holds its input twice, and
    the two products in its MLP's middle; the head holds the logits of each sequence's last token,
    also in fp32."""

    def forward(work: Workload) -> ActivationFacts:
        tokens = work.batch * work.sequence
        block = tokens * (4 * shape.hidden + 3 * shape.mlp_width) * itemsize
        logits = work.batch * shape.vocabulary * (itemsize + 2 * 4)
        peak = tokens * shape.hidden * itemsize + max(block, logits)
        active = shape.numel - shape.expert_numel + shape.moe_layers * shape.mlp_numel
        active -= shape.embedding_numel if shape.family is FamilyName.LLAMA else 0
        flops = 2 * active * tokens + 4 * tokens * work.sequence * shape.hidden * shape.layers
        touched = active * itemsize + 3 * shape.layers * block
        cost = PassCost(flops, touched, shape.layers * 20)
        heap = HeapFacts(0, peak, peak)
        return ActivationFacts(0, peak, peak, "forward of a block", cost, NO_WORK, heap)

    prefill, decode = forward(generation.prefill), forward(generation.decode)
    return generation_facts(prefill, decode, cache_of(shape), generation, itemsize)
