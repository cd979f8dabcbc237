"""The command line: exit codes, one-screen errors, and what it must not import."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offload import __version__
from offload.cli.app import main
from offload.tools.memest.cli import main as memest

REPOSITORY = Path(__file__).parents[2]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 1\n")
    return path


def test_help_and_version(capsys: Any) -> None:
    assert run("--help") == 0
    output = capsys.readouterr().out
    commands = re.findall(r"^\W*(\w+)  ", output.partition("Commands")[2], re.MULTILINE)
    assert commands[:4] == ["train", "generate", "serve", "doctor"]
    assert {"config", "checkpoint", "bench"} < set(commands)
    assert run("--version") == 0
    assert capsys.readouterr().out == f"offload {__version__}\n"


def test_a_mistake_in_the_file_is_one_screen_and_exit_code_2(
    config_file: Path, capsys: Any
) -> None:
    config_file.write_text("seed: 1\noptimizer: {lrr: 3}\n")
    assert run("train", str(config_file)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"error: {config_file}:2: optimizer.lrr: unknown key" in captured.err
    assert "Traceback" not in captured.err
    assert len(captured.err.splitlines()) < 24


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["train", "nothing.yaml"], "nothing.yaml: cannot read the configuration: no such file"),
        (["train", "FILE", "-o", "seed=x"], "-o seed=x: seed: must be a valid integer"),
        (["train", "FILE", "--resume"], "add --run-dir DIR"),
        (["train", "FILE", "--resume", "--run-dir", "none"], "none holds no run"),
        (["config", "show", "FILE", "-o", "seed"], "expected key=value"),
        (["train", "FILE", "-o", "precision=fp8"], "fp32, bf16, fp16"),
        (["train"], "FILE"),
        (["nonsense"], "nonsense"),
    ],
)
def test_bad_input_ends_with_2(
    arguments: list[str], fragment: str, config_file: Path, capsys: Any
) -> None:
    words = [str(config_file) if word == "FILE" else word for word in arguments]
    assert run(*words) == 2
    error = capsys.readouterr().err
    assert fragment in error
    assert "Traceback" not in error


# Commands that take a file or a folder, NAMED; and what is wrong about it.
TAKES_A_FILE = (
    "train NAMED", "config show NAMED", "migrate NAMED", "memest NAMED",
    "memest compare NAMED", "memest --params 1e6 --config NAMED", "bench step --config NAMED",
)  # fmt: skip
TAKES_A_FOLDER = (
    "doctor NAMED", "memest check NAMED",
    "checkpoint inspect NAMED", "checkpoint verify NAMED", "checkpoint export NAMED out",
    "checkpoint import-deepspeed NAMED out --trust",
)  # fmt: skip
WRONG = {
    "is not there": ("missing", TAKES_A_FILE + TAKES_A_FOLDER),
    "is in a file": ("text.txt/inside", TAKES_A_FILE + TAKES_A_FOLDER),
    "is a file": ("text.txt", TAKES_A_FILE + TAKES_A_FOLDER),
    "is a folder of nothing": (
        "folder",
        tuple(each for each in TAKES_A_FILE + TAKES_A_FOLDER if not each.startswith("doctor")),
    ),
    "is no YAML": ("broken.yaml", TAKES_A_FILE),
    "has an unknown key": ("unknown.yaml", TAKES_A_FILE),
}
OPTIONS = ("-o seed", "-o seed=x", "-o nope=1", "--nope")


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "line",
    [
        *(c.replace("NAMED", name) for name, commands in WRONG.values() for c in commands),
        *(f"{command} good.yaml {option}" for option in OPTIONS
          for command in ("train", "config show", "memest", "bench step --config")),
    ],
)  # fmt: skip
def test_the_same_mistake_has_the_same_exit_code_in_every_command(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    files = {"text.txt": "words\n", "good.yaml": "seed: 1\n", "broken.yaml": "a: [\n",
             "unknown.yaml": "optimiser: 1\n"}  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    program, *arguments = line.split() if line.startswith("memest") else ["offload", *line.split()]
    with pytest.raises(SystemExit) as caught:
        {"offload": main, "memest": memest}[program](arguments)
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--debug", "train"], ["train", "--debug"]])
def test_debug_adds_the_traceback(arguments: list[str], capsys: Any) -> None:
    assert run(*arguments, "nothing.yaml") == 2
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "error: nothing.yaml" in error


def test_other_errors_end_with_1(
    config_file: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.errors import StorageError

    def failing(*_: object, **__: object) -> None:
        raise StorageError("reading 4 KiB at 0 failed: EIO")

    monkeypatch.setattr("offload.train.loop.run_training", failing)
    assert run("train", str(config_file)) == 1
    assert capsys.readouterr().err == "error: reading 4 KiB at 0 failed: EIO\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_one_line(unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "offload", "--version"], cwd=REPOSITORY, env=environment,
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    expected = "error: cannot read or write: No space left on device; --debug shows where\n"
    assert (done.returncode, done.stderr) == (1, expected)


def test_an_interrupt_ends_with_130(
    config_file: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("offload.train.loop.run_training", interrupted)
    assert run("train", str(config_file)) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_show_prints_a_file_that_reads_back(config_file: Path, capsys: Any, tmp_path: Path) -> None:
    from offload.config import OffloadConfig

    assert run("config", "show", str(config_file), "-o", "precision=bf16") == 0
    shown = tmp_path / "shown.yaml"
    shown.write_text(capsys.readouterr().out)
    config = OffloadConfig.load(shown)
    assert (config.seed, config.optimizer.master) == (1, "split")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        ("budget: {host: 64KiB}", "budget.host: 0.1 MiB is "),
        ("budget: {host: 900TiB}", "budget.host: 900.0 TiB is more than"),
        ("nvme: {paths: [FOLDER/missing/deeper]}", "nvme.paths: "),
        ("nvme: {paths: [FOLDER, FOLDER/../FOLDER_NAME]}", "is named twice"),
        ("groups: {blocks: [Nope]}", "groups.blocks: "),
    ],
)
def test_what_this_machine_cannot_do_names_the_key(
    line: str, fragment: str, config_file: Path, tmp_path: Path, capsys: Any
) -> None:
    line = line.replace("FOLDER_NAME", tmp_path.name).replace("FOLDER", str(tmp_path))
    config_file.write_text(
        f"train: {{text: {config_file}, sequence: 8, batch: 1}}\n{line}\n" + "#" * 999
    )
    assert run("train", str(config_file), "--run-dir", str(tmp_path / "run")) == 2
    captured = capsys.readouterr()
    assert fragment in captured.err
    assert "Traceback" not in captured.err
    assert not (tmp_path / "run").exists()
