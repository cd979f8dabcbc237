"""Thousands of small parameters take RAM beside the tiers: objects, which a plan counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offload.planning.machine.baseline import OBJECTS_NBYTES, Baseline
from offload.planning.plan.estimate import MemoryClass
from offload.tiers.tier import Tier
from tests.offload.engine_cases import said_by
from tests.planning.memory_cases import Case, draw, predict

PROGRAM = Path(__file__).with_name("object_program.py")


def test_what_a_parameter_takes_beside_the_tiers_is_bounded_by_what_is_predicted(
    tmp_path: Path,
) -> None:
    measured, predicted = said_by(PROGRAM, str(tmp_path))
    assert predicted == OBJECTS_NBYTES
    assert predicted / 2 < measured < predicted


def test_predicted_ram_has_the_objects_of_each_parameter(tmp_path: Path) -> None:
    few = draw("tiny", 0, tmp_path)
    many = Case(few.name, _with_layers(few.config, 9), few.own_loop)
    grown = many.shape().tensors - few.shape().tensors
    assert grown > 20
    assert _framework(many) - _framework(few) == grown * OBJECTS_NBYTES


def _with_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    train = config["train"]
    return {**config, "train": {**train, "model": {**train["model"], "layers": layers}}}


def _framework(case: Case) -> int:
    ram = predict(case, Baseline(1), activations=False).memory.places[Tier.HOST]
    return ram.by_class[MemoryClass.FRAMEWORK]
