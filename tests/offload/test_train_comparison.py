"""`train.compare_plain`: the same run in plain PyTorch, counted as ours is."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from offload.config import OffloadConfig
from offload.runs.folder import RunFolder
from offload.runs.metrics import StepMetrics
from offload.train import comparison
from offload.train.comparison import Process, agreement, cannot_compare, comparison_table
from offload.train.loop import run
from offload.train.summary import MemoryUse

pytestmark = pytest.mark.usefixtures("no_pictures")

ROW = StepMetrics(1, 2.0, 1e-3, 0.5, 100.0, None, 0, 1 << 20, {}, {})


def config_of(folder: Path, **train: Any) -> OffloadConfig:
    text = folder / "text.txt"
    text.write_bytes(b"The quick brown fox jumps over the lazy dog.\n" * 20)
    model = {"layers": 1, "hidden": 16, "heads": 2, "mlp": 32, "max_sequence": 16}
    return OffloadConfig.load({
        "device": "cpu", "budget": {"host": "16MiB", "nvme": "16MiB"},
        "nvme": {"paths": [str(folder)], "backend": "threads"}, "clip_grad_norm": 1.0,
        "placement": dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme"),
        "train": {
            "model": model, "text": str(text), "steps": 5, "batch": 2, "sequence": 16,
            "sample": {"length": 0}, "compare_plain": True, **train,
        },
    })  # fmt: skip


def trained(folder: Path, **train: Any) -> str:
    console = Console(file=io.StringIO(), width=120)
    run(config_of(folder, **train), RunFolder.new(folder / "run"), console=console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_plain_pytorch_trains_the_same_in_a_process_of_its_own(tmp_path: Path) -> None:
    output = trained(tmp_path, schedule={"type": "cosine", "warmup_steps": 2})
    folder = RunFolder(tmp_path / "run")
    ours, plain = folder.metrics.read(), folder.plain_metrics.read()
    assert [row.step for row in plain] == [1, 2, 3, 4, 5]
    assert plain[0].loss == ours[0].loss  # from the same weights, on the same bytes
    for a, b in zip(ours, plain, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=1e-6)
        assert b.lr == a.lr
        assert b.gradient_norm == pytest.approx(a.gradient_norm, rel=1e-5)
    assert all(row.rss_nbytes > 0 and row.tiers == {} for row in plain)
    table = output[output.index("beside plain PyTorch") :]
    for fragment in ("peak RAM of the process", "on disk", "seconds per step", "bit"):
        assert fragment in table


@pytest.mark.slow
def test_a_run_is_complete_where_plain_pytorch_fails(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(comparison, "PROGRAM", "offload.train.plain:no_such_function")
    output = trained(tmp_path)
    assert "plain PyTorch ended early with status 1" in output
    assert "states alone: 16 bytes" in output
    assert "beside plain PyTorch" not in output
    assert len(RunFolder(tmp_path / "run").metrics.read()) == 5


def test_what_plain_pytorch_cannot_train_alike_says_why() -> None:
    def why(keys: dict[str, Any], ranks: int = 1, *, resumed: bool = False) -> str:
        return cannot_compare(OffloadConfig.load(keys), ranks, resumed=resumed)

    assert why({}) == ""
    assert "resumed" in why({}, resumed=True)
    assert "ranks" in why({}, 2)
    assert "adamw" in why({"optimizer": {"type": "lion"}})
    assert "precision" in why({"precision": "fp16"})


def test_agreement_is_said_as_bits_or_as_rounding() -> None:
    same = agreement([ROW, ROW], [ROW, ROW])
    assert same == "the losses of all 2 steps are those of plain PyTorch, bit for bit"
    apart = agreement([ROW, ROW], [ROW, replace(ROW, loss=2.0 + 2**-20)])
    assert "in 1 of 2 steps, at most 1e-06 apart" in apart


def test_both_processes_are_counted_alike() -> None:
    memory = MemoryUse(baseline_nbytes=100 << 20, peak_nbytes=150 << 20)
    table = comparison_table(
        Process([ROW], memory, 20 << 20, 7 << 20), Process([ROW], memory, 40 << 20)
    )
    columns = [list(column.cells) for column in table.columns[1:]]
    assert columns[0][:5] == ["150.0 MiB", "20.0 MiB", "100.0 MiB", "30.0 MiB", "7.0 MiB"]
    assert columns[1][:5] == ["150.0 MiB", "40.0 MiB", "100.0 MiB", "10.0 MiB", "0 B"]
