"""A lower bound on what a case needs, without a plan, to skip changes that cannot be enough."""

from __future__ import annotations

from offload.planning.activations.facts import ActivationFacts
from offload.planning.plan.sizes import ITEMSIZE, least_nbytes, record_formats
from offload.tiers.tier import Tier
from offload.tools.memest.estimate.case import Case

_NUMEL = 1 << 24  # of so many, the gaps between arrays are next to nothing


def cannot_fit(case: Case, facts: ActivationFacts) -> bool:
    """Whether no placement can hold the case: it has too many bytes for all places together, or one
    pass works on too many for the place where the model computes. False decides nothing."""
    hardware = case.hardware
    there = {
        Tier.DEVICE: hardware.device_nbytes,
        Tier.HOST: hardware.host_nbytes,
        Tier.NVME: hardware.nvme_free_nbytes,
    }
    compute = Tier.DEVICE if hardware.device_nbytes else Tier.HOST
    working = facts.peak_nbytes
    if case.config.placement.activations.tier != "device":
        working = min(working, facts.peak_elsewhere_nbytes)
    states = states_nbytes(case) // case.sharding.ranks
    return working > there[compute] or states + working > sum(there.values())


def states_nbytes(case: Case) -> int:
    """Return the bytes of parameters, gradients and optimizer states where they are smallest,
    without padding."""
    config, shape = case.config, case.shape
    per_gradient = 4 if config.sums_gradients else ITEMSIZE[config.precision]
    record = min(kept.nbytes(_NUMEL) for kept in record_formats(config).values()) / _NUMEL
    trained = shape.numel_trainable
    weights = sum(least_nbytes(group, ITEMSIZE[config.precision]) for group in shape.groups)
    return int(weights + trained * (per_gradient + record))
