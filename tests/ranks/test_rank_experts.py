"""Experts that are spread over ranks train as experts that every rank has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tests.offload.engine_cases import HOST, assert_same_bits
from tests.ranks.expert_programs import EXPERTS, case
from tests.ranks.processes import run_ranks
from tests.ranks.programs import Outcome, train_all


def together(outcomes: Sequence[Outcome]) -> dict[str, Tensor]:
    """The states of all ranks; those that several have are the same."""
    found: dict[str, Tensor] = {}
    for outcome in outcomes:
        for name, value in outcome.states.items():
            assert torch.equal(found.setdefault(name, value), value), name
    return found


def assert_close(found: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    mine, theirs = together(found), together(expected)
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
        assert_same_bits(together(outcomes), together(spread[0]))
    own = {n for n in spread[0][1].states if ".experts." in n}
    assert {int(n.split(".experts.")[1][0]) for n in own} == {*range(EXPERTS // 2, EXPERTS)}
