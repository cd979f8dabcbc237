"""The field's capacity headlines follow from its papers' formulas, with one set of assumptions."""

from __future__ import annotations

import pytest

from offload.tools.memest.commands.run_systems import history_table, print_history
from offload.tools.memest.systems.headlines import TOLERANCE, Headline, find, findings, headlines
from offload.tools.memest.systems.memory import System

CASES = headlines()


@pytest.mark.parametrize("headline", CASES, ids=lambda h: f"{h.system} {h.claim:.3g}")
def test_a_headline_is_met_or_its_difference_is_explained(headline: Headline) -> None:
    found = find(headline)
    assert found.numel > 0
    assert found.within or len(headline.why) > 60, f"{found.difference:+.0%}"


def test_all_but_one_are_within_the_tolerance() -> None:
    """Also without the explanation: a formula that drifts is noticed."""
    apart = [f.headline.system for f in findings() if not f.within]
    assert apart == [System.INFINITY_NVME]
    assert TOLERANCE == 0.15


def test_only_what_differs_is_explained() -> None:
    assert [h.system for h in CASES if h.why] == [System.INFINITY_NVME]


def test_every_claim_of_the_field_is_there_with_its_source() -> None:
    claims = sorted(headline.claim for headline in CASES)
    assert claims == [1.4e9, 6e9, 13e9, 13e9, 120e9, 170e9, 1e12, 3.5e12]
    assert all(len(h.source) > 20 and len(h.machine) > 10 for h in CASES)


def test_the_table_has_a_row_and_a_source_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    found = findings()
    assert history_table(found).row_count == len(found)
    print_history()
    text = " ".join(capsys.readouterr().out.split())
    for each in found:
        assert " ".join(each.headline.source.split()) in text
