"""Of a dispatched model's experts those are read that a router has chosen, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import offload
import offload.memory.tier_manager
from offload.tiers.units import round_up
from tests.offload.engine_cases import bits, config, seeded
from tests.outside.routed_model import EXPERTS, HIDDEN, Routed
from tests.outside.test_expert_bytes import LAYERS, at_once, drawn, forget_copies

__all__ = ["at_once"]
PASSES = 6


def read_nbytes(dispatched: offload.Dispatched) -> int:
    return dispatched.report().bytes_moved["nvme read"]


@pytest.mark.sample(4)
@pytest.mark.parametrize("packed", [False, True], ids=["modules", "packed"])
@pytest.mark.parametrize("stays", [False, True], ids=["nothing stays", "all stays"])
def test_a_pass_reads_what_the_routing_asks_for(tmp_path: Path, packed: bool, stays: bool) -> None:
    plain = seeded(lambda: Routed(LAYERS, packed=packed))
    model = seeded(lambda: Routed(LAYERS, packed=packed))
    keys = config(
        tmp_path, {"parameters": "nvme"}, budget={"host": "64MiB", "nvme": "64MiB"},
        prefetch=2 if stays else 0, device="cpu",
    )  # fmt: skip
    tokens = torch.ones(2, HIDDEN).cumsum(0)
    with offload.dispatched(offload.dispatch(model, keys)) as dispatched, torch.no_grad():
        groups = {g.name: round_up(g.state.nbytes, 4096) for g in dispatched.store.groups}
        assert len(groups) == LAYERS * (1 + EXPERTS)
        forget_copies(dispatched)
        known: set[str] = set()
        for _, routing in zip(range(PASSES), drawn(2), strict=False):
            before = read_nbytes(dispatched)
            assert bits(model(tokens, routing)) == bits(plain(tokens, routing))
            used = {name for name in groups if "experts" not in name}
            used |= {
                f"layers.{layer}.experts.{expert}"
                for layer, chosen in enumerate(routing)
                for expert in chosen.unique().tolist()
            }
            read = read_nbytes(dispatched) - before
            assert read == sum(groups[name] for name in used - known)
            if stays:
                known |= used
            else:
                forget_copies(dispatched)
