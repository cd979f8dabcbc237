"""Experts that are spread over ranks train as experts that every rank has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import offload
from offload.checkpoint.exporting import read_whole
from tests.offload.engine_cases import HOST, assert_same_bits, states_of
from tests.ranks.expert_programs import EXPERTS, case, keys_of, save_and_load, spread
from tests.ranks.processes import run_ranks
from tests.ranks.programs import Outcome, train_all


def together(states: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Those of all ranks; what several have is the same."""
    found: dict[str, Tensor] = {}
    for mine in states:
        for name, value in mine.items():
            assert torch.equal(found.setdefault(name, value), value), name
    return found


def assert_close(found: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    mine, theirs = (together(each.states for each in some) for some in (found, expected))
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6, msg=name)
    for here, there in zip(found, expected, strict=True):
        torch.testing.assert_close(here.losses, there.losses, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(here.norms, there.norms, rtol=1e-6, atol=1e-6)
        assert here.norms == found[0].norms


def test_every_stage_trains_as_with_all_experts_on_each_rank(tmp_path: Path) -> None:
    cases = [case(1, 2), *(case(2, stage) for stage in range(4)), case(2, 3, HOST)]
    ranks = run_ranks(2, tmp_path, train_all, cases, str(tmp_path))
    one, *spread = (list(each) for each in zip(*ranks, strict=True))
    assert max(one[0].norms) > 0.5  # what the cases clip to
    for outcomes in spread:
        assert_close(outcomes, one)
        for here, first in zip(outcomes, spread[0], strict=True):
            assert_same_bits(here.states, first.states)
    own = {n for n in spread[0][1].states if ".experts." in n}
    assert {int(n.split(".experts.")[1][0]) for n in own} == {*range(EXPERTS // 2, EXPERTS)}


def test_a_checkpoint_has_the_experts_of_all_ranks(tmp_path: Path) -> None:
    ranks = run_ranks(2, tmp_path, save_and_load, str(tmp_path), "bf16")
    found = {
        name: [together(rank[name][when] for rank in ranks) for when in (0, 1)] for name in ranks[0]
    }
    for saved in "12":
        for loaded in "12":
            assert_same_bits(found[f"{saved} {loaded}"][0], found[saved][0])
        assert_same_bits(found[f"{saved} {saved}"][1], found[saved][1])
    assert any(".experts.3." in name for name in found["2"][0])
    with offload.initialize(spread(1)(), keys_of(str(tmp_path), 0, precision="bf16")) as engine:
        engine.load_checkpoint(tmp_path / "of 2")
        assert_same_bits(states_of(engine), found["2"][0])
    exported = read_whole(tmp_path / "of 2")
    assert exported.keys() == dict(spread(1)().state_dict()).keys()
