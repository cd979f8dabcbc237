"""`train.compare_plain`: the same run in plain PyTorch, counted as ours is."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from offload.config import OffloadConfig
from offload.runs.folder import RunFolder
from offload.train import comparison
from offload.train.comparison import cannot_compare
from offload.train.loop import run

pytestmark = pytest.mark.usefixtures("no_pictures")


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


@pytest.mark.slow
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
