"""Thousands of small parameters take RAM beside the tiers: objects, which a plan counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.planning.machine.baseline import OBJECTS_NBYTES
from tests.offload.engine_cases import said_by

PROGRAM = Path(__file__).with_name("object_program.py")


@pytest.mark.slow
def test_what_a_parameter_takes_beside_the_tiers_is_bounded_by_what_is_predicted(
    tmp_path: Path,
) -> None:
    measured, predicted = said_by(PROGRAM, str(tmp_path))
    assert predicted == OBJECTS_NBYTES
    assert predicted / 2 < measured < predicted
