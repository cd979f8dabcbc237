"""The loop of `offload train`."""

from __future__ import annotations

import io
import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import nn

import offload
from offload.config import OffloadConfig
from offload.config.training import ScheduleConfig
from offload.errors import CheckpointError, ConfigError, PathError
from offload.process.interrupts import Terminated
from offload.runs.folder import RunFolder, check_same_run
from offload.runs.metrics import Measured
from offload.train.loop import resuming_command, run
from tests.offload.engine_cases import ON, on_a_gpu_too

TRAIN = {
    "model": {"layers": 1, "hidden": 16, "heads": 2, "mlp": 32, "max_sequence": 64},
    "steps": 6,
    "batch": 2,
    "sequence": 16,
    "sample": {"length": 4},
    "evaluate_batches": 1,
}


Begun = Callable[[offload.Engine, int], None]  # told of the step that is about to be made


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(b"The quick brown fox jumps over the lazy dog.\n" * 100)
    return path


@pytest.fixture
def make_config(text_file: Path) -> Callable[..., OffloadConfig]:
    def make(train: dict[str, Any] | None = None, **top: Any) -> OffloadConfig:
        return OffloadConfig.load(
            {"device": ON, "train": {**TRAIN, "text": str(text_file), **(train or {})}, **top}
        )

    return make


def run_quietly(
    config: OffloadConfig, path: Path, *, resume: bool = False,
    initialize: Any = offload.initialize,
) -> str:  # fmt: skip
    """The output of a run."""
    folder = RunFolder.reopen(path) if resume else RunFolder.new(path)
    console = Console(file=io.StringIO(), width=120)
    run(config, folder, resume=resume, console=console, initialize=initialize)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def losses(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (path / "metrics.jsonl").read_text().splitlines()]


def told(begun: Begun) -> Any:
    """`initialize` whose engine tells `begun` of each optimizer step before it is made."""

    def initialize(model: nn.Module, config: OffloadConfig) -> offload.Engine:
        engine = offload.initialize(model, config)
        count = 0

        def tell(*_: Any) -> None:
            nonlocal count
            count += 1
            begun(engine, count)

        engine.optimizer.register_step_pre_hook(tell)
        return engine

    return initialize


def ended_by(
    error: type[BaseException], config: OffloadConfig, path: Path, begun: Begun, **keys: Any
) -> str:
    """The output of a run with this end."""
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(error) as caught:
        run(config, RunFolder.new(path), console=console, initialize=told(begun), **keys)
    assert isinstance(caught.value, Terminated) is (error is Terminated)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@on_a_gpu_too
def test_a_run_leaves_its_folder_complete(make_config: Any, tmp_path: Path) -> None:
    config = make_config()
    output = run_quietly(config, tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 6
    written = OffloadConfig.load(tmp_path / "run/config.resolved.yaml")
    given = config.owning_the_loop().resolved()
    assert (written.train, written.precision, written.seed) == (given.train, "fp32", given.seed)
    assert written.optimizer.in_backward == given.optimizer.in_backward
    assert None not in (written.placement.parameters, written.placement.optimizer)
    measured = Measured.from_json((tmp_path / "run/measured.json").read_text())
    assert (measured.steps, measured.stopped, measured.cut_short) == (6, False, False)
    for fragment in ("text before", "text after", "peak RSS", "plain PyTorch", "nvme", "tokens/s"):
        assert fragment in output


@on_a_gpu_too
def test_resume_is_exact(make_config: Any, tmp_path: Path) -> None:
    config = make_config({"checkpoint_every": 2}, gradient_accumulation_steps=2)
    run_quietly(config, tmp_path / "whole")

    def stop(engine: offload.Engine, step: int) -> None:
        if step == 6:
            raise ZeroDivisionError

    ended_by(ZeroDivisionError, config, tmp_path / "cut", stop)
    assert len(losses(tmp_path / "cut")) == 5  # one past the checkpoint
    output = run_quietly(config, tmp_path / "cut", resume=True)
    assert "resumed after step 4" in output
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def interrupted(
    config: OffloadConfig, path: Path, number: int = signal.SIGINT, again_s: float | None = None
) -> str:
    """What is printed when a signal comes amid the third step, and another one `again_s` later."""

    def press(engine: offload.Engine, step: int) -> None:
        if step == 3:
            signal.raise_signal(number)
            signal.raise_signal(number)  # torchrun passes it on
        if step == 3 and again_s is not None:
            time.sleep(again_s)
            signal.raise_signal(number)

    error = Terminated if number == signal.SIGTERM else KeyboardInterrupt
    again = "offload train file.yaml --run-dir RUN --resume"
    return ended_by(error, config, path, press, resume_with=again)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_step_saves_and_says_how_to_go_on(
    name: str, make_config: Any, tmp_path: Path, capfd: Any
) -> None:
    config, number = make_config(), signal.Signals[name]
    before = signal.getsignal(number)
    output = interrupted(config, tmp_path / "cut", number)
    assert "interrupted after step 3 of 6; the checkpoint of step 3 is in\n" in output
    assert output.endswith(":\n  offload train file.yaml --run-dir RUN --resume\n")
    said = "Ctrl-C" if name == "SIGINT" else name
    assert capfd.readouterr().err.count(f"{said}: finishing and saving this step") == 1
    assert signal.getsignal(number) is before
    assert checkpoints_in(tmp_path / "cut") == ["step-000003"]


def test_a_second_interrupt_stops_at_once_and_saves_nothing(
    make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.process.interrupts._AGAIN_S", 0.01)
    output = interrupted(make_config(), tmp_path / "none", again_s=0.02)
    assert "interrupted after step 2 of 6; nothing was saved" in output
    assert not list((tmp_path / "none/checkpoints").iterdir())


@pytest.mark.parametrize(
    ("ranks", "launcher"), [("1", ""), ("2", "torchrun [options as before] -m ")]
)
def test_the_command_that_resumes_is_said(
    ranks: str, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    said = resuming_command(Path("my file.yaml"), ["optimizer.lr=1"], Path("runs/a b"))
    command = "offload train 'my file.yaml' -o optimizer.lr=1 --run-dir 'runs/a b' --resume"
    assert said == launcher + command


def test_the_engine_is_closed_when_the_loop_fails(make_config: Any, tmp_path: Path) -> None:
    engines = []

    def failing(model: nn.Module, config: OffloadConfig) -> offload.Engine:
        engines.append(offload.initialize(model, config))
        engines[0].backward = lambda loss: 1 / 0  # type: ignore[method-assign,assignment]
        return engines[0]

    with pytest.raises(ZeroDivisionError):
        run_quietly(make_config(), tmp_path / "run", initialize=failing)
    assert engines[0].is_closed


def test_a_folder_with_a_run_is_not_overwritten(make_config: Any, tmp_path: Path) -> None:
    run_quietly(make_config({"steps": 1}), tmp_path / "run")
    with pytest.raises(ConfigError, match="already holds a run; add --resume"):
        RunFolder.new(tmp_path / "run")


def test_resume_without_a_run_or_checkpoint_says_so(make_config: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        RunFolder.reopen(tmp_path / "nothing")
    run_quietly(make_config({"steps": 1}), tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"train\.checkpoint_every"):
        run_quietly(make_config(), tmp_path / "run", resume=True)


def test_two_runs_do_not_write_to_one_folder(tmp_path: Path) -> None:
    first, second = RunFolder.new(tmp_path / "run"), RunFolder.new(tmp_path / "run")
    first.make()
    with pytest.raises(ConfigError, match="another run is writing"):
        second.make()
    first.close()
    second.close()
    second.make()
    second.close()


def test_a_run_folder_that_cannot_be_made_is_a_path_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file/run/deeper"):
        with pytest.raises(PathError, match=r"--run-dir: cannot create .*file is not a folder"):
            RunFolder.new(path)


def test_a_run_that_is_refused_leaves_no_folder(make_config: Any, tmp_path: Path) -> None:
    def refusing(model: nn.Module, config: OffloadConfig) -> offload.Engine:
        raise ConfigError("groups.blocks: no module is a Nope")

    with pytest.raises(ConfigError, match="Nope"):
        run_quietly(make_config(), tmp_path / "runs/one", initialize=refusing)
    with pytest.raises(PathError):
        run_quietly(make_config({"text": "/nowhere.txt"}), tmp_path / "runs/one")
    assert not (tmp_path / "runs").exists()


def test_resume_names_the_keys_that_changed(make_config: Any) -> None:
    before = make_config().to_dict()
    check_same_run(before, make_config({"steps": 99}))
    with pytest.raises(ConfigError, match=r"train\.batch: 3 was 2") as caught:
        check_same_run(before, make_config({"batch": 3}, seed=1))
    assert "seed: 1 was 0" in str(caught.value)


def checkpoints_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in (path / "checkpoints").iterdir())


def test_the_last_checkpoints_stay_and_of_the_older_ones_every_so_manieth(
    make_config: Any, tmp_path: Path
) -> None:
    config = make_config({"checkpoint_every": 2, "steps": 9, "keep_last": 2, "keep_every": 4})
    run_quietly(config, tmp_path / "run")
    # the last step is saved in any case
    assert checkpoints_in(tmp_path / "run") == [f"step-00000{n}" for n in (4, 8, 9)]


def test_a_damaged_checkpoint_is_an_error_that_names_the_way_to_the_one_before(
    make_config: Any, tmp_path: Path
) -> None:
    config, run = make_config({"checkpoint_every": 3}), tmp_path / "run"
    run_quietly(config, run)
    expected, newest = losses(run), run / "checkpoints/step-000006"
    file = newest / "optimizer/000.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError, match=f"remove {newest} to go on from the checkpoint"):
        run_quietly(config, run, resume=True)
    assert checkpoints_in(run) == ["step-000003", "step-000006"]
    shutil.rmtree(newest)
    assert "resumed after step 3" in run_quietly(config, run, resume=True)
    assert losses(run) == expected


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(
    make_config: Any, tmp_path: Path
) -> None:
    config, run = make_config({"checkpoint_every": 2}), tmp_path / "run"
    run_quietly(config, run)
    expected = losses(run)
    shutil.rmtree(run / "checkpoints")
    output = run_quietly(config, run, resume=True)
    assert "nothing was saved there yet: the run begins anew" in output
    assert losses(run) == expected
    never = make_config({"checkpoint_every": 0})
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        run_quietly(never, run, resume=True)
    assert losses(run) == expected


def test_a_checkpoint_of_another_loop_is_a_checkpoint_error(tmp_path: Path) -> None:
    folder = RunFolder.new(tmp_path / "run")
    folder.make()
    engine = offload.initialize(nn.Linear(4, 4), {"device": ON})
    engine.save_checkpoint(folder.checkpoint_path(2))
    engine.close()
    with pytest.raises(CheckpointError, match="is none of `offload train`"):
        folder.latest_checkpoint()


def test_the_schedule_warms_up_and_ends_where_it_should() -> None:
    schedule = ScheduleConfig(type="cosine", warmup_steps=4, final=0.1)
    factors = [schedule.factor(step, 20) for step in range(20)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert factors[-1] == pytest.approx(0.1)
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert ScheduleConfig(type="constant").factor(7, 20) == 1.0
