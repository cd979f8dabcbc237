"""`memest check` for one's own loop: the engine keeps what it needs, if asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.config import OffloadConfig
from offload.errors import ConfigError
from offload.gpt import LanguageModel, build_meta_model
from offload.planning.choice.run_check import check_run
from offload.tools.memest.cli import main as memest

pytestmark = pytest.mark.usefixtures("no_pictures")

TRAIN = {"model": {"layers": 2, "hidden": 64, "heads": 2, "max_sequence": 32}, "sequence": 32}
NVME = dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme")


def keys(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "device": "cpu", "budget": {"host": "24MiB", "nvme": "256MiB"}, "placement": NVME,
        "nvme": {"paths": [str(folder)], "backend": "threads"}, "train": TRAIN, **more,
    }  # fmt: skip


def steps(engine: Any, model: LanguageModel, count: int) -> None:
    tokens = torch.arange(128).reshape(4, 32)
    for _ in range(count):
        model(tokens, tokens).loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()


def own_loop(folder: Path, count: int, **more: Any) -> Any:
    config = OffloadConfig.load(keys(folder, **more))
    model = build_meta_model(config)
    with offload.initialize(model, config, run_folder=folder / "run") as engine:
        steps(engine, model, count)
    return check_run(folder / "run")


def written_for(folder: Path) -> dict[str, Any]:
    model = build_meta_model(OffloadConfig.load(keys(folder)))
    numel = sum(param.numel() for param in model.parameters())
    return {"model": "mine", "parameters": numel, "batch": 4, "sequence": 32}


@pytest.mark.slow
def test_a_loop_of_ones_own_is_checked(tmp_path: Path) -> None:
    found = own_loop(tmp_path, 5, written_for=written_for(tmp_path))
    assert found.steps == 5
    rows = {row.name: row for row in found.rows}
    assert {"host", "nvme", "RSS"} <= set(rows)
    assert rows["host"].ratio == pytest.approx(1, rel=0.1)
    assert rows["nvme"].is_bound
    assert rows["nvme"].measured <= rows["nvme"].predicted
    assert "step" in rows or found.missing[0].startswith("step: not predicted: this machine's")


def test_what_cannot_be_predicted_says_why(tmp_path: Path, capsys: Any) -> None:
    found = own_loop(tmp_path, 1)
    assert not found.rows
    (why,) = found.missing
    assert why.startswith("nothing is predicted for a loop whose batch is not known")
    with pytest.raises(SystemExit) as caught:
        memest(["check", str(tmp_path / "run")])
    assert not caught.value.code
    out = " ".join(capsys.readouterr().out.split())
    assert why in out


def test_the_folder_of_a_loop_that_is_under_way_has_its_settings_and_steps(tmp_path: Path) -> None:
    config = OffloadConfig.load(keys(tmp_path))
    model = build_meta_model(config)
    with offload.initialize(model, config, run_folder=tmp_path / "run") as engine:
        steps(engine, model, 2)
        with pytest.raises(ConfigError, match="this one was killed or still trains"):
            check_run(tmp_path / "run")
        written = OffloadConfig.load(tmp_path / "run/config.resolved.yaml")
        read_by_train = {"train": written.train}  # no part of a loop of one's own
        assert written == engine.config.model_copy(update=read_by_train)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_a_folder_with_a_run_is_kept(tmp_path: Path) -> None:
    own_loop(tmp_path, 1)
    before = (tmp_path / "run/metrics.jsonl").read_text()
    model = build_meta_model(OffloadConfig.load(keys(tmp_path)))
    with pytest.raises(ConfigError, match=r"run_folder: .* already holds a run"):
        offload.initialize(model, keys(tmp_path), run_folder=tmp_path / "run")
    assert (tmp_path / "run/metrics.jsonl").read_text() == before
    assert all(param.is_meta for param in model.parameters())
