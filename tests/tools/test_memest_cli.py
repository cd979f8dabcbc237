"""The `memest` command: exit codes, one-line reasons, and what it must not import."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offload.tools.memest.cli import main

REPOSITORY = Path(__file__).parents[2]
# all that is needed of hardware, so that answers do not depend on this machine
MACHINE = ["--gpu", "RTX 4090", "--ram", "64GiB", "--ssd", "Gen4 SSD"]
TINY = ["--layers", "2", "--hidden", "64", "--vocab", "256"]
WORK = ["--batch", "2", "--sequence", "32", "-o", "precision=bf16"]
SMALL = [*TINY, *WORK, *MACHINE, "-o", "placement.activations.checkpoint=false"]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "device: cpu\n"
        "budget: {host: 64MiB, nvme: 256MiB}\n"
        "train:\n"
        "  model: {layers: 2, hidden: 64, heads: 2, max_sequence: 32}\n"
        "  batch: 2\n  sequence: 32\n"
    )
    return path


# ---------------------------------------------------------------- answers
def test_a_model_that_fits_ends_with_0_and_says_everything(capsys: Any) -> None:
    assert run(*SMALL) == 0
    text = capsys.readouterr().out
    assert text.startswith("fits\n")
    for word in ("Peak memory", "GPU memory", "RAM", "One step", "bound by", "tokens/s",
                 "written per step", "checkpoint", "Where each state lives", "Notes"):  # fmt: skip
        assert word in text


def test_a_model_that_does_not_fit_ends_with_1_and_says_what_would(capsys: Any) -> None:
    tight = ["-o", "budget.host=1MiB", "-o", "placement.optimizer=host"]
    assert run(*SMALL, *tight, "--format", "json") == 1
    value = json.loads(capsys.readouterr().out)
    assert value["fits"] is False
    assert value["shortfalls"][0]["key"] == "budget.host"
    assert value["changes"]
    for change in value["changes"]:
        options = [
            word
            for key, setting in change["settings"].items()
            for word in ([key, setting] if key.startswith("--") else ["-o", f"{key}={setting}"])
        ]
        base = [*SMALL, *tight]
        assert run(*_without(base, change["settings"]), *options, "--format", "json") == 0
        assert json.loads(capsys.readouterr().out)["fits"] is True


def _without(words: Sequence[str], settings: dict[str, str]) -> list[str]:
    """The command line without options that a change gives another value."""
    kept: list[str] = []
    pairs = list(words)
    while pairs:
        word = pairs.pop(0)
        value = pairs.pop(0)
        if word not in settings and value.partition("=")[0] not in settings:
            kept += [word, value]
    return kept


def test_options_win_over_the_file(yaml: Path, capsys: Any) -> None:
    options = ["--batch", "4", "--sequence", "16", "-o", "precision=fp16"]
    options += ["-o", "gradient_accumulation_steps=3"]
    assert run(str(yaml), *options, "--no-measure", "--format", "json") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["workload"] == {"batch": 4, "sequence": 16, "passes": 3, "tokens_per_step": 192}
    assert value["config"]["precision"] == "fp16"


@pytest.mark.parametrize(
    ("name", "start"), [("a.html", b"<!DOCTYPE html>"), ("a.json", b"{\n"), ("a.txt", b"fits")]
)
def test_the_file_s_name_says_the_format(name: str, start: bytes, tmp_path: Path) -> None:
    assert run(*SMALL, "--out", str(tmp_path / name)) == 0
    assert (tmp_path / name).read_bytes().startswith(start)
    assert os.listdir(tmp_path) == [name]


def test_ranks_share_the_states_and_have_no_times(capsys: Any) -> None:
    values = []
    for count in ("1", "4"):
        assert run(*SMALL, "--gpus", count, "--format", "json") == 0
        values.append(json.loads(capsys.readouterr().out))
    one, four = (value["memory"]["device"]["by_class"] for value in values)
    held = [sum(by_class.get(name, 0) for name in ("parameters", "optimizer"))
            for by_class in (one, four)]  # fmt: skip
    assert 0 < held[1] < held[0] / 2
    assert values[0]["step"]["tokens_per_s"] * values[0]["step"]["seconds"] == pytest.approx(64)
    assert values[1]["step"] is None
    assert "no times: the network between the ranks is not known" in values[1]["notes"]
    said = "memory and disk (but for the checkpoint) are of one of 4 ranks, ZeRO stage 3"
    assert said in values[1]["notes"]
    assert values[1]["checkpoint_nbytes"] == values[0]["checkpoint_nbytes"]


def test_weights_without_code_are_counted_without_activations(tmp_path: Path, capsys: Any) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "m.safetensors"
    save_file({"layers.0.w": torch.zeros(64, 64), "head": torch.zeros(8, 64)}, path)
    assert run(str(path), *MACHINE, "--format", "json") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["model"]["parameters"] == 64 * 64 + 8 * 64
    assert value["step"] is None
    assert any("activations are not counted" in note for note in value["notes"])


class AsksForValues(nn.Module):
    """Its code depends on values, which a trace has none of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 8))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> SimpleNamespace:
        loss = self.weight[tokens].sum()
        return SimpleNamespace(loss=loss if float(loss) > 0 else -loss)


def frozen() -> nn.Module:
    return nn.Linear(4, 4).requires_grad_(False)


def has_nothing() -> nn.Module:
    return nn.Identity()


def test_a_model_of_which_nothing_is_trained_is_refused_or_said(capsys: Any) -> None:
    assert run(f"{__name__}:has_nothing", *MACHINE) == 2
    assert "the model has no parameters" in capsys.readouterr().err
    assert run(f"{__name__}:frozen", *MACHINE, "--format", "json") == 0
    assert any("is trained" in note for note in json.loads(capsys.readouterr().out)["notes"])


def test_a_model_that_cannot_be_traced_is_answered_without_activations(capsys: Any) -> None:
    model = f"{__name__}:AsksForValues"
    assert run(model, *MACHINE, "--format", "json") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["model"]["parameters"] == 64 * 8
    assert value["memory"]["host"]["by_class"] or value["memory"]["device"]["by_class"]
    assert value["step"] is None
    said = "activations are not counted, and there are no times: AsksForValues cannot be traced"
    assert any(note.startswith(said) for note in value["notes"])


@pytest.mark.slow  # each of 15 changes that could help is planned for 101 layers
def test_chunks_that_an_enormous_model_cannot_have_are_no_change(capsys: Any) -> None:
    hardware = ["--gpu", "24GiB", "--ram", "64GiB", "--nvme", "8TiB", "--no-measure"]
    asked = ["--params", "200B", *hardware, "-o", "placement.optimizer=host"]
    assert run(*asked) == 1
    assert "does not fit: RAM is" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("ram", ["1280MiB", "2GiB"])
def test_what_fits_with_recomputation_fits_where_that_is_left_open(ram: str, capsys: Any) -> None:
    sizes = ["--layers", "8", "--hidden", "512", "--vocab", "1000"]
    work = ["--batch", "8", "--sequence", "256", "-o", "precision=bf16", "--no-measure"]
    asked = [*sizes, *work, "--gpu", "none", "--ram", ram, "--nvme", "64GiB", "--format", "json"]
    recomputing = run(*asked, "-o", "placement.activations.checkpoint=true")
    assert run(*asked) <= recomputing


@pytest.mark.slow
def test_a_model_too_large_for_a_machine_without_a_disk_is_told_how_much_would_do(
    capsys: Any,
) -> None:
    wide = ["--layers", "24", "--hidden", "2048", "--vocab", "32000", *WORK]
    hardware = ["--gpu", "RTX 4090", "--ram", "6GiB", "--nvme", "0", "-o", "budget.device=1GiB"]
    assert run(*wide, *hardware, "--format", "json") == 1
    value = json.loads(capsys.readouterr().out)
    disks = [each["settings"] for each in value["changes"] if "--nvme" in each["settings"]]
    (size,) = {each["--nvme"] for each in disks}
    assert run(*wide, *hardware[:-4], "--nvme", size, *hardware[-2:], "--format", "json") == 0


def test_check_prints_predicted_and_measured(tmp_path: Path, capsys: Any) -> None:
    from offload.runs.metrics import MEASURED, PREDICTION, Measured, Prediction

    tiers = {"host": 1 << 20, "nvme": 1 << 30}
    (tmp_path / PREDICTION).write_text(Prediction(tiers, 110, 2.0).to_json())
    (tmp_path / MEASURED).write_text(Measured(tiers, 100, 1.0, 7).to_json())
    assert run("check", str(tmp_path)) == 0
    text = capsys.readouterr().out
    assert "1.0 GiB" in text
    assert "+10.0%" in text
    assert "+100.0%" in text
    assert "7 steps" in text


# ---------------------------------------------------------------- bad input
BAD: list[tuple[list[str], str]] = [
    (["nothing.json"], "nothing.json"),
    (["--layers", "2"], "--hidden"),
    (["--params", "7 apples"], "is no number of parameters"),
    (["--params", "7e9", "--layers", "0"], "invalid value for '--layers'"),
    (["m.json", "--params", "7e9"], "--params contradicts the model m.json"),
    ([*TINY, "--batch", "0"], "invalid value for '--batch'"),
    ([*TINY, "--batch", "100000", "--sequence", "1000000"], "tokens in a pass"),
    ([*TINY, "-o", "precision=fp8"], "fp8"),
    ([*TINY, "-o", "precsion=bf16"], "did you mean `precision`?"),
    ([*TINY, "-o", "nonsense"], "expected key=value"),
    ([*TINY, "--ram", "1KiB"], "--ram 1KiB"),
    ([*TINY, "--nvme", "Gen4 SSD"], "is a drive, not a size; name it with --ssd"),
    ([*TINY, "--gpu", "DGX-3"], "--gpu DGX-3"),
    ([*TINY, "-o", "device=cuda", "--gpu", "none"], "has no GPU"),
    ([*TINY, "--force"], "--force"),
    ([*TINY, "--out", "missing/x.html"], "there is no folder missing"),
    ([*TINY, "--out", "."], "it is a folder"),
    ([*TINY, "--out", "a.html", "--write", "a.html"], "--write names the same file"),
    (["check", "nothing"], "nothing cannot be checked"),
    (["calibrate", "absent"], "absent does not exist"),
    (["--bathc", "3"], "no such option: --bathc"),
    (["a.json", "b.json"], "unexpected extra argument"),
    (["check"], "missing argument 'RUN'"),
    ([""], "the model's name is empty"),
    (["--layers", "2", "--hidden", "64", "--vocab", "1"], "--vocab: input should be greater"),
]


@pytest.mark.parametrize(("arguments", "fragment"), BAD, ids=[" ".join(a)[-60:] for a, _ in BAD])
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], fragment: str, capsys: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert fragment in captured.err
    assert "Traceback" not in captured.err
    assert captured.err.startswith("error:")
    assert len(captured.err.splitlines()) == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [
        ("config.json", b'{"model_type": "llama", "hidden_size": -4}', "hidden_size"),
        ("model.safetensors", b"\x10\0\0\0\0\0\0\0{", "model.safetensors"),
        ("run.yaml", b"precision: [", "run.yaml:1"),
        ("run.yaml", b"presicion: bf16", "did you mean `precision`?"),
    ],
)
def test_a_file_that_is_no_model_is_one_line_and_exit_code_2(
    name: str, content: bytes, fragment: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / name).write_bytes(content)
    assert run(str(tmp_path / name), *MACHINE) == 2
    said = [
        line for line in capsys.readouterr().err.splitlines() if "building the model" not in line
    ]
    assert len(said) == 1
    assert fragment in said[0]


def test_a_configuration_s_mistake_is_named_with_its_line(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("seed: 1\nbudget: {hots: 1GiB}\n")
    assert run(*TINY, "--config", str(path)) == 2
    assert f"error: {path}:2: budget.hots: unknown key" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_standard_output_is_not_a_verdict() -> None:
    command = [sys.executable, "-m", "offload.tools.memest", *SMALL, "--no-measure"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=REPOSITORY, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr.decode().count("\n") == 1


# ---------------------------------------------------------------- what is imported
def test_no_module_of_memest_imports_anything_heavy() -> None:
    """But for the one that builds torch modules from names, which is imported when it does."""
    folder = REPOSITORY / "tools/memest"
    paths = [path.relative_to(folder).with_suffix("") for path in sorted(folder.rglob("*.py"))]
    names = [
        ".".join(path.parts) for path in paths if path.name not in ("__main__", "weight_names")
    ]
    imports = "\n".join(f"import offload.tools.memest.{name}" for name in names)
    program = (
        f"import sys\n{imports}\n"
        "heavy = {'torch', 'numba', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY)


@pytest.mark.slow
def test_a_budget_that_is_proposed_is_enough_when_it_is_taken(capsys: Any) -> None:
    """Chunks that are left open grow with the budget, and with them what is needed."""
    question = [
        "--layers", "16", "--hidden", "1536", "--vocab", "32000", "--gpu", "none",
        "--ram", "64GiB", "--nvme", "100GiB", "--no-measure", "-o", "precision=fp32",
        "--batch", "1", "--sequence", "128", "-o", "placement.optimizer=host", "--format", "json",
    ]  # fmt: skip
    assert run(*question, "-o", "budget.host=256MiB") == 1
    (proposed,) = (change["settings"] for change in json.loads(capsys.readouterr().out)["changes"])
    assert proposed.keys() == {"budget.host"}
    assert run(*question, "-o", f"budget.host={proposed['budget.host']}") == 0
