"""What is still in memory is not read again, and what is used up is never written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import offload
from tests.offload.engine_cases import MARKS, NVME, TinyLM, batches, config, losses_of, seeded

pytestmark = MARKS

STEPS = 4


def trained(folder: Path, **keys: Any) -> offload.engine.Report:
    keys = {"optimizer": {"chunk": 2048}, **keys}
    model = seeded(lambda: TinyLM(blocks=12))
    with offload.initialize(model, config(folder, NVME, **keys)) as engine:
        losses_of(engine, batches(STEPS))
        engine.settle()
        return engine.report()


def test_with_room_for_everything_nothing_is_read_back(tmp_path: Path) -> None:
    assert trained(tmp_path).bytes_moved["nvme read"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, {"in_backward": True}], ids=["behind it", "in backward"])
def test_gradients_that_find_room_until_they_are_used_up_are_never_written(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    report = trained(tmp_path, optimizer={"chunk": 2048, **keys})
    assert report.tiers["nvme"].peak_by_class.get("gradients", 0) == 0
