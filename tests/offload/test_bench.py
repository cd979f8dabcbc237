"""`offload bench`: each command runs, its record is complete, ratios are taken within rounds."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.bench.step import SYSTEMS
from tests.offload.test_cli import run

TINY_MODEL = [
    "-o", "train.model.layers=2", "-o", "train.model.hidden=64", "-o", "train.model.heads=2",
    "-o", "train.model.mlp=128", "-o", "train.model.vocab=256", "-o", "train.batch=1",
    "-o", "train.sequence=16", "-o", "budget.host=80MiB", "-o", "budget.nvme=256MiB",
]  # fmt: skip
STEP = ["step", *TINY_MODEL]


@pytest.fixture
def recorded(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a bench with two rounds; its JSON and what it printed, 100 columns wide."""
    monkeypatch.setenv("COLUMNS", "100")

    def record(*arguments: str) -> tuple[dict[str, Any], str]:
        path = tmp_path / "record.json"
        assert run("bench", *arguments, "--rounds", "2", "--json", str(path)) == 0
        return json.loads(path.read_text()), capsys.readouterr().out

    return record


def check(record: dict[str, Any], bench: str) -> dict[str, dict[str, Any]]:
    """The schema, and that every ratio follows from the rows; the rows by name."""
    assert (record["format"], record["bench"]) == (2, bench)
    assert {"cpu", "cores", "memory_nbytes", "torch"} <= set(record["machine"])
    assert any("2 rounds only" in note for note in record["notes"])
    rows = {row["name"]: row for row in record["rows"]}
    assert len(rows) == len(record["rows"])
    for row in rows.values():
        assert row["kind"] in {"limit", "offload", "peer"}
        assert row["measures"] or row["note"], row["name"]
        for measure, values in row["measures"].items():
            assert len(values) == 2
            assert row["medians"][measure] == statistics.median(values)
        assert all(second > 0 for second in row["measures"].get("seconds", ()))
    assert record["ratios"]
    for ratio in record["ratios"]:
        above, below = (_values(rows[ratio[key]], ratio["measure"]) for key in ("of", "to"))
        assert ratio["rounds"] == [a / b for a, b in zip(above, below, strict=True)]
        assert ratio["median"] == statistics.median(ratio["rounds"])
    return rows


def _values(row: dict[str, Any], measure: str) -> list[float]:
    values: list[float] = row["measures"].get(measure) or [row["facts"][measure]]
    return values


@pytest.mark.slow
def test_step_finds_equal_losses_and_a_roofline_of_the_same_rounds(
    recorded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a peer that fails is a note."""
    monkeypatch.setattr("offload.bench.step.BUS_NUMEL", 1 << 16)
    monkeypatch.setattr("offload.bench.step.DISK_NBYTES", 32 << 20)
    broken = dataclasses.replace(
        SYSTEMS[0], name="broken", label="a peer", program="offload.bench.systems:Nothing"
    )
    monkeypatch.setattr("offload.bench.step.SYSTEMS", (*SYSTEMS, broken))
    systems = ("--systems", "plain,host,nvme,broken")
    record, printed = recorded(*STEP, *systems, "--path", str(tmp_path))
    rows = check(record, "step")
    assert rows["a peer"]["note"].startswith("failed: ")
    assert "a peer: failed: " in printed
    bounds = [
        rows[f"bound by {name}"]["measures"]["seconds"] for name in ("bus", "compute", "disk")
    ]
    highest = [max(values) for values in zip(*bounds, strict=True)]
    assert rows["roofline"]["measures"]["seconds"] == highest
    losses = record["details"]["losses"]
    assert losses["host"] == losses["nvme"]
    assert len(losses["host"]) == 2 * len(losses["plain"]) == 6  # warm-up round included
    assert rows["offload, all on nvme"]["facts"]["loss_difference"] < 1e-3
    assert all(rows["offload, all on nvme"]["measures"]["written_nbytes"])
    assert not any(rows["offload, all on host"]["measures"]["written_nbytes"])
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["step", "--numbers", "3"], "No such option"),
        (["step", "--rounds", "0"], "--rounds"),
        (["step", "--json", "missing/file.json"], "--json missing/file.json: there is no folder"),
        (["step", "--path", "nowhere"], "--path: nowhere is not a folder"),
        (["step", "--systems", "plain,fancy"], "--systems: 'fancy' is unknown"),
        (["step", "-o", "train.model.layer=3"], "train.model.layer"),
        (["step", "-o", "optimizer.type=lion"], "set optimizer.type: adamw"),
        (["step", "-o", "precision=fp16"], "set precision: fp32 or bf16"),
        (["nonsense"], "No such command"),
    ],
)
def test_what_cannot_be_measured_is_one_message_and_exit_code_2(
    arguments: list[str], fragment: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run("bench", *arguments) == 2
    error = capsys.readouterr().err
    assert fragment in re.sub(r"\x1b\[[0-9;]*m", "", error)
    assert "Traceback" not in error


@pytest.mark.slow
def test_a_failure_of_offload_ends_the_bench_with_its_own_words(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.bench.step.raw_loop", None)  # its turn does not come
    arguments = [*STEP, "--systems", "nvme", "-o", "budget.host=1MiB", "--path", str(tmp_path)]
    assert run("bench", *arguments, "--rounds", "1") == 1
    error = capsys.readouterr().err
    assert "offload, all on nvme ended early with status 1" in error
    assert "budget.host: 1.0 MiB" in error
    assert list(tmp_path.iterdir()) == []
