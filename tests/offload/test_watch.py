"""`engine.watch()`: which figures are in which step's row, what its end leaves, what is said."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload.errors import ConfigError, StateError, UnsupportedError
from offload.loggers import JSONLinesLogger
from tests.offload.engine_cases import HOST, MARKS, TinyLM, batches, config, seeded
from tests.offload.engine_states import assert_same_bits, losses_of, states_of, train_step

pytestmark = MARKS

Rows = list[tuple[int, dict[str, Any]]]


class Kept:
    """A logger."""

    def __init__(self) -> None:
        self.rows: Rows = []
        self.closed = 0

    def log(self, values: Any, step: int) -> None:
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1

    def of(self, name: str) -> list[Any]:
        return [values[name] for _, values in self.rows]

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.rows]


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """An engine of the tiny model."""

    def made(**keys: Any) -> offload.Engine:
        placement = keys.pop("placement", HOST)
        return offload.initialize(seeded(TinyLM), config(tmp_path, placement, **keys))

    return made


def step(engine: offload.Engine, tokens: Tensor) -> float:
    """One step; its loss."""
    return train_step(engine.optimizer, engine.module.loss(tokens))  # type: ignore[operator]


def test_what_is_logged_is_in_the_row_of_its_step(make: Any) -> None:
    """Before the step or after it, and whatever comes between."""
    kept, losses = Kept(), []
    with make() as engine, engine.watch(loggers=[kept], show=False, tokens=12) as watch:
        model = engine.module
        for number, tokens in enumerate(batches(6)):
            loss = model.loss(tokens)
            loss.backward()
            if number % 2:
                watch.log(loss=loss)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            if number == 2:
                with torch.no_grad():
                    watch.log(validation_loss=float(model.loss(tokens)), tokens=24)
            if not number % 2:
                watch.log(loss=7.0)
                watch.log(loss, number=number)  # the last one counts
            losses.append(float(loss.detach()))
    assert kept.steps == [1, 2, 3, 4, 5, 6]
    assert kept.of("loss") == losses
    assert [values["figures"] for _, values in kept.rows] == [
        {"number": 0}, {}, {"number": 2}, {}, {"number": 4}, {},
    ]  # fmt: skip
    assert [value is None for value in kept.of("validation_loss")] == [
        True, True, False, True, True, True,
    ]  # fmt: skip
    for values, tokens_of_step in zip((v for _, v in kept.rows), [12, 12, 24, 12, 12, 12],
                                      strict=True):  # fmt: skip
        assert values["tokens_per_second"] * values["seconds"] == pytest.approx(tokens_of_step)
    assert kept.closed == 1


def test_the_loss_of_engine_backward_is_read_where_none_is_logged(make: Any) -> None:
    kept, sums = Kept(), []
    with make(gradient_accumulation_steps=2) as engine, engine.watch(loggers=[kept], show=False):
        for tokens in batches(3):
            total = 0.0
            for _ in range(2):
                loss = engine.module.loss(tokens) / 2
                engine.backward(loss)
                total += float(loss.detach())
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            sums.append(total)
    assert kept.of("loss") == pytest.approx(sums)


def test_a_skipped_step_has_a_row_and_a_number(make: Any) -> None:
    kept = Kept()
    with make(skip_nonfinite=True) as engine, engine.watch(loggers=[kept], show=False) as watch:
        for number, tokens in enumerate(batches(3)):
            loss = engine.module.loss(tokens)
            train_step(engine.optimizer, loss * (math.inf if number == 1 else 1.0))
            watch.log(loss=loss)
    assert kept.steps == [1, 2, 3]
    assert kept.of("skipped_steps") == [0, 1, 1]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(2), r"log\(loss=\.\.\.\) got a Tensor of shape \(2,\)"),
        ("0.5 nats", "got a str, and a figure is one number"),
        ([1.0], "got a list"),
    ],
)
def test_what_is_no_number_is_refused(value: Any, said: str, make: Any) -> None:
    with make() as engine, engine.watch(show=False) as watch:
        with pytest.raises(UnsupportedError, match=said):
            watch.log(loss=value)
        watch.log(loss=torch.ones(1, 1), other=True)
        step(engine, batches(1)[0])


def test_a_loss_that_is_not_finite_is_said_once(make: Any, caplog: Any) -> None:
    kept = Kept()
    with make() as engine, engine.watch(loggers=[kept], show=False) as watch:
        for tokens in batches(3):
            step(engine, tokens)
            watch.log(loss=math.nan)
    said = [record.message for record in caplog.records if "the loss of step" in record.message]
    assert len(said) == 1
    assert said[0].startswith("the loss of step 1 is nan; lower optimizer.lr")
    assert all(map(math.isnan, kept.of("loss")))


def test_rows_go_on_from_the_step_of_a_checkpoint(make: Any, tmp_path: Path) -> None:
    kept = Kept()
    with make() as engine:
        for tokens in batches(3):
            step(engine, tokens)
        engine.save_checkpoint(tmp_path / "saved")
    with make() as engine, engine.watch(loggers=[kept], show=False):
        engine.load_checkpoint(tmp_path / "saved")
        step(engine, batches(1)[0])
    assert kept.steps == [4]


def test_the_bits_are_the_same_when_watched(make: Any, tmp_path: Path) -> None:
    data, runs = batches(3), []
    for watched in (False, True):
        with make() as engine:
            if watched:
                engine.watch(loggers=[JSONLinesLogger(tmp_path / "a.jsonl")], show=False)
            losses = losses_of(engine, data)
            runs.append((losses, states_of(engine)))
    assert runs[0][0] == runs[1][0]
    assert_same_bits(runs[0][1], runs[1][1])


def test_the_next_watch_ends_the_one_before(make: Any) -> None:
    first, second = Kept(), Kept()
    with make() as engine:
        engine.watch(loggers=[first], show=False).log(loss=step(engine, batches(1)[0]))
        watch = engine.watch(loggers=[second], show=False)
        assert (first.closed, first.steps) == (1, [1])
        step(engine, batches(1)[0])
        watch.close()
        watch.close()
        with pytest.raises(StateError, match="this watch has ended"):
            watch.log(loss=1.0)
        step(engine, batches(1)[0])
    assert (first.steps, second.steps, second.closed) == ([1], [2], 1)


def test_an_error_in_a_logger_is_the_loops_own_and_the_engine_ends(make: Any) -> None:
    def failing(values: Any, step: int) -> None:
        raise ZeroDivisionError(step)

    kept, engine = Kept(), make()
    engine.watch(loggers=[kept, failing], show=False)
    tokens = batches(1)[0]
    step(engine, tokens)
    with pytest.raises(ZeroDivisionError, match="1"):
        step(engine, tokens)
    step(engine, tokens)
    with pytest.raises(ZeroDivisionError, match="2"):
        engine.close()
    assert engine.is_closed
    assert kept.closed == 1


def test_ranks_but_the_first_neither_show_nor_log(
    make: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    kept = Kept()
    with make() as engine:
        monkeypatch.setattr("offload.runs.watch.rank_here", lambda: 1)
        capfd.readouterr()  # what took long on a busy machine
        with engine.watch(loggers=[kept], every=1) as watch:
            watch.log(loss=step(engine, batches(1)[0]))
    assert (kept.rows, kept.closed) == ([], 0)
    assert capfd.readouterr() == ("", "")


def test_a_watch_that_is_refused_leaves_the_engine_as_it_was(make: Any) -> None:
    kept = Kept()
    with make() as engine:
        with pytest.raises(ConfigError, match="is not a list"):
            engine.watch(loggers=kept)
        for keys in ({"steps": 1e3}, {"every": 0}, {"tokens": "9"}):
            with pytest.raises(ConfigError, match=r": a whole number above 0, or None"):
                engine.watch(**keys)
        step(engine, batches(1)[0])


def test_a_forked_child_leaves_the_watch_to_its_parent(make: Any, tmp_path: Path) -> None:
    kept = JSONLinesLogger(tmp_path / "rows.jsonl")
    with make() as engine, engine.watch(loggers=[kept], show=False):
        step(engine, batches(1)[0])
        child = os.fork()
        if not child:
            try:
                engine.close()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        step(engine, batches(1)[0])
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
