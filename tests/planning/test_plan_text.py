"""What `offload plan` says: where, why, how long, and what comes next."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from offload.config import OffloadConfig
from offload.planning.choice.plan_text import Planned, _time, describe, expert_facts
from offload.planning.choice.solver import solve
from offload.planning.machine.preflight import Preflight
from offload.planning.plan.estimate import LinkTime, StepEstimate
from offload.planning.plan.experts import estimate_experts
from offload.planning.plan.workload import Workload
from tests.planning.test_experts import model as experts_model
from tests.planning.test_experts import plan_of
from tests.planning.test_solver import hardware, known, model


def said(keys: dict[str, Any], width: int = 80, **more: Any) -> str:
    config = OffloadConfig.load(keys)
    solution = solve(config, model(), hardware(), more.pop("about", known()))
    looked = Preflight((), more.pop("warnings", ()))
    timed = more.pop("timed", True)
    planned = Planned(
        "a model", config, Workload(4, 128), solution, "cpu", looked, timed, **more
    )  # fmt: skip
    out = StringIO()
    Console(file=out, width=width, highlight=False).print(describe(planned))
    return out.getvalue()


TIGHT = {"budget": {"host": "150MiB", "nvme": "2GiB"}}


def test_every_open_class_says_why_it_is_there():
    text = " ".join(said(TIGHT).split())
    assert text.count("(auto)") >= 3
    assert "more of host would hold it all" in text or "nothing has to move" in text


def test_experts_are_told_of_where_there_are_some():
    assert "Experts" not in said(TIGHT)
    shape = experts_model()
    plan, _ = plan_of(shape)
    found = estimate_experts(plan, shape, Workload(1, 4))
    assert found is not None
    text = " ".join(said(TIGHT, experts=found, width=120).split())
    for fact in expert_facts(found):
        assert fact in text


def test_the_model_and_the_work_are_named():
    lines = said(TIGHT).splitlines()
    assert lines[0].split() == ["model", "a", "model"]
    assert "4 x 128 tokens" in lines[2]


def test_a_named_class_says_that_it_was_named():
    text = said({**TIGHT, "placement": {"parameters": "nvme"}})
    assert "as the configuration says" in text


def test_the_bottleneck_is_named():
    text = said(TIGHT)
    assert "Predicted step: " in text
    assert text.count("(bottleneck)") == 1


def test_no_time_is_said_where_none_is_known():
    text = said(TIGHT, timed=False)
    assert "Predicted step" not in text
    assert "memest calibrate" in text


def test_what_preflight_found_is_said():
    assert "note: nvme.paths: /x is on tmpfs" in said(
        TIGHT, warnings=("nvme.paths: /x is on tmpfs",)
    )


@pytest.mark.parametrize("width", [80, 100])
def test_nothing_is_wider_than_the_terminal(width: int):
    assert max(map(len, said(TIGHT, width).splitlines())) <= width


@pytest.mark.parametrize(("value", "text"), [(0.0312, "31.2 ms"), (2990.0, "49 min 50 s")])
def test_times_are_worded_for_people(value: float, text: str):
    step = StepEstimate(value, (LinkTime("compute", value),), "compute", 64)
    out = StringIO()
    Console(width=100, file=out).print(_time("step", step, "of the step"))
    assert out.getvalue().count(text) == 2
