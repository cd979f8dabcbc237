"""Predicted against measured, read back from a run's folder; advice that would matter."""

import json
import os
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from offload.config import OffloadConfig
from offload.errors import ConfigError
from offload.runs.folder import RunFolder
from offload.runs.metrics import Measured, Prediction
from offload.swap.io.threads_backend import ThreadsBackend
from offload.tools.memest.commands.run_check import RunCheck, check_run
from offload.train.loop import Trainer, run
from tests.offload.test_background_saves import Held

PREDICTION = Prediction({"device": 0, "host": 110, "nvme": 200}, 330, 2.0)
MEASURED = Measured({"device": 0, "host": 100, "nvme": 200}, 300, 2.5, 20)


def leave(folder: Path, prediction: Prediction = PREDICTION) -> None:
    folder.mkdir()
    (folder / "prediction.json").write_text(prediction.to_json())
    (folder / "measured.json").write_text(MEASURED.to_json())


def ratios(check: RunCheck) -> dict[str, str]:
    return {row.name: f"{row.ratio:.2f}" for row in check.rows}


def test_every_tier_that_holds_something_is_compared(tmp_path):
    leave(tmp_path / "run")
    check = check_run(tmp_path / "run")
    assert ratios(check) == {"host": "1.10", "nvme": "1.00", "RSS": "1.10", "step": "0.80"}
    assert [row.unit for row in check.rows] == ["bytes", "bytes", "bytes", "seconds"]


def test_of_a_tier_that_depends_on_the_moment_a_bound_is_predicted(tmp_path):
    leave(tmp_path / "run", replace(PREDICTION, bounds=("nvme",)))
    check = check_run(tmp_path / "run")
    assert [row.name for row in check.rows if row.is_bound] == ["nvme"]


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda run: (run / "prediction.json").unlink(), "prediction.json: No such file"),
        (lambda run: (run / "prediction.json").write_text("{"), "prediction.json is damaged"),
        (lambda run: (run / "measured.json").write_text('{"format": 1}'), "measured.json is dam"),
        (lambda run: (run / "measured.json").unlink(), "killed or still trains"),
        (lambda run: change(run / "prediction.json", rss_nbytes="x"), "prediction.json is dam"),
        (lambda run: change(run / "measured.json", rss_nbytes=0), "measured.json is damaged"),
    ],
)
def test_a_folder_that_cannot_be_checked_says_why(tmp_path: Path, damage: Any, said: str):
    leave(tmp_path / "run")
    damage(tmp_path / "run")
    with pytest.raises(ConfigError) as refusal:
        check_run(tmp_path / "run")
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


# ---------------------------------------------------------------- a run of offload train
def train(folder: Path, **keys: Any) -> OffloadConfig:
    config = OffloadConfig.load(
        {
            "device": "cpu",
            "budget": {"host": "24MiB", "nvme": "256MiB"},
            "nvme": {"paths": [str(folder)], "backend": "threads"},
            **keys,
            "train": {
                "model": {"layers": 2, "hidden": 64, "heads": 2, "max_sequence": 32},
                "text": "python", "steps": 6, "batch": 4, "sequence": 32,
                "evaluate_batches": 0, "sample": {"length": 0}, **keys.get("train", {}),
            },
        }
    )  # fmt: skip
    run(config, RunFolder.new(folder / "run"), console=Console(file=StringIO()))
    return OffloadConfig.load(folder / "run/config.resolved.yaml")


def test_a_run_predicts_itself(tmp_path):
    train(tmp_path)
    check = check_run(tmp_path / "run")
    tiers = [row for row in check.rows if row.name in ("host", "nvme")]
    assert tiers
    for row in tiers:  # in a run so small every page counts
        assert row.ratio == pytest.approx(1, rel=0.1), row


@pytest.mark.slow
def test_what_a_run_leaves_open_is_chosen_and_written_down(tmp_path):
    left_open = {"checkpoint": "auto"}
    written = train(tmp_path, placement={"activations": left_open})
    assert written.placement.activations.checkpoint in (False, "selective", True)
    assert written.placement.optimizer is not None


@pytest.mark.slow
@pytest.mark.parametrize("parameters", ["host", "nvme"])
def test_nvme_never_holds_more_than_at_most(
    parameters: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Writes slower than everything else, and a checkpoint over what is there already."""

    def slow(*args: Any) -> int:
        time.sleep(0.002)
        return os.pwritev(*args)

    monkeypatch.setitem(ThreadsBackend.__init__.__kwdefaults__, "pwritev", slow)
    gradients = "nvme" if parameters == "nvme" else "host"
    keys: dict[str, Any] = {
        "budget": {"host": "5MiB" if parameters == "nvme" else "11MiB", "nvme": "256MiB"},
        "placement": {"parameters": parameters, "gradients": gradients, "optimizer": "nvme"},
        "optimizer": {"chunk": 16384}, "clip_grad_norm": 1.0,
    }  # fmt: skip
    work = {"model": {"layers": 6, "hidden": 128, "heads": 2, "max_sequence": 32},
            "steps": 2, "checkpoint_every": 2}  # fmt: skip
    config = train(tmp_path, train=work, **keys)
    check_bound(tmp_path / "run")
    longer = config.train.model_copy(update={"steps": 4})
    run(config.model_copy(update={"train": longer}), RunFolder.reopen(tmp_path / "run"),
        resume=True, console=Console(file=StringIO()))  # fmt: skip
    check_bound(tmp_path / "run")


@pytest.mark.slow
def test_nor_while_saves_beside_its_steps_keep_old_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    held, step = Held(monkeypatch), Trainer._step

    def stepped(trainer: Trainer, number: int) -> None:
        step(trainer, number)
        if number == 3:  # two steps beside the save, which has read nothing yet
            trainer.engine.settle()
            held.go.set()

    monkeypatch.setattr(Trainer, "_step", stepped)
    work = {"model": {"layers": 6, "hidden": 128, "heads": 2, "max_sequence": 32},
            "steps": 4, "checkpoint_every": 2}  # fmt: skip
    train(
        tmp_path, train=work, budget={"host": "5MiB", "nvme": "256MiB"},
        placement={"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"},
        optimizer={"chunk": 16384},
    )  # fmt: skip
    check_bound(tmp_path / "run")


def check_bound(folder: Path) -> None:
    (nvme,) = (row for row in check_run(folder).rows if row.name == "nvme")
    assert nvme.is_bound
    assert nvme.measured <= nvme.predicted


def test_a_new_prediction_is_not_held_against_what_was_measured_before(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.write_measured(MEASURED)
    folder.write_prediction(PREDICTION)
    assert not (tmp_path / "measured.json").exists()
