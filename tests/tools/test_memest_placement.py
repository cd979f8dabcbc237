"""What is left open is placed at least as well as by hand, on named parts."""

import itertools
from typing import Any

import pytest

from offload.config import OffloadConfig
from offload.planning.activations.facts import ActivationFacts, PassCost
from offload.planning.choice.solver import Candidate, RunFacts, solve
from offload.planning.machine.baseline import Baseline
from offload.planning.plan.estimate import Workload
from offload.tools.memest.commands.options import EstimateOptions
from offload.tools.memest.commands.run_estimate import answered, read_question
from offload.tools.memest.estimate.answer import estimate
from offload.tools.memest.estimate.case import Question
from offload.tools.memest.hardware.profiles import HardwareProfile
from offload.tools.memest.hardware.read_profile import read_profile
from offload.tools.memest.source.read_model import read_stated
from offload.tools.memest.source.stated_sizes import StatedSizes
from offload.zero.groups.model_shape import ModelShape

CLASSES = ("parameters", "gradients", "optimizer")
TIERS = ("device", "host", "nvme")
MIB = 1 << 20
SIZES = {  # parameters: layers, width
    350_000_000: (24, 1024), 2_070_000_000: (32, 2048), 7_000_000_000: (32, 4096),
    13_000_000_000: (40, 5120), 70_000_000_000: (80, 8192),
}  # fmt: skip
PARTS: dict[str, dict[str, Any]] = {
    "H100": {"ram": "512GiB", "nvme": "8TiB"},
    "A100-80": {"ram": "256GiB", "nvme": "4TiB"},
    "H200": {"ram": "1TiB", "nvme": "4TiB"},
    "RTX 4090": {"ram": "64GiB", "nvme": "2TiB"},
}
SAMPLE = {(2_070_000_000, "H100")}


def profile_of(part: str) -> HardwareProfile:
    return read_profile(part, **PARTS[part])


def known_of(shape: ModelShape, profile: HardwareProfile, layers: int, hidden: int) -> RunFacts:
    """One pass of 2,048 tokens, by the usual formulas instead of a trace."""
    tokens, speeds = 2048, profile.speeds()
    assert speeds is not None
    forward = 2 * shape.numel * tokens
    saved = 34 * layers * hidden * tokens

    def facts_of(config: OffloadConfig) -> ActivationFacts:
        again = config.placement.activations.checkpoint
        kept, backward = (saved // 8, 3 * forward) if again else (saved, 2 * forward)
        first, second = (PassCost(n, n // 200, 20 * layers) for n in (forward, backward))
        return ActivationFacts(kept, kept + 256 * MIB, 256 * MIB, first, second)

    libraries = Baseline(1536 * MIB, 768 * MIB, compiler_nbytes=0)
    return RunFacts(Workload(1, tokens), speeds, facts_of, libraries)


def best_of(
    shape: ModelShape, profile: HardwareProfile, known: RunFacts, placement: dict[str, Any]
) -> Candidate:
    keys = {"precision": "bf16", "placement": placement}
    return solve(OffloadConfig.load(keys), shape, profile.hardware(), known).best


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("numel", SIZES)
def test_no_class_forced_whole_into_a_tier_is_faster(numel: int, part: str, long: bool) -> None:
    if (numel, part) not in SAMPLE and not long:
        pytest.skip("every model on every part: --long")
    layers, hidden = SIZES[numel]
    shape = read_stated(StatedSizes(params=numel, layers=layers, hidden=hidden)).shape
    profile = profile_of(part)
    known = known_of(shape, profile, layers, hidden)
    auto = {"activations": {"checkpoint": "auto"}}
    best = best_of(shape, profile, known, auto)
    corners = 0
    for chosen in itertools.product(TIERS, repeat=3):
        for again in (False, True) if long else (best.config.placement.activations.checkpoint,):
            placement = dict(zip(CLASSES, chosen, strict=True))
            forced = {**placement, "activations": {"checkpoint": again}}
            by_hand = best_of(shape, profile, known, forced)
            if by_hand.fits:
                corners += 1
                assert best.fits
                assert best.seconds <= by_hand.seconds * 1.02, (chosen, again)
    assert corners


def test_a_round_figure_that_fits_is_advised() -> None:
    """369 M parameters that fit a GPU, in 3 GiB of RAM: 4 GiB are enough, or 5 where torch's code
    for checkpoints is large (it is sure to fit if it fits with recomputation)."""

    def asked(ram: str) -> Question:
        return read_question(
            EstimateOptions(
                layers=24, hidden=1024, batch=1, sequence=512, gpu="RTX 4090", ram=ram, nvme="0"
            )
        )

    _, short = answered(asked("3GiB"), estimate)
    assert not short.fits
    assert short.system_nbytes == 3 << 29
    ((advised,),) = (change.settings.values() for change in short.changes)
    assert advised in ("4GiB", "5GiB")
    assert answered(asked(advised), estimate)[1].fits


def test_all_of_a_model_that_fits_the_gpu_is_there() -> None:
    """2.07 B parameters, where parameters on host would take twice the time."""
    shape = read_stated(StatedSizes(params=2_070_000_000, layers=32, hidden=2048)).shape
    for part in ("A100-80", "H100"):
        profile = profile_of(part)
        best = best_of(shape, profile, known_of(shape, profile, 32, 2048), {})
        placed = [where.describe() for where in best.plan.placements.values()]
        assert placed == ["device"] * 3, part
