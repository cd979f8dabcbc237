"""`offload train` saves beside its steps: what is complete, what is said, what stays, whatever ends
the run or the save."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.checkpoint.format import folder as checkpoint_folder
from offload.config import OffloadConfig
from offload.errors import NoSpaceError
from offload.process.interrupts import Terminated
from offload.runs.metrics import Measured
from tests.offload.checkpoint_crash import bits_of
from tests.offload.engine_cases import HOST, NVME, ON
from tests.offload.test_background_saves import Held, slow
from tests.offload.test_train_loop import TRAIN, checkpoints_in, ended_by, losses, run_quietly, told

MIXED: dict[str, Any] = {"parameters": "host", "gradients": "host", "optimizer": "nvme"}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., OffloadConfig]:
    text = tmp_path / "text.txt"
    text.write_bytes(b"The quick brown fox jumps over the lazy dog.\n" * 100)

    def made(placement: dict[str, Any] = NVME, **train: Any) -> OffloadConfig:
        return OffloadConfig.load({
            "device": ON, "seed": 1, "placement": placement, "nvme": {"paths": [str(tmp_path)]},
            "budget": {"host": "16MiB", "nvme": "64MiB"},
            "train": {**TRAIN, "text": str(text), "sample": {"length": 0}, "checkpoint_every": 2,
                      **train},
        })  # fmt: skip

    return made


def check_goes_on_as(whole: Path, config: OffloadConfig, cut: Path, step: int) -> None:
    """A run that was cut goes on after `step`, to the bits of the whole one."""
    said = run_quietly(config, cut, resume=True)
    assert f"resumed after step {step} from" in said
    assert losses(cut) == losses(whole)
    last = f"checkpoints/step-{config.train.steps:06d}"
    assert bits_of(cut / last) == bits_of(whole / last)


@pytest.mark.sample(2)
@pytest.mark.parametrize("placement", [MIXED, HOST, NVME])
def test_steps_go_on_beside_a_save_and_its_bits_are_of_one_that_is_waited_for(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: dict[str, Any]
) -> None:
    config = make(placement, keep_last=9)
    save, waited = offload.Engine.save_checkpoint, []

    def waiting(engine: offload.Engine, path: Path, *, wait: bool = True, **keys: Any) -> None:
        waited.append(wait)
        save(engine, path, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(offload.Engine, "save_checkpoint", waiting)
        run_quietly(config, tmp_path / "waited")
    assert waited == [False, False, True], "the last one ends before the run"
    with slow(max_s=0.005):
        run_quietly(config, tmp_path / "beside")
    assert losses(tmp_path / "beside") == losses(tmp_path / "waited")
    names = checkpoints_in(tmp_path / "waited")
    assert checkpoints_in(tmp_path / "beside") == names
    for name in names:
        beside, other = (tmp_path / run / "checkpoints" / name for run in ("beside", "waited"))
        assert bits_of(beside) == bits_of(other), name


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
def test_pruning_counts_what_is_complete_alone(make: Any, tmp_path: Path, every: int) -> None:
    config = make(checkpoint_every=every, keep_last=2, steps=8)
    path, seen = tmp_path / "run/checkpoints", []

    def look(engine: offload.Engine, step: int) -> None:
        names = os.listdir(path)
        complete = [name for name in names if name.partition(".")[2] == ""]
        seen.append(len(complete))
        assert len(names) <= 3, "keep_last and the one that is being written"
        # the first is waited for by the second at the latest
        assert len(complete) >= min(2, (step - 1) // every - 1), names

    with slow(max_s=0.02):
        run_quietly(config, tmp_path / "run", initialize=told(look))
    assert max(seen) >= 2
    assert checkpoints_in(tmp_path / "run") == [f"step-{n:06d}" for n in (8 - every, 8)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("placement", "number"), [(MIXED, signal.SIGINT), (NVME, signal.SIGTERM)])
def test_a_signal_amid_a_save_completes_it_and_saves_the_step(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals,
    placement: dict[str, Any],
) -> None:  # fmt: skip
    config = make(placement)
    run_quietly(config, tmp_path / "whole")
    held = Held(monkeypatch)

    def press(engine: offload.Engine, step: int) -> None:
        if step == 3:
            assert not engine.checkpoint_saved(wait=False)
            signal.raise_signal(number)
            held.go.set()

    error = Terminated if number is signal.SIGTERM else KeyboardInterrupt
    said = ended_by(error, config, tmp_path / "cut", press)
    assert "interrupted after step 3 of 6; the checkpoint of step 3 is in" in said
    assert checkpoints_in(tmp_path / "cut") == ["step-000002", "step-000003"]
    measured = Measured.from_json((tmp_path / "cut/measured.json").read_text())
    assert (measured.steps, measured.stopped, measured.cut_short) == (3, True, False)
    check_goes_on_as(tmp_path / "whole", config, tmp_path / "cut", 3)


@pytest.mark.sample(2)
@pytest.mark.parametrize("third", [False, True])
def test_after_a_second_ctrl_c_a_save_is_completed_and_a_third_gives_it_up(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, third: bool
) -> None:
    monkeypatch.setattr("offload.process.interrupts._AGAIN_S", 0.01)
    config = make(checkpoint_every=1)
    held: list[Held] = []

    def press(engine: offload.Engine, step: int) -> None:
        if step == 2:
            engine.checkpoint_saved()
            held.append(Held(monkeypatch))  # the save of step 2
        if step == 3:
            assert not engine.checkpoint_saved(wait=False)
            alarm = threading.Timer(0.5, held[0].go.set)
            if third:
                threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
            alarm.start()
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.02)
            signal.raise_signal(signal.SIGINT)

    said = ended_by(KeyboardInterrupt, config, tmp_path / "cut", press)
    assert "a checkpoint is being completed; Ctrl-C: it is given up" in said
    kept = 1 if third else 2
    assert f"interrupted after step 2 of 6; {'step 2 is not saved; ' if third else ''}" in said
    assert f"the checkpoint of step {kept} is in" in said
    assert checkpoints_in(tmp_path / "cut")[-1] == f"step-{kept:06d}"


def full_disk(patch: pytest.MonkeyPatch, beside: int, waited: int = 0) -> None:
    """Of the saves beside training, and of those that are waited for, the last call of so many."""
    left = {True: beside, False: waited}
    publish = checkpoint_folder._publish

    def published(new: Path, target: Path) -> Path | None:
        is_beside = threading.current_thread().name.startswith("offload-checkpoint")
        left[is_beside] -= 1
        if left[is_beside] >= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return publish(new, target)

    patch.setattr(checkpoint_folder, "_publish", published)


def test_a_save_that_fails_beside_a_step_is_made_up_for_behind_it(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(keep_last=9)

    def look(engine: offload.Engine, step: int) -> None:
        while step == 3 and not engine._saves.under_way.has_ended:  # type: ignore[union-attr]
            time.sleep(0.001)

    full_disk(monkeypatch, 1)
    said = run_quietly(config, tmp_path / "run", initialize=told(look))
    flat = " ".join(said.split())
    assert "warning: a checkpoint was not saved: writing" in flat
    assert "No space left on device" in flat
    assert "step 3 is saved instead" in flat
    assert checkpoints_in(tmp_path / "run") == [f"step-{n:06d}" for n in (3, 4, 6)]


def test_a_disk_that_stays_full_ends_the_run_and_the_checkpoint_before_stays(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(keep_last=1)

    def fill(engine: offload.Engine, step: int) -> None:
        if step == 4:
            engine.checkpoint_saved()
            full_disk(monkeypatch, 9, 9)

    ended_by(NoSpaceError, config, tmp_path / "cut", fill)
    assert checkpoints_in(tmp_path / "cut") == ["step-000002"]
