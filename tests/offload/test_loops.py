"""Loops as people write them train as plain PyTorch does, or are refused by an `OffloadError`."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

import offload
from tests.offload.engine_cases import MARKS, ON
from tests.offload.loop_page import PAGE, line, page
from tests.offload.loop_rows import ROWS
from tests.offload.loop_trial import Row, Trial, blocks, configuration, result

pytestmark = MARKS
# what no other test trains, beside every fifth
ALWAYS = (
    "unused", "submodules", "autograd_grad", "sparse_gradients", "tied", "gradient_penalty",
    "checkpointed", "checkpointed_reentrant", "scheduler", "add_param_group", "frozen_later",
    "unfrozen", "closure", "optimizer_state", "data_loader", "two_engines", "stop_in_forward",
    "stop_in_backward",
)  # fmt: skip


@pytest.mark.sample(*[row.name for row in ROWS][::5], *ALWAYS)
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_a_loop_comes_to_what_the_page_says(row: Row, long: bool) -> None:
    """On nvme; on the host, too, with --long, where the page tells them apart, and of a fourth."""
    begin, written = line(row, "").removesuffix(" |"), PAGE.read_text().splitlines()
    apart = any(each.startswith(f"{begin}host: ") for each in written)
    both = long or apart or ROWS.index(row) % 4 == 0
    placements = ("host", "nvme") if both else ("nvme",)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of what some loops do
        outcome = line(row, result(row, placements))
    if ON != "cpu":  # the page is of one, where parameters on the host are computed with in place
        outcome = outcome.replace("cuda:0", "cpu")
        written = [re.sub(r"\| host: .*; nvme: ", "| ", each) for each in written]
    assert outcome in written, (
        f"not in {PAGE.name}: {outcome}\n(python -m tests.offload.loop_page writes it anew)"
    )


def test_the_page_is_made_of_the_rows_alone() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    written = PAGE.read_text().splitlines()
    begins = {row.name: line(row, "").removesuffix(" |") for row in ROWS}
    lines = {
        name: next((each for each in written if each.startswith(begin)), begin)
        for name, begin in begins.items()
    }
    assert written == list(page(lines)), "python -m tests.offload.loop_page writes it anew"


def test_loops_on_nvme_move_their_states(tmp_path: Path) -> None:
    with offload.initialize(blocks(), configuration(tmp_path, "nvme", {})) as engine:
        Trial(engine.module, lambda model: (engine.optimizer, engine), engine.optimizer).train()
        engine.settle()
        report = engine.report()
    assert report.evictions > 0
    assert all(report.bytes_moved[way] > 50 * 2**10 for way in ("nvme read", "nvme write"))
