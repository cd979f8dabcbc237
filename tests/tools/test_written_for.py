"""A file that memest wrote for one model is not taken for another's."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from offload.cli.app import main as offload_main
from offload.config import OffloadConfig
from offload.tools.memest.cli import main as memest_main
from tests.tools.model_files import TINY_LLAMA, TINY_LLAMA_NUMEL, write_config

WORK = ["--batch", "3", "--sequence", "16", "--no-measure", "--gpu", "none"]
ONE = ["-o", "placement.activations.checkpoint=false", "-o", "precision=fp32"]
COUNT = f"{TINY_LLAMA_NUMEL:,}"


def run(main: Any, *arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return int(caught.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = tmp_path / "tiny-llama"
    made.mkdir()
    write_config(made)
    return made


@pytest.fixture
def file(folder: Path, tmp_path: Path, capsys: Any) -> Path:
    path = tmp_path / "offload.yaml"
    assert run(memest_main, folder, *WORK, *ONE, "--write", path) == 0
    capsys.readouterr()
    return path


def other(tmp_path: Path) -> Path:
    made = tmp_path / "wider"
    made.mkdir()
    write_config(made, {**TINY_LLAMA, "vocab_size": 96})
    return made


def test_a_written_file_names_its_model(file: Path, folder: Path) -> None:
    written = OffloadConfig.load(file).written_for
    assert written is not None
    assert (written.model, written.parameters) == ("tiny-llama", TINY_LLAMA_NUMEL)
    assert (written.source, written.batch, written.sequence) == (str(folder), 3, 16)


def test_a_file_written_for_another_model_than_the_built_in_one_is_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(offload_main, "train", file) == 2
    said = capsys.readouterr().err
    assert f"written for tiny-llama ({COUNT} parameters)" in said
    assert "`memest FILE` plans this one" in said
    assert not (tmp_path / "runs").exists()


def test_memest_reads_the_model_that_a_file_was_written_for(
    file: Path, tmp_path: Path, capsys: Any
) -> None:
    assert run(memest_main, file, "--no-measure", "--format", "json") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["model"]["parameters"] == TINY_LLAMA_NUMEL
    assert (value["workload"]["batch"], value["workload"]["sequence"]) == (3, 16)
    assert run(memest_main, other(tmp_path), "--config", file, *WORK) == 2
    assert "was written for tiny-llama" in capsys.readouterr().err


def test_initialize_says_when_the_model_is_another(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from torch import nn

    import offload

    with (
        caplog.at_level(logging.WARNING, logger="offload"),
        offload.initialize(nn.Linear(8, 8), file),
    ):
        pass
    assert f"was written for tiny-llama ({COUNT} parameters), and Linear has 72" in caplog.text
