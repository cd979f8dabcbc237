"""`--write`: a configuration that loads, says what was planned, and trains."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from offload.cli.errors import check_target
from offload.config import OffloadConfig
from tests.tools.test_memest_cli import TINY, run

ONE = ["-o", "placement.activations.checkpoint=false"]  # one trace each
WORK = ["--batch", "2", "--sequence", "32", "--no-measure", *ONE]


def written(path: Path, *arguments: str) -> OffloadConfig:
    assert run(*arguments, "--write", str(path), "--format", "json") == 0
    return OffloadConfig.load(path)


def test_what_was_planned_is_what_is_written(tmp_path: Path, capsys: Any) -> None:
    places = "placement={parameters: host, gradients: {host: 60%, nvme: 40%}, optimizer: nvme}"
    config = written(
        tmp_path / "a.yaml", *TINY, *WORK, "--gpu", "none", "-o", "precision=bf16",
        "-o", places, "-o", "budget={host: 96MiB, nvme: 1GiB}", "-o", "clip_grad_norm=0.5",
        "-o", "optimizer={type: lion, lr: 3e-4}", "-o", "nvme.paths=[a b, 'c: d']",
    )  # fmt: skip
    value = json.loads(capsys.readouterr().out)
    assert config.precision == "bf16"
    assert config.device == "cpu"
    assert config.budget.host == 96 << 20
    assert config.placement.gradients is not None
    assert config.placement.gradients.describe() == "host 60% + nvme 40%"
    assert config.clip_grad_norm == 0.5
    assert config.optimizer.type == "lion"
    assert config.nvme.paths == ("a b", "c: d")
    assert config.chunk_numel == value["plan"]["chunk_numel"]
    assert config.prefetch == value["plan"]["prefetch"]


def test_a_written_configuration_says_the_same_when_asked_about(
    tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "a.yaml"
    options = ["--gpu", "none", "-o", "budget={host: 64MiB, nvme: 256MiB}"]
    assert run(*TINY, *WORK, *options, "--write", str(path), "--format", "json") == 0
    first = json.loads(capsys.readouterr().out)
    assert run(str(path), "--no-measure", "--format", "json") == 0
    second = json.loads(capsys.readouterr().out)
    assert second["plan"] == first["plan"]
    assert second["ledger_peaks"] == first["ledger_peaks"]
    assert second["model"]["parameters"] == first["model"]["parameters"]


@pytest.mark.slow
def test_a_built_in_model_trains_from_what_was_written(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    from offload.cli.app import main as offload

    monkeypatch.chdir(tmp_path)
    options = ["--gpu", "none", "-o", "placement={parameters: nvme, optimizer: nvme}"]
    written(tmp_path / "a.yaml", *TINY, *WORK, *options, "-o", "budget.host=64MiB")
    lines = (tmp_path / "a.yaml").read_text().splitlines()
    assert any(line.startswith("# Train with `offload train ") for line in lines)
    command = ["train", "a.yaml", "-o", "train.steps=2", "-o", "train.text=python"]
    extra = ["-o", "train.evaluate_batches=0", "-o", "train.sample.length=0", "--run-dir", "run"]
    with pytest.raises(SystemExit) as caught:
        offload([*command, *extra])
    assert not caught.value.code, capsys.readouterr().err
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == 2


def test_any_model_takes_it_through_initialize(tmp_path: Path) -> None:
    import torch
    from torch import nn

    import offload

    path = tmp_path / "a.yaml"
    written(path, *TINY, *WORK, "--gpu", "none", "-o", "precision=fp32")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    with offload.initialize(model, path) as engine:
        for _ in range(2):
            engine.backward(model(torch.ones(2, 8)).sum())
            engine.optimizer.step()


@pytest.mark.slow
def test_what_does_not_fit_says_so_in_its_first_line(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "a.yaml"
    assert run(*TINY, *WORK, "--gpu", "none", "-o", "budget.host=1MiB", "--write", str(path)) == 1
    headline = capsys.readouterr().out.splitlines()[0]
    text = path.read_text()
    assert text.splitlines()[0] == headline.replace("does not fit", "# DOES NOT FIT")
    assert "Train with" not in text
    OffloadConfig.load(path)


def test_a_share_of_several_ranks_is_said_to_be_one_and_how_all_start(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    hardware = ["--gpu", "RTX 4090", "--ram", "64GiB", "--gpus", "2", "--nodes", "3"]
    written(path, *TINY, *WORK, *hardware)
    text = path.read_text()
    assert "# all of this is of one of 6 ranks; " in text
    command = "torchrun --nnodes 3 --nproc-per-node 2 -m offload train"
    assert f"#   {command} {path}\n# or in a loop of your own:\n" in text


def test_a_file_that_is_there_is_kept_unless_forced(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("mine")
    assert run(*TINY, *WORK, "--gpu", "none", "--write", str(path)) == 2
    assert "add --force to replace it" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert run(*TINY, *WORK, "--gpu", "none", "--write", str(path), "--force") == 0
    assert OffloadConfig.load(path).device == "cpu"
    assert os.listdir(tmp_path) == ["a.yaml"]


# ---------------------------------------------------------------- files
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    from offload.tiers.errors import PathError

    tmp_path.chmod(0o500)
    with pytest.raises(PathError, match="not allowed to write there"):
        check_target(tmp_path / "a", "--out", replace=True)


def test_a_gpu_s_budget_is_shown_written_and_proposed(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "a.yaml"
    question = [*TINY, *WORK, "--gpu", "RTX 4090", "--ram", "16GiB", "--nvme", "0"]
    assert run(*question, "-o", "budget.gpu=4GiB", "--write", str(file)) == 0
    assert "· GPU 0.7 of 4.0 GiB: " in capsys.readouterr().out
    config = OffloadConfig.load(file)
    assert (config.budget.gpu, config.device) == (4 << 30, "cuda")
    assert run(*question, "-o", "budget.gpu=600MiB", "--format", "json") == 1
    value = json.loads(capsys.readouterr().out)
    assert value["shortfalls"][0]["key"] == "budget.gpu"
    settings = [change["settings"] for change in value["changes"]]
    (proposed,) = (each["budget.gpu"] for each in settings if "budget.gpu" in each)
    assert run(*question, "-o", f"budget.gpu={proposed}") == 0
