"""The field's capacity headlines, computed again from the formulas of `systems`.

One set of assumptions for all, none fitted to a row: the models of `shapes`; 16-bit Adam; one pass
of 4 sequences of 1,024 tokens per GPU with every block recomputed, attention scores kept (PyTorch
did then; MegaTrain's fused attention keeps none); the buffers, libraries and fragmentation of
`systems`; all of the memory that the machine's data sheet names. Ours is the largest shape that
fits. Of a family of models of which the sizes were published they are counted from its layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.planning.plan.workload import Workload
from offload.tools.memest.hardware.parts import GIB, TB, gpu_named, machine_named
from offload.tools.memest.systems.largest import largest_shape
from offload.tools.memest.systems.memory import System
from offload.tools.memest.systems.shapes import FamilyName
from offload.tools.memest.systems.subject import Ranks, Room

TOLERANCE = 0.15
WORKLOAD = Workload(batch=4, sequence=1024)


@dataclass(frozen=True)
class Headline:
    """A published capacity. `why`: what explains a difference beyond the tolerance."""

    system: System
    claim: float  # parameters
    family: FamilyName
    ranks: Ranks
    room: Room
    machine: str
    source: str
    scores: bool = True  # attention scores are kept
    why: str = ""


@dataclass(frozen=True)
class PublishedSize:
    """The published size of a model with an encoder and a decoder whose every other block has
    `experts` instead of its MLP; of the dense model that they are made of with one."""

    claim: float  # parameters
    encoder_layers: int
    decoder_layers: int
    hidden: int
    vocabulary: int
    experts: int
    source: str
    why: str = ""
    system: str = "parameters"

    @property
    def numel(self) -> int:
        """A decoder's block attends twice. Biases, norms and routers are left out."""
        attention, mlp = 4 * self.hidden**2, 8 * self.hidden**2
        blocks = self.encoder_layers + self.decoder_layers
        dense = (blocks + self.decoder_layers) * attention + blocks * mlp
        return dense + self.vocabulary * self.hidden + blocks // 2 * (self.experts - 1) * mlp

    @property
    def machine(self) -> str:
        experts = f", {self.experts} experts in every other" if self.experts > 1 else ", dense"
        return f"{self.encoder_layers} + {self.decoder_layers} layers of {self.hidden:,}{experts}"


@dataclass(frozen=True)
class Finding:
    """A published figure and what the formulas make of it: parameters, 0 if not even the smallest
    shape fits."""

    headline: Headline | PublishedSize
    numel: int

    @property
    def difference(self) -> float:
        """Of ours, as a share of the claim."""
        return self.numel / self.headline.claim - 1

    @property
    def within(self) -> bool:
        return abs(self.difference) <= TOLERANCE


def headlines() -> tuple[Headline, ...]:
    """Those this project is measured by."""
    dgx2, nd_a100 = machine_named("DGX-2"), machine_named("ND A100 v4")
    v100 = Room(dgx2.gpu.nbytes, dgx2.ram_nbytes, 0)
    a100 = Room(nd_a100.gpu.nbytes, nd_a100.ram_nbytes, 0)
    gpt = FamilyName.GPT
    return (
        Headline(
            System.DDP, 1.4e9, gpt, Ranks(16, 8), v100, "128 x V100-32",
            "ZeRO, arXiv 1910.02054: the most without it; the same in 2101.06840, abstract",
        ),
        Headline(
            System.ZERO1, 6e9, gpt, Ranks(16, 4), v100, "64 x V100-32",
            "ZeRO, arXiv 1910.02054: states alone shared, 6.2 B measured",
        ),
        Headline(
            System.ZERO2, 13e9, gpt, Ranks(16, 8), v100, "128 x V100-32",
            "ZeRO, arXiv 1910.02054, abstract: without model parallelism",
        ),
        Headline(
            System.ZERO2, 170e9, gpt, Ranks(16, 25, tensor=16), v100,
            "400 x V100-32, 16-way tensor parallel",
            "ZeRO-2 announcement, 2020-05-19; its 16-way tensor parallelism: arXiv 1910.02054",
        ),
        Headline(
            System.ZERO_OFFLOAD, 13e9, gpt, Ranks(), v100, "1 x V100-32 of a DGX-2",
            "ZeRO-Offload, arXiv 2101.06840, abstract",
        ),
        Headline(
            System.INFINITY_NVME, 1e12, gpt, Ranks(16),
            Room(dgx2.gpu.nbytes, dgx2.ram_nbytes, 28 * TB),
            "DGX-2: 16 x V100-32, 1.5 TB RAM, 28 of its 30 TB NVMe",
            "ZeRO-Infinity, arXiv 2104.07857, abstract; SC21 slides: 1 T on a single node",
            why="1 T is a size that was trained on one node, not the most that fits: at 20 bytes a "
            "parameter, which the paper counts, too, its states take 20 of the 28 TB, and the "
            "disks are full at 1.4 T",
        ),
        Headline(
            System.ZERO_OFFLOAD, 3.5e12, FamilyName.MOE, Ranks(8, 64, tensor=8, experts=512),
            a100,
            "512 x A100-40, 8 in a node with 900 GiB RAM, 8-way tensor parallel",
            "DeepSpeed-MoE announcement, 2021-08-18; its tutorial's E + Z-Off + M",
        ),
        Headline(
            System.ZERO_OFFLOAD, 400e9, FamilyName.MOE, Ranks(8, 8, tensor=8, experts=64),
            a100,
            "64 x A100-40 instead of 512, 8-way tensor parallel",
            "DeepSpeed-MoE announcement, 2021-08-18; that it takes 512 without offload is quoted",
        ),
        Headline(
            System.ZERO2, 15e9, gpt, Ranks(8, 64), a100, "512 x A100-40",
            "DeepSpeed-MoE announcement, 2021-08-18: the base model, E + Z",
        ),
        Headline(
            System.ZERO2, 100e9, gpt, Ranks(8, 64, tensor=8), a100,
            "512 x A100-40, 8-way tensor parallel",
            "DeepSpeed-MoE announcement, 2021-08-18: the base model with model parallelism",
            why="the base model alone is counted, and is given all memory: at 100 B its 16-bit "
            "weights take 23 of a GPU's 40 GiB, and the experts that are added to it take of the "
            "rest",
        ),
        Headline(
            System.MEGATRAIN, 120e9, FamilyName.LLAMA, Ranks(),
            Room(gpu_named("H200").nbytes, 1536 * GIB, 0), "1 x H200, 1.5 TB RAM",
            "MegaTrain, 2026: 120 B on one H200, 12 bytes a parameter in RAM", scores=False,
        ),
    )  # fmt: skip


def published_sizes() -> tuple[PublishedSize, ...]:
    """Of the translation models that the announcement trains: each is the one before with more
    experts."""
    source = (
        "DeepSpeed-MoE announcement, 2021-08-18 (its paper: arXiv 2109.10465); layers, experts and "
        "a vocabulary of 128,000 are assumed: one shape that explains all three"
    )
    return tuple(
        PublishedSize(claim, 24, 12, 1024, 128_000, experts, source)
        for claim, experts in ((0.7e9, 1), (1.8e9, 8), (10e9, 64))
    )


def find(headline: Headline | PublishedSize) -> Finding:
    """The largest model that the formulas let that system train on that machine."""
    if isinstance(headline, PublishedSize):
        return Finding(headline, headline.numel)
    found = largest_shape(
        headline.system, headline.family, headline.ranks, headline.room, WORKLOAD,
        experts=headline.ranks.experts, scores=headline.scores,
    )  # fmt: skip
    return Finding(headline, found.numel)


def findings() -> list[Finding]:
    claims: list[Headline | PublishedSize] = [*headlines(), *published_sizes()]
    return [find(each) for each in claims]
