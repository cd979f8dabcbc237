"""The field's capacity headlines, computed again from the formulas of `systems`.

One set of assumptions for all, none fitted to a row: the models of `shapes`; 16-bit Adam; one pass
of 4 sequences of 1,024 tokens per GPU with every block recomputed, attention scores kept (PyTorch
did then; MegaTrain's fused attention keeps none); the buffers, libraries and fragmentation of
`systems`; all of the memory that the machine's data sheet names. Ours is the largest shape that
fits.
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
class Finding:
    """A headline and what the formulas make of it: parameters, 0 if not even the smallest shape
    fits."""

    headline: Headline
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
            Room(nd_a100.gpu.nbytes, nd_a100.ram_nbytes, 0),
            "512 x A100-40, 8 in a node with 900 GiB RAM, 8-way tensor parallel",
            "DeepSpeed-MoE announcement, 2021-08-18; its tutorial's E + Z-Off + M",
        ),
        Headline(
            System.MEGATRAIN, 120e9, FamilyName.LLAMA, Ranks(),
            Room(gpu_named("H200").nbytes, 1536 * GIB, 0), "1 x H200, 1.5 TB RAM",
            "MegaTrain, 2026: 120 B on one H200, 12 bytes a parameter in RAM", scores=False,
        ),
    )  # fmt: skip


def find(headline: Headline) -> Finding:
    """The largest model that the formulas let that system train on that machine."""
    found = largest_shape(
        headline.system, headline.family, headline.ranks, headline.room, WORKLOAD,
        experts=headline.ranks.experts, scores=headline.scores,
    )  # fmt: skip
    return Finding(headline, found.numel)


def findings() -> list[Finding]:
    return [find(headline) for headline in headlines()]
